// Where a block of ConvKernel works, its shared memory, and the tables that its main loop reads.
#ifndef JSC_CUDA_SPARSE_ECR_WINDOW_PLACE_CUH_
#define JSC_CUDA_SPARSE_ECR_WINDOW_PLACE_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/sparse/ecr/task.cuh"

namespace jsc {

// Where a block works.
struct BlockPlace {
  int64_t image;                                // first image of the tile
  int images;                                   // images of the tile that exist
  int out[2];                                   // first output
  int conv[2];                                  // first convolution result, negative where the pool's padding covers it
  int stack, group, out_channel, out_channels;  // first output channel, of K; how many of them the tile has
  int split;
  int tile;  // index among all (tile, output channel tile) pairs
};

// blockIdx.x, read again: what follows from it need not stay in registers through the main loop.
__device__ inline int BlockIndex() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

template <typename T>
__device__ BlockPlace Locate(const ConvTask<T>& task, int block) {
  const EcrPlan& plan = task.plan;
  BlockPlace b;
  const Quotient split = Divide(block, task.by_splits);
  b.split = split.remainder;
  b.tile = split.quotient;
  const Quotient channel = Divide(b.tile, task.by_channel_tiles);  // over all groups
  const Quotient in_group = Divide(channel.remainder, task.by_group_tiles);
  b.group = in_group.quotient;
  const int first = in_group.remainder * plan.tile_out_channels();
  b.out_channel = b.group * task.group_out_channels + first;
  b.out_channels = min(plan.tile_out_channels(), task.group_out_channels - first);
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

// A warp's work of each chunk: part of the rows of one pixel group.
struct WarpItem {
  int4 base;            // bytes of each of the group's pixels in the patch
  int group, part;      // part -1: no item
  int first_row, rows;  // 0 rows where no pixel is inside the result
};

// What a chunk's copies have in common, for TMA: the corner of the boxes.
struct FetchCorner {
  int out_channel, tap;      // of the kernel
  int channel, x, y, image;  // of x
};

static_assert(sizeof(WarpItem) == kItemBytes && sizeof(uint64_t) + sizeof(FetchCorner) == kCornerBytes);

// Shared memory of a block. The sums of the epilogue take the place of the stages and of what is behind them.
template <typename T>
struct BlockMemory {
  T* kernel;        // [stage, chunk tap, chunk channel, tile output channel]
  T* patch;         // [stage, tile image, patch row, patch column, chunk channel]
  int* row_offset;  // [chunk tap * chunk channel + 32] bytes of a list candidate in the patch, zeros behind them
  WarpItem* items;  // [warp, kGroupsPerWarp]
  FetchCorner* corner;
  float4* values;        // [list_rows] of this warp
  uint32_t* rows;        // [list_rows] byte offsets into kernel, of this warp
  uint64_t* rows_full;   // [stage] barriers at which bulk copies of kernel rows count
  uint64_t* patch_full;  // [stage] and of patches
  uint32_t* done;        // [stage] warps that are done with it
  float* sums;           // [part, group, pixel, tile output channel]
  float* inbox;          // [split, group, pixel, share output channel] sums that the cluster's blocks send to this one
  uint64_t* inbox_full;
};

template <typename T>
__device__ BlockMemory<T> Carve(unsigned char* shared, const EcrPlan& plan) {
  BlockMemory<T> m;
  m.inbox_full = reinterpret_cast<uint64_t*>(shared);
  m.corner = reinterpret_cast<FetchCorner*>(shared + sizeof(uint64_t));
  m.items = reinterpret_cast<WarpItem*>(shared + kCornerBytes);
  shared += plan.head_bytes;
  m.inbox = reinterpret_cast<float*>(shared);
  m.sums = reinterpret_cast<float*>(shared + plan.inbox_bytes);
  if (!plan.late_inbox) shared += plan.inbox_bytes;
  m.kernel = reinterpret_cast<T*>(shared);
  shared += plan.stages * plan.kernel_bytes;
  m.patch = reinterpret_cast<T*>(shared);
  shared += plan.stages * plan.patch_bytes;
  const int warp = threadIdx.x / kWarp;
  m.values = reinterpret_cast<float4*>(shared) + warp * plan.list_rows;
  shared += plan.warps * plan.list_rows * sizeof(float4);
  m.rows = reinterpret_cast<uint32_t*>(shared) + warp * plan.list_rows;
  shared += plan.warps * plan.list_rows * sizeof(uint32_t);
  m.rows_full = reinterpret_cast<uint64_t*>(shared);
  m.patch_full = m.rows_full + kMaxStages;
  m.done = reinterpret_cast<uint32_t*>(m.patch_full + kMaxStages);
  shared += kMaxStages * (2 * sizeof(uint64_t) + sizeof(uint32_t));
  m.row_offset = reinterpret_cast<int*>(shared);
  return m;
}

// Where stage number `stage` lies in a pipeline.
template <typename T>
__device__ T* StageOf(T* stages, int bytes, int stage) {
  return stages + stage * (bytes / static_cast<int>(sizeof(T)));
}

// The first warp asks for copies while the others make the tables; a warp on its own does both.
__device__ inline int TableThreads() { return blockDim.x > kWarp ? blockDim.x - kWarp : kWarp; }
__device__ inline int TableThread() { return threadIdx.x - (blockDim.x - TableThreads()); }

// Clears the row behind the kernel rows of each stage, which the padding of lists points at.
template <typename T, int kLanes>
__device__ void ClearZeroRows(const EcrPlan& plan, const BlockMemory<T>& m) {
  constexpr int kRowWords = kLanes * kLaneChannels * static_cast<int>(sizeof(T)) / 4;
#pragma unroll 1
  for (int i = TableThread(); i < plan.stages * kRowWords; i += TableThreads()) {
    T* rows = StageOf(m.kernel, plan.kernel_bytes, i / kRowWords);
    T* row = rows + (plan.chunk_taps << plan.chunk_shift) * kLanes * kLaneChannels;
    reinterpret_cast<uint32_t*>(row)[i % kRowWords] = 0;
  }
}

// Where pixel p of a group lies in the tile; beyond its last image where the group hangs over the tile's edge.
struct TilePixel {
  int image, y, x;
};

template <typename T>
__device__ TilePixel FindPixel(const ConvTask<T>& task, int group, int p) {
  const EcrPlan& plan = task.plan;
  if (plan.quads[0] == 0) {
    const Quotient x = Divide(group * kPixels + p, task.by_tile_conv[1]), y = Divide(x.quotient, task.by_tile_conv[0]);
    return {y.quotient < plan.tile_images ? y.quotient : plan.tile_images, y.remainder, x.remainder};
  }
  const Quotient qx = Divide(group, task.by_quads[1]), qy = Divide(qx.quotient, task.by_quads[0]);
  return {qy.quotient, qy.remainder * 2 + p / 2, qx.remainder * 2 + p % 2};
}

// The inverse: group * kPixels + p.
template <typename T>
__device__ int FindSlot(const ConvTask<T>& task, int image, int y, int x) {
  const EcrPlan& plan = task.plan;
  if (plan.quads[0] == 0) return (image * plan.tile_conv[0] + y) * plan.tile_conv[1] + x;
  const int group = (image * plan.quads[0] + y / 2) * plan.quads[1] + x / 2;
  return group * kPixels + y % 2 * 2 + x % 2;
}

// Fills items: warp w takes the items w and w + warps of all (part, group). A pixel that is outside the result takes
// the place of one inside: it adds no entries.
template <typename T>
__device__ void FindItems(const ConvTask<T>& task, const BlockPlace& b, const BlockMemory<T>& m) {
  const EcrPlan& plan = task.plan;
#pragma unroll 1
  for (int i = blockDim.x - 1 - threadIdx.x; i < plan.warps * kGroupsPerWarp; i += TableThreads()) {
    const Quotient place = Divide(i / kGroupsPerWarp + i % kGroupsPerWarp * plan.warps, task.by_groups);
    WarpItem item{};
    item.group = place.remainder;
    item.part = place.quotient < plan.row_parts ? place.quotient : -1;
    item.first_row = place.quotient * plan.part_rows;
    int base[kPixels];
    int inside = -1;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      base[p] = -1;
      const TilePixel at = FindPixel(task, item.group, p);
      const auto conv_y = static_cast<unsigned>(b.conv[0] + at.y), conv_x = static_cast<unsigned>(b.conv[1] + at.x);
      if (at.image >= b.images || conv_y >= task.conv[0] || conv_x >= task.conv[1]) continue;
      base[p] = (((at.image * plan.tile_patch[0] + at.y * task.stride[0]) * plan.tile_patch[1] + at.x * task.stride[1])
                 << plan.chunk_shift) *
                static_cast<int>(sizeof(T));
      inside = base[p];
    }
#pragma unroll
    for (int p = 0; p < kPixels; ++p) base[p] = base[p] < 0 ? inside : base[p];
    item.base = make_int4(base[0], base[1], base[2], base[3]);
    if (item.part >= 0 && inside >= 0)
      item.rows = min(plan.part_rows, (plan.chunk_taps << plan.chunk_shift) - item.first_row);
    m.items[i] = item;
  }
}

// Offsets of list candidates (tap, channel) of taps [first_tap, first_tap + taps) from a pixel's corner of the patch.
template <typename T>
__device__ void FindRows(const ConvTask<T>& task, const BlockMemory<T>& m, int first_tap, int taps) {
  const EcrPlan& plan = task.plan;
  const int rows = taps << plan.chunk_shift;
#pragma unroll 1
  for (int row = TableThread(); row < rows + kWarp; row += TableThreads()) {
    const Quotient tap = Divide(first_tap + (row >> plan.chunk_shift), task.by_kernel_width);
    const int pixel = tap.quotient * task.dilation[0] * plan.tile_patch[1] + tap.remainder * task.dilation[1];
    const int element = (pixel << plan.chunk_shift) + (row & (plan.chunk_channels - 1));
    m.row_offset[row] = row < rows ? element * static_cast<int>(sizeof(T)) : 0;
  }
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_WINDOW_PLACE_CUH_
