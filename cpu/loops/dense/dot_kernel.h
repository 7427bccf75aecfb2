// One task of the dense convolution with few output channels, as dot products: nothing is skipped.
//
// What: sums[window][channel] += the dot product of each run of x with the channel's weights, chunk by chunk, then the
//   epilogue. A vector of output channels, as all other loops have it, would be mostly empty.
// Layout: x as of dense_conv_kernel.h, packed or in place. Weights are [runs, vectors of a run, rows, lanes], a row for
//   each output channel, with zeros behind a run's end. The plan's vectors are the rows: 1, 2, 3, 4, 6 or 8.
// Why this tiling: vectors lie along a run's products, the input channels of one pixel or of a kernel's row. kRows *
//   kWindows sums stay in registers while a chunk passes by. A vector of x serves all rows, and one of weights all
//   windows. At the end of a chunk the lanes of each sum are added up.
// Order of each sum: a lane's products from 0 on, then the lanes, then the chunks.
// Bound by: reading x. With one output channel there are no more multiply-adds than loads.
#ifndef JSC_CPU_LOOPS_DENSE_DOT_KERNEL_H_
#define JSC_CPU_LOOPS_DENSE_DOT_KERNEL_H_

#include "cpu/loops/dense/dense_conv_kernel.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Windows that run together, so that their sums, a vector of x and one of each row's weights are registers.
template <int kRows>
constexpr int kDotWindows = kManyRegisters ? (kRows <= 3   ? 8
                                              : kRows == 4 ? 6
                                              : kRows == 6 ? 4
                                                           : 2)
                                           : (kRows == 1   ? 8
                                              : kRows == 2 ? 6
                                              : kRows == 3 ? 3
                                              : kRows == 4 ? 2
                                                           : 1);

// Vectors of all runs of a chunk.
template <typename F>
int64_t DotVectors(const ConvArgs& a, int64_t chunk_channels) {
  const int64_t run = RunTaps(a);
  return a.kernel_size[0] * a.kernel_size[1] / run * CeilDiv(run * chunk_channels, kLanes<F>);
}

// Those of the dense loop, with other weights, and a row of biases.
template <typename F>
struct DotBuffers {
  DirectBuffers<F> of;  // packed: [DotVectors, rows, lanes], sums: [windows + kMostWindows, block]
  F* biases;            // [tile columns, output channels], those of a pixel over and over
  int64_t bytes;
};

template <typename F>
DotBuffers<F> TakeDotBuffers(const ConvTask& task, const Tile& tile, bool in_place, char* scratch) {
  const ConvPlan& p = *task.plan;
  const ConvArgs& a = task.call->args;
  const Patch patch = PatchOf(task, tile);
  Arena arena(scratch);
  DotBuffers<F> buffers{};
  DirectBuffers<F>& of = buffers.of;
  of.images = arena.Take<TileImage>(tile.images);
  of.packed = arena.Take<F>(DotVectors<F>(a, p.chunk_channels) * p.vectors * kLanes<F>);
  of.sums = arena.Take<F>((tile.windows + kMostWindows) * p.block + kLanes<F>);
  of.pixels = arena.Take<F>(in_place ? 0 : patch.rows * patch.columns * p.chunk_channels);
  of.windows = arena.Take<int64_t>(tile.windows + kMostWindows);
  of.taps = arena.Take<int64_t>(a.kernel_size[0] * a.kernel_size[1]);
  buffers.biases = arena.Take<F>(tile.conv_cols.size() * a.out_channels + kLanes<F>);
  buffers.bytes = arena.used();
  return buffers;
}

// A chunk's weights; kernel: [S, kh * kw, C, output channels].
template <typename T>
[[gnu::noinline]] void PackDots(const ConvTask& task, const Chunk& chunk, Factor<T>* packed) {
  using F = Factor<T>;
  const ConvArgs& a = task.call->args;
  const int64_t rows = task.plan->vectors, channels = a.out_channels, taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t run = RunTaps(a), run_vectors = CeilDiv(run * chunk.channels, kLanes<F>);
  const T* kernel = static_cast<const T*>(task.call->kernel) + task.stack * taps * a.group_channels * channels;
  __builtin_memset(packed, 0, taps / run * run_vectors * rows * kLanes<F> * sizeof(F));
  for (int64_t tap = 0; tap < taps; ++tap) {
    F* const first = packed + tap / run * run_vectors * rows * kLanes<F>;
    const T* row = kernel + (tap * a.group_channels + chunk.channel_begin) * channels;
    for (int64_t c = 0; c < chunk.channels; ++c, row += channels) {
      const int64_t at = tap % run * chunk.channels + c;
      F* const target = first + at / kLanes<F> * rows * kLanes<F> + at % kLanes<F>;
      for (int64_t k = 0; k < channels; ++k) target[k * kLanes<F>] = Widen(row[k]);
    }
  }
}

// What a chunk adds to all windows. packed and sums: as in DotBuffers.
template <int kRows, typename F>
[[gnu::noinline]] void MultiplyDots(int64_t channels, const DirectBuffers<F>& buffers, const DirectWork<F>& work,
                                    F* sums) {
  constexpr int kWindows = kDotWindows<kRows>;
  constexpr bool kKept = kManyRegisters || kRows <= 6;
  const int64_t stride = work.stride, whole = work.run / kLanes<F> * kLanes<F>, rest = work.run - whole;
  for (int64_t first = 0; first < work.windows; first += kWindows, sums += kWindows * stride) {
    Vector<F> sum[kWindows][kRows];
#pragma GCC unroll 8
    for (int w = 0; w < kWindows; ++w) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[w][r] = Vector<F>{};
    }
    AskForPixels<kWindows>(buffers, work, first + kWindows);
    const F* weights = work.weights;
    for (int64_t run = 0; run < work.runs; ++run) {
      const F* pixel[kWindows];
#pragma GCC unroll 8
      for (int w = 0; w < kWindows; ++w) {
        pixel[w] = work.pixels + (buffers.windows[first + w] + buffers.taps[run]) * work.channels;
      }
      for (int64_t c = 0; c < whole; c += kLanes<F>, weights += kRows * kLanes<F>) {
        Vector<F> weight[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          weight[r] = kKept ? KeepLoaded(Load(weights + r * kLanes<F>)) : Load(weights + r * kLanes<F>);
#pragma GCC unroll 8
        for (int w = 0; w < kWindows; ++w) {
          const Vector<F> value = Load(pixel[w] + c);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[w][r] += value * weight[r];
        }
      }
      if (rest == 0) continue;
#pragma GCC unroll 8
      for (int w = 0; w < kWindows; ++w) {
        const Vector<F> value = LoadFirst(pixel[w] + whole, rest);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[w][r] += value * Load(weights + r * kLanes<F>);
      }
      weights += kRows * kLanes<F>;
    }
#pragma GCC unroll 8
    for (int w = 0; w < kWindows; ++w) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        if (r >= channels) continue;
        F& target = sums[w * stride + r];
        target = SumOf<F>(sum[w][r]) + (work.first ? 0 : target);
      }
    }
  }
}

template <typename F>
void MultiplyDotsOf(const ConvTask& task, const DirectBuffers<F>& buffers, const DirectWork<F>& work) {
  const int64_t channels = task.call->args.out_channels;
  switch (task.plan->vectors) {
    case 1:
      return MultiplyDots<1>(channels, buffers, work, buffers.sums);
    case 2:
      return MultiplyDots<2>(channels, buffers, work, buffers.sums);
    case 3:
      return MultiplyDots<3>(channels, buffers, work, buffers.sums);
    case 4:
      return MultiplyDots<4>(channels, buffers, work, buffers.sums);
    case 6:
      return MultiplyDots<6>(channels, buffers, work, buffers.sums);
    default:
      return MultiplyDots<8>(channels, buffers, work, buffers.sums);
  }
}

// Bias, residual and ReLU, where no pool follows, so that a block is the output channels: a row of results is one run
// of memory, unless it is a part of a wider map.
template <typename T>
void WriteDots(const ConvTask& task, const Tile& tile, const DotBuffers<Factor<T>>& buffers) {
  using A = Accumulator<T>;
  const ConvArgs& a = task.call->args;
  const int64_t channels = a.out_channels, columns = tile.conv_cols.size(), out_stride = task.call->out_stride;
  const bool whole = out_stride == channels;
  const int64_t length = whole ? columns * channels : channels, runs = whole ? 1 : columns;
  const T *bias = static_cast<const T*>(task.call->bias), *residual = static_cast<const T*>(task.call->residual);
  for (int64_t i = 0; i < columns * channels; ++i) {
    buffers.biases[i] = a.has_bias ? Widen(bias[task.stack * channels + i % channels]) : 0;
  }
  for (int64_t i = 0; i < tile.images; ++i) {
    const TileImage& image = buffers.of.images[i];
    for (int64_t y = image.conv_rows.begin; y < image.conv_rows.end; ++y) {
      const int64_t pixel = (image.image * a.conv_size[0] + y) * a.conv_size[1] + tile.conv_cols.begin;
      const A* sums = buffers.of.sums + (image.first_sum + y - image.conv_rows.begin) * columns * channels;
      T* out = static_cast<T*>(task.call->out) + pixel * out_stride;
      for (int64_t run = 0; run < runs; ++run, sums += length, out += out_stride) {
        for (int64_t at = 0; at < length; at += kLanes<A>) {
          Vector<A> value = Load(sums + at) + Load(buffers.biases + at);
          if (a.has_residual) {
            value += LoadFirstOf<A>(residual + (pixel + run) * channels + at, length - at);
          }
          StoreFirst(out + at, a.activation == Activation::kRelu ? Relu<A>(value) : value, length - at);
        }
      }
    }
  }
}

template <typename T>
int64_t DotBytes(const ConvTask& task) {
  return TakeDotBuffers<Factor<T>>(task, MakeTile(task, nullptr), ReadsInPlace<T>(task), nullptr).bytes;
}

template <typename T>
void RunDots(const ConvTask& task, char* scratch) {
  using F = Factor<T>;
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const Tile tile = MakeTile(task, nullptr);
  const bool in_place = ReadsInPlace<T>(task);
  DotBuffers<F> buffers = TakeDotBuffers<F>(task, tile, in_place, scratch);
  LocateWindows(task, tile, in_place, buffers.of);
  if (a.pool != Pool::kNone) __builtin_memset(buffers.of.sums, 0, tile.windows * p.block * sizeof(F));
  for (int64_t channel = 0; channel == 0 || channel < a.group_channels; channel += p.chunk_channels) {
    const Chunk chunk = {channel, Min(p.chunk_channels, a.group_channels - channel), 0, a.kernel_size[0]};
    DirectWork<F> work = WorkOf<T>(task, tile, chunk, in_place, buffers.of);
    if (!in_place) PackPixels<T>(task, tile, chunk, buffers.of.images, buffers.of.pixels);
    PackDots<T>(task, chunk, buffers.of.packed);
    MultiplyDotsOf(task, buffers.of, work);
  }
  if (a.pool == Pool::kNone) return WriteDots<T>(task, tile, buffers);
  WriteBlock<T>(task, tile, buffers.of.images, 0, buffers.of.sums);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_DENSE_DOT_KERNEL_H_
