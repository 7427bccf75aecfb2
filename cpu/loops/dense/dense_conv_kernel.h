// One task of the dense convolution: nothing is skipped, so 0 * inf is NaN where a zero of x meets it.
//
// What: sums[block][window][channel] += x * kernel for every tap and channel, chunk by chunk, then the epilogue.
// Layout: the tile's pixels of x, widened to the accumulator's type, padding included, as [rows, columns, chunk
//   channels]. Kernel slices are packed as for loops/window_kernel.h, [taps, chunk channels, block].
// Why this tiling (Cheng et al. 2018, sections 2.2 and 3.1, for a CPU): kWindows x kVectors sums stay in registers
//   while a chunk's rows pass by. Each row costs kVectors loads of weights and kWindows broadcasts for kWindows *
//   kVectors multiply-adds. The slice stays in L1 while all windows of the tile run over it. A row of a window is one
//   run of packed pixels, and of weights, where the kernel is not dilated: a stem of three channels has runs of 9 or
//   21 products. Addresses of a window are added up once per run. The loop checks no bounds, because the packed pixels
//   have their padding.
// 1x1: a packed kernel is read as it lies, eight vectors to a row, and so is x where it needs no padding. What a dense
//   block scales is scaled when it is packed.
// Order of each sum: a chunk's products from 0 on, then the chunks (core/simd.h, AddTo).
// Weights: a row of products asks for one line of the packed kernel's next slice, so that packing it finds it in L2.
// Lost: asking for the weights of the next block as well (1x1 layers 5 % less to 5 % more).
// Bound by: multiply-adds on wide layers; packing x and the kernel where there are few windows or few channels.
#ifndef JSC_CPU_LOOPS_DENSE_DENSE_CONV_KERNEL_H_
#define JSC_CPU_LOOPS_DENSE_DENSE_CONV_KERNEL_H_

#include "cpu/loops/dense/patch.h"
#include "cpu/loops/depthwise_kernel.h"
#include "cpu/loops/window_kernel.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kMostWindows = 8;  // that run together
constexpr int64_t kPackedLine = 16;  // weights of a cache line, of which a packed kernel's blocks are multiples

// Windows that run together, so that their sums, a row of weights and a broadcast value are registers.
template <int kVectors>
constexpr int kDirectWindows = kVectors == 8                     ? 3
                               : kVectors == 4                   ? 6
                               : kManyRegisters || kVectors == 1 ? 8
                                                                 : 6;

// Whether the kernel is read as a packed one lies: 1x1, of which a row of a block is one.
inline bool ReadsPacked(const ConvTask& task) {
  const ConvArgs& a = task.call->args;
  const bool is_point = a.kernel_size[0] * a.kernel_size[1] == 1;
  return task.call->packed != nullptr && is_point && task.plan->block == PackedBlock(a, task.plan->pairs);
}

template <typename F>
struct DirectBuffers {
  TileImage* images;     // [tile images]
  F* packed;             // [chunk rows + 1, block], unless the call has it
  Accumulator<F>* sums;  // [task blocks, windows + kMostWindows, block]
  F* pixels;             // [patch rows, patch columns, chunk channels], unless they are read in x
  int64_t* windows;      // [windows + kMostWindows] where each begins in the patch, in pixels
  int64_t* taps;         // [kh * kw] and how far each run of them is from there
  int64_t bytes;
};

template <typename F>
DirectBuffers<F> TakeDirectBuffers(const ConvTask& task, const Tile& tile, bool in_place, char* scratch) {
  const ConvPlan& p = *task.plan;
  const ConvArgs& a = task.call->args;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  const Patch patch = PatchOf(task, tile);
  Arena arena(scratch);
  DirectBuffers<F> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.packed = arena.Take<F>(ReadsPacked(task) ? 0 : (taps * p.chunk_channels + 1) * p.block);
  buffers.sums =
      arena.Take<Accumulator<F>>((task.block_end - task.block_begin) * (tile.windows + kMostWindows) * p.block);
  buffers.pixels = arena.Take<F>(in_place ? 0 : patch.rows * patch.columns * p.chunk_channels);
  buffers.windows = arena.Take<int64_t>(tile.windows + kMostWindows);
  buffers.taps = arena.Take<int64_t>(taps);
  buffers.bytes = arena.used();
  return buffers;
}

template <typename F>
void LocateDirectWindows(const ConvArgs& a, const Tile& tile, const Patch& patch, DirectBuffers<F>& buffers) {
  int64_t window = 0, first_row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = 0; y < buffers.images[i].conv_rows.size(); ++y) {
      for (int64_t x = 0; x < tile.conv_cols.size(); ++x) {
        buffers.windows[window++] = (first_row + y * a.stride[0]) * patch.columns + x * a.stride[1];
      }
    }
    first_row += PatchRows(a, buffers.images[i]);
  }
  for (int64_t i = 0; i < kMostWindows; ++i) buffers.windows[window + i] = 0;  // computed and not used
  const int64_t run = RunTaps(a), runs = a.kernel_size[1] / run;
  for (int64_t ky = 0; ky < a.kernel_size[0]; ++ky) {
    for (int64_t kx = 0; kx < runs; ++kx) {
      buffers.taps[ky * runs + kx] = ky * a.dilation[0] * patch.columns + kx * a.dilation[1];
    }
  }
}

// The same for windows that are pixels of x: where each lies there.
template <typename F>
void LocatePixels(const ConvArgs& a, const Tile& tile, DirectBuffers<F>& buffers) {
  int64_t window = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    const TileImage& image = buffers.images[i];
    for (int64_t y = image.conv_rows.begin; y < image.conv_rows.end; ++y) {
      const int64_t row = (image.image * a.size[0] + y * a.stride[0]) * a.size[1];
      for (int64_t x = tile.conv_cols.begin; x < tile.conv_cols.end; ++x) {
        buffers.windows[window++] = row + x * a.stride[1];
      }
    }
  }
  for (int64_t i = 0; i < kMostWindows; ++i) buffers.windows[window + i] = 0;  // computed and not used
  buffers.taps[0] = 0;
}

// Fills what buffers say of the tile's images and windows.
template <typename F>
void LocateWindows(const ConvTask& task, const Tile& tile, bool in_place, DirectBuffers<F>& buffers) {
  MakeTile(task, buffers.images);
  const ConvArgs& a = task.call->args;
  in_place ? LocatePixels(a, tile, buffers) : LocateDirectWindows(a, tile, PatchOf(task, tile), buffers);
}

// Cache lines of the next weights, of which each row of products asks for one: windows that run together for those
// from `first` on, the next ones for those from `step` on, until `times` have.
struct NextLines {
  const char* first;
  int64_t line, step;  // bytes from one line to the next, and from one row of windows to the next
  int64_t times;
};

// What a chunk adds to a block's windows.
template <typename F>
struct DirectWork {
  const F* pixels;
  const F* weights;  // [products, stride]
  int64_t windows;
  int64_t runs, run;  // of the kernel's rows, and the products in each
  int64_t channels;   // from one pixel to the next
  int64_t stride;     // of a row of weights and of sums: the block
  bool first;         // of the chunks: sums are new
  bool in_place;      // pixels are those of x, and their rows of a chunk far apart
  NextLines ahead = {};
};

// The work of a chunk on packed weights, whose pixels are packed, too, or read in x.
template <typename T, typename F>
DirectWork<F> WorkOf(const ConvTask& task, const Tile& tile, const Chunk& chunk, bool in_place,
                     const DirectBuffers<F>& buffers) {
  const ConvArgs& a = task.call->args;
  const int64_t run = RunTaps(a), taps = a.kernel_size[0] * a.kernel_size[1];
  DirectWork<F> work = {buffers.pixels,   buffers.packed,           tile.windows,
                        taps / run,       run * chunk.channels,     chunk.channels,
                        task.plan->block, chunk.channel_begin == 0, in_place};
  if (in_place) {
    work.channels = a.channels;
    work.pixels = static_cast<const F*>(task.call->x) + task.group * a.group_channels + chunk.channel_begin;
  }
  return work;
}

// The rows of windows from `first` on, where they lie in x: the processor does not see them coming.
template <int kWindows, typename F>
[[gnu::always_inline]] inline void AskForPixels(const DirectBuffers<F>& buffers, const DirectWork<F>& work,
                                                int64_t first) {
  if (!work.in_place) return;
  for (int w = 0; w < kWindows; ++w) {
    const F* next = work.pixels + buffers.windows[Min(first + w, work.windows)] * work.channels;
    for (int64_t c = 0; c < work.run; c += 64 / sizeof(F)) __builtin_prefetch(next + c);
  }
}

// A chunk of one block; pixels and packed as in DirectBuffers, sums: [windows + kMostWindows, stride].
template <int kVectors, typename F>
[[gnu::noinline]] void MultiplyDirect(const DirectBuffers<F>& buffers, const DirectWork<F>& work,
                                      Accumulator<F>* sums) {
  using A = Accumulator<F>;
  constexpr int kWindows = kDirectWindows<kVectors>;
  const int64_t stride = work.stride, length = work.run;
  for (int64_t first = 0; first < work.windows; first += kWindows, sums += kWindows * stride) {
    Vector<A> sum[kWindows][kVectors];
    for (int w = 0; w < kWindows; ++w) {
      for (int v = 0; v < kVectors; ++v) sum[w][v] = Vector<A>{};
    }
    AskForPixels<kWindows>(buffers, work, first + kWindows);
    const F* weights = work.weights;
    const bool asks = first < work.ahead.times * kWindows;  // else for what is there: no branch in the loop
    const char* line =
        asks ? work.ahead.first + first / kWindows * work.ahead.step : reinterpret_cast<const char*>(weights);
    const int64_t next_line = asks ? work.ahead.line : 0;
    for (int64_t run = 0; run < work.runs; ++run) {
      const F* pixel[kWindows];
      for (int w = 0; w < kWindows; ++w) {
        pixel[w] = work.pixels + (buffers.windows[first + w] + buffers.taps[run]) * work.channels;
      }
      for (int64_t c = 0; c < length; ++c, weights += stride, line += next_line) {
        __builtin_prefetch(line, 0, 2);
        if constexpr (kVectors > kWindows) {  // broadcast values are fewer registers than weights
          F value[kWindows];
          for (int w = 0; w < kWindows; ++w) value[w] = pixel[w][c];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const Vector<F> weight = Load(weights + v * kLanes<F>);
#pragma GCC unroll 8
            for (int w = 0; w < kWindows; ++w) MultiplyAdd(sum[w][v], value[w], weight);
          }
          continue;
        }
        Vector<F> weight[kVectors];
        for (int v = 0; v < kVectors; ++v) weight[v] = Load(weights + v * kLanes<F>);
#pragma GCC unroll 8
        for (int w = 0; w < kWindows; ++w) {
          const F value = pixel[w][c];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) MultiplyAdd(sum[w][v], value, weight[v]);
        }
      }
    }
    for (int w = 0; w < kWindows; ++w) {
      for (int v = 0; v < kVectors; ++v) {
        A* const target = sums + w * stride + v * kLanes<A>;
        work.first ? Store(target, sum[w][v]) : AddTo(target, sum[w][v]);
      }
    }
  }
}

template <typename F>
void MultiplyDirectBlock(int64_t vectors, const DirectBuffers<F>& buffers, const DirectWork<F>& work,
                         Accumulator<F>* sums) {
  if (vectors == 1) return MultiplyDirect<1>(buffers, work, sums);
  if constexpr (kManyRegisters) {
    if (vectors == 3) return MultiplyDirect<3>(buffers, work, sums);
    if (vectors == 4) return MultiplyDirect<4>(buffers, work, sums);
    if (vectors > 4) return MultiplyDirect<8>(buffers, work, sums);
  }
  MultiplyDirect<2>(buffers, work, sums);
}

// Of a packed kernel: those of the chunk after this one.
template <typename T>
NextLines NextLinesOf(const ConvTask& task, const Chunk& chunk, int64_t block) {
  if constexpr (kIsPacked<T>) {
    const ChunkOfBlock next = ChunkAfter(task, chunk, block);
    if (task.call->packed != nullptr && next.chunk.channels > 0) {
      constexpr int64_t kVectors = kPackedLine / kLanes<T>;  // of a line
      const Weights<T> weights = WeightsOf<T>(task, next.chunk, next.block);
      const auto at = [&](int64_t line) { return reinterpret_cast<const char*>(weights.first[line * kVectors]); };
      const int64_t lines = CeilDiv(weights.vectors, kVectors);
      return {at(0), weights.tap_stride * int64_t{sizeof(T)}, lines > 1 ? at(1) - at(0) : 0, lines};
    }
  }
  return {};
}

template <typename T>
int64_t DirectBytes(const ConvTask& task) {
  return TakeDirectBuffers<Factor<T>>(task, MakeTile(task, nullptr), ReadsInPlace<T>(task), nullptr).bytes;
}

template <typename T>
void RunDirect(const ConvTask& task, char* scratch) {
  using F = Factor<T>;
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const Tile tile = MakeTile(task, nullptr);
  const bool in_place = ReadsInPlace<T>(task), packed = ReadsPacked(task);
  DirectBuffers<F> buffers = TakeDirectBuffers<F>(task, tile, in_place, scratch);
  LocateWindows(task, tile, in_place, buffers);
  const int64_t all_blocks = CeilDiv(a.out_channels / a.groups, p.block);
  const int64_t blocks = task.block_end - task.block_begin;
  const int64_t block_sums = (tile.windows + kMostWindows) * p.block;
  for (int64_t channel = 0; channel == 0 || channel < a.group_channels; channel += p.chunk_channels) {
    const Chunk chunk = {channel, Min(p.chunk_channels, a.group_channels - channel), 0, a.kernel_size[0]};
    DirectWork<F> work = WorkOf<T>(task, tile, chunk, in_place, buffers);
    if (!in_place) PackRead<T>(task, tile, chunk, buffers.images, buffers.pixels);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = task.block_begin + block, width = Min(p.block, a.out_channels / a.groups - at * p.block);
      if (packed) {  // [S, groups, blocks, C / groups, 1, block]
        const int64_t row = ((task.stack * a.groups + task.group) * all_blocks + at) * a.group_channels + channel;
        work.weights = static_cast<const F*>(task.call->packed) + row * p.block;
      } else {
        PackBlock<T>(task, chunk, at, buffers.packed);
        work.ahead = NextLinesOf<T>(task, chunk, at);
      }
      MultiplyDirectBlock(CeilDiv(width, kLanes<F>), buffers, work, buffers.sums + block * block_sums);
    }
  }
  for (int64_t block = 0; block < blocks; ++block) {
    WriteBlock<Stored<T>>(task, tile, buffers.images, task.block_begin + block, buffers.sums + block * block_sums);
  }
}

// Depthwise, dense: see loops/depthwise_kernel.h.
template <typename T>
void RunDirectDepthwise(const ConvTask& task, char* scratch) {
  RunDepthwiseTask<T, false>(task, scratch);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_DENSE_DENSE_CONV_KERNEL_H_
