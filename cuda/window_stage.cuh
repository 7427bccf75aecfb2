// Where a block of ConvKernel works, its shared memory, and how the patch and the kernel rows get there.
#ifndef JSC_CUDA_WINDOW_STAGE_CUH_
#define JSC_CUDA_WINDOW_STAGE_CUH_

#include "conv_task.cuh"

namespace jsc {

// Where a block works.
struct BlockPlace {
  int64_t image;                        // first image of the tile
  int images;                           // images of the tile that exist
  int out[2];                           // first output
  int conv[2];                          // first convolution result, negative where the pool's padding covers it
  int stack, group, feature, features;  // first output channel, of K; how many of them the tile has
  int split;
  int tile;  // index among all (tile, feature tile) pairs
};

template <typename T>
__device__ BlockPlace Locate(const ConvTask<T>& task, int block) {
  const ConvPlan& plan = task.plan;
  BlockPlace b;
  const Quotient split = Divide(block, task.by_splits);
  b.split = split.remainder;
  b.tile = split.quotient;
  const Quotient channel = Divide(b.tile, task.by_channel_tiles);  // over all groups
  const Quotient in_group = Divide(channel.remainder, task.by_group_tiles);
  b.group = in_group.quotient;
  const int first = in_group.remainder * plan.tile_features();
  b.feature = b.group * task.group_features + first;
  b.features = min(plan.tile_features(), task.group_features - first);
  const Quotient x = Divide(channel.quotient, task.by_tiles[2]);
  const Quotient y = Divide(x.quotient, task.by_tiles[1]);
  const Quotient image = Divide(y.quotient, task.by_tiles[0]);
  b.out[0] = y.remainder * plan.tile_out[0];
  b.out[1] = x.remainder * plan.tile_out[1];
  b.stack = image.quotient;
  const int64_t first_image = static_cast<int64_t>(image.remainder) * plan.tile_images;
  b.image = b.stack * task.images_per_stack + first_image;
  b.images = static_cast<int>(min(static_cast<int64_t>(plan.tile_images), task.images_per_stack - first_image));
  for (int i = 0; i < 2; ++i) b.conv[i] = b.out[i] * task.window_stride[i] - task.window_pad[i];
  return b;
}

// Shared memory of a block. The sums of the epilogue take the place of the stages.
template <typename T>
struct BlockMemory {
  T* kernel;         // [stage, chunk tap, chunk channel, tile feature]
  T* patch;          // [stage, tile image, patch row, patch column, chunk channel]
  int* row_offset;   // [chunk tap * chunk channel] offset of a list candidate within the patch
  int4* group_base;  // [groups] patch offset of each of a group's pixels; x = -1 for a group without any
  float4* values;    // [list_rows] of this warp
  uint32_t* rows;    // [list_rows] byte offsets into kernel, of this warp
  uint64_t* full;    // [2] barriers at which the bulk copies of a stage count
  float* sums;       // [tile pixel, tile feature]
};

template <typename T>
__device__ BlockMemory<T> Carve(unsigned char* shared, const ConvPlan& plan) {
  BlockMemory<T> m;
  m.sums = reinterpret_cast<float*>(shared);
  m.kernel = reinterpret_cast<T*>(shared);
  shared += plan.stages * plan.kernel_bytes;
  m.patch = reinterpret_cast<T*>(shared);
  shared += plan.stages * plan.patch_bytes;
  const int warp = threadIdx.x / kWarp;
  m.values = reinterpret_cast<float4*>(shared) + warp * plan.list_rows;
  shared += plan.warps * plan.list_rows * sizeof(float4);
  m.rows = reinterpret_cast<uint32_t*>(shared) + warp * plan.list_rows;
  shared += plan.warps * plan.list_rows * sizeof(uint32_t);
  m.full = reinterpret_cast<uint64_t*>(shared);
  shared += 2 * sizeof(uint64_t);
  m.group_base = reinterpret_cast<int4*>(shared);
  shared += plan.groups * sizeof(int4);
  m.row_offset = reinterpret_cast<int*>(shared);
  return m;
}

// Where stage number `stage` (they take turns) lies in a ring of plan.stages.
template <typename T>
__device__ T* StageOf(const ConvPlan& plan, T* ring, int bytes, int stage) {
  return ring + (stage & (plan.stages - 1)) * (bytes / static_cast<int>(sizeof(T)));
}

// Clears the row behind the kernel rows of each stage, which the padding of lists points at.
template <typename T, int kLanes>
__device__ void ClearZeroRows(const ConvPlan& plan, const BlockMemory<T>& m) {
  constexpr int kRowWords = kLanes * kLaneChannels * static_cast<int>(sizeof(T)) / 4;
  for (int i = threadIdx.x; i < plan.stages * kRowWords; i += blockDim.x) {
    T* rows = StageOf(plan, m.kernel, plan.kernel_bytes, i / kRowWords);
    T* row = rows + (plan.chunk_taps << plan.chunk_shift) * kLanes * kLaneChannels;
    reinterpret_cast<uint32_t*>(row)[i % kRowWords] = 0;
  }
}

// Where pixel p of a group lies in the tile; index = -1 where the group hangs over the tile's edge.
struct TilePixel {
  int index, image, y, x;
};

template <typename T>
__device__ TilePixel FindPixel(const ConvTask<T>& task, int group, int p) {
  const ConvPlan& plan = task.plan;
  if (plan.quads[0] == 0) {
    const int index = group * kPixels + p;
    const Quotient x = Divide(index, task.by_tile_conv[1]), y = Divide(x.quotient, task.by_tile_conv[0]);
    return {y.quotient < plan.tile_images ? index : -1, y.quotient, y.remainder, x.remainder};
  }
  const Quotient qx = Divide(group, task.by_quads[1]), qy = Divide(qx.quotient, task.by_quads[0]);
  const int y = qy.remainder * 2 + p / 2, x = qx.remainder * 2 + p % 2;
  return {(qy.quotient * plan.tile_conv[0] + y) * plan.tile_conv[1] + x, qy.quotient, y, x};
}

// Fills group_base. A pixel that is outside the result takes the place of one inside: it adds no entries.
template <typename T>
__device__ void FindGroups(const ConvTask<T>& task, const BlockPlace& b, const BlockMemory<T>& m) {
  const ConvPlan& plan = task.plan;
  for (int group = threadIdx.x; group < plan.groups; group += blockDim.x) {
    int base[kPixels];
    int inside = -1;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      base[p] = -1;
      const TilePixel at = FindPixel(task, group, p);
      const auto conv_y = static_cast<unsigned>(b.conv[0] + at.y), conv_x = static_cast<unsigned>(b.conv[1] + at.x);
      if (at.index < 0 || at.image >= b.images || conv_y >= task.conv[0] || conv_x >= task.conv[1]) continue;
      base[p] = ((at.image * plan.tile_patch[0] + at.y * task.stride[0]) * plan.tile_patch[1] + at.x * task.stride[1])
                << plan.chunk_shift;
      inside = base[p];
    }
#pragma unroll
    for (int p = 0; p < kPixels; ++p) base[p] = base[p] < 0 ? inside : base[p];
    m.group_base[group] = make_int4(base[0], base[1], base[2], base[3]);
  }
}

// Offsets of list candidates (tap, channel) of taps [first_tap, first_tap + taps) from a pixel's corner of the patch.
template <typename T>
__device__ void FindRows(const ConvTask<T>& task, const BlockMemory<T>& m, int first_tap, int taps) {
  const ConvPlan& plan = task.plan;
  for (int row = threadIdx.x; row < taps << plan.chunk_shift; row += blockDim.x) {
    const Quotient tap = Divide(first_tap + (row >> plan.chunk_shift), task.by_kernel_width);
    const int pixel = tap.quotient * task.dilation[0] * plan.tile_patch[1] + tap.remainder * task.dilation[1];
    m.row_offset[row] = (pixel << plan.chunk_shift) + (row & (plan.chunk_channels - 1));
  }
}

// Asks for the patch [tile image, patch row, patch column, chunk channel] of channels [first, first + chunk_channels).
template <typename T, int kWidth>
__device__ void StagePatch(const ConvTask<T>& task, const BlockPlace& b, T* patch, int first) {
  const ConvPlan& plan = task.plan;
  const int unit_shift = plan.copy_x_shift;  // of the elements of a copy
  const int units_shift = plan.chunk_shift - unit_shift;
  const int origin_y = b.conv[0] * task.stride[0] - task.pad_low[0];
  const int origin_x = b.conv[1] * task.stride[1] - task.pad_low[1];
  const int64_t image_elements = static_cast<int64_t>(task.height) * task.width * task.channels;
  const T* corner = task.x + b.image * image_elements + b.group * task.group_channels + first;
  const int total = (plan.tile_images * plan.tile_patch[0] * plan.tile_patch[1]) << units_shift;
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int channel = (i & ((1 << units_shift) - 1)) << unit_shift;
    const Quotient px = Divide(i >> units_shift, task.by_tile_patch[1]);
    const Quotient py = Divide(px.quotient, task.by_tile_patch[0]);
    const int y = origin_y + py.remainder, x = origin_x + px.remainder, image = py.quotient;
    const bool valid = image < b.images && static_cast<unsigned>(y) < task.height &&
                       static_cast<unsigned>(x) < task.width && first + channel < task.group_channels;
    const T* source = corner + image * image_elements + (y * task.width + x) * task.channels + channel;
    CopyAsync<kWidth>(patch + (i << unit_shift), valid ? source : task.x, static_cast<int>(sizeof(T)) << unit_shift,
                      valid);
  }
}

// Asks for the kernel rows [chunk tap, chunk channel, tile feature] of taps [first_tap, first_tap + taps).
template <typename T, int kLanes, int kWidth>
__device__ void StageKernel(const ConvTask<T>& task, const BlockPlace& b, T* rows, int first_tap, int taps, int first) {
  const ConvPlan& plan = task.plan;
  const int unit_shift = kWidth ? (sizeof(T) == 4 ? 2 : 3) : plan.copy_kernel_shift;
  constexpr int kFeatureShift = kLanes == 16 ? 7 : kLanes == 8 ? 6 : 5;
  const int units_shift = kFeatureShift - unit_shift;
  const int total = taps << plan.chunk_shift << units_shift;
  const T* corner = task.kernel + b.feature +
                    (static_cast<int64_t>(b.stack) * task.kernel_height * task.kernel_width * task.group_channels +
                     static_cast<int64_t>(first_tap) * task.group_channels + first) *
                        task.features;
#pragma unroll 2
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int row = i >> units_shift, feature = (i & ((1 << units_shift) - 1)) << unit_shift;
    const int tap = row >> plan.chunk_shift, channel = row & (plan.chunk_channels - 1);
    const bool valid = first + channel < task.group_channels && feature < b.features;
    const T* source = corner + ((tap * task.group_channels + channel) * task.features + feature);
    CopyAsync<kWidth>(rows + (i << unit_shift), valid ? source : task.kernel, static_cast<int>(sizeof(T)) << unit_shift,
                      valid);
  }
}

// Asks for chunk number `chunk` of the block's input channels and kernel positions: two groups of copies.
template <typename T, int kLanes>
__device__ void Stage(const ConvTask<T>& task, const CUtensorMap& map, const BlockPlace& b, const BlockMemory<T>& m,
                      int chunk) {
  const ConvPlan& plan = task.plan;
  const int channel_chunk = plan.tap_chunks == 1 ? chunk : chunk / plan.tap_chunks;
  const int tap_chunk = chunk - channel_chunk * plan.tap_chunks;
  const int channel = channel_chunk << plan.chunk_shift, tap = tap_chunk * plan.chunk_taps;
  const int taps = min(plan.chunk_taps, task.kernel_height * task.kernel_width - tap);
  T* patch = StageOf(plan, m.patch, plan.patch_bytes, channel_chunk);
  T* rows = StageOf(plan, m.kernel, plan.kernel_bytes, chunk);
  if (tap_chunk > 0) {  // the patch is there
  } else if (static_cast<int>(sizeof(T)) << plan.copy_x_shift == 16) {
    StagePatch<T, 16>(task, b, patch, channel);
  } else {
    StagePatch<T, 0>(task, b, patch, channel);
  }
  CommitCopies();
#if __CUDA_ARCH__ >= 900
  if (plan.bulk) {
    if (threadIdx.x == 0) {
      uint64_t* full = m.full + (chunk & (plan.stages - 1));
      ExpectBytes(full, (plan.chunk_taps << plan.chunk_shift) * plan.tile_features() * static_cast<int>(sizeof(T)));
      CopyBox(rows, &map, b.feature, channel, b.stack * task.kernel_height * task.kernel_width + tap, full);
    }
    CommitCopies();
    return;
  }
#endif
  if (static_cast<int>(sizeof(T)) << plan.copy_kernel_shift == 16) {
    StageKernel<T, kLanes, 16>(task, b, rows, tap, taps, channel);
  } else {
    StageKernel<T, kLanes, 0>(task, b, rows, tap, taps, channel);
  }
  CommitCopies();
}

// Waits until the kernel rows of a chunk, the use-th of the block, are in shared memory.
template <typename T>
__device__ void WaitForKernel(const ConvPlan& plan, const BlockMemory<T>& m, int chunk, int use) {
#if __CUDA_ARCH__ >= 900
  if (plan.bulk) {
    WaitForBytes(m.full + (chunk & (plan.stages - 1)), use / plan.stages % 2);
    return;
  }
#endif
  WaitForCopies<0>();
  __syncthreads();
}

}  // namespace jsc

#endif  // JSC_CUDA_WINDOW_STAGE_CUH_
