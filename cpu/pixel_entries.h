// The non-zeros of every pixel of a tile for pixel_kernel.h: values, and where the kernel rows of their channels lie.
//
// Layout: one list per chunk of channels; in it the pixels of the tile follow each other, with starts[] at each.
// Why a row of x at a time: a chunk's place in its list stays in registers for a row, and a row is in L1 when the next
//   chunk reads it.
// Bound by: compressing 16 elements twice, 6 cycles. A chunk's part of a pixel is too short for the hardware to see
//   where x is read next, so the next row is asked for here: 2 to 4 % of a layer of 128 and 256 channels.
// Lost: channels in bytes instead of offsets: lists take as long, and the loop over them takes 2 to 5 % more.
#ifndef JSC_CPU_PIXEL_ENTRIES_H_
#define JSC_CPU_PIXEL_ENTRIES_H_

#include "simd.h"
#include "tile.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// The list of one chunk of channels.
template <typename A>
struct EntryList {
  A* values;          // entries of all pixels of the tile, row by row
  uint32_t* offsets;  // same: of the channel's rows in the slice, in bytes
  int32_t* starts;    // [in_rows * in_cols + 1]: where each pixel begins
};

template <typename A>
struct PixelEntries {
  A* values;          // [chunks, capacity]
  uint32_t* offsets;  // [chunks, capacity]
  int32_t* starts;    // [chunks, pixels + 1]
  int64_t* used;      // [chunks]: entries so far
  int64_t chunks;     // of channels
  int64_t capacity;   // entries per chunk
  int64_t pixels;

  EntryList<A> At(int64_t chunk) const {
    return {values + chunk * capacity, offsets + chunk * capacity, starts + chunk * (pixels + 1)};
  }
};

template <typename A>
PixelEntries<A> TakePixelEntries(Arena& arena, const ConvTask& task, const Tile& tile) {
  const int64_t chunk_channels = task.plan->chunk_channels;
  PixelEntries<A> entries{};
  entries.chunks = CeilDiv(task.call->args.group_channels, chunk_channels);
  entries.pixels = tile.in_rows * tile.in_cols.size();
  entries.capacity = entries.pixels * chunk_channels + kListSlack;
  entries.values = arena.Take<A>(entries.chunks * entries.capacity);
  entries.offsets = arena.Take<uint32_t>(entries.chunks * entries.capacity);
  entries.starts = arena.Take<int32_t>(entries.chunks * (entries.pixels + 1));
  entries.used = arena.Take<int64_t>(entries.chunks);
  return entries;
}

// Appends one row of pixels to the list of one chunk and asks for the next row's, row_stride elements on; returns how
// many entries the list has then. pixels: [columns, pixel_stride], of which `count` channels are the chunk's.
template <typename T, typename A>
inline int64_t AppendRow(const T* pixels, int64_t columns, int64_t pixel_stride, int64_t row_stride, int64_t count,
                         uint32_t row_bytes, int32_t* starts, int64_t used, A* values, uint32_t* offsets) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t x = 0; x < columns; ++x, pixels += pixel_stride) {
    starts[x] = static_cast<int32_t>(used);
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(pixels + row_stride + i);
    used += Append(pixels, count, 0, row_bytes, values + used, offsets + used);
  }
  return used;
}

// Lists the non-zeros of every pixel of the tile: the only read of x.
template <typename T, typename A>
void ListEntries(const ConvTask& task, const Tile& tile, const TileImage* images, const PixelEntries<A>& entries) {
  const ConvArgs& a = task.call->args;
  const T* x = static_cast<const T*>(task.call->x) + task.group * a.group_channels;  // [N, H, W, C]
  const int64_t columns = tile.in_cols.size(), chunk_channels = task.plan->chunk_channels;
  __builtin_memset(entries.used, 0, entries.chunks * sizeof(int64_t));
  const uint32_t row_bytes = a.kernel_size[0] * a.kernel_size[1] * task.plan->block * sizeof(A);
  int64_t index = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y, index += columns) {
      const T* pixels = x + ((images[i].image * a.size[0] + y) * a.size[1] + tile.in_cols.begin) * a.channels;
      for (int64_t c = 0; c < entries.chunks; ++c) {
        const EntryList<A> list = entries.At(c);
        const int64_t used = entries.used[c], count = Min(chunk_channels, a.group_channels - c * chunk_channels);
        entries.used[c] = AppendRow(pixels + c * chunk_channels, columns, a.channels, a.size[1] * a.channels, count,
                                    row_bytes, list.starts + index, used, list.values, list.offsets);
      }
    }
  }
  for (int64_t c = 0; c < entries.chunks; ++c) entries.At(c).starts[index] = static_cast<int32_t>(entries.used[c]);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_PIXEL_ENTRIES_H_
