// What a block of the engine grouped has in shared memory before it multiplies: weights, pixels, and where units and
// pixels are.
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_COPIES_CUH_
#define JSC_CUDA_DENSE_CONV_GROUPED_COPIES_CUH_

#include "cuda/core/copies.cuh"
#include "cuda/dense_conv/grouped/task.cuh"

namespace jsc {

struct GroupedPlace {
  int stack, image;        // first of the tile, in its stack
  int y, x;                // first result
  int group, out_channel;  // first of the block; output channel: of all
};

template <class U, typename T>
__device__ __forceinline__ GroupedPlace FindGroupedPlace(const GroupedTask<T>& group) {
  const Quotient across = Divide(static_cast<int>(blockIdx.x), group.by_across);
  const Quotient down = Divide(across.quotient, group.by_down);
  const Quotient image = Divide(down.quotient, group.by_image_tiles);
  const Quotient bundle = Divide(static_cast<int>(blockIdx.y), group.by_out_channel_splits);
  const int first = bundle.quotient * group.groups;
  return {image.quotient,
          image.remainder * group.tile_images,
          down.remainder * group.tile_high,
          across.remainder * group.tile_wide,
          first,
          first * group.small_map.mma.group_out_channels + bundle.remainder * group.columns * (8 * U::kTiles)};
}

// How far a unit is from the window's start.
template <class U, typename T>
__device__ __forceinline__ void FillOffsets(const GroupedTask<T>& group, int* offsets) {
  const MmaTask<T>& task = group.small_map.mma;
  for (int unit = static_cast<int>(threadIdx.x); unit < group.units; unit += U::kThreads) {
    const Quotient tap = Divide(unit, group.by_unit_span), place = Divide(tap.quotient, group.by_kernel_width);
    const int pixel = place.quotient * task.dilation[0] * group.box_wide + place.remainder * task.dilation[1];
    offsets[unit] = pixel * group.pixel_bytes + tap.remainder * kUnitBytes;
  }
}

template <class U, typename T>
__device__ __forceinline__ void CopyGroupedWeights(const GroupedTask<T>& group, const GroupedPlace& at,
                                                   unsigned char* to) {
  const MmaTask<T>& task = group.small_map.mma;
  const T* from = task.kernel + at.stack * group.small_map.stack_kernel + at.out_channel;
  const int out_channels = task.out_channels - at.out_channel;  // the last block may have fewer groups
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < group.weight_rows * group.weight_copies; i += U::kThreads) {
    const Quotient row = Divide(i, group.by_weight_copies);
    const int column = row.remainder * U::kUnit;
    CopyAsync<16>(to + row.quotient * group.weight_bytes + row.remainder * kUnitBytes,
                  from + static_cast<int64_t>(row.quotient) * task.out_channels + column, 16, column < out_channels);
  }
}

// Pixels outside the map are zeros.
template <class U, typename T>
__device__ __forceinline__ void CopyGroupedPixels(const GroupedTask<T>& group, const GroupedPlace& at,
                                                  unsigned char* to) {
  const MmaTask<T>& task = group.small_map.mma;
  const int lane = static_cast<int>(threadIdx.x % kWarp), channel = at.group * task.group_channels;
  const int y0 = at.y * task.stride[0] - task.pad_low[0], x0 = at.x * task.stride[1] - task.pad_low[1];
  const T* from = task.x + at.stack * group.small_map.stack_x + channel;
  const Quotient first = Divide(lane, group.by_span);  // pixel, and which of its copies
  const int there = (task.channels - channel) / U::kUnit;
  const int span = group.span_copies, copies = group.box_wide * span;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x / kWarp); row < group.box_rows; row += kGroupedWarps) {
    const Quotient image = Divide(row, group.by_box_high);
    const int y = y0 + image.remainder, number = at.image + image.quotient;
    const bool inside = number < task.images_per_stack && static_cast<unsigned>(y) < static_cast<unsigned>(task.height);
    const T* line = from + static_cast<int64_t>((number * task.height + y) * task.width + x0) * task.channels;
    int x = x0 + first.quotient, copy = first.remainder;
    int source = first.quotient * task.channels + copy * U::kUnit;
    unsigned char* target = to + (row * group.box_wide + first.quotient) * group.pixel_bytes + copy * kUnitBytes;
#pragma unroll 2
    for (int i = lane; i < copies; i += kWarp) {
      const bool valid = inside && static_cast<unsigned>(x) < static_cast<unsigned>(task.width) && copy < there;
      CopyAsync<16>(target, line + source, 16, valid);
      x += group.step_pixels, copy += group.step_copies;
      source += group.step_pixels * task.channels + group.step_copies * U::kUnit;
      target += group.step_pixels * group.pixel_bytes + group.step_copies * kUnitBytes;
      if (copy >= span) {
        ++x, copy -= span;
        source += task.channels - span * U::kUnit;
        target += group.pixel_bytes - span * kUnitBytes;
      }
    }
  }
}

// Of a pixel of the tile: where its window starts in shared memory, and its number in the stack, or -1.
struct PixelPlace {
  int start, number;
};

// With pixels that there are not behind the last, up to whole fragments of a warp.
template <class U, typename T>
__device__ __forceinline__ void FillPlaces(const GroupedTask<T>& group, const GroupedPlace& at, PixelPlace* places) {
  constexpr int kPixels = U::kRows * 16;
  const MmaTask<T>& task = group.small_map.mma;
  const int pixels = group.tile_images * group.tile_pixels, whole = (pixels + kPixels - 1) / kPixels * kPixels;
#pragma unroll 1
  for (int pixel = static_cast<int>(threadIdx.x); pixel < whole; pixel += U::kThreads) {
    const Quotient image = Divide(pixel, group.by_tile_pixels), row = Divide(image.remainder, group.by_tile_wide);
    const int n = at.image + image.quotient, y = at.y + row.quotient, x = at.x + row.remainder;
    const int line = image.quotient * group.box_high + row.quotient * task.stride[0];
    const int start = (line * group.box_wide + row.remainder * task.stride[1]) * group.pixel_bytes;
    const bool valid = pixel < pixels && n < task.images_per_stack && y < group.out_high && x < group.out_wide;
    places[pixel] = {valid ? start : 0, valid ? (n * group.out_high + y) * group.out_wide + x : -1};
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_COPIES_CUH_
