// Depthwise convolution (one input and one output channel per group), then the same epilogue and pool as
// loops/window_kernel.h.
//
// What: sums[window][channel] += x[pixel][channel] * kernel[tap][channel] where x is not zero.
// Layout: channels are the vector, so x, kernel and result are read as they lie in memory.
// Why no lists: each value meets one weight, so finding a zero costs as much as multiplying by it. The zeros are
//   masked, which drops 0 * inf and 0 * nan as the other sparse kernels do. The dense convolution does not mask.
// Bound by: loads of x from L1 and L2, each pixel once per tap.
#ifndef JSC_CPU_LOOPS_DEPTHWISE_KERNEL_H_
#define JSC_CPU_LOOPS_DEPTHWISE_KERNEL_H_

#include "cpu/loops/window_kernel.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// One window, one vector of channels. x: [H, W, C] at the first channel; packed: [kh * kw, stride] at the vector.
template <bool kSkipZeros, typename T, typename A>
inline Vector<A> DepthwiseWindow(const ConvArgs& a, const T* x, int64_t width, int64_t y, int64_t column,
                                 const A* packed, int64_t stride) {
  Vector<A> sum = {};
  for (int64_t ky = 0; ky < a.kernel_size[0]; ++ky) {
    const int64_t row = y * a.stride[0] - a.pad_low[0] + ky * a.dilation[0];
    if (row < 0 || row >= a.size[0]) continue;
    for (int64_t kx = 0; kx < a.kernel_size[1]; ++kx) {
      const int64_t in = column * a.stride[1] - a.pad_low[1] + kx * a.dilation[1];
      if (in < 0 || in >= a.size[1]) continue;
      const Vector<A> value = LoadFirstOf<A>(x + (row * a.size[1] + in) * a.channels, width);
      const Vector<A> product = value * Load(packed + (ky * a.kernel_size[1] + kx) * stride);
      if constexpr (kSkipZeros) {
        sum += value == Vector<A>{} ? Vector<A>{} : product;
      } else {
        sum += product;
      }
    }
  }
  return sum;
}

template <typename A>
struct DepthwiseBuffers {
  TileImage* images;  // [tile images]
  A* packed;          // [kh * kw + 1, block]
  A* sums;            // [windows + 1, block]
  int64_t bytes;
};

template <typename A>
DepthwiseBuffers<A> TakeDepthwiseBuffers(const ConvTask& task, const Tile& tile, char* scratch) {
  const ConvArgs& a = task.call->args;
  Arena arena(scratch);
  DepthwiseBuffers<A> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.packed = arena.Take<A>((a.kernel_size[0] * a.kernel_size[1] + 1) * task.plan->block);
  buffers.sums = arena.Take<A>((tile.windows + 1) * task.plan->block);
  buffers.bytes = arena.used();
  return buffers;
}

template <typename T>
int64_t DepthwiseBytes(const ConvTask& task) {
  return TakeDepthwiseBuffers<Accumulator<T>>(task, MakeTile(task, nullptr), nullptr).bytes;
}

// The task's call has groups = 1 and group_channels = 1: all K channels are one group, in blocks.
template <typename T, bool kSkipZeros>
void RunDepthwiseTask(const ConvTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block;
  const Tile tile = MakeTile(task, nullptr);
  DepthwiseBuffers<A> buffers = TakeDepthwiseBuffers<A>(task, tile, scratch);
  MakeTile(task, buffers.images);
  for (int64_t block = task.block_begin; block < task.block_end; ++block) {
    const KernelSlice<T> slice = SliceAt<T>(task, {0, 1, 0, a.kernel_size[0]}, block);
    Pack(slice, stride, buffers.packed);
    A* sums = buffers.sums;
    for (int64_t i = 0; i < tile.images; ++i) {
      const TileImage& image = buffers.images[i];
      const T* x =
          static_cast<const T*>(task.call->x) + image.image * a.size[0] * a.size[1] * a.channels + block * stride;
      for (int64_t y = image.conv_rows.begin; y < image.conv_rows.end; ++y) {
        for (int64_t column = tile.conv_cols.begin; column < tile.conv_cols.end; ++column, sums += stride) {
          for (int64_t v = 0; v < slice.width; v += kLanes<A>) {
            Store(sums + v,
                  DepthwiseWindow<kSkipZeros>(a, x + v, slice.width - v, y, column, buffers.packed + v, stride));
          }
        }
      }
    }
    WriteBlock<T>(task, tile, buffers.images, block, buffers.sums);
  }
}

template <typename T>
void RunDepthwise(const ConvTask& task, char* scratch) {
  RunDepthwiseTask<T, true>(task, scratch);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_DEPTHWISE_KERNEL_H_
