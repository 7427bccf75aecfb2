// The non-zeros of every pixel of a tile for loops/pixel_kernel.h: a bit for each channel, 64 to a word, and the
// values.
//
// Layout: a word per pixel and chunk of channels. In a chunk the pixels of the tile follow each other. Values are read
//   where they lie in x or, where many blocks of output channels meet them, from a copy without the zeros, in the same
//   order.
// Why bits: a word takes no more to read than one entry of a list, and is made by four comparisons. Where an entry's
//   kernel rows lie, which a list would say, is found by integer operations. Other units do those than the loads that
//   bound the loop: layers take 10 to 20 % less than with lists of values and offsets.
// Why two ways: for many blocks the copy is less to bring to L1 (512->512 7x7 at 85 % zeros takes 16 % more without).
//   Blocks of a 3x3 kernel that is packed here each go through all of x, so two are many (128->128 28x28 takes 35 %
//   more without).
//   For few, AVX-512 finds the bits of a pixel in x while the one in front is added. So nothing is listed at all, and x
//   is read early enough: 5 to 9 % less than with bits from here (64->64 56x56, 128->32 14x14). It is 17 % more where
//   the bits are found when they are needed.
// Why a row of x at a time: a chunk's place in its copy stays in registers for a row, and a row is in L1 when the next
//   chunk reads it. A chunk's part of a pixel is too short for the hardware to see where x is read next. So the next
//   row is asked for here, where that is to be copied.
// Lost: a copy with the zeros, 1 to 2 % behind x itself or the copy without; asking for a pixel's values in x one or
//   two pixels ahead, 1 to 10 %.
#ifndef JSC_CPU_LOOPS_PIXEL_ENTRIES_H_
#define JSC_CPU_LOOPS_PIXEL_ENTRIES_H_

#include "cpu/loops/epilogue.h"
#include "cpu/loops/nonzero_bits.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Where a tile's pixels are read: in x, or in a copy of the tile, whose rows go on through its images.
template <typename T>
struct PixelSource {
  const T* first;  // of x, of its first column in the tile; of a copy
  int64_t pixel;   // elements from a pixel to the next one, ...
  int64_t row;     // ... from a row to the next one, ...
  int64_t image;   // ... and rows from an image to the next one; 0: a copy

  // Row y of one image in the tile.
  const T* RowAt(const TileImage& of, int64_t y) const {
    return first + (image > 0 ? of.image * image + y : of.first_in + y - of.in_rows.begin) * row;
  }
};

template <typename T>
PixelSource<T> SourceOf(const ConvTask& task, const Tile& tile) {
  const ConvArgs& a = task.call->args;
  const T* x = static_cast<const T*>(task.call->x) + task.group * a.group_channels;  // [N, H, W, C]
  return {x + tile.in_cols.begin * a.channels, a.channels, a.size[1] * a.channels, a.size[0]};
}

// Of a copy [in_rows, in_cols, C].
template <typename A>
PixelSource<A> ActivatedSource(const ConvTask& task, const Tile& tile, const A* copy) {
  const int64_t channels = task.call->args.group_channels;
  return {copy, channels, tile.in_cols.size() * channels, 0};
}

// Some channels of one pixel of x as it is read: the average of relu(scale * x + shift) over a window whose first pixel
// is at `x`. All arrays begin at the first of those channels.
template <typename A>
inline void ActivatePixel(const ConvArgs& a, const Scaled& scaled, const A* scale, const A* shift, int64_t channels,
                          const A* x, A* target) {
  const int64_t row = scaled.size[1] * a.channels;
  const A share = A{1} / static_cast<A>(scaled.window * scaled.window);
  for (int64_t c = 0; c < channels; c += kLanes<A>) {
    const int64_t width = Min(kLanes<A>, channels - c);
    const Vector<A> factor = LoadFirstOf<A>(scale + c, width), term = LoadFirstOf<A>(shift + c, width);
    if (scaled.window == 1) {
      StoreFirst(target + c, Relu<A>(LoadFirstOf<A>(x + c, width) * factor + term), width);
      continue;
    }
    Vector<A> sum = {};
    for (int64_t y = 0; y < scaled.window; ++y) {
      for (int64_t column = 0; column < scaled.window; ++column) {
        sum += Relu<A>(LoadFirstOf<A>(x + y * row + column * a.channels + c, width) * factor + term);
      }
    }
    StoreFirst(target + c, sum * share, width);
  }
}

// `channels` of the tile's pixels as they are read, from `first` on, to a copy [in_rows, in_cols, channels].
template <typename A>
void ActivatePixels(const ConvTask& task, const Tile& tile, const TileImage* images, int64_t first, int64_t channels,
                    A* copy) {
  const ConvArgs& a = task.call->args;
  const Scaled& scaled = task.call->scaled;
  const A* x = static_cast<const A*>(task.call->x) + task.group * a.group_channels + first;
  const A* scale = static_cast<const A*>(scaled.scale) + first;
  const A* shift = static_cast<const A*>(scaled.shift) + first;
  const int64_t row = scaled.size[1] * a.channels;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y) {
      const A* line = x + (images[i].image * scaled.size[0] + y * scaled.window) * row;
      for (int64_t column = tile.in_cols.begin; column < tile.in_cols.end; ++column, copy += channels) {
        ActivatePixel(a, scaled, scale, shift, channels, line + column * scaled.window * a.channels, copy);
      }
    }
  }
}

template <typename A>
struct PixelEntries {
  uint64_t* bits;    // [chunks, in_rows * in_cols]; null where nothing is listed
  int32_t* starts;   // [chunks, in_rows + 1]: entries in front of each row
  A* values;         // [chunks, capacity]: of the entries; null where they are read from x
  int64_t chunks;    // of channels
  int64_t capacity;  // entries per chunk
  int64_t pixels;    // in_rows * in_cols
  int64_t rows;      // in_rows
};

// One chunk's part of them.
template <typename A>
struct EntryList {
  const uint64_t* bits;
  const int32_t* starts;
  const A* values;
};

template <typename A>
EntryList<A> EntriesOf(const PixelEntries<A>& entries, int64_t chunk) {
  if (entries.bits == nullptr) return {nullptr, nullptr, nullptr};
  return {entries.bits + chunk * entries.pixels, entries.starts + chunk * (entries.rows + 1),
          entries.values == nullptr ? nullptr : entries.values + chunk * entries.capacity};
}

template <typename A>
PixelEntries<A> TakePixelEntries(Arena& arena, const ConvTask& task, const Tile& tile, bool copied) {
  PixelEntries<A> entries{};
  entries.chunks = CeilDiv(task.call->args.group_channels, task.plan->chunk_channels);
  if (kFindsBitsFast && !copied) return entries;
  entries.pixels = tile.in_rows * tile.in_cols.size();
  entries.rows = tile.in_rows;
  entries.bits = arena.Take<uint64_t>(entries.chunks * entries.pixels);
  entries.starts = arena.Take<int32_t>(entries.chunks * (entries.rows + 1));
  if (copied) {
    entries.capacity = entries.pixels * task.plan->chunk_channels + kListSlack;
    entries.values = arena.Take<A>(entries.chunks * entries.capacity);
  }
  return entries;
}

// One row of pixels of one chunk, of `count` channels; asks for the next row, row_stride elements on. Returns how many
// entries there are. pixels: [columns, pixel_stride]; bits: [columns]; values: null or what to append to.
template <typename T, typename A>
inline int64_t ListPixelRow(const T* pixels, int64_t columns, int64_t pixel_stride, int64_t row_stride, int64_t count,
                            uint64_t* bits, A* values) {
  constexpr int64_t kLine = 64 / sizeof(T);
  int64_t used = 0;
  for (int64_t x = 0; x < columns; ++x, pixels += pixel_stride) {
    for (int64_t i = 0; values != nullptr && i < count; i += kLine) __builtin_prefetch(pixels + row_stride + i);
    bits[x] = values == nullptr ? NonZeroBits(pixels, count) : CompressNonZeros(pixels, count, values + used);
    used += __builtin_popcountll(bits[x]);
  }
  return used;
}

// Lists the non-zeros of every pixel of the tile.
template <typename T, typename A>
void ListEntries(const ConvTask& task, const Tile& tile, const TileImage* images, const PixelSource<T>& x,
                 const PixelEntries<A>& entries) {
  if (entries.bits == nullptr) return;
  const ConvArgs& a = task.call->args;
  const int64_t columns = tile.in_cols.size(), chunk_channels = task.plan->chunk_channels;
  for (int64_t c = 0; c < entries.chunks; ++c) entries.starts[c * (entries.rows + 1)] = 0;
  int64_t row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y, ++row) {
      const T* pixels = x.RowAt(images[i], y);
      for (int64_t c = 0; c < entries.chunks; ++c) {
        int32_t* const starts = entries.starts + c * (entries.rows + 1);
        const int64_t count = Min(chunk_channels, a.group_channels - c * chunk_channels);
        uint64_t* const bits = entries.bits + c * entries.pixels + row * columns;
        A* const values = entries.values == nullptr ? nullptr : entries.values + c * entries.capacity + starts[row];
        const int64_t used = ListPixelRow(pixels + c * chunk_channels, columns, x.pixel, x.row, count, bits, values);
        starts[row + 1] = starts[row] + static_cast<int32_t>(used);
      }
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_PIXEL_ENTRIES_H_
