// The non-zeros of every pixel of a tile, compressed once and reused by all windows that overlap there.
//
// Layout: one list per chunk of channels; in it the pixels of a tile row of x follow each other, with starts[] at each.
// An entry is a value and an offset: where the packed kernel slice holds the rows that the value multiplies, in bytes.
// The offset is that of the tile's first column: the part of a window that lies in one row of x is one contiguous
// segment, and a single addition moves it to the window's own column and kernel row.
//
// Why all chunks at once: pixels are C elements apart, so reading one chunk at a time meets every page of x again for
//   each chunk. One pass over whole pixels takes 3 % less of the whole layer.
#ifndef JSC_CPU_LOOPS_PIXEL_LISTS_H_
#define JSC_CPU_LOOPS_PIXEL_LISTS_H_

#include "cpu/core/simd.h"
#include "cpu/loops/tile.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Channels and kernel rows of one chunk.
struct Chunk {
  int64_t channel_begin, channels;
  int64_t tap_begin, taps;
};

// What a task reads of the kernel after a chunk of a block: that of the block behind it or, behind the last one, the
// first block's next chunk, which has no channels where all are done.
struct ChunkOfBlock {
  Chunk chunk;
  int64_t block;
};

inline ChunkOfBlock ChunkAfter(const ConvTask& task, Chunk chunk, int64_t block) {
  if (++block < task.block_end) return {chunk, block};
  chunk.channel_begin += chunk.channels;
  chunk.channels = Min(chunk.channels, task.call->args.group_channels - chunk.channel_begin);
  return {chunk, task.block_begin};
}

// The lists of one chunk of channels.
template <typename A>
struct PixelList {
  A* values;          // entries of all pixels of the tile, row by row
  uint32_t* offsets;  // same
  int32_t* starts;    // [in_rows, in_cols + 1]: where each pixel begins
};

template <typename A>
struct PixelLists {
  A* values;            // [chunks, capacity]
  uint32_t* offsets;    // [chunks, capacity]
  int32_t* starts;      // [chunks, in_rows, in_cols + 1]
  bool* needed_rows;    // [in_rows]: some window reaches it
  bool* needed_cols;    // [in_cols]
  int64_t* used;        // [chunks]: entries so far
  int64_t chunks;       // of channels
  int64_t capacity;     // entries per chunk
  int64_t starts_size;  // per chunk
  uint32_t row_bytes;   // from one channel's rows to the next one's
  bool by_column;       // a pixel's offsets begin where its column's rows begin

  PixelList<A> At(int64_t chunk) const {
    return {values + chunk * capacity, offsets + chunk * capacity, starts + chunk * starts_size};
  }
};

template <typename A>
PixelLists<A> TakePixelLists(Arena& arena, const ConvTask& task, const Tile& tile, int64_t row_bytes, bool by_column) {
  const int64_t chunk_channels = task.plan->chunk_channels;
  PixelLists<A> lists{};
  lists.chunks = CeilDiv(task.call->args.group_channels, chunk_channels);
  lists.capacity = tile.in_rows * tile.in_cols.size() * chunk_channels + kListSlack;
  lists.starts_size = tile.in_rows * (tile.in_cols.size() + 1);
  lists.row_bytes = static_cast<uint32_t>(row_bytes);
  lists.by_column = by_column;
  lists.values = arena.Take<A>(lists.chunks * lists.capacity);
  lists.offsets = arena.Take<uint32_t>(lists.chunks * lists.capacity);
  lists.starts = arena.Take<int32_t>(lists.chunks * lists.starts_size);
  lists.needed_rows = arena.Take<bool>(tile.in_rows);
  lists.needed_cols = arena.Take<bool>(tile.in_cols.size());
  lists.used = arena.Take<int64_t>(lists.chunks);
  return lists;
}

// Appends one pixel to the list of every chunk. pixel: [group_channels]
template <typename T, typename A>
inline void CompressPixel(const T* pixel, int64_t channels, int64_t chunk_channels, int64_t column, int64_t start,
                          const PixelLists<A>& lists) {
  for (int64_t c = 0; c < lists.chunks; ++c) {
    const int64_t count = Min(chunk_channels, channels - c * chunk_channels);
    const PixelList<A> list = lists.At(c);
    const int64_t used = lists.used[c];
    list.starts[start] = static_cast<int32_t>(used);
    if (pixel == nullptr) continue;
    const uint32_t first = lists.by_column ? static_cast<uint32_t>(column * count) * lists.row_bytes : 0;
    lists.used[c] = used + Append(pixel + c * chunk_channels, count, first, lists.row_bytes, list.values + used,
                                  list.offsets + used);
  }
}

// Lists the non-zeros of every pixel of the tile: the only read of x.
template <typename T, typename A>
void CompressPixels(const ConvTask& task, const Tile& tile, const TileImage* images, PixelLists<A>& lists) {
  const ConvArgs& a = task.call->args;
  const T* x = static_cast<const T*>(task.call->x) + task.group * a.group_channels;  // [N, H, W, C]
  const int64_t columns = tile.in_cols.size();
  __builtin_memset(lists.used, 0, lists.chunks * sizeof(int64_t));
  int64_t row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y, ++row) {
      const T* pixels = x + ((images[i].image * a.size[0] + y) * a.size[1] + tile.in_cols.begin) * a.channels;
      for (int64_t column = 0; column <= columns; ++column) {
        const bool needed = column < columns && lists.needed_rows[row] && lists.needed_cols[column];
        CompressPixel(needed ? pixels + column * a.channels : nullptr, a.group_channels, task.plan->chunk_channels,
                      column, row * (columns + 1) + column, lists);
      }
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_PIXEL_LISTS_H_
