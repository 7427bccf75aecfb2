// Depthwise convolution (one input and one output channel per group), then the same epilogue and pool as
// loops/window_kernel.h.
//
// What: sums[window][channel] += x[pixel][channel] * kernel[tap][channel] where x is not zero.
// Layout: channels are the vector, so x, kernel and result are read as they lie in memory.
// Why no lists: each value meets one weight, so finding a zero costs as much as multiplying by it. The zeros are
//   masked, which drops 0 * inf and 0 * nan as the other sparse kernels do. The dense convolution does not mask.
// Four vectors of a window at a time share the addresses of its taps. Those beyond the map are left out at once.
// Bound by: loads of x from L1 and L2, each pixel once per tap.
#ifndef JSC_CPU_LOOPS_DEPTHWISE_KERNEL_H_
#define JSC_CPU_LOOPS_DEPTHWISE_KERNEL_H_

#include "cpu/loops/window_kernel.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int kTogether = 4;  // vectors of a window that share the addresses of its taps

// The taps of a window that lie within the map, as rows and columns of them: where the first lies in x and in the
// packed kernel, and the steps from one to the next, in elements.
template <typename T, typename A>
struct DepthwiseTaps {
  const T* x;
  const A* packed;
  int64_t rows, columns;
  int64_t x_row, x_column, packed_row, packed_column;
};

// Of an axis: taps [begin, end) of a window that begins at `first`.
inline Range TapsWithin(int64_t first, int64_t size, int64_t taps, int64_t dilation) {
  if (first >= 0 && first + (taps - 1) * dilation < size) return {0, taps};
  Range within = {0, taps};
  while (within.begin < taps && first + within.begin * dilation < 0) ++within.begin;
  while (within.end > within.begin && first + (within.end - 1) * dilation >= size) --within.end;
  return within;
}

// Those of the window whose first tap is in row `top` and column `left`. x: an image, packed: [kh * kw, stride], both
// at the block's first channel.
template <typename T, typename A>
inline DepthwiseTaps<T, A> DepthwiseTapsAt(const ConvArgs& a, const T* x, int64_t top, int64_t left, const A* packed,
                                           int64_t stride) {
  const Range rows = TapsWithin(top, a.size[0], a.kernel_size[0], a.dilation[0]);
  const Range columns = TapsWithin(left, a.size[1], a.kernel_size[1], a.dilation[1]);
  const int64_t row = top + rows.begin * a.dilation[0], column = left + columns.begin * a.dilation[1];
  DepthwiseTaps<T, A> taps{};
  taps.x = x + (row * a.size[1] + column) * a.channels;
  taps.packed = packed + (rows.begin * a.kernel_size[1] + columns.begin) * stride;
  taps.rows = rows.size();
  taps.columns = columns.size();
  taps.x_row = a.dilation[0] * a.size[1] * a.channels;
  taps.x_column = a.dilation[1] * a.channels;
  taps.packed_row = a.kernel_size[1] * stride;
  taps.packed_column = stride;
  return taps;
}

// kVectors vectors of channels of one window, from channel v of the block on; the last has `width` channels.
template <bool kSkipZeros, int kVectors, typename T, typename A>
inline void DepthwiseWindow(const DepthwiseTaps<T, A>& taps, int64_t v, int64_t width, A* sums) {
  Vector<A> sum[kVectors] = {};
  for (int64_t row = 0; row < taps.rows; ++row) {
    const T* x = taps.x + row * taps.x_row + v;
    const A* packed = taps.packed + row * taps.packed_row + v;
    for (int64_t column = 0; column < taps.columns; ++column, x += taps.x_column, packed += taps.packed_column) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        const int64_t at = i * kLanes<A>;
        const Vector<A> value = kVectors > 1 ? Load(x + at) : LoadFirstOf<A>(x + at, width);
        const Vector<A> product = value * Load(packed + at);
        if constexpr (kSkipZeros) {
          sum[i] += value == Vector<A>{} ? Vector<A>{} : product;
        } else {
          sum[i] += product;
        }
      }
    }
  }
  for (int i = 0; i < kVectors; ++i) Store(sums + v + i * kLanes<A>, sum[i]);
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
        const int64_t top = y * a.stride[0] - a.pad_low[0];
        for (int64_t column = tile.conv_cols.begin; column < tile.conv_cols.end; ++column, sums += stride) {
          const int64_t left = column * a.stride[1] - a.pad_low[1];
          const auto taps = DepthwiseTapsAt(a, x, top, left, buffers.packed, stride);
          int64_t v = 0;
          for (; v + kTogether * kLanes<A> <= slice.width; v += kTogether * kLanes<A>) {
            DepthwiseWindow<kSkipZeros, kTogether>(taps, v, kLanes<A>, sums);
          }
          for (; v < slice.width; v += kLanes<A>) DepthwiseWindow<kSkipZeros, 1>(taps, v, slice.width - v, sums);
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
