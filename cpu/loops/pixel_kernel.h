// One task of ECR / PECR pixel by pixel. Each pixel's non-zeros times their kernel rows are summed in registers for all
// windows that the pixel lies in; then bias, residual, ReLU and pool.
//
// What: for each chunk of channels, each block of several, each row of x and each part of the block that fills the
//   registers: SweepRow (loops/pixel_rows.h). Kernel rows whose result is not in the tile are left out, and columns at
//   the sides likewise.
// Layout: a slice is [chunk channels, kh * kw, block], so that all rows of an entry follow each other. Sums are
//   [places, block] for each block, see loops/sums_layout.h.
// Why this tiling: an entry costs a load for each multiply-add and one more, where loops/window_kernel.h has two more
//   for each tap. Its bit serves kh * kw windows, so there is nothing to copy for each of them. Sixteen
//   output channels make lists longer for the same slice in L1, so more entries share loading and storing sums: that is
//   how a packed kernel lies. Of pairs, whose lists are half as long, 32 do. Where it is packed here, in each call,
//   blocks are 128 bytes wide, which is what the outer cache gives in one piece. A row of sums is zeroed just before it
//   is first added to and becomes a row of results right after the last addition, while it is in L1. Its lines of the
//   result are fetched meanwhile. A few rows do so together. In the chunks between the first and the last all of them
//   run in one go: row by row a layer takes 4 to 8 % longer.
// Order of blocks: they go through a chunk one after another, up to 16 of a packed kernel, their sums in L2. The branch
//   predictor then learns the lengths of the chunk's lists and misses fewer of their ends. Block by block, through all
//   chunks each, a layer of 256 channels takes 4 to 14 % longer.
// Bound by: loads, see loops/pixel_rows.h; the kernel's way from the outer cache where maps are small and sparse, which
//   a packed kernel halves and overlaps with the sums.
// Lost: prefetching the rows of the next slice before packing it; packing several blocks at once into L2; several
//   blocks at a chunk for a kernel that is packed here (28 % longer at 512->512 28x28) or for 1x1 layers (up to 3 %).
// Order of each sum: chunk, row, pixel, channel. It does not depend on tiles and threads.
#ifndef JSC_CPU_LOOPS_PIXEL_KERNEL_H_
#define JSC_CPU_LOOPS_PIXEL_KERNEL_H_

#include <type_traits>

#include "cpu/loops/epilogue.h"
#include "cpu/loops/packed_row.h"
#include "cpu/loops/pixel_rows.h"
#include "cpu/loops/sums_layout.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// All of a block's channels, kVectors registers at a time.
template <int kRows, int kCols, int kVectors, int kPitch, typename F>
void SweepBlock(const RowWork<F>& work, int64_t pitch) {
  for (int64_t k = 0; k < pitch; k += kVectors * kLanes<F>) SweepRows<kRows, kCols, kVectors, kPitch>(work, k);
}

// Of a kernel of kSize columns, with at most kRows of its rows.
template <int kRows, int kSize, int kVectors, int kPitch, typename F>
void SweepSquare(const RowWork<F>& work, int64_t pitch) {
  if constexpr (kRows > 1) {
    if (work.kernel_rows < kRows) return SweepSquare<kRows - 1, kSize, kVectors, kPitch>(work, pitch);
  }
  SweepBlock<kRows, kSize, kVectors, kPitch>(work, pitch);
}

template <typename F>
void Sweep(const ConvTask& task, const RowWork<F>& work) {
  const int64_t pitch = task.plan->block, size = task.call->args.kernel_size[0];
  if (size == 3) {
    // Two short vectors, where registers hold the sums of both: fewer sweeps through the entries.
    constexpr int kOf16 = kManyRegisters && kVectorBytes == 16 ? 2 : 1;
    if (pitch == 16) return SweepSquare<3, 3, kOf16, 16>(work, pitch);
    return SweepSquare<3, 3, kManyRegisters ? 2 : 1, 32>(work, pitch);
  }
  if constexpr (kManyRegisters) {
    if (size == 5) return SweepSquare<5, 5, 1, 16>(work, pitch);
  }
  const int64_t vectors = pitch / kLanes<F>;
  if (vectors >= 8) return SweepBlock<1, 1, 8, 0>(work, pitch);
  if (vectors >= 4) return SweepBlock<1, 1, 4, 0>(work, pitch);
  if (vectors >= 2) return SweepBlock<1, 1, 2, 0>(work, pitch);
  SweepBlock<1, 1, 1, 0>(work, pitch);
}

// Channels [first, first + count) of a block of the kernel. packed: [count, kh * kw, block]; what is beyond the group's
// output channels is zero.
template <typename T, typename F>
[[gnu::noinline]] void PackSlice(const ConvTask& task, int64_t block, int64_t first, int64_t count, F* packed) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block, out_channels = a.out_channels / a.groups,
                taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t width = Min(stride, out_channels - block * stride), row_size = kChannelsOf<T> * a.out_channels;
  const Stored<T>* kernel = static_cast<const Stored<T>*>(task.call->kernel) +
                            task.stack * taps * a.group_channels * row_size + task.group * out_channels +
                            block * stride;
  for (int64_t tap = 0; tap < taps; ++tap) {
    for (int64_t c = 0; c < count; ++c) {
      const Stored<T>* row = kernel + (tap * a.group_channels + first + c) * row_size;
      PackRow<T>(row, a.out_channels, width, stride, packed + (c * taps + tap) * stride);
    }
  }
}

template <typename F>
struct PixelBuffers {
  TileImage* images;  // [tile images]
  F* activated;       // [in_rows, in_cols, C], where x is to be scaled first
  PixelEntries<F> entries;
  F* packed;             // [chunk channels, kh * kw, block], where the call has no packed kernel
  int64_t places;        // of one block's sums
  Accumulator<F>* sums;  // [blocks together, places, block]
  int64_t bytes;
};

constexpr int64_t kPlacesBeyond = 4;  // that SweepRow reads and does not use

// Whether lists have the values of the non-zeros, or x is read for them, which must be of the type of sums then.
template <typename T>
inline bool IsCopied(const ConvTask& task) {
  return task.plan->copied || sizeof(T) != sizeof(Accumulator<T>);
}

// Blocks that go through each chunk one after another.
inline int64_t BlocksTogether(const ConvTask& task) {
  return Min(task.block_end - task.block_begin, task.plan->sweep_blocks);
}

// The lists come first: they stay where they are from one task of a tile to the next.
template <typename T, typename F = Factor<T>>
PixelBuffers<F> TakePixelBuffers(const ConvTask& task, const Tile& tile, const SumsLayout& layout, char* scratch) {
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  Arena arena(scratch);
  PixelBuffers<F> buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  const bool scaled = task.call->scaled.scale != nullptr;
  buffers.activated = arena.Take<F>(scaled ? tile.in_rows * tile.in_cols.size() * a.group_channels : 0);
  buffers.entries = TakePixelEntries<F>(arena, task, tile, IsCopied<T>(task));
  buffers.packed = arena.Take<F>(task.call->packed == nullptr ? p.chunk_channels * taps * p.block : 0);
  buffers.places = layout.places + kPlacesBeyond;
  buffers.sums = arena.Take<Accumulator<F>>(BlocksTogether(task) * buffers.places * p.block);
  buffers.bytes = arena.used();
  return buffers;
}

template <typename T>
int64_t PixelBytes(const ConvTask& task) {
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  return TakePixelBuffers<T>(task, tile, layout, nullptr).bytes;
}

// One chunk of one block.
template <typename F>
struct ChunkWork {
  int64_t block;
  const F* slice;  // [channels, kh * kw, block]
  EntryList<F> list;
  int64_t channels;
  const PixelSource<F>* x;  // null where the list has the values
  int64_t first_channel;
  Accumulator<F>* sums;  // [rows, layout.columns, block], the tile's first result at the beginning
  Ahead ahead;
  bool first, last;   // of the block's chunks
  int64_t most_rows;  // of x, swept in one go
};

// Row y of the convolution's results in one image, its first place.
template <typename A>
inline A* SumsOfRow(const ConvTask& task, const SumsLayout& layout, const TileImage& image, int64_t y, A* sums) {
  return sums + (image.first_sum + y - image.conv_rows.begin) * layout.columns * task.plan->block;
}

constexpr int64_t kSweepBytes = 8192;  // of sums that are zeroed, added to and written in one go

// What adds row y of one image, which is the tile's `row`-th, and if it meets all kernel rows those after it that do.
template <typename T, typename F>
RowWork<F> WorkOfRows(const ConvTask& task, const Tile& tile, const SumsLayout& layout, const TileImage& image,
                      int64_t y, int64_t row, ChunkWork<F>& chunk) {
  const ConvArgs& a = task.call->args;
  const int64_t block = task.plan->block, columns = tile.in_cols.size(), step = a.dilation[0];
  const int64_t* const kernel = a.kernel_size;
  // Kernel rows first to last have a result in the tile, y + pad - ky * step.
  const int64_t through_first = y + a.pad_low[0];
  const int64_t first = Max(0, CeilDiv(through_first - image.conv_rows.end + 1, step));
  const int64_t last = Min(kernel[0] - 1, (through_first - image.conv_rows.begin) / step);
  RowWork<F> work{};
  work.rows = 1;
  if (first == 0 && last + 1 == kernel[0]) {
    work.rows = Min(Min(image.in_rows.end, image.conv_rows.end - a.pad_low[0]) - y, chunk.most_rows);
  }
  if (through_first < image.conv_rows.begin || first > last || columns == 0) return work;
  const int32_t* const starts = chunk.list.starts;
  if (starts != nullptr && starts[row] == starts[row + work.rows]) return work;
  work.pixels = columns;
  work.channels = chunk.channels;
  if (chunk.list.bits != nullptr) work.bits = chunk.list.bits + row * columns;
  work.copied = chunk.list.values != nullptr;
  if (work.copied) {
    work.values = chunk.list.values + starts[row];
  } else {
    work.values_step = chunk.x->pixel;
    work.values_row = chunk.x->row;
    work.values = chunk.x->RowAt(image, y) + chunk.first_channel;
  }
  work.slice = chunk.slice + first * kernel[1] * block;
  work.pitch = block;
  work.sums = SumsOfRow(task, layout, image, through_first - first * step, chunk.sums) + layout.first_x * block;
  work.row_bytes = layout.columns * step * block * static_cast<int64_t>(sizeof(Accumulator<F>));
  work.sums_step = layout.columns * block;
  work.trim_left = columns > 1 && layout.first_x < 0;
  work.trim_right = columns > 1 && layout.first_x + columns + kernel[1] - 2 >= tile.conv_cols.size();
  work.ahead = &chunk.ahead;
  const int64_t complete = through_first - (kernel[0] - 1) * step;
  if (chunk.last && a.pool == Pool::kNone && complete >= image.conv_rows.begin) {
    const int64_t pixel = (image.image * a.conv_size[0] + complete) * a.conv_size[1] + tile.conv_cols.begin;
    work.out = static_cast<const char*>(task.call->out) +
               (pixel * task.call->out_stride + task.group * (a.out_channels / a.groups) + chunk.block * block) *
                   sizeof(Stored<T>);
    work.out_step = task.call->out_stride * sizeof(Stored<T>);
    work.out_row = a.conv_size[1] * work.out_step;
  }
  work.kernel_rows = last - first + 1;
  return work;
}

// Adds one chunk. With the first one rows of sums are zeroed before they are added to, with the last one they become
// results as soon as no row of x is left that adds to them.
template <typename T, typename F>
void AddChunk(const ConvTask& task, const Tile& tile, const SumsLayout& layout, const TileImage* images,
              ChunkWork<F>& chunk) {
  using A = Accumulator<F>;
  const ConvArgs& a = task.call->args;
  const int64_t row_bytes = layout.columns * task.plan->block * sizeof(A);  // 0 where all windows are padding
  chunk.most_rows = chunk.first || chunk.last ? Max(1, kSweepBytes / Max(1, row_bytes)) : tile.in_rows;
  int64_t row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    const TileImage& image = images[i];
    BlockWriter<Stored<T>, A> writer(task, tile, image, chunk.block, chunk.sums);
    int64_t zeroed = image.conv_rows.begin;
    const auto zero_to = [&](int64_t end) {
      for (; zeroed < Min(end, image.conv_rows.end); ++zeroed) {
        __builtin_memset(SumsOfRow(task, layout, image, zeroed, chunk.sums), 0, row_bytes);
      }
    };
    for (int64_t y = image.in_rows.begin, rows; y < image.in_rows.end; y += rows, row += rows) {
      const RowWork<F> work = WorkOfRows<T>(task, tile, layout, image, y, row, chunk);
      rows = work.rows;
      const int64_t reached = y + rows - 1 + a.pad_low[0];
      if (chunk.first) zero_to(reached + 1);
      if (work.kernel_rows > 0) Sweep(task, work);
      if (chunk.last) writer.WriteTo(reached - (a.kernel_size[0] - 1) * a.dilation[0] + 1);
    }
    if (chunk.first) zero_to(image.conv_rows.end);
    if (chunk.last) writer.WriteTo(image.conv_rows.end);
  }
}

// The slice after this one of a packed kernel, to be fetched while this one is added.
template <typename F>
Ahead NextSlice(const ConvTask& task, const Tile& tile, const F* next, int64_t channels, int64_t row) {
  Ahead ahead = {reinterpret_cast<const char*>(next), 0, 0};
  ahead.lines = Min(task.plan->chunk_channels, channels) * row * static_cast<int64_t>(sizeof(F)) / 64;
  ahead.each = CeilDiv(ahead.lines, Max(1, tile.in_rows * tile.in_cols.size()));
  return ahead;
}

// What is read after chunk `index` of a block, to be fetched meanwhile: the next block's slice of it or, after the
// last one's, the first block's next slice. ready: [blocks, C / groups, kh * kw, block]
template <typename F>
Ahead AfterChunk(const ConvTask& task, const Tile& tile, const F* ready, Range blocks, int64_t block, int64_t index) {
  const ConvArgs& a = task.call->args;
  const int64_t row = a.kernel_size[0] * a.kernel_size[1] * task.plan->block;
  const int64_t all = CeilDiv(a.out_channels / a.groups, task.plan->block);
  int64_t next = block + 1, first = index * task.plan->chunk_channels;
  if (next == blocks.end) {
    first += task.plan->chunk_channels;
    if (first < a.group_channels) {
      next = blocks.begin;
    } else if (next < all) {
      first = 0;  // behind the task's last block too: its thread is likely to take the task after it
    } else {
      return {nullptr, 0, 0};
    }
  }
  return NextSlice(task, tile, ready + (next * a.group_channels + first) * row, a.group_channels - first, row);
}

// Blocks of output channels, one after another at each chunk.
template <typename T, typename F>
void AddBlocks(const ConvTask& task, const Tile& tile, const SumsLayout& layout, const PixelBuffers<F>& buffers,
               const PixelSource<T>& x, Range blocks) {
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const int64_t row = a.kernel_size[0] * a.kernel_size[1] * p.block;  // elements of one channel in a slice
  const F* ready = static_cast<const F*>(task.call->packed);          // [S, groups, blocks, C / groups, kh * kw, block]
  if (ready != nullptr) {
    ready +=
        (task.stack * a.groups + task.group) * CeilDiv(a.out_channels / a.groups, p.block) * a.group_channels * row;
  }
  ChunkWork<F> chunk{};
  for (int64_t index = 0; index < buffers.entries.chunks; ++index) {
    const int64_t first = index * p.chunk_channels, count = Min(p.chunk_channels, a.group_channels - first);
    chunk.list = EntriesOf(buffers.entries, index);
    chunk.channels = count;
    if constexpr (std::is_same_v<T, F>) chunk.x = chunk.list.values == nullptr ? &x : nullptr;
    chunk.first_channel = first;
    chunk.first = index == 0;
    chunk.last = index + 1 == buffers.entries.chunks;
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      chunk.block = block;
      chunk.sums = buffers.sums + ((block - blocks.begin) * buffers.places + layout.before) * p.block;
      if (ready != nullptr) {
        chunk.slice = ready + (block * a.group_channels + first) * row;
        chunk.ahead = AfterChunk(task, tile, ready, blocks, block, index);
      } else {
        PackSlice<T>(task, block, first, count, buffers.packed);
        chunk.slice = buffers.packed;
        chunk.ahead = {nullptr, 0, 0};
      }
      AddChunk<T>(task, tile, layout, buffers.images, chunk);
    }
  }
}

template <typename T>
void RunPixels(const ConvTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ConvPlan& p = *task.plan;
  Tile tile = MakeTile(task, nullptr);
  const SumsLayout layout = LayOutSums(task, tile, nullptr);
  PixelBuffers<Factor<T>> buffers = TakePixelBuffers<T>(task, tile, layout, scratch);
  PixelSource<T> x = SourceOf<T>(task, tile);
  if (!task.lists_ready) {
    MakeTile(task, buffers.images);
    LayOutSums(task, tile, buffers.images);
  }
  if constexpr (std::is_same_v<T, A>) {
    if (task.call->scaled.scale != nullptr) {
      if (!task.lists_ready) {
        ActivatePixels(task, tile, buffers.images, 0, task.call->args.group_channels, buffers.activated);
      }
      x = ActivatedSource(task, tile, buffers.activated);
    }
  }
  if (!task.lists_ready) ListEntries<T>(task, tile, buffers.images, x, buffers.entries);
  // Places around the results are added to as well: no subnormals may lie there.
  const int64_t after = layout.before + layout.rows * layout.columns, together = BlocksTogether(task);
  for (int64_t i = 0; i < together; ++i) {
    A* sums = buffers.sums + i * buffers.places * p.block;
    __builtin_memset(sums, 0, layout.before * p.block * sizeof(A));
    __builtin_memset(sums + after * p.block, 0, (layout.places - after) * p.block * sizeof(A));
  }
  for (int64_t block = task.block_begin; block < task.block_end; block += together) {
    AddBlocks<T>(task, tile, layout, buffers, x, {block, Min(block + together, task.block_end)});
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_PIXEL_KERNEL_H_
