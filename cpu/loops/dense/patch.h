// The pixels of x that a task of the dense loops reads: where they are packed, with their padding, or that they are
// not.
#ifndef JSC_CPU_LOOPS_DENSE_PATCH_H_
#define JSC_CPU_LOOPS_DENSE_PATCH_H_

#include <type_traits>

#include "cpu/core/simd.h"
#include "cpu/loops/pixel_entries.h"
#include "cpu/loops/pixel_lists.h"
#include "cpu/loops/tile.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// The rectangles of x that a tile's windows span, one below the other.
struct Patch {
  int64_t rows, columns;
};

inline int64_t Span(int64_t windows, int64_t stride, int64_t kernel_size, int64_t dilation) {
  return windows <= 0 ? 0 : (windows - 1) * stride + (kernel_size - 1) * dilation + 1;
}

inline int64_t PatchRows(const ConvArgs& a, const TileImage& image) {
  return Span(image.conv_rows.size(), a.stride[0], a.kernel_size[0], a.dilation[0]);
}

inline Patch PatchOf(const ConvTask& task, const Tile& tile) {
  const ConvArgs& a = task.call->args;
  Patch patch = {0, Span(tile.conv_cols.size(), a.stride[1], a.kernel_size[1], a.dilation[1])};
  for (int64_t i = 0; i < tile.images; ++i) patch.rows += PatchRows(a, ImageOfTile(task, i));
  return patch;
}

// Taps whose pixels lie one behind the other: a row of the kernel, unless it is dilated.
inline int64_t RunTaps(const ConvArgs& a) { return a.dilation[1] == 1 ? a.kernel_size[1] : 1; }

// Whether windows are read in x: each is a pixel, all of them lie within it, and its type is that of sums.
template <typename T>
inline bool ReadsInPlace(const ConvTask& task) {
  const ConvArgs& a = task.call->args;
  const bool scaled = task.call->scaled.scale != nullptr;
  bool inside = sizeof(T) == sizeof(Accumulator<T>) && !task.call->lone_channel && !scaled;
  for (int i = 0; i < 2; ++i) {
    inside &= a.kernel_size[i] == 1 && a.pad_low[i] == 0 && (a.conv_size[i] - 1) * a.stride[i] < a.size[i];
  }
  return inside;
}

// target[0, count) = source widened.
template <typename T, typename F>
inline void WidenRun(const T* source, int64_t count, F* target) {
  int64_t c = 0;
  for (; c + kLanes<F> <= count; c += kLanes<F>) Store(target + c, Load(source + c));
  for (; c < count; ++c) target[c] = Widen(source[c]);
}

// A chunk's channels, in pairs, of `count` pixels with an odd number of channels. source: [count, channels]
inline void PairRun(const BFloat16* source, int64_t count, int64_t channels, const Chunk& chunk, BFloat16Pair* target) {
  for (int64_t pixel = 0; pixel < count; ++pixel, source += channels) {
    for (int64_t pair = chunk.channel_begin; pair < chunk.channel_begin + chunk.channels; ++pair) {
      *target++ = PairOf(source[2 * pair], 2 * pair + 1 < channels ? source[2 * pair + 1] : BFloat16{});
    }
  }
}

// Packs a chunk's channels of the patch; pixels outside x are zeros.
template <typename T, typename F>
[[gnu::noinline]] void PackPixels(const ConvTask& task, const Tile& tile, const Chunk& chunk, const TileImage* images,
                                  F* pixels) {
  const ConvArgs& a = task.call->args;
  const Patch patch = PatchOf(task, tile);
  const T* x = static_cast<const T*>(task.call->x) + task.group * a.group_channels + chunk.channel_begin;
  const int64_t first_x = tile.conv_cols.begin * a.stride[1] - a.pad_low[1];
  for (int64_t i = 0; i < tile.images; ++i) {
    const int64_t first_y = images[i].conv_rows.begin * a.stride[0] - a.pad_low[0];
    for (int64_t row = 0; row < PatchRows(a, images[i]); ++row) {
      const int64_t y = first_y + row;
      const T* line = x + (images[i].image * a.size[0] + y) * a.size[1] * a.channels;
      const bool inside = y >= 0 && y < a.size[0];
      const int64_t begin = inside ? Clamp(-first_x, 0, patch.columns) : patch.columns;
      const int64_t end = Clamp(a.size[1] - first_x, begin, patch.columns);
      const auto zeros = [&](int64_t columns) {
        __builtin_memset(pixels, 0, columns * chunk.channels * sizeof(F));
        pixels += columns * chunk.channels;
      };
      zeros(begin);
      const int64_t columns = end - begin;
      if constexpr (kChannelsOf<T> == 2) {
        if (task.call->lone_channel) {
          const int64_t channels = 2 * a.channels - 1;
          const int64_t pixel = (images[i].image * a.size[0] + y) * a.size[1] + first_x + begin;
          PairRun(static_cast<const Stored<T>*>(task.call->x) + pixel * channels, columns, channels, chunk, pixels);
          pixels += columns * chunk.channels;
          zeros(patch.columns - end);
          continue;
        }
      }
      const int64_t together = chunk.channels == a.channels ? columns : 1;  // whole pixels are one run
      for (int64_t column = 0; column < columns; column += together, pixels += together * chunk.channels) {
        WidenRun(line + (first_x + begin + column) * a.channels, together * chunk.channels, pixels);
      }
      zeros(patch.columns - end);
    }
  }
}

// The same, scaled where the call has a scale: of dense blocks, whose windows are pixels then.
template <typename T, typename F>
void PackRead(const ConvTask& task, const Tile& tile, const Chunk& chunk, const TileImage* images, F* pixels) {
  if constexpr (std::is_same_v<T, float>) {
    if (task.call->scaled.scale != nullptr) {
      return ActivatePixels(task, tile, images, chunk.channel_begin, chunk.channels, pixels);
    }
  }
  PackPixels<T>(task, tile, chunk, images, pixels);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_DENSE_PATCH_H_
