// Whether the buffers of two 1x1 convolutions let one kernel have them (chain/pair.cuh).
#include <cstdint>

#include "cuda/chain/pair.h"

namespace jsc {
namespace {

struct Room {
  const void* data;  // or null: nowhere
  int64_t bytes;
};

bool Overlap(const Room& a, const Room& b) {
  const auto first = reinterpret_cast<uintptr_t>(a.data), second = reinterpret_cast<uintptr_t>(b.data);
  return a.data && b.data && first < second + static_cast<uintptr_t>(b.bytes) &&
         second < first + static_cast<uintptr_t>(a.bytes);
}

}  // namespace

bool SuitsPair(const PairCall& call) {
  constexpr uintptr_t kWhole = 16;  // bytes: of TMA, and of the widest loads and stores
  for (const void* data : {call.x, call.kernel, call.bias, call.residual, call.next_kernel, call.next_bias,
                           static_cast<const void*>(call.middle), static_cast<const void*>(call.out)}) {
    if (reinterpret_cast<uintptr_t>(data) % kWhole != 0) return false;
  }
  const int64_t pixel = call.shape.pixels * (call.dtype == DataType::F32 ? 4 : 2);
  const int64_t x = pixel * call.shape.in_channels, middle = pixel * call.shape.channels,
                out = pixel * call.shape.out_channels;
  const Room written[] = {{call.middle, middle}, {call.out, out}, {call.low_middle, middle}, {call.low_out, out}};
  const Room read[] = {{call.x, x}, {call.low_x, x}, {call.residual, middle}};
  for (const Room& to : written) {
    for (const Room& other : written) {
      if (&to != &other && Overlap(to, other)) return false;
    }
    for (const Room& from : read) {
      const bool is_residual = from.data == call.residual && to.data == call.middle && from.data == to.data;
      if (!is_residual && Overlap(to, from)) return false;
    }
  }
  return true;
}

}  // namespace jsc
