// One task of ECR / PECR pixel by pixel: each pixel's non-zeros times their kernel rows, summed in registers for all
// windows that the pixel lies in; then bias, residual, ReLU and pool.
//
// What: for each chunk of channels and each pixel with a non-zero there: the sums of its kh x kw windows to registers;
//   for each of its entries, for each kernel element: sums += value * slice[channel][element]; the sums back.
// Layout: a slice is [chunk channels, kh * kw, block], so that all rows of an entry follow each other. Sums are
//   [places, block], see sums_layout.h. The pixels of a strip are ordered by how many entries they have in the chunk.
// Why this tiling: an entry costs a load for each multiply-add and two more, where conv_kernel.h has two more for each
//   kernel element, and its list serves kh * kw windows, so there is nothing to copy for each of them. Pixels of equal
//   length in a row are what the branch predictor knows: without the order, each would end in a miss of some 20 cycles.
//   Sixteen output channels make lists longer for the same slice in L1, so that loading and storing sums is shared by
//   more entries: that is how a packed kernel lies. Where it is packed here, in each call, blocks are 128 bytes wide,
//   which is what the outer cache gives in one piece.
// Bound by: loads, a multiply-add with its weight from L1 every 0.77 cycles whatever else the loop does; the kernel's
//   way from the outer cache where maps are small and sparse, which a packed kernel halves and overlaps with the sums.
// Lost: prefetching the rows of the next slice before packing it; packing several blocks at once into L2.
// Order of each sum: chunk, strip, length, pixel, channel: it does not depend on tiles and threads.
#ifndef JSC_CPU_PIXEL_KERNEL_H_
#define JSC_CPU_PIXEL_KERNEL_H_

#include "epilogue.h"
#include "pixel_runs.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// The next slice of a packed kernel, brought closer while this one's sums keep the core busy.
struct SliceAhead {
  const char* line;
  int64_t lines;  // still to fetch
  int64_t each;   // of them with each pixel

  [[gnu::always_inline]] void Fetch() {
    for (int64_t i = Min(each, lines); i > 0; --i, --lines, line += 64) __builtin_prefetch(line, 0, 2);
  }
};

// What AddPixels reads and writes of one chunk and block.
template <typename A>
struct ChunkWork {
  const PixelGroup* groups;
  int64_t group_count;
  const PixelRef* refs;
  PixelList<A> list;
  const A* slice;     // [channels, kRows * kCols, kPitch]
  A* sums;            // [places, kPitch]
  int64_t row_bytes;  // between the sums of neighbouring kernel rows
  SliceAhead ahead;
};

// The first kVectors vectors of slice and sums.
template <int kRows, int kCols, int kVectors, int kPitch, typename A>
[[gnu::noinline]] void AddPixels(const ChunkWork<A>& work) {
  constexpr int kTaps = kRows * kCols;
  const PixelRef* refs = work.refs;
  const char* const slice = reinterpret_cast<const char*>(work.slice);
  char* const sums = reinterpret_cast<char*>(work.sums);
  const int64_t row_bytes = work.row_bytes;
  SliceAhead ahead = work.ahead;
  for (int64_t g = 0; g < work.group_count; ++g) {
    const int64_t length = work.groups[g].length;
    for (const PixelRef* end = refs + work.groups[g].pixels; refs != end; ++refs) {
      char* const place = sums + refs->place;
      Vector<A> sum[kTaps][kVectors];
#pragma GCC unroll 16
      for (int tap = 0; tap < kTaps; ++tap) {
        const A* row = reinterpret_cast<const A*>(place + (kRows - 1 - tap / kCols) * row_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sum[tap][v] = Load(row + (kCols - 1 - tap % kCols) * kPitch + v * kLanes<A>);
        }
      }
      ahead.Fetch();
      const A* values = work.list.values + refs->entry;
      const uint32_t* offsets = work.list.offsets + refs->entry;
      for (int64_t i = 0; i < length; ++i) {
        const A value = values[i];
        const A* row = reinterpret_cast<const A*>(slice + offsets[i]);
        asm("" : "+r"(row));  // one register: indexed operands would be split into two micro-operations
#pragma GCC unroll 16
        for (int tap = 0; tap < kTaps; ++tap) {
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sum[tap][v] += value * Load(row + tap * kPitch + v * kLanes<A>);
        }
      }
#pragma GCC unroll 16
      for (int tap = 0; tap < kTaps; ++tap) {
        A* row = reinterpret_cast<A*>(place + (kRows - 1 - tap / kCols) * row_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          Store(row + (kCols - 1 - tap % kCols) * kPitch + v * kLanes<A>, sum[tap][v]);
        }
      }
    }
  }
}

// All of a block's `pitch` channels, kVectors registers at a time.
template <int kRows, int kCols, int kVectors, int kPitch, typename A>
void AddBlock(ChunkWork<A> work, int64_t pitch) {
  for (int64_t k = 0; k < pitch; k += kVectors * kLanes<A>) {
    AddPixels<kRows, kCols, kVectors, kPitch>(work);
    work.slice += kVectors * kLanes<A>;
    work.sums += kVectors * kLanes<A>;
    work.ahead.lines = 0;
  }
}

template <typename A>
void AddChunk(const ConvTask& task, const ChunkWork<A>& work) {
  const int64_t pitch = task.plan->block;
  if (task.call->args.kernel_size[0] == 3) {
    if (pitch == 16) return AddBlock<3, 3, 1, 16>(work, pitch);
    return AddBlock<3, 3, kManyRegisters ? 2 : 1, 32>(work, pitch);
  }
  const int64_t vectors = pitch / kLanes<A>;
  if (vectors >= 8) return AddBlock<1, 1, 8, 0>(work, pitch);
  if (vectors >= 4) return AddBlock<1, 1, 4, 0>(work, pitch);
  if (vectors >= 2) return AddBlock<1, 1, 2, 0>(work, pitch);
  AddBlock<1, 1, 1, 0>(work, pitch);
}

// Channels [first, first + count) of a block of the kernel. packed: [count, kh * kw, block]; what is beyond the group's
// output channels is zero.
template <typename T, typename A>
[[gnu::noinline]] void PackSlice(const ConvTask& task, int64_t block, int64_t first, int64_t count, A* packed) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block, features = a.features / a.groups, taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t width = Min(stride, features - block * stride), whole = width / kLanes<A> * kLanes<A>;
  const T* kernel = static_cast<const T*>(task.call->kernel) + task.stack * taps * a.group_channels * a.features +
                    task.group * features + block * stride;
  for (int64_t tap = 0; tap < taps; ++tap) {
    for (int64_t c = 0; c < count; ++c) {
      const T* row = kernel + (tap * a.group_channels + first + c) * a.features;
      A* target = packed + (c * taps + tap) * stride;
      for (int64_t k = 0; k < whole; k += kLanes<A>) Store(target + k, Load(row + k));
      if (whole == stride) continue;
      for (int64_t k = whole; k < stride; ++k) target[k] = k < width ? Widen(row[k]) : A{0};
    }
  }
}

template <typename A>
struct PixelBuffers {
  TileImage* images;  // [tile images]
  PixelLists<A> lists;
  PixelRuns<A> runs;
  A* packed;  // [chunk channels, kh * kw, block]
  A* sums;    // [places, block]
  int64_t bytes;
};

// The lists come first: they stay where they are from one task of a tile to the next.
template <typename A>
PixelBuffers<A> TakePixelBuffers(const ConvTask& task, const Tile& tile, const SumsLayout& layout, char* scratch) {
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  Arena arena(scratch);
  PixelBuffers<A> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.lists = TakePixelLists<A>(arena, task, tile, taps * p.block * sizeof(A), false);
  buffers.runs = TakePixelRuns<A>(arena, task, tile, buffers.lists.chunks);
  buffers.packed = arena.Take<A>(p.chunk_channels * taps * p.block);
  buffers.sums = arena.Take<A>(layout.places * p.block);
  buffers.bytes = arena.used();
  return buffers;
}

template <typename T>
int64_t PixelBytes(const ConvTask& task) {
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  return TakePixelBuffers<Accumulator<T>>(task, tile, layout, nullptr).bytes;
}

// Every chunk of one block.
template <typename T, typename A>
void AddChunks(const ConvTask& task, const SumsLayout& layout, const PixelBuffers<A>& buffers, int64_t block) {
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const PixelRuns<A>& runs = buffers.runs;
  const int64_t row = a.kernel_size[0] * a.kernel_size[1] * p.block;  // elements of one channel in a slice
  const A* ready = static_cast<const A*>(task.call->packed);          // [S, groups, blocks, C / groups, kh * kw, block]
  if (ready != nullptr) {
    const int64_t blocks = CeilDiv(a.features / a.groups, p.block);
    ready += ((task.stack * a.groups + task.group) * blocks + block) * a.group_channels * row;
  }
  ChunkWork<A> work{};
  work.sums = buffers.sums;
  work.row_bytes = layout.columns * a.dilation[0] * p.block * sizeof(A);
  for (int64_t chunk = 0; chunk < buffers.lists.chunks; ++chunk) {
    const int64_t first = chunk * p.chunk_channels, count = Min(p.chunk_channels, a.group_channels - first);
    work.groups = runs.groups + chunk * runs.pixels;
    work.group_count = runs.used[chunk];
    work.refs = runs.refs + chunk * runs.pixels;
    work.list = buffers.lists.At(chunk);
    if (ready != nullptr) {
      work.slice = ready + first * row;
      const bool last = chunk + 1 == buffers.lists.chunks && block + 1 == task.block_end;
      const int64_t next = Min(p.chunk_channels, Max(a.group_channels - first - count, count));
      work.ahead = {reinterpret_cast<const char*>(work.slice + count * row), 0, 0};
      work.ahead.lines = last ? 0 : next * row * static_cast<int64_t>(sizeof(A)) / 64;
      work.ahead.each = CeilDiv(work.ahead.lines, Max(1, runs.found[chunk]));
    } else {
      PackSlice<T>(task, block, first, count, buffers.packed);
      work.slice = buffers.packed;
    }
    AddChunk(task, work);
  }
}

template <typename T>
void RunPixels(const ConvTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ConvPlan& p = *task.plan;
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  PixelBuffers<A> buffers = TakePixelBuffers<A>(task, tile, layout, scratch);
  if (!task.lists_ready) {
    MakeTile(task, buffers.images);
    LayOutSums(task, tile, buffers.images);
    LocatePixels(task, tile, buffers.images, layout, buffers.runs);
    __builtin_memset(buffers.lists.needed_rows, 1, tile.in_rows);
    __builtin_memset(buffers.lists.needed_cols, 1, tile.in_cols.size());
    CompressPixels<T>(task, tile, buffers.images, buffers.lists);
    OrderPixels(task, tile, buffers.lists, buffers.runs);
  }
  for (int64_t block = task.block_begin; block < task.block_end; ++block) {
    __builtin_memset(buffers.sums, 0, layout.places * p.block * sizeof(A));
    AddChunks<T>(task, layout, buffers, block);
    WriteBlock<T>(task, tile, buffers.images, block, buffers.sums + layout.before * p.block);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_PIXEL_KERNEL_H_
