// One task of a kernel's gradient: kernel[tap][c][k] = sum over pixels of x[pixel][c] * cotangent[result][k], where the
// tap leads from the result to the pixel. Zeros of x are skipped.
//
// Kernels of one tap are point_gradient.h's.
// What: the non-zeros of a tile of x are listed by channel. For a channel and a block of output channels, the sums of
//   up to kMostTaps taps are registers while the channel's list passes by. An entry is a broadcast value and one vector
//   of the cotangent for each multiply-add. It is loops/scatter_kernel.h the other way round: there weights are
//   registers and sums are memory.
// Layout: the cotangent of a tile is copied for each block of output channels, [places, block], with negative zeros
//   where it has no results. So no bounds are checked, and places of a tap lie a fixed distance apart. A tile of x with
//   infinities or NaN leaves places without a result out. Neighbouring entries read neighbouring places, so as many
//   rows as the kernel has are in L1.
// Strides: pixels of one phase (their place modulo the stride) meet the same taps. A phase has lists of its own; one
//   without taps is not read.
// Order of each sum: a tile's pixels from 0 on, then the tiles of a chunk (core/simd.h, AddTo). It does not depend on
//   threads. The chunks are added by the caller: with few channels, only pixels are many enough for all threads.
// Bound by: loads, one per multiply-add; the lists where there are few output channels.
#ifndef JSC_CPU_TRAINING_KERNEL_GRADIENT_H_
#define JSC_CPU_TRAINING_KERNEL_GRADIENT_H_

#include <algorithm>
#include <cmath>

#include "cpu/core/isa.h"
#include "cpu/loops/channel_lists.h"
#include "cpu/loops/epilogue.h"
#include "cpu/training/point_gradient.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int kMostTaps = 9;                             // whose sums are registers together
constexpr int64_t kTapVectors = kManyRegisters ? 2 : 1;  // of a block
constexpr int64_t kPlaces = 1024;                        // of a tile, about
constexpr int64_t kPixelsAhead = 8;                      // whose channels are prefetched: few of each, far apart

inline int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -CeilDiv(-a, b); }

inline int64_t FloorMod(int64_t a, int64_t b) { return a - FloorDiv(a, b) * b; }

// The pixels of x whose place is `phase` modulo the strides, and the taps that they meet.
struct Phase {
  int64_t at[2];
  int64_t first_tap, taps;  // of GradientBuffers::taps
};

// A tap, and how far its place lies before a pixel's, in places.
struct PhaseTap {
  int64_t tap, back;
};

// Rows [begin, end) of x of one image, and where its places begin.
struct GradientRows {
  int64_t image, begin, end;
  int64_t first_result;  // result row of the first row of places
  int64_t result_rows;
  int64_t first_place;
};

// Sizes of what a task works on, the same for all of its tiles.
struct GradientShape {
  int64_t block;
  int64_t reach[2];      // rows and columns of places in front of a pixel's that taps lead to
  int64_t first_column;  // result column of the first column of places
  int64_t columns;       // of places
  int64_t tile_rows;     // of x
  int64_t tile_images, tile_places;
  int64_t phases, capacity;
};

inline GradientShape ShapeOf(const KernelGradientTask& task, int64_t lanes) {
  const ConvArgs& a = task.call->args;
  GradientShape s{};
  s.block = kTapVectors * lanes;
  for (int i = 0; i < 2; ++i) s.reach[i] = (a.kernel_size[i] - 1) * a.dilation[i] / a.stride[i];
  const int64_t first = FloorDiv(a.pad_low[1], a.stride[1]);
  const int64_t last = FloorDiv(a.size[1] - 1 + a.pad_low[1], a.stride[1]);
  s.first_column = first - s.reach[1];
  s.columns = last - s.first_column + 1;
  s.tile_rows = Clamp(kPlaces / s.columns * a.stride[0], a.stride[0], a.images * a.size[0]);
  s.tile_images = s.tile_rows / a.size[0] + 2;
  s.tile_places = (s.tile_rows / a.stride[0] + s.tile_images * (s.reach[0] + 2)) * s.columns;
  s.phases = a.stride[0] * a.stride[1];
  constexpr int64_t kPerLine = 8;  // an odd number of lines: lists would share a few cache sets otherwise
  s.capacity = (CeilDiv(s.tile_rows * a.size[1], kPerLine) | 1) * kPerLine;
  return s;
}

template <typename A>
struct GradientBuffers {
  Phase* phases;
  PhaseTap* taps;
  GradientRows* rows;  // [tile images]
  A* values;           // [row of x, slack]: non-zeros of a row of x, ...
  uint32_t* keys;      // ... and column of places << 16 | channel
  Entry<A>* entries;   // [channels, capacity]: of one phase after the other
  int64_t* ends;       // [phases + 1, channels]
  A* places;           // [tile places, block]
  A times_zero;        // the sum of a tile's non-zeros times zero: NaN where one is not finite
  int64_t bytes;
};

template <typename A>
GradientBuffers<A> TakeGradientBuffers(const KernelGradientTask& task, const GradientShape& s, char* scratch) {
  const ConvArgs& a = task.call->args;
  const int64_t channels = task.channel_end - task.channel_begin, run = a.size[1] * channels + kListSlack;
  Arena arena(scratch);
  GradientBuffers<A> b{};
  b.phases = arena.Take<Phase>(s.phases);
  b.taps = arena.Take<PhaseTap>(a.kernel_size[0] * a.kernel_size[1]);
  b.rows = arena.Take<GradientRows>(s.tile_images);
  b.values = arena.Take<A>(run);
  b.keys = arena.Take<uint32_t>(run);
  b.entries = arena.Take<Entry<A>>(channels * s.capacity);
  b.ends = arena.Take<int64_t>((s.phases + 1) * channels);
  b.places = arena.Take<A>(s.tile_places * s.block);
  b.bytes = arena.used();
  return b;
}

// Phases that no tap meets have none.
template <typename A>
void FindPhases(const ConvArgs& a, const GradientShape& s, GradientBuffers<A>& b) {
  int64_t used = 0;
  for (int64_t i = 0; i < s.phases; ++i) {
    Phase& phase = b.phases[i];
    phase = {{i / a.stride[1], i % a.stride[1]}, used, 0};
    for (int64_t ky = 0; ky < a.kernel_size[0]; ++ky) {
      for (int64_t kx = 0; kx < a.kernel_size[1]; ++kx) {
        const int64_t y = ky * a.dilation[0] - phase.at[0], x = kx * a.dilation[1] - phase.at[1];
        if (y % a.stride[0] != 0 || x % a.stride[1] != 0) continue;
        b.taps[used++] = {ky * a.kernel_size[1] + kx, y / a.stride[0] * s.columns + x / a.stride[1]};
      }
    }
    phase.taps = used - phase.first_tap;
  }
}

// The rows of x from `first` on, of all images one below the other, by image; returns how many images.
template <typename A>
int64_t LayOutTile(const ConvArgs& a, const GradientShape& s, int64_t first, int64_t end, GradientBuffers<A>& b) {
  int64_t images = 0, places = 0;
  while (first < end) {
    GradientRows& rows = b.rows[images++];
    rows.image = first / a.size[0];
    rows.begin = first % a.size[0];
    rows.end = Min(a.size[0], rows.begin + end - first);
    rows.first_result = FloorDiv(rows.begin + a.pad_low[0], a.stride[0]) - s.reach[0];
    rows.result_rows = FloorDiv(rows.end - 1 + a.pad_low[0], a.stride[0]) - rows.first_result + 1;
    rows.first_place = places;
    places += rows.result_rows * s.columns;
    first += rows.end - rows.begin;
  }
  return images;
}

// The non-zeros of the task's channels in a row of x, those of one phase.
template <typename T, typename A>
void ListPhaseRow(const KernelGradientTask& task, const GradientShape& s, const GradientRows& rows, int64_t y,
                  int64_t phase, GradientBuffers<A>& b, int64_t* ends) {
  const ConvArgs& a = task.call->args;
  const int64_t channels = task.channel_end - task.channel_begin;
  const T* line = static_cast<const T*>(task.call->x) + (rows.image * a.size[0] + y) * a.size[1] * a.channels +
                  task.group * a.group_channels + task.channel_begin;
  const int64_t low = a.pad_low[1], step = a.stride[1];
  int64_t used = 0;
  for (int64_t x = FloorMod(phase - low, step); x < a.size[1]; x += step) {
    const char* ahead = reinterpret_cast<const char*>(line + (x + kPixelsAhead * step) * a.channels);
    for (int64_t i = 0; i < channels * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(ahead + i);
    const uint32_t column = static_cast<uint32_t>(FloorDiv(x + low, step) - s.first_column);
    used += Append(line + x * a.channels, channels, column << 16, 1, b.values + used, b.keys + used);
  }
  const int64_t row = FloorDiv(y + a.pad_low[0], a.stride[0]) - rows.first_result;
  const int64_t place_bytes = s.block * static_cast<int64_t>(sizeof(A));
  const int64_t first = rows.first_place + row * s.columns, capacity = s.capacity;
  Entry<A>* const entries = b.entries;
  const A* const values = b.values;
  const uint32_t* const keys = b.keys;
  for (int64_t i = 0; i < used; ++i) {
    const int64_t channel = keys[i] & 0xffffu;
    const auto offset = static_cast<uint32_t>((first + (keys[i] >> 16)) * place_bytes);
    entries[channel * capacity + ends[channel]++] = {values[i], offset};
    b.times_zero += values[i] * A{0};
  }
}

template <typename T, typename A>
void ListTileByChannel(const KernelGradientTask& task, const GradientShape& s, int64_t images, GradientBuffers<A>& b) {
  const ConvArgs& a = task.call->args;
  const int64_t channels = task.channel_end - task.channel_begin;
  b.times_zero = A{0};
  for (int64_t c = 0; c < channels; ++c) b.ends[c] = 0;
  for (int64_t i = 0; i < s.phases; ++i) {
    int64_t* ends = b.ends + (i + 1) * channels;
    for (int64_t c = 0; c < channels; ++c) ends[c] = ends[c - channels];
    if (b.phases[i].taps == 0) continue;
    for (int64_t image = 0; image < images; ++image) {
      const GradientRows& rows = b.rows[image];
      for (int64_t y = rows.begin; y < rows.end; ++y) {
        if (FloorMod(y + a.pad_low[0], a.stride[0]) != b.phases[i].at[0]) continue;
        ListPhaseRow<T>(task, s, rows, y, b.phases[i].at[1], b, ends);
      }
    }
  }
}

// A block of the cotangent, channels [k, k + width) of the group, to the places; negative zeros elsewhere.
template <typename T, typename A>
[[gnu::noinline]] void CopyCotangent(const KernelGradientTask& task, const GradientShape& s, int64_t images, int64_t k,
                                     int64_t width, GradientBuffers<A>& b) {
  const ConvArgs& a = task.call->args;
  const T* from = static_cast<const T*>(task.call->cotangent) + task.group * (a.out_channels / a.groups) + k;
  A* to = b.places;
  for (int64_t image = 0; image < images; ++image) {
    const GradientRows& rows = b.rows[image];
    for (int64_t row = 0; row < rows.result_rows; ++row) {
      const int64_t p = rows.first_result + row;
      const T* line = from + (rows.image * a.conv_size[0] + p) * a.conv_size[1] * a.out_channels;
      for (int64_t column = 0; column < s.columns; ++column, to += s.block) {
        const int64_t q = s.first_column + column;
        if (p < 0 || p >= a.conv_size[0] || q < 0 || q >= a.conv_size[1]) {
          std::fill_n(to, s.block, -A{0});
        } else if (width == s.block) {
          for (int64_t v = 0; v < s.block; v += kLanes<A>) Store(to + v, Load(line + q * a.out_channels + v));
        } else {
          for (int64_t v = 0; v < s.block; ++v) to[v] = v < width ? Widen(line[q * a.out_channels + v]) : A{0};
        }
      }
    }
  }
}

// sums [kTaps, kVectors] of a channel's entries; kLists of them at once where the sums are too few to hide latency.
template <int kTaps, typename A>
[[gnu::noinline]] void SumEntries(const Entry<A>* entry, const Entry<A>* end, const PhaseTap* taps, const A* places,
                                  int64_t block, A* sums) {
  constexpr int kVectors = kTapVectors;
  constexpr int kLists = kTaps * kVectors >= 8 ? 1 : kTaps * kVectors >= 4 ? 2 : kTaps * kVectors >= 2 ? 4 : 8;
  const char* at[kTaps];
  for (int t = 0; t < kTaps; ++t) at[t] = reinterpret_cast<const char*>(places - taps[t].back * block);
  Vector<A> sum[kLists][kTaps][kVectors] = {};
  const auto add = [&](int list, const Entry<A>& each) __attribute__((always_inline)) {
    const A value = each.value;
    const int64_t offset = each.offset;
#pragma GCC unroll 16
    for (int t = 0; t < kTaps; ++t) {
      const A* row = reinterpret_cast<const A*>(at[t] + offset);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[list][t][v] += value * Load(row + v * kLanes<A>);
    }
  };
  for (; entry + kLists <= end; entry += kLists) {
#pragma GCC unroll 8
    for (int list = 0; list < kLists; ++list) add(list, entry[list]);
  }
  for (; entry < end; ++entry) add(0, *entry);
#pragma GCC unroll 16
  for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vector<A> total = sum[0][t][v];
#pragma GCC unroll 8
      for (int list = 1; list < kLists; ++list) total += sum[list][t][v];
      Store(sums + (t * kVectors + v) * kLanes<A>, total);
    }
  }
}

template <typename A>
void SumTaps(int64_t taps, const Entry<A>* entry, const Entry<A>* end, const PhaseTap* first, const A* places,
             int64_t block, A* sums) {
  switch (taps) {
    case 1:
      return SumEntries<1>(entry, end, first, places, block, sums);
    case 2:
      return SumEntries<2>(entry, end, first, places, block, sums);
    case 3:
      return SumEntries<3>(entry, end, first, places, block, sums);
    case 4:
      return SumEntries<4>(entry, end, first, places, block, sums);
    case 5:
      return SumEntries<5>(entry, end, first, places, block, sums);
    case 6:
      return SumEntries<6>(entry, end, first, places, block, sums);
    case 7:
      return SumEntries<7>(entry, end, first, places, block, sums);
    case 8:
      return SumEntries<8>(entry, end, first, places, block, sums);
    default:
      return SumEntries<9>(entry, end, first, places, block, sums);
  }
}

// The same of entries that may not be finite: places without a result are left out.
template <typename A>
[[gnu::noinline]] void SumTapsWithResults(int64_t taps, const Entry<A>* entry, const Entry<A>* end,
                                          const PhaseTap* first, const A* places, int64_t block, A* sums) {
  std::fill_n(sums, taps * block, A{0});
  for (; entry < end; ++entry) {
    for (int64_t t = 0; t < taps; ++t) {
      const char* at = reinterpret_cast<const char*>(places - first[t].back * block) + entry->offset;
      const A* row = reinterpret_cast<const A*>(at);
      for (int64_t v = 0; v < block; ++v) {
        if (row[v] != 0 || !std::signbit(row[v])) sums[t * block + v] += entry->value * row[v];
      }
    }
  }
}

// The gradient of a tap and channel, of the group's output channels.
template <typename A>
A* GradientAt(const KernelGradientTask& task, int64_t tap, int64_t channel) {
  const ConvArgs& a = task.call->args;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  return static_cast<A*>(task.call->out) + ((task.chunk * taps + tap) * a.group_channels + channel) * a.out_channels +
         task.group * (a.out_channels / a.groups);
}

// One block of output channels of a tile, k of the group on: added to out.
template <typename A>
void AddBlock(const KernelGradientTask& task, const GradientShape& s, int64_t k, int64_t width,
              const GradientBuffers<A>& b) {
  const int64_t channels = task.channel_end - task.channel_begin;
  alignas(64) A sums[kMostTaps * kTapVectors * kLanes<A>];
  for (int64_t i = 0; i < s.phases; ++i) {
    const int64_t* begins = b.ends + i * channels;
    for (int64_t c = 0; c < channels && b.phases[i].taps > 0; ++c) {
      const Entry<A>* entries = b.entries + c * s.capacity;
      if (begins[c] == begins[c + channels]) continue;
      for (int64_t tap = 0; tap < b.phases[i].taps; tap += kMostTaps) {
        const PhaseTap* first = b.taps + b.phases[i].first_tap + tap;
        const int64_t taps = Min(kMostTaps, b.phases[i].taps - tap);
        const auto sum = b.times_zero == 0 ? SumTaps<A> : SumTapsWithResults<A>;
        sum(taps, entries + begins[c], entries + begins[c + channels], first, b.places, s.block, sums);
        for (int64_t t = 0; t < taps; ++t) {
          A* out = GradientAt<A>(task, first[t].tap, task.channel_begin + c) + k;
          int64_t v = 0;
          for (; v + kLanes<A> <= width; v += kLanes<A>) AddTo(out + v, Load(sums + t * s.block + v));
          for (; v < width; ++v) out[v] += sums[t * s.block + v];
        }
      }
    }
  }
}

inline bool IsPoint(const KernelGradientTask& task) {
  const ConvArgs& a = task.call->args;
  return a.kernel_size[0] * a.kernel_size[1] == 1;
}

template <typename T>
int64_t KernelGradientBytes(const KernelGradientTask& task) {
  using A = Accumulator<T>;
  if (IsPoint(task)) return TakePointBuffers<A>(task, nullptr).bytes;
  return TakeGradientBuffers<A>(task, ShapeOf(task, kLanes<A>), nullptr).bytes;
}

template <typename T>
void RunKernelGradient(const KernelGradientTask& task, char* scratch) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  if (IsPoint(task)) return RunPointGradient<T>(task, scratch);
  const ConvArgs& a = task.call->args;
  const GradientShape s = ShapeOf(task, kLanes<A>);
  GradientBuffers<A> b = TakeGradientBuffers<A>(task, s, scratch);
  FindPhases(a, s, b);
  for (int64_t tap = 0; tap < a.kernel_size[0] * a.kernel_size[1]; ++tap) {
    for (int64_t c = task.channel_begin; c < task.channel_end; ++c) {
      __builtin_memset(GradientAt<A>(task, tap, c) + task.out_begin, 0, (task.out_end - task.out_begin) * sizeof(A));
    }
  }
  const int64_t rows = a.images * a.size[0], end = rows * (task.chunk + 1) / task.call->chunks;
  for (int64_t first = rows * task.chunk / task.call->chunks; first < end; first += s.tile_rows) {
    const int64_t images = LayOutTile(a, s, first, Min(end, first + s.tile_rows), b);
    ListTileByChannel<T>(task, s, images, b);
    for (int64_t k = task.out_begin; k < task.out_end; k += s.block) {
      const int64_t width = Min(s.block, task.out_end - k);
      CopyCotangent<T>(task, s, images, k, width, b);
      AddBlock(task, s, k, width, b);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_TRAINING_KERNEL_GRADIENT_H_
