// The non-zeros of a tile listed by channel: which pixels each input channel has something in.
//
// Layout: pixels are cut into strips of a few rows, so that the sums a strip adds to stay in L1. A strip has one list
//   per channel, each with room for all of its pixels. Of a sparse map only the first lines are ever touched, and one
//   pass over x fills them. Room is an odd number of cache lines, or lists would share a few cache sets.
// An entry is a value and where it goes: the pixel's place among the sums of the last kernel row and column, in bytes.
//   The sums of every other tap lie a fixed distance after it.
// Bound by: compressing 16 elements in about 5 cycles, then 3 to 4 cycles per entry.
#ifndef JSC_CPU_LOOPS_CHANNEL_LISTS_H_
#define JSC_CPU_LOOPS_CHANNEL_LISTS_H_

#include "cpu/core/simd.h"
#include "cpu/loops/sums_layout.h"

namespace jsc {
namespace JSC_ISA {
namespace {

template <typename A>
struct Entry {
  A value;
  uint32_t offset;
};

template <typename A>
struct ChannelLists {
  Entry<A>* entries;     // [strips, channels, capacity]
  Entry<A>** ends;       // [strips, channels]: one past the last entry
  A* values;             // [in_cols * channels + slack]: one row of x, compressed
  uint32_t* keys;        // same: column << 16 | channel
  int32_t* active;       // [channels]: those with an entry in some strip, ...
  int64_t active_count;  // ... so many
  int64_t strips, channels, capacity;

  Entry<A>* Begin(int64_t strip, int64_t channel) const { return entries + (strip * channels + channel) * capacity; }
};

template <typename A>
ChannelLists<A> TakeChannelLists(Arena& arena, const ConvTask& task, const Tile& tile) {
  constexpr int64_t kPerLine = 64 / sizeof(Entry<A>);
  const int64_t columns = tile.in_cols.size();
  ChannelLists<A> lists{};
  lists.channels = task.call->args.group_channels;
  lists.strips = Max(1, CeilDiv(tile.in_rows, task.plan->strip_rows));
  lists.capacity = (CeilDiv(Min(task.plan->strip_rows, tile.in_rows) * columns, kPerLine) | 1) * kPerLine;
  lists.entries = arena.Take<Entry<A>>(lists.strips * lists.channels * lists.capacity);
  lists.ends = arena.Take<Entry<A>*>(lists.strips * lists.channels);
  lists.active = arena.Take<int32_t>(lists.channels);
  lists.values = arena.Take<A>(columns * lists.channels + kListSlack);
  lists.keys = arena.Take<uint32_t>(columns * lists.channels + kListSlack);
  return lists;
}

// Appends one row of pixels, [in_cols, a.channels] from the group's first channel on, to the lists of its strip.
// first_place: what the pixel at in_cols.begin adds to through the last kernel row and column.
template <typename T, typename A>
void ListRow(const T* pixels, int64_t columns, int64_t pixel_stride, int64_t first_place, int64_t place_bytes,
             const ChannelLists<A>& lists, Entry<A>** ends) {
  int64_t used = 0;
  for (int64_t x = 0; x < columns; ++x) {
    used += Append(pixels + x * pixel_stride, lists.channels, static_cast<uint32_t>(x) << 16, 1, lists.values + used,
                   lists.keys + used);
  }
  const A* values = lists.values;
  const uint32_t* keys = lists.keys;
  for (int64_t i = 0; i < used; ++i) {
    const uint32_t offset = static_cast<uint32_t>((first_place + (keys[i] >> 16)) * place_bytes);
    Entry<A>*& end = ends[keys[i] & 0xffffu];
    *end++ = {values[i], offset};
  }
}

template <typename A>
void FindActive(ChannelLists<A>& lists) {
  lists.active_count = 0;
  for (int64_t c = 0; c < lists.channels; ++c) {
    bool any = false;
    for (int64_t strip = 0; strip < lists.strips; ++strip) {
      any |= lists.ends[strip * lists.channels + c] != lists.Begin(strip, c);
    }
    lists.active[lists.active_count] = static_cast<int32_t>(c);
    lists.active_count += any;
  }
}

// Lists every non-zero that the tile needs: the only read of x.
template <typename T, typename A>
void ListChannels(const ConvTask& task, const Tile& tile, const TileImage* images, const SumsLayout& layout,
                  ChannelLists<A>& lists) {
  const ConvArgs& a = task.call->args;
  const T* x = static_cast<const T*>(task.call->x) + task.group * a.group_channels;  // [N, H, W, C]
  const int64_t place_bytes = task.plan->block * sizeof(A);
  for (int64_t strip = 0; strip < lists.strips; ++strip) {
    for (int64_t c = 0; c < lists.channels; ++c) lists.ends[strip * lists.channels + c] = lists.Begin(strip, c);
  }
  int64_t row = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    const ImageRows rows = RowsOfImage(a, images[i]);
    const int64_t first_row = images[i].first_sum - rows.first_result + rows.first_y;
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y, ++row) {
      const T* pixels = x + ((images[i].image * a.size[0] + y) * a.size[1] + tile.in_cols.begin) * a.channels;
      const int64_t place = layout.before + (first_row + y - images[i].in_rows.begin) * layout.columns + layout.first_x;
      Entry<A>** ends = lists.ends + row / task.plan->strip_rows * lists.channels;
      ListRow(pixels, tile.in_cols.size(), a.channels, place, place_bytes, lists, ends);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_CHANNEL_LISTS_H_
