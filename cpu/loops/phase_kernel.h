// One task of ECR / PECR for a 3x3 kernel with strides of 2, pixel by pixel, from a packed kernel.
//
// What: a pixel meets the kernel elements that its row and its column leave: 2x2, 2x1, 1x2 or 1x1 of them. So x has
//   four phases, and each is a convolution of stride 1 with such a kernel. For each chunk of channels, each block, each
//   phase and each row of it, the sums of a window stay in registers while it moves along the row, as in
//   loops/pixel_rows.h.
// Layout: slices are those of loops/pixel_kernel.h, [C, 9, 16] or, of pairs, [C, 9, 32]. A block is up to four vectors
//   of them side by side. Sums are [places, block]. What is not zero is found in x, see loops/pixel_entries.h.
// Why this tiling: an entry of the last phase has one product for each vector of output channels, and the next entry
//   waits for it. Four vectors hide that. A phase's part of a slice stays in L1 while the rows of the phase pass by.
// Bound by: multiply-adds that wait for each other where a pixel meets one kernel element, and the end of its list.
// Order of each sum: chunk, phase, row, pixel, channel. It does not depend on tiles and threads.
#ifndef JSC_CPU_LOOPS_PHASE_KERNEL_H_
#define JSC_CPU_LOOPS_PHASE_KERNEL_H_

#include <type_traits>

#include "cpu/loops/epilogue.h"
#include "cpu/loops/nonzero_bits.h"
#include "cpu/loops/sums_layout.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kPhaseStride = 2, kPhaseTaps = 9, kPhaseLanes = 16;  // output channels of a vector

template <typename F>
constexpr int64_t kSliceBlock = kPhaseLanes * kChannelsOf<F>;

template <typename A>
struct PhaseBuffers {
  TileImage* images;  // [tile images]
  A* sums;            // [blocks, places, block]
  int64_t places;
  int64_t bytes;
};

template <typename A>
PhaseBuffers<A> TakePhaseBuffers(const ConvTask& task, const Tile& tile, const SumsLayout& layout, char* scratch) {
  Arena arena(scratch);
  PhaseBuffers<A> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.places = layout.places + kPhaseStride;  // a row of one pixel writes two places
  buffers.sums = arena.Take<A>((task.block_end - task.block_begin) * buffers.places * task.plan->block);
  buffers.bytes = arena.used();
  return buffers;
}

template <typename T>
int64_t PhaseBytes(const ConvTask& task) {
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  return TakePhaseBuffers<Accumulator<T>>(task, tile, layout, nullptr).bytes;
}

// One row of one phase, one chunk of channels and one block.
template <typename F>
struct PhaseRow {
  const F* values;  // the first pixel's channels
  int64_t step;     // elements to the next pixel of the phase
  int64_t pixels;
  int64_t channels;
  const F* slice;        // the first kernel element that counts, of the block's first slice, ...
  int64_t apart;         // ... and elements to that of the next slice
  Accumulator<F>* sums;  // of the first pixel through the last kernel column and the first kernel row that counts, ...
  int64_t row;           // ... and elements from there to the next kernel row's, upwards
};

template <int kRows, int kCols, int kVectors, typename F>
[[gnu::noinline]] void SweepPhase(const PhaseRow<F>& given) {
  using A = Accumulator<F>;
  constexpr int64_t kPitch = kVectors * kPhaseLanes, kOfSlice = kSliceBlock<F> / kPhaseLanes;
  constexpr int kTapRow = kPhaseStride * 3 * kSliceBlock<F>, kTapColumn = kPhaseStride * kSliceBlock<F>;
  static_assert(kLanes<A> <= kPhaseLanes, "a slice has whole vectors");
  const PhaseRow<F> work = given;
  Vector<A> sum[kRows][kCols][kVectors] = {};
  const F* values = work.values;
  A* place = work.sums;
  uint64_t found = work.pixels > 0 ? NonZeroBits(values, work.channels) : 0;
  for (int64_t x = 0; x < work.pixels; ++x, place += kPitch) {
    const F* next = x + 1 < work.pixels ? values + work.step : values;
    uint64_t rest = found;
    found = NonZeroBits(next, work.channels);  // early, as the row's end waits for it
    for (; rest != 0; rest &= rest - 1) {
      const int64_t channel = __builtin_ctzll(rest);
      const F value = values[channel];
      const F* const first = work.slice + channel * (kPhaseTaps * kSliceBlock<F>);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F* const weights = first + v / kOfSlice * work.apart + v % kOfSlice * kPhaseLanes;
#pragma GCC unroll 2
        for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 2
          for (int j = 0; j < kCols; ++j) {
            MultiplyAddAt(sum[ky][j][v], value, weights + ky * kTapRow + (kCols - 1 - j) * kTapColumn);
          }
        }
      }
    }
    values = next;
#pragma GCC unroll 2
    for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        AddTo(place - ky * work.row + v * kPhaseLanes, sum[ky][0][v]);
        if (kCols == 2) sum[ky][0][v] = sum[ky][kCols - 1][v];
        sum[ky][kCols - 1][v] = Vector<A>{};
      }
    }
  }
  if (kCols == 1) return;
#pragma GCC unroll 2
  for (int ky = 0; ky < kRows; ++ky) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) AddTo(place - ky * work.row + v * kPhaseLanes, sum[ky][0][v]);
  }
}

template <int kVectors, typename F>
void SweepPhaseOf(int64_t rows, int64_t columns, const PhaseRow<F>& work) {
  if (rows == 2) return columns == 2 ? SweepPhase<2, 2, kVectors>(work) : SweepPhase<2, 1, kVectors>(work);
  columns == 2 ? SweepPhase<1, 2, kVectors>(work) : SweepPhase<1, 1, kVectors>(work);
}

// What the rows and columns of a phase meet: kernel elements `first`, first + 2, ..., `taps` of them; the first of them
// leads pixel `at` to result (at + padding - first) / 2, the others to the results before it.
struct TapsMet {
  int64_t first, taps;
  int64_t ResultOf(int64_t at, int64_t padding) const { return (at + padding - first) / kPhaseStride; }
};

inline TapsMet TapsMetAt(int64_t at, int64_t padding) {
  const int64_t first = (at + padding) % kPhaseStride;
  return {first, first == 0 ? 2 : 1};
}

// Row y of one image, the columns of one phase.
template <typename F>
void AddPhaseRow(const ConvTask& task, const Tile& tile, const SumsLayout& layout, const TileImage& image, int64_t y,
                 int64_t column, int64_t chunk, int64_t block, Accumulator<F>* sums) {
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const TapsMet rows = TapsMetAt(y, a.pad_low[0]), columns = TapsMetAt(column, a.pad_low[1]);
  const int64_t top = rows.ResultOf(y, a.pad_low[0]);  // through the first kernel row
  const int64_t begin = Max(0, top - image.conv_rows.end + 1), end = Min(rows.taps, top - image.conv_rows.begin + 1);
  if (begin >= end) return;
  constexpr int64_t kSlice = kSliceBlock<F>;
  const int64_t slices = CeilDiv(a.out_channels / a.groups, kSlice), slice_size = kPhaseTaps * kSlice;
  const int64_t first_slice = block * p.block / kSlice;
  const F* packed = static_cast<const F*>(task.call->packed);  // [S, groups, slices, C / groups, 9, kSlice]
  PhaseRow<F> work{};
  work.channels = Min(p.chunk_channels, a.group_channels - chunk);
  work.values = static_cast<const F*>(task.call->x) +
                ((image.image * a.size[0] + y) * a.size[1] + column) * a.channels + task.group * a.group_channels +
                chunk;
  work.step = kPhaseStride * a.channels;
  work.pixels = CeilDiv(tile.in_cols.end - column, kPhaseStride);
  work.apart = a.group_channels * slice_size;
  work.slice = packed + ((task.stack * a.groups + task.group) * slices + first_slice) * work.apart +
               chunk * slice_size + ((rows.first + begin * kPhaseStride) * 3 + columns.first) * kSlice;
  work.row = layout.columns * p.block;
  const int64_t row = image.first_sum + top - begin - image.conv_rows.begin;
  const int64_t place = columns.ResultOf(column, a.pad_low[1]) - (columns.taps - 1) - tile.conv_cols.begin;
  work.sums = sums + (row * layout.columns + place) * p.block;
  switch (p.block / kPhaseLanes) {
    case 4:
      return SweepPhaseOf<4>(end - begin, columns.taps, work);
    case 2:
      return SweepPhaseOf<2>(end - begin, columns.taps, work);
    default:
      return SweepPhaseOf<1>(end - begin, columns.taps, work);
  }
}

template <typename T>
void RunPhases(const ConvTask& task, char* scratch) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, Factor<T>> && kLanes<A> == kPhaseLanes) {
    const IeeeScope ieee;
    const ConvArgs& a = task.call->args;
    const ConvPlan& p = *task.plan;
    Tile tile = MakeTile(task, nullptr);
    const SumsLayout layout = LayOutSums(task, tile, nullptr);
    PhaseBuffers<A> buffers = TakePhaseBuffers<A>(task, tile, layout, scratch);
    MakeTile(task, buffers.images);
    LayOutSums(task, tile, buffers.images);
    const int64_t blocks = task.block_end - task.block_begin, block_sums = buffers.places * p.block;
    __builtin_memset(buffers.sums, 0, blocks * block_sums * sizeof(A));
    for (int64_t chunk = 0; chunk < a.group_channels; chunk += p.chunk_channels) {
      for (int64_t block = 0; block < blocks; ++block) {
        A* const sums = buffers.sums + block * block_sums + layout.before * p.block;
        for (int64_t phase = 0; phase < kPhaseStride * kPhaseStride; ++phase) {
          const int64_t column = tile.in_cols.begin + phase % kPhaseStride;
          if (column >= tile.in_cols.end) continue;
          for (int64_t i = 0; i < tile.images; ++i) {
            const Range rows = buffers.images[i].in_rows;
            for (int64_t y = rows.begin + phase / kPhaseStride; y < rows.end; y += kPhaseStride) {
              AddPhaseRow<T>(task, tile, layout, buffers.images[i], y, column, chunk, task.block_begin + block, sums);
            }
          }
        }
      }
    }
    for (int64_t block = 0; block < blocks; ++block) {
      A* const sums = buffers.sums + block * block_sums + layout.before * p.block;
      WriteBlock<Stored<T>>(task, tile, buffers.images, task.block_begin + block, sums);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_PHASE_KERNEL_H_
