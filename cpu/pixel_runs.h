// The pixels of a tile, ordered by how many non-zeros they have in a chunk of channels, strip by strip.
//
// Why: pixels of equal length in a row are what the branch predictor knows. A strip is a few rows of x whose sums stay
//   in L1; it begins at a fixed row of the batch, so that the order of two pixels does not depend on the tile.
// Bound by: two passes over the counts, some 6 cycles a pixel and chunk, shared by all blocks of output channels.
#ifndef JSC_CPU_PIXEL_RUNS_H_
#define JSC_CPU_PIXEL_RUNS_H_

#include "pixel_lists.h"
#include "sums_layout.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// A pixel with something in a chunk: its first entry, and where it adds to through the last kernel row and column.
struct PixelRef {
  uint32_t entry;
  uint32_t place;  // in bytes
};

// Pixels of equally many entries.
struct PixelGroup {
  int32_t length, pixels;
};

template <typename A>
struct PixelRuns {
  PixelRef* refs;      // [chunks, pixels]
  PixelGroup* groups;  // [chunks, pixels]
  int64_t* used;       // [chunks]: groups
  int64_t* found;      // [chunks]: refs
  int32_t* histogram;  // [chunk channels + 1]
  uint32_t* places;    // [pixels]
  int32_t* strips;     // [in_rows]: of which strip a row is
  int64_t pixels;
};

template <typename A>
PixelRuns<A> TakePixelRuns(Arena& arena, const ConvTask& task, const Tile& tile, int64_t chunks) {
  PixelRuns<A> runs{};
  runs.pixels = tile.in_rows * tile.in_cols.size();
  runs.refs = arena.Take<PixelRef>(chunks * runs.pixels);
  runs.groups = arena.Take<PixelGroup>(chunks * runs.pixels);
  runs.used = arena.Take<int64_t>(chunks);
  runs.found = arena.Take<int64_t>(chunks);
  runs.histogram = arena.Take<int32_t>(task.plan->chunk_channels + 1);
  runs.places = arena.Take<uint32_t>(runs.pixels);
  runs.strips = arena.Take<int32_t>(tile.in_rows);
  return runs;
}

// Where the pixels of the tile add to. Strips begin at fixed rows of the batch, whatever the tile.
template <typename A>
void LocatePixels(const ConvTask& task, const Tile& tile, const TileImage* images, const SumsLayout& layout,
                  PixelRuns<A>& runs) {
  const ConvArgs& a = task.call->args;
  const int64_t place_bytes = task.plan->block * sizeof(A), columns = tile.in_cols.size();
  int64_t row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    const ImageRows rows = RowsOfImage(a, images[i]);
    const int64_t first_row = images[i].first_sum - rows.first_result + rows.first_y;
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y, ++row) {
      const int64_t place = layout.before + (first_row + y - images[i].in_rows.begin) * layout.columns + layout.first_x;
      runs.strips[row] = static_cast<int32_t>((images[i].image * a.size[0] + y) / task.plan->strip_rows);
      for (int64_t x = 0; x < columns; ++x) {
        runs.places[row * columns + x] = static_cast<uint32_t>((place + x) * place_bytes);
      }
    }
  }
}

// Orders the pixels of rows [row_begin, row_end), one strip, by length. Appends to refs and groups.
template <typename A>
void OrderStrip(const Tile& tile, const PixelList<A>& list, int64_t longest, int64_t row_begin, int64_t row_end,
                const uint32_t* places, int32_t* histogram, PixelRef*& refs, PixelGroup*& groups) {
  const int64_t columns = tile.in_cols.size();
  __builtin_memset(histogram, 0, (longest + 1) * sizeof(int32_t));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int32_t* starts = list.starts + row * (columns + 1);
    for (int64_t x = 0; x < columns; ++x) ++histogram[starts[x + 1] - starts[x]];
  }
  int32_t before = 0;
  histogram[0] = 0;
  for (int64_t length = 1; length <= longest; ++length) {
    const int32_t pixels = histogram[length];
    histogram[length] = before;
    before += pixels;
    if (pixels > 0) *groups++ = {static_cast<int32_t>(length), pixels};
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int32_t* starts = list.starts + row * (columns + 1);
    for (int64_t x = 0; x < columns; ++x) {
      const int32_t length = starts[x + 1] - starts[x];
      if (length == 0) continue;
      refs[histogram[length]++] = {static_cast<uint32_t>(starts[x]), places[row * columns + x]};
    }
  }
  refs += before;
}

template <typename A>
void OrderPixels(const ConvTask& task, const Tile& tile, const PixelLists<A>& lists, PixelRuns<A>& runs) {
  for (int64_t chunk = 0; chunk < lists.chunks; ++chunk) {
    PixelRef* refs = runs.refs + chunk * runs.pixels;
    PixelGroup* const first = runs.groups + chunk * runs.pixels;
    PixelGroup* groups = first;
    for (int64_t begin = 0, end = 0; begin < tile.in_rows; begin = end) {
      while (end < tile.in_rows && runs.strips[end] == runs.strips[begin]) ++end;
      OrderStrip(tile, lists.At(chunk), task.plan->chunk_channels, begin, end, runs.places, runs.histogram, refs,
                 groups);
    }
    runs.used[chunk] = groups - first;
    runs.found[chunk] = refs - (runs.refs + chunk * runs.pixels);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_PIXEL_RUNS_H_
