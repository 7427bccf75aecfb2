// ECR for many channels: the non-zeros of every convolution window of a tile, for one chunk of channels and kernel
// rows.
//
// What: values, kernel offsets and count of each window. The parts of a window in the rows of x (loops/pixel_lists.h)
//   are copied together. Empty windows are recognised and dropped.
// Layout: windows are ordered by their count and run in groups of (almost) equal length, padded to the longest with
//   zeros that point at a row of zeros.
// Why: equal trip counts one after another are what the branch predictor knows. At high sparsity a miss costs more than
//   the arithmetic of a window. And the windows of a group can share one loop.
// Bound by: about 80 cycles and 1.5 per entry for a window and chunk, shared by all blocks of output channels of a
// task.
#ifndef JSC_CPU_LOOPS_WINDOW_LISTS_H_
#define JSC_CPU_LOOPS_WINDOW_LISTS_H_

#include "cpu/loops/pixel_lists.h"

namespace jsc {
namespace JSC_ISA {
namespace {

template <typename A>
struct WindowLists {
  A* values;            // groups in order; window j of a group at j * its length
  uint32_t* offsets;    // same
  int32_t* order;       // [windows + kMaxGroup]: window of the tile at each place;
                        // `windows` stands for none
  int32_t* lengths;     // [windows / group + 1]: entries per window of each group
  int64_t groups;       // that are not empty
  int32_t* counts;      // [windows]
  int32_t* histogram;   // [chunk rows + 2]
  int32_t* rows;        // [windows]: tile row of each window
  int32_t* columns;     // [windows]: column within conv_cols
  int32_t* row_counts;  // [in_rows, conv_cols]: entries that a window there gets
                        // from a row of x
  int32_t* input_rows;  // [conv_rows, kh]: tile row of x, or -1
  int32_t* seg_begin;   // [conv_cols, segments]: first pixel, relative to
                        // in_cols.begin
  int32_t* seg_end;     // same: one past the last
  int32_t* seg_shift;   // same: kernel column minus pixel
  int64_t segments;     // per window and row: 1, or kw when dilated (then a
                        // window's pixels are not contiguous)
};

constexpr int64_t kMaxGroup = 8;

template <typename A>
WindowLists<A> TakeWindowLists(Arena& arena, const ConvTask& task, const Tile& tile) {
  const ConvArgs& a = task.call->args;
  const int64_t rows = task.plan->chunk_taps * a.kernel_size[1] * task.plan->chunk_channels;
  const int64_t capacity = (tile.windows + kMaxGroup) * rows + kListSlack;
  WindowLists<A> lists{};
  lists.segments = a.dilation[1] == 1 ? 1 : a.kernel_size[1];
  lists.values = arena.Take<A>(capacity);
  lists.offsets = arena.Take<uint32_t>(capacity);
  lists.order = arena.Take<int32_t>(tile.windows + kMaxGroup);
  lists.lengths = arena.Take<int32_t>(tile.windows + 1);
  lists.counts = arena.Take<int32_t>(tile.windows);
  lists.histogram = arena.Take<int32_t>(rows + 2);
  lists.rows = arena.Take<int32_t>(tile.windows);
  lists.columns = arena.Take<int32_t>(tile.windows);
  lists.row_counts = arena.Take<int32_t>(tile.in_rows * tile.conv_cols.size());
  lists.input_rows = arena.Take<int32_t>(tile.conv_rows * a.kernel_size[0]);
  lists.seg_begin = arena.Take<int32_t>(tile.conv_cols.size() * lists.segments);
  lists.seg_end = arena.Take<int32_t>(tile.conv_cols.size() * lists.segments);
  lists.seg_shift = arena.Take<int32_t>(tile.conv_cols.size() * lists.segments);
  return lists;
}

// Where the windows of the tile find their pixels; once per task.
template <typename A>
void LocateWindows(const ConvArgs& a, const Tile& tile, const TileImage* images, WindowLists<A>& lists,
                   PixelLists<A>& pixels) {
  __builtin_memset(pixels.needed_rows, 0, tile.in_rows);
  __builtin_memset(pixels.needed_cols, 0, tile.in_cols.size());
  int64_t row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = images[i].conv_rows.begin; y < images[i].conv_rows.end; ++y, ++row) {
      for (int64_t ky = 0; ky < a.kernel_size[0]; ++ky) {
        const int64_t in = y * a.stride[0] - a.pad_low[0] + ky * a.dilation[0];
        const bool inside = in >= images[i].in_rows.begin && in < images[i].in_rows.end;
        const int64_t tile_row = inside ? images[i].first_in + in - images[i].in_rows.begin : -1;
        lists.input_rows[row * a.kernel_size[0] + ky] = static_cast<int32_t>(tile_row);
        if (inside) pixels.needed_rows[tile_row] = true;
      }
      for (int64_t x = 0; x < tile.conv_cols.size(); ++x) {
        lists.rows[row * tile.conv_cols.size() + x] = static_cast<int32_t>(row);
        lists.columns[row * tile.conv_cols.size() + x] = static_cast<int32_t>(x);
      }
    }
  }
  const int64_t run = lists.segments == 1 ? a.kernel_size[1] : 1;  // pixels per segment
  for (int64_t x = 0; x < tile.conv_cols.size(); ++x) {
    for (int64_t s = 0; s < lists.segments; ++s) {
      const int64_t first = (tile.conv_cols.begin + x) * a.stride[1] - a.pad_low[1] + s * a.dilation[1];
      const int64_t begin = Clamp(first, tile.in_cols.begin, tile.in_cols.end) - tile.in_cols.begin;
      const int64_t end = Clamp(first + run, tile.in_cols.begin, tile.in_cols.end) - tile.in_cols.begin;
      const int64_t at = x * lists.segments + s;
      lists.seg_begin[at] = static_cast<int32_t>(begin);
      lists.seg_end[at] = static_cast<int32_t>(end);
      lists.seg_shift[at] = static_cast<int32_t>(s - (first - tile.in_cols.begin));
      for (int64_t column = begin; column < end; ++column) pixels.needed_cols[column] = true;
    }
  }
}

// Counts the entries that each window column gets from each row of x.
template <typename A>
void CountRows(const Tile& tile, const PixelList<A>& pixels, WindowLists<A>& lists) {
  const int64_t columns = tile.conv_cols.size();
  for (int64_t row = 0; row < tile.in_rows; ++row) {
    const int32_t* starts = pixels.starts + row * (tile.in_cols.size() + 1);
    int32_t* counts = lists.row_counts + row * columns;
    for (int64_t x = 0; x < columns; ++x) {
      int32_t count = 0;
      for (int64_t s = x * lists.segments; s < (x + 1) * lists.segments; ++s) {
        count += starts[lists.seg_end[s]] - starts[lists.seg_begin[s]];
      }
      counts[x] = count;
    }
  }
}

// Counts the entries of each window and orders the windows by falling count.
template <typename A>
void OrderWindows(const ConvArgs& a, const Tile& tile, const Chunk& chunk, WindowLists<A>& lists) {
  const int64_t columns = tile.conv_cols.size(), limit = chunk.taps * a.kernel_size[1] * chunk.channels;
  int32_t* histogram = lists.histogram;  // [limit + 2]; then the place of the
                                         // windows with each count, from the top
  __builtin_memset(histogram, 0, (limit + 2) * sizeof(int32_t));
  __builtin_memset(lists.counts, 0, tile.windows * sizeof(int32_t));
  for (int64_t row = 0; row < tile.conv_rows; ++row) {
    int32_t* counts = lists.counts + row * columns;
    for (int64_t ky = chunk.tap_begin; ky < chunk.tap_begin + chunk.taps; ++ky) {
      const int32_t in = lists.input_rows[row * a.kernel_size[0] + ky];
      if (in < 0) continue;
      const int32_t* row_counts = lists.row_counts + in * columns;
      for (int64_t x = 0; x < columns; ++x) counts[x] += row_counts[x];
    }
    for (int64_t x = 0; x < columns; ++x) ++histogram[counts[x]];
  }
  int32_t place = 0;
  for (int64_t count = limit; count >= 0; --count) {
    const int32_t here = histogram[count];
    histogram[count] = place;
    place += here;
  }
  for (int64_t window = 0; window < tile.windows; ++window) {
    lists.order[histogram[lists.counts[window]]++] = static_cast<int32_t>(window);
  }
}

// Copies 16 entries at a time, moved by `shift`; the first 16 without asking
// how many there are, because a short loop of unknown length costs a branch
// miss. Writes up to kListSlack entries more.
template <typename A>
inline void CopySegment(const A* values, const uint32_t* offsets, int64_t count, uint32_t shift, A* values_out,
                        uint32_t* offsets_out) {
  int64_t i = 0;
  do {
    for (int64_t j = i; j < i + kListSlack; j += kLanes<A>) StoreAs(values_out + j, Load(values + j));
    for (int64_t j = i; j < i + kListSlack; j += kLanes<uint32_t>) {
      StoreAs(offsets_out + j, LoadAs<Word32>(offsets + j) + shift);
    }
    i += kListSlack;
  } while (__builtin_expect(i < count, 0));
}

// Appends `missing` zeros to a list; writes up to kListSlack entries more.
template <typename A>
inline void Pad(int64_t missing, uint32_t zeros, A* values, uint32_t* offsets) {
  int64_t i = 0;
  do {
    for (int64_t j = i; j < i + kListSlack; j += kLanes<A>) StoreAs(values + j, Vector<A>{});
    for (int64_t j = i; j < i + kListSlack; j += kLanes<uint32_t>) StoreAs(offsets + j, Word32{} + zeros);
    i += kListSlack;
  } while (__builtin_expect(i < missing, 0));
}

// What FillWindow reads, by value: the stores below could otherwise change it, as far as the compiler knows.
template <typename A>
struct Segments {
  PixelList<A> pixels;
  const int32_t* begin;  // seg_begin
  const int32_t* end;    // seg_end
  const int32_t* shift;  // seg_shift
  int64_t count;         // per window and row
  int64_t taps;          // kernel rows of the chunk
  int64_t kernel_width;
  int64_t starts_stride;  // of pixels.starts
  uint32_t column_bytes;  // one kernel column of the packed slice
};

// The ECR entries of the window at conv column x, at values and offsets; input_rows: [taps].
template <typename A>
inline void FillWindow(const Segments<A> segments, const int32_t* input_rows, int64_t x, A* values, uint32_t* offsets) {
  for (int64_t tap = 0; tap < segments.taps; ++tap) {
    if (input_rows[tap] < 0) continue;
    const int32_t* starts = segments.pixels.starts + input_rows[tap] * segments.starts_stride;
    for (int64_t s = x * segments.count; s < (x + 1) * segments.count; ++s) {
      const int32_t begin = starts[segments.begin[s]], count = starts[segments.end[s]] - begin;
      const uint32_t shift =
          static_cast<uint32_t>(tap * segments.kernel_width + segments.shift[s]) * segments.column_bytes;
      CopySegment(segments.pixels.values + begin, segments.pixels.offsets + begin, count, shift, values, offsets);
      values += count;
      offsets += count;
    }
  }
}

// Builds the lists of all windows, in groups of `group`.
template <typename A>
void FillWindows(const ConvTask& task, const Tile& tile, const Chunk& chunk, const PixelList<A>& pixels,
                 WindowLists<A>& lists) {
  const ConvArgs& a = task.call->args;
  const int64_t group = task.plan->windows, kernel_rows = a.kernel_size[0], windows = tile.windows;
  const uint32_t column_bytes = static_cast<uint32_t>(chunk.channels * task.plan->block * sizeof(A));
  const uint32_t zeros = static_cast<uint32_t>(chunk.taps * a.kernel_size[1]) * column_bytes;
  const Segments<A> segments = {pixels,     lists.seg_begin,  lists.seg_end,           lists.seg_shift, lists.segments,
                                chunk.taps, a.kernel_size[1], tile.in_cols.size() + 1, column_bytes};
  const int32_t* input_rows = lists.input_rows + chunk.tap_begin;
  const int32_t *order = lists.order, *counts = lists.counts, *rows = lists.rows, *columns = lists.columns;
  for (int64_t i = 0; i < kMaxGroup; ++i) lists.order[windows + i] = static_cast<int32_t>(windows);
  A* values = lists.values;
  uint32_t* offsets = lists.offsets;
  int64_t groups = 0;
  for (int64_t first = 0; first < windows; first += group) {
    const int64_t length = counts[order[first]];
    if (length == 0) break;
    lists.lengths[groups++] = static_cast<int32_t>(length);
    for (int64_t place = first; place < first + group; ++place, values += length, offsets += length) {
      const int64_t window = order[place];
      const int64_t count = window < windows ? counts[window] : 0;
      if (count > 0) FillWindow(segments, input_rows + rows[window] * kernel_rows, columns[window], values, offsets);
      Pad(length - count, zeros, values + count, offsets + count);
    }
  }
  lists.groups = groups;
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_WINDOW_LISTS_H_
