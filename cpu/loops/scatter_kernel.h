// One task of ECR / PECR for very sparse maps. Each input channel's kernel rows, held in registers, are added to the
// windows that its non-zeros lie in; then bias, residual, ReLU and pool.
//
// What: for each channel with a non-zero, weights [kh, kw, block] go to registers. For each of its entries and each
//   tap: sums[window of the pixel and element] += value * weight.
// Layout: the kernel is read as it lies in memory (HWIO), once per strip, `block` channels of it at a time: nothing is
//   packed. Sums are [places, block], see loops/channel_lists.h.
// Why this tiling: where a kernel row serves only a few windows, packing it and copying lists for each window, as
//   loops/window_kernel.h does, cost more than the arithmetic. A 3x3 kernel of two vectors takes 18 registers, which
//   leaves one load and one store of sums per multiply-add and nothing else. The sums of a strip stay in L1.
// Bound by: the store port, one vector a cycle, or the kernel's way from the outer cache (20 GB/s a core; the rows of
//   the channels that follow are prefetched meanwhile). loops/window_kernel.h needs no store per multiply-add and wins
//   on denser maps; plan/window_plan.cc chooses.
// Order of each sum: channel, then tap, from 0 on for every kSumTaps taps; then such sums (core/simd.h, AddTo). It
//   depends on nothing else.
#ifndef JSC_CPU_LOOPS_SCATTER_KERNEL_H_
#define JSC_CPU_LOOPS_SCATTER_KERNEL_H_

#include "cpu/loops/channel_lists.h"
#include "cpu/loops/epilogue.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kChannelsAhead = 1;  // whose kernel rows are prefetched
constexpr int64_t kSumTaps = 1024;     // of a sum's channels, few of which are not zero

// One block of output channels: kernel [kh, kw, channels, block] with these strides, in elements.
template <typename S>
struct KernelRows {
  const S* first;
  int64_t taps, tap_stride, channel_stride;
};

// What a strip adds, from which weights, to which sums. S is the kernel's type, or the sums' where it is packed.
template <typename S, typename A>
struct ScatterWork {
  KernelRows<S> kernel;
  A* copy;                 // [channels, taps, block] to keep the weights in for the strips that follow, or null
  A* sums;                 // [places, block]
  int64_t kernel_size[2];  // kh, kw
  int64_t row_bytes, column_bytes;  // between the sums of neighbouring kernel rows and columns
  const ChannelLists<A>* lists;
  Range active;  // of lists->active
  int64_t strip;
};

// Adds one channel's kRows x kCols kernel rows, beginning at `rows`, to the sums that its entries name. The rows of a
// later channel at `ahead` are prefetched in between: all at once they would stall.
template <int kRows, int kCols, int kVectors, typename S, typename A>
[[gnu::always_inline]] inline void ScatterChannel(const S* rows, const S* ahead, int64_t tap_stride, A* copy,
                                                  int64_t row_bytes, const Entry<A>* entry, const Entry<A>* end,
                                                  char* sums) {
  constexpr int64_t kPlace = kVectors * kVectorBytes, kTaps = kRows * kCols;
  constexpr int64_t kLine = 64 / sizeof(S), kWidth = kVectors * kLanes<A>;
  Vector<A> weights[kRows][kCols][kVectors];
#pragma GCC unroll 16
  for (int tap = 0; tap < kTaps; ++tap) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      weights[tap / kCols][tap % kCols][v] = Load(rows + tap * tap_stride + v * kLanes<A>);
      if (copy != nullptr) Store(copy + tap * kWidth + v * kLanes<A>, weights[tap / kCols][tap % kCols][v]);
    }
  }
  const S* last = ahead + (kTaps - 1) * tap_stride;
  for (; entry < end; ++entry) {
    for (int64_t k = 0; k < kWidth; k += kLine) __builtin_prefetch(ahead + k);
    ahead = ahead == last ? last : ahead + tap_stride;
    const A value = entry->value;
    char* place = sums + entry->offset;
#pragma GCC unroll 8
    for (int ky = kRows - 1; ky >= 0; --ky, place += row_bytes) {
#pragma GCC unroll 8
      for (int kx = kCols - 1; kx >= 0; --kx) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          A* sum = reinterpret_cast<A*>(place + (kCols - 1 - kx) * kPlace) + v * kLanes<A>;
          Store(sum, Load(sum) + value * weights[ky][kx][v]);
        }
      }
    }
  }
}

// All channels of one strip; kRows x kCols taps at a time.
template <int kRows, int kCols, int kVectors, typename S, typename A>
[[gnu::noinline]] void ScatterStrip(const ScatterWork<S, A> work) {
  const ChannelLists<A> lists = *work.lists;
  const KernelRows<S> kernel = work.kernel;
  for (int64_t i = work.active.begin; i < work.active.end; ++i) {
    const int64_t c = lists.active[i];
    const int64_t c_ahead = lists.active[Min(i + kChannelsAhead, lists.active_count - 1)];
    const Entry<A>* entries = lists.Begin(work.strip, c);
    const Entry<A>* end = lists.ends[work.strip * lists.channels + c];
    for (int64_t tap = 0; tap < kernel.taps; tap += kRows * kCols) {
      const int64_t ky = tap / work.kernel_size[1], kx = tap % work.kernel_size[1];
      char* sums = reinterpret_cast<char*>(work.sums) + (work.kernel_size[0] - kRows - ky) * work.row_bytes +
                   (work.kernel_size[1] - kCols - kx) * work.column_bytes;
      const S* rows = kernel.first + tap * kernel.tap_stride;
      A* copy = work.copy == nullptr ? nullptr : work.copy + (c * kernel.taps + tap) * kVectors * kLanes<A>;
      ScatterChannel<kRows, kCols, kVectors>(rows + c * kernel.channel_stride, rows + c_ahead * kernel.channel_stride,
                                             kernel.tap_stride, copy, work.row_bytes, entries, end, sums);
    }
  }
}

template <typename S, typename A>
void Scatter(const ConvTask& task, const ScatterWork<S, A>& work) {
  const ConvArgs& a = task.call->args;
  const bool square3 = a.kernel_size[0] == 3 && a.kernel_size[1] == 3 && a.dilation[1] == 1;
  switch (task.plan->vectors) {
    case 1:
      return square3 ? ScatterStrip<3, 3, 1>(work) : ScatterStrip<1, 1, 1>(work);
    case 2:
      return square3 ? ScatterStrip<3, 3, 2>(work) : ScatterStrip<1, 1, 2>(work);
    default:
      return ScatterStrip<1, 1, 4>(work);
  }
}

// packed: [channels, taps, block]; what is beyond `width` is zero.
template <typename T, typename A>
void PackRows(const KernelRows<T>& kernel, int64_t channels, int64_t width, int64_t block, A* packed) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t tap = 0; tap < kernel.taps; ++tap, packed += block) {
      const T* row = kernel.first + tap * kernel.tap_stride + c * kernel.channel_stride;
      for (int64_t k = 0; k < block; ++k) packed[k] = k < width ? Widen(row[k]) : A{0};
    }
  }
}

template <typename A>
struct ScatterBuffers {
  TileImage* images;  // [tile images]
  ChannelLists<A> lists;
  A* sums;    // [places, block]
  A* before;  // same: the sums of channels before, where there are more than kSumTaps taps; else null
  A* packed;  // [channels, taps, block] where several strips or an incomplete block want it, else null
  int64_t bytes;
};

inline int64_t SumChannels(const ConvArgs& a) { return Max(1, kSumTaps / (a.kernel_size[0] * a.kernel_size[1])); }

// The lists come first: they stay where they are from one task of a tile to the next.
template <typename A>
ScatterBuffers<A> TakeScatterBuffers(const ConvTask& task, const Tile& tile, const SumsLayout& layout, char* scratch) {
  const ConvArgs& a = task.call->args;
  Arena arena(scratch);
  ScatterBuffers<A> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.lists = TakeChannelLists<A>(arena, task, tile);
  buffers.sums = arena.Take<A>(layout.places * task.plan->block);
  if (SumChannels(a) < a.group_channels) buffers.before = arena.Take<A>(layout.places * task.plan->block);
  if (buffers.lists.strips > 1 || a.out_channels / a.groups % task.plan->block != 0) {
    buffers.packed = arena.Take<A>(a.group_channels * a.kernel_size[0] * a.kernel_size[1] * task.plan->block);
  }
  buffers.bytes = arena.used();
  return buffers;
}

template <typename T>
int64_t ScatterBytes(const ConvTask& task) {
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  return TakeScatterBuffers<Accumulator<T>>(task, tile, layout, nullptr).bytes;
}

// Some channels in all strips of one block: weights from the kernel as it lies, then from the copy in the outer cache.
template <typename T, typename A>
void ScatterBlock(const ConvTask& task, const SumsLayout& layout, const ScatterBuffers<A>& buffers, int64_t block,
                  const Range& active) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block, taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t out_channels = a.out_channels / a.groups, width = Min(stride, out_channels - block * stride);
  const T* kernel = static_cast<const T*>(task.call->kernel) + task.stack * taps * a.group_channels * a.out_channels;
  const KernelRows<T> rows = {kernel + task.group * out_channels + block * stride, taps,
                              a.group_channels * a.out_channels, a.out_channels};
  const KernelRows<A> packed = {buffers.packed, taps, stride, taps * stride};
  const int64_t place_bytes = stride * sizeof(A);
  ScatterWork<A, A> again = {packed,
                             nullptr,
                             buffers.sums,
                             {a.kernel_size[0], a.kernel_size[1]},
                             layout.columns * a.dilation[0] * place_bytes,
                             a.dilation[1] * place_bytes,
                             &buffers.lists,
                             active,
                             0};
  if (width < stride) {
    if (active.begin == 0) PackRows(rows, a.group_channels, width, stride, buffers.packed);
  } else {
    A* copy = buffers.lists.strips > 1 ? buffers.packed : nullptr;
    Scatter(task, ScatterWork<T, A>{rows,
                                    copy,
                                    buffers.sums,
                                    {a.kernel_size[0], a.kernel_size[1]},
                                    again.row_bytes,
                                    again.column_bytes,
                                    &buffers.lists,
                                    active,
                                    0});
    again.strip = 1;
  }
  for (; again.strip < buffers.lists.strips; ++again.strip) Scatter(task, again);
}

// All channels of one block; the result is where their sums are, [places, block].
template <typename T, typename A>
A* ScatterChannels(const ConvTask& task, const SumsLayout& layout, const ScatterBuffers<A>& buffers, int64_t block) {
  const ChannelLists<A>& lists = buffers.lists;
  const int64_t size = layout.places * task.plan->block, step = SumChannels(task.call->args);
  __builtin_memset(buffers.sums, 0, size * sizeof(A));
  if (buffers.before == nullptr) {
    ScatterBlock<T>(task, layout, buffers, block, {0, lists.active_count});
    return buffers.sums;
  }
  __builtin_memset(buffers.before, 0, size * sizeof(A));
  Range active = {0, 0};
  for (int64_t channel = 0; channel < lists.channels; channel += step) {
    active.begin = active.end;
    while (active.end < lists.active_count && lists.active[active.end] < channel + step) ++active.end;
    if (active.size() == 0) continue;
    ScatterBlock<T>(task, layout, buffers, block, active);
    for (int64_t i = 0; i < size; i += kLanes<A>) {
      AddTo(buffers.before + i, Load(buffers.sums + i));
      Store(buffers.sums + i, Vector<A>{});
    }
  }
  return buffers.before;
}

template <typename T>
void RunScatter(const ConvTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  ScatterBuffers<A> buffers = TakeScatterBuffers<A>(task, tile, layout, scratch);
  if (!task.lists_ready) {
    MakeTile(task, buffers.images);
    LayOutSums(task, tile, buffers.images);
    ListChannels<T>(task, tile, buffers.images, layout, buffers.lists);
  }
  FindActive(buffers.lists);
  for (int64_t block = task.block_begin; block < task.block_end; ++block) {
    A* sums = ScatterChannels<T>(task, layout, buffers, block);
    WriteBlock<T>(task, tile, buffers.images, block, sums + layout.before * task.plan->block);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_SCATTER_KERNEL_H_
