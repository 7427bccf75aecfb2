// One task of the gradient of a kernel of one tap: kernel[c][k] = sum over results of x[pixel][c] *
// cotangent[result][k]. Zeros of x are skipped. Such windows share no places, so nothing but a tile's own size keeps
// the cotangent in L1.
//
// What: of 64 results at a time a word for each channel says in which of them x is not zero. For a channel and a block
//   of output channels, up to kPointVectors sums are registers while the word's bits pass by: each is a broadcast value
//   and a vector of the cotangent for each multiply-add.
// Layout: x is copied to [channels / lanes, places, lanes], so that the channels of a vector are read from 4 KB. The
//   cotangent is copied for each block, [places, block].
// Order of each sum: the results of a tile from 0 on, then the tiles of a chunk (core/simd.h, AddTo). It does not
//   depend on threads.
// Bound by: loads, one per multiply-add.
#ifndef JSC_CPU_TRAINING_POINT_GRADIENT_H_
#define JSC_CPU_TRAINING_POINT_GRADIENT_H_

#include "cpu/core/isa.h"
#include "cpu/loops/epilogue.h"
#include "cpu/loops/nonzero_bits.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kPointVectors = 8;         // of a block at most
constexpr int64_t kPointPlaces = kWordBits;  // of a tile
constexpr int64_t kPlacesAhead = 8;          // whose channels are prefetched: few of each, far apart

template <typename A>
struct PointBuffers {
  int64_t* pixels;  // [places]: where the result's pixel begins in x, below 0 where it is padding
  uint64_t* words;  // [channels]: bit i for place i
  A* values;        // [channels / lanes, places, lanes]
  A* places;        // [places, block]
  int64_t bytes;
};

template <typename A>
PointBuffers<A> TakePointBuffers(const KernelGradientTask& task, char* scratch) {
  const int64_t channels = CeilDiv(task.channel_end - task.channel_begin, kWordBits) * kWordBits;
  Arena arena(scratch);
  PointBuffers<A> b{};
  b.pixels = arena.Take<int64_t>(kPointPlaces);
  b.words = arena.Take<uint64_t>(channels);
  b.values = arena.Take<A>(channels * kPointPlaces);
  b.places = arena.Take<A>(kPointPlaces * kPointVectors * kLanes<A>);
  b.bytes = arena.used();
  return b;
}

// A result of all images, one below the other.
struct ResultAt {
  int64_t image, row, column;

  ResultAt(const ConvArgs& a, int64_t number)
      : image(number / (a.conv_size[0] * a.conv_size[1])),
        row(number / a.conv_size[1] % a.conv_size[0]),
        column(number % a.conv_size[1]) {}

  void Next(const ConvArgs& a) {
    if (++column < a.conv_size[1]) return;
    column = 0;
    if (++row < a.conv_size[0]) return;
    row = 0;
    ++image;
  }
};

// The pixels of `count` results from `first` on.
template <typename A>
void FindPixels(const ConvArgs& a, int64_t first, int64_t count, PointBuffers<A>& b) {
  ResultAt at(a, first);
  for (int64_t i = 0; i < count; ++i, at.Next(a)) {
    const int64_t y = at.row * a.stride[0] - a.pad_low[0], x = at.column * a.stride[1] - a.pad_low[1];
    const bool is_in = y >= 0 && y < a.size[0] && x >= 0 && x < a.size[1];
    b.pixels[i] = is_in ? ((at.image * a.size[0] + y) * a.size[1] + x) * a.channels : -1;
  }
}

// Bit i of word j becomes bit j of word i.
inline void TransposeBits(uint64_t* words) {
  uint64_t low = 0xffffffffu;
  for (int64_t width = 32; width > 0; width /= 2, low ^= low << width) {
    for (int64_t first = 0; first < kWordBits; first += 2 * width) {
      for (int64_t i = first; i < first + width; ++i) {
        const uint64_t swapped = (words[i] >> width ^ words[i + width]) & low;
        words[i] ^= swapped << width;
        words[i + width] ^= swapped;
      }
    }
  }
}

// A pixel's channels as vectors a tile apart; zeros behind the last.
template <typename T, typename A>
inline void CopyPixel(const T* from, int64_t channels, A* to) {
  constexpr int64_t kStep = kPointPlaces * kLanes<A>;
  int64_t c = 0;
  for (; c + kLanes<A> <= channels; c += kLanes<A>, to += kStep) Store(to, Load(from + c));
  for (int64_t lane = 0; c < channels; ++c, ++lane) to[lane] = Widen(from[c]);
}

// The task's channels of a tile's pixels: their values, and which are not zero.
template <typename T, typename A>
[[gnu::noinline]] void ReadPixels(const KernelGradientTask& task, int64_t count, PointBuffers<A>& b) {
  const ConvArgs& a = task.call->args;
  const T* x = static_cast<const T*>(task.call->x) + task.group * a.group_channels;
  for (int64_t first = task.channel_begin; first < task.channel_end; first += kWordBits) {
    const int64_t channels = Min(kWordBits, task.channel_end - first), at = first - task.channel_begin;
    uint64_t words[kPointPlaces] = {};
    for (int64_t i = 0; i < count; ++i) {
      const char* ahead = reinterpret_cast<const char*>(x + b.pixels[Min(i + kPlacesAhead, count - 1)] + first);
      for (int64_t byte = 0; byte < channels * static_cast<int64_t>(sizeof(T)); byte += 64) {
        __builtin_prefetch(ahead + byte);
      }
      if (b.pixels[i] < 0) continue;
      words[i] = NonZeroBits(x + b.pixels[i] + first, channels);
      CopyPixel(x + b.pixels[i] + first, channels, b.values + at * kPointPlaces + i * kLanes<A>);
    }
    TransposeBits(words);
    for (int64_t c = 0; c < channels; ++c) b.words[at + c] = words[c];
  }
}

// A block of the cotangent of `count` results from `first` on, channels [k, k + width) of the group.
template <typename T, typename A>
[[gnu::noinline]] void CopyResults(const KernelGradientTask& task, int64_t first, int64_t count, int64_t k,
                                   int64_t width, int64_t block, A* to) {
  const ConvArgs& a = task.call->args;
  const T* from = static_cast<const T*>(task.call->cotangent) + first * a.out_channels +
                  task.group * (a.out_channels / a.groups) + k;
  for (int64_t i = 0; i < count; ++i, from += a.out_channels, to += block) {
    int64_t v = 0;
    for (; v + kLanes<A> <= width; v += kLanes<A>) Store(to + v, Load(from + v));
    for (; v < block; ++v) to[v] = v < width ? Widen(from[v]) : A{0};
  }
}

// A channel's products with a block, added to out [width]; kLists sums of each where they are too few to hide latency.
template <int kVectors, typename A>
inline void AddChannel(uint64_t word, const A* values, const A* places, int64_t width, A* out) {
  constexpr int kLists = kPointVectors / kVectors;
  constexpr int64_t kBlock = kVectors * kLanes<A>;
  Vector<A> sum[kLists][kVectors] = {};
  const auto add = [&](int list) __attribute__((always_inline)) {
    const int64_t place = __builtin_ctzll(word);
    word &= word - 1;
    const A value = values[place * kLanes<A>];
    const A* row = places + place * kBlock;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) MultiplyAddAt(sum[list][v], value, row + v * kLanes<A>);
  };
  for (int64_t left = __builtin_popcountll(word); left >= kLists; left -= kLists) {
#pragma GCC unroll 8
    for (int list = 0; list < kLists; ++list) add(list);
  }
  while (word != 0) add(0);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 8
    for (int list = 1; list < kLists; ++list) sum[0][v] += sum[list][v];
    if ((v + 1) * kLanes<A> <= width) {
      AddTo(out + v * kLanes<A>, sum[0][v]);
    } else {
      alignas(64) A rest[kLanes<A>];
      Store(rest, sum[0][v]);
      for (int64_t lane = v * kLanes<A>; lane < width; ++lane) out[lane] += rest[lane - v * kLanes<A>];
    }
  }
}

// All of the task's channels with a block.
template <int kVectors, typename T, typename A>
[[gnu::noinline]] void AddPlaces(const KernelGradientTask& task, int64_t first, int64_t count, int64_t k, int64_t width,
                                 A* out, PointBuffers<A>& b) {
  const ConvArgs& a = task.call->args;
  CopyResults<T>(task, first, count, k, width, kVectors * kLanes<A>, b.places);
  for (int64_t c = 0; c < task.channel_end - task.channel_begin; ++c, out += a.out_channels) {
    if (b.words[c] == 0) continue;
    const A* values = b.values + c / kLanes<A> * kLanes<A> * kPointPlaces + c % kLanes<A>;
    AddChannel<kVectors>(b.words[c], values, b.places, width, out);
  }
}

template <typename T>
void RunPointGradient(const KernelGradientTask& task, char* scratch) {
  using A = Accumulator<T>;
  const ConvArgs& a = task.call->args;
  PointBuffers<A> b = TakePointBuffers<A>(task, scratch);
  A* out = static_cast<A*>(task.call->out) + (task.chunk * a.group_channels + task.channel_begin) * a.out_channels +
           task.group * (a.out_channels / a.groups);
  for (int64_t c = 0; c < task.channel_end - task.channel_begin; ++c) {
    __builtin_memset(out + c * a.out_channels + task.out_begin, 0, (task.out_end - task.out_begin) * sizeof(A));
  }
  const int64_t results = a.images * a.conv_size[0] * a.conv_size[1];
  const int64_t end = results * (task.chunk + 1) / task.call->chunks;
  for (int64_t first = results * task.chunk / task.call->chunks; first < end; first += kPointPlaces) {
    const int64_t count = Min(kPointPlaces, end - first);
    FindPixels(a, first, count, b);
    ReadPixels<T>(task, count, b);
    for (int64_t k = task.out_begin; k < task.out_end;) {
      // Of five vectors four and then one, else at most a quarter of a block is empty.
      const int64_t left = task.out_end - k, vectors = CeilDiv(left, kLanes<A>);
      const int64_t taken = vectors > 5 ? 8 : vectors > 2 ? 4 : vectors;
      const auto add = taken == 8   ? &AddPlaces<8, T, A>
                       : taken == 4 ? &AddPlaces<4, T, A>
                       : taken == 2 ? &AddPlaces<2, T, A>
                                    : &AddPlaces<1, T, A>;
      add(task, first, count, k, Min(left, taken * kLanes<A>), out + k, b);
      k += taken * kLanes<A>;
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_TRAINING_POINT_GRADIENT_H_
