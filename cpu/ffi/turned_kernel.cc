#include "cpu/ffi/turned_kernel.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "cpu/ffi/host.h"
#include "cpu/ffi/huge_pages.h"
#include "cpu/ffi/tasks.h"
#include "cpu/plan/ceil_div.h"

namespace jsc {
namespace {

constexpr int64_t kSquare = 16;          // elements of a side
constexpr int64_t kStrip = 2 * kSquare;  // columns, whole lines of each row
constexpr int64_t kRowsAhead = 32;       // whose lines are prefetched: far apart, and from memory in a step

// to[column][row] = from[row][column], of a whole square. Through a copy of known size, so that compilers read and
// write with vectors: rows a power of two apart share a few cache sets, and must not be wanted twice.
template <typename T>
void TransposeSquare(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  T square[kSquare][kSquare];
  for (int64_t row = 0; row < kSquare; ++row) {
    for (int64_t column = 0; column < kSquare; ++column) square[column][row] = from[row * from_stride + column];
  }
  for (int64_t column = 0; column < kSquare; ++column) {
    __builtin_memcpy(to + column * to_stride, square[column], sizeof(square[column]));
  }
}

// The same of [rows, columns], at most kStrip columns.
template <typename T>
void TransposeStrip(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  int64_t done = 0;
  if (columns == kStrip) {
    for (; done + kSquare <= rows; done += kSquare) {
      const T* square = from + done * from_stride;
      const int64_t ahead = std::clamp<int64_t>(rows - done - kRowsAhead, 0, kSquare);
      for (int64_t row = kRowsAhead; row < kRowsAhead + ahead; ++row) {
        const T* line = square + row * from_stride;
        for (int64_t column = 0; column < kStrip; column += kLine) __builtin_prefetch(line + column);
      }
      for (int64_t column = 0; column < kStrip; column += kSquare) {
        TransposeSquare(square + column, from_stride, to + column * to_stride + done, to_stride);
      }
    }
  }
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = done; row < rows; ++row) to[column * to_stride + row] = from[row * from_stride + column];
  }
}

// A task is a strip of kStrip output channels of every group, at one tap.
template <typename T>
void Run(Team& team, const TurnedKernelCall& call) {
  constexpr int64_t kBytesOfThread = 1 << 17;  // below it a helper takes longer to come
  const int64_t in_stride = call.groups * call.out_channels, out_stride = call.groups * call.channels;
  const int64_t tap_size = call.channels * in_stride, strips = CeilDiv(call.out_channels, kStrip);
  const int64_t taps = call.count[0] * call.count[1];
  const int64_t bytes = call.stacks * taps * tap_size * static_cast<int64_t>(sizeof(T));
  const int64_t threads = std::clamp<int64_t>(bytes / kBytesOfThread, 1, team.threads());
  team.Run(threads, call.stacks * taps * strips, {8, strips}, [&](Taken taken, int64_t) {
    for (int64_t i = taken.begin; i < taken.end; ++i) {
      const int64_t tap = i / strips, stack = tap / taps, begin = i % strips * kStrip;
      const int64_t row = call.first[0] + tap % taps / call.count[1] * call.step[0];
      const int64_t column = call.first[1] + tap % call.count[1] * call.step[1];
      const int64_t from_tap = (stack * call.size[0] + row) * call.size[1] + column;
      const T* from = static_cast<const T*>(call.kernel) + from_tap * tap_size + begin;
      T* to = static_cast<T*>(call.out) + tap * tap_size + begin * out_stride;
      const int64_t columns = std::min(kStrip, call.out_channels - begin);
      for (int64_t group = 0; group < call.groups; ++group) {
        TransposeStrip(from + group * call.out_channels, in_stride, to + group * call.channels, out_stride,
                       call.channels, columns);
      }
    }
  });
}

ffi::Error Invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_turned_kernel: " + what);
}

// Whether there are such taps among `size`.
bool AreTaps(int64_t first, int64_t step, int64_t count, int64_t size) {
  if (first < 0 || first >= size) return false;
  if (count == 1) return true;
  if (step == 0 || step < -size || step > size) return false;
  return count - 1 <= (step > 0 ? (size - 1 - first) / step : first / -step);
}

ffi::ErrorOr<TurnedKernelCall> MakeCall(ffi::AnyBuffer kernel, ffi::AnyBuffer out, ffi::Dictionary attributes) {
  const auto first = attributes.get<ffi::Span<const int64_t>>("first");
  const auto step = attributes.get<ffi::Span<const int64_t>>("step");
  const auto groups = attributes.get<int64_t>("groups");
  if (!first.has_value() || !step.has_value() || !groups.has_value() || first->size() != 2 || step->size() != 2) {
    return ffi::Unexpected(Invalid("attributes must be first[2], step[2] and groups, all int64"));
  }
  if (IndexOf(TypeOf(kernel)) < 0)
    return ffi::Unexpected(Invalid("the kernel must be float32, bfloat16, float16 or float64"));
  if (TypeOf(out) != TypeOf(kernel)) return ffi::Unexpected(Invalid("the result must have the kernel's dtype"));
  const auto size = kernel.dimensions(), turned = out.dimensions();
  if (size.size() != 5 || turned.size() != 5) {
    return ffi::Unexpected(
        Invalid("the kernel must be [S, kh, kw, C / groups, K], the result [S, rows, columns, K / "
                "groups, C]"));
  }
  if (*groups < 1 || size[4] % *groups != 0 || turned[0] != size[0] || turned[3] != size[4] / *groups ||
      turned[4] % *groups != 0 || turned[4] / *groups != size[3]) {
    return ffi::Unexpected(Invalid("in " + std::to_string(*groups) + " groups the result must be [" +
                                   std::to_string(size[0]) + ", rows, columns, K / groups, C] for a kernel [" +
                                   std::to_string(size[0]) + ", kh, kw, C / groups, K]"));
  }
  TurnedKernelCall call{};
  call.stacks = size[0];
  call.groups = *groups;
  call.channels = size[3];
  call.out_channels = turned[3];
  for (int i = 0; i < 2; ++i) {
    call.size[i] = size[1 + i];
    call.first[i] = (*first)[i];
    call.step[i] = (*step)[i];
    call.count[i] = turned[1 + i];
    if (out.element_count() > 0 && !AreTaps(call.first[i], call.step[i], call.count[i], call.size[i])) {
      return ffi::Unexpected(Invalid(std::to_string(call.count[i]) + " taps from " + std::to_string(call.first[i]) +
                                     " on in steps of " + std::to_string(call.step[i]) + " are not all among the " +
                                     std::to_string(call.size[i]) + " of the kernel"));
    }
  }
  // Groups of one channel are together one matrix.
  if (call.channels == 1) {
    call.channels = std::exchange(call.groups, 1);
  } else if (call.out_channels == 1) {
    call.out_channels = std::exchange(call.groups, 1);
  }
  call.element_bytes = static_cast<int64_t>(ffi::ByteWidth(kernel.element_type()));
  call.kernel = kernel.untyped_data();
  call.out = out.untyped_data();
  return call;
}

}  // namespace

void RunTurnedKernelCall(Team& team, const TurnedKernelCall& call) {
  if (call.element_bytes == 8) return Run<uint64_t>(team, call);
  if (call.element_bytes == 4) return Run<uint32_t>(team, call);
  return Run<uint16_t>(team, call);
}

ffi::Error TurnedKernel(ffi::ThreadPool pool, ffi::AnyBuffer kernel, ffi::AnyBuffer after,
                        ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  (void)after;
  try {
    const ffi::ErrorOr<TurnedKernelCall> call = MakeCall(kernel, *out, attributes);
    if (!call.has_value()) return call.error();
    if (out->element_count() == 0) return ffi::Error::Success();
    AdviseHugePages(*out);
    Team team(pool);
    RunTurnedKernelCall(team, *call);
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace jsc
