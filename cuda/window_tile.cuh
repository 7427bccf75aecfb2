// Convolution over lists of non-zeros: the device code that ecr.cu and pecr.cu share.
//
// What: out = pool(activation(conv(x, kernel) + bias + residual)) for one tile of outputs and 32, 64 or 128 output
// channels per block; with `splits` > 1 several blocks share the input channels of a tile.
//
// How, per chunk of input channels (and kernel positions):
//   1. Stage: the tile's patch of x and the chunk's kernel rows come to shared memory one chunk ahead: the patch by
//      cp.async, the rows as one box of a tensor map (sm_90) or by cp.async. The patch is zero outside the image, so
//      nothing after it checks bounds.
//   2. Compress: a warp takes a group of 4 results (2x2 where the tile is even) and writes the list of (kernel row,
//      4 values) for which any of the 4 values is non-zero: 32 candidates per ballot, slots from popc, no atomics.
//   3. Accumulate: per entry two 16-byte loads of the row's weights a lane, one broadcast of 4 values, 32 FFMA; with
//      fewer than 32 lanes over the channels, the parts of the warp take turns at the entries. No branches on data: an
//      empty window is a list of length 0.
// Then sums meet in a shared tile of float32 (of a cluster, or in the workspace), and the epilogue adds bias and
// residual, applies ReLU, pools and writes. Order of summation is fixed, so results repeat bit for bit.
//
// Layout: x NHWC, kernel HWIO. Patch [pixel][chunk channel], kernel rows [tap][chunk channel][tile feature].
//
// Why groups of 4: a list entry costs its weights' shared-memory cycles however many pixels use it. On real maps at 82
// % zeros 4 pixels share .33 of all rows against .16 for one: half the weight traffic per result for twice the FFMA.
//
// What bounds it: shared-memory bandwidth (about 10.5 cycles per 32 FFMA of a warp against 8 cycles of FFMA; half of
// that bound is reached), and at batch 1 latency: on an H200 256->256 14x14 spends some 2,500 cycles until the block
// has its tables, 6,000 on lists and sums, 5,000 on meeting in the cluster, 3,000 outside the kernel.
//
// Tried on an H200 and lost: 4 channels a lane (10-15 % slower: more shared-memory cycles per FFMA); 28 warps with one
// group each in 72 registers instead of 16 with two in 128 (25 % slower at batch 32: too few loads in flight a warp);
// one bulk copy per kernel row (60 cycles of issue each, 8,800 for a stage, against one tensor copy); cp.async for
// kernel rows (its instructions cost as much as the sums: 12.0 us against 10.6); clusters of 8 that need more than 15
// places with a multiprocessor each (two waves).
#ifndef JSC_CUDA_WINDOW_TILE_CUH_
#define JSC_CUDA_WINDOW_TILE_CUH_

#include <cooperative_groups.h>

#include "common.cuh"
#include "conv_plan.h"
#include "kernel_map.h"

namespace jsc {

// The buffers of a call and its static sizes, passed to kernels by value.
template <typename T>
struct ConvTask {
  const T* x;         // [N, H, W, C]
  const T* kernel;    // [S, kh, kw, C / groups, K]
  const T* bias;      // [S, K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  float* partial;     // [tile, feature tile, split, tile pixel, tile feature], only with Reduction::kWorkspace
  ConvPlan plan;
  int64_t images_per_stack;
  int height, width, channels, group_channels, features, group_features, groups;
  int kernel_height, kernel_width;
  int stride[2], pad_low[2], dilation[2], conv[2], out_size[2];
  int window[2], window_stride[2], window_pad[2];
  bool relu, average;
  float pool_scale;  // 1 / pixels of an averaged window, else 1
  // Divisors that the kernels need.
  Divider by_splits, by_channel_tiles, by_group_tiles, by_tiles[3], by_tile_conv[2], by_tile_out[2], by_tile_patch[2],
      by_quads[2], by_kernel_width, by_groups, by_features, by_out_width;
};

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

// A list is read in runs: each of the kParts parts of a warp takes kRun entries of a run, part p those at p, p +
// kParts,
// ... so that values read at the same time lie side by side. Their row offsets are stored part by part for one load.
template <int kLanes>
struct ListOrder {
  static constexpr int kParts = kWarp / kLanes;
  static constexpr int kRun = kParts == 2 ? 4 : kListMultiple / kParts;  // 4, 4, 2
  static constexpr int kMultiple = kParts * kRun;

  // Where the row offset of entry number `slot` goes.
  __device__ static int RowSlot(int slot) {
    const int in_run = slot % kMultiple;
    return slot - in_run + in_run % kParts * kRun + in_run / kParts;
  }
};

// Writes a group's list for kernel rows [first, first + rows) and returns its length, a multiple of
// ListOrder::kMultiple: the tail repeats the last row with zeros. All candidates are read before the first ballot: one
// latency for the list, not one for each ballot.
template <typename T, int kLanes>
__device__ int Compress(const T* patch, const int* row_offset, int4 base, int first, int rows, float4* values,
                        uint32_t* list) {
  using Order = ListOrder<kLanes>;
  constexpr uint32_t kRowBytes = kLanes * kLaneChannels * sizeof(T);
  constexpr int kBallots = kMaxChunkRows / kWarp;
  const int lane = threadIdx.x % kWarp;
  float4 v[kBallots];
#pragma unroll
  for (int i = 0; i < kBallots; ++i) {
    if (i * kWarp >= rows) break;
    const T* corner = patch + row_offset[first + min(i * kWarp + lane, rows - 1)];
    v[i] = {ToFloat(corner[base.x]), ToFloat(corner[base.y]), ToFloat(corner[base.z]), ToFloat(corner[base.w])};
  }
  int count = 0;
#pragma unroll
  for (int i = 0; i < kBallots; ++i) {
    if (i * kWarp >= rows) break;
    const int row = i * kWarp + lane;
    const bool kept = row < rows && (v[i].x != 0.f || v[i].y != 0.f || v[i].z != 0.f || v[i].w != 0.f);
    const unsigned mask = __ballot_sync(0xffffffffu, kept);
    if (kept) {
      const int slot = count + __popc(mask & ((1u << lane) - 1));
      values[slot] = v[i];
      list[Order::RowSlot(slot)] = (first + row) * kRowBytes;
    }
    count += __popc(mask);
  }
  __syncwarp();
  const int padded = (count + Order::kMultiple - 1) / Order::kMultiple * Order::kMultiple;
  if (count + lane < padded) {
    values[count + lane] = {0.f, 0.f, 0.f, 0.f};
    list[Order::RowSlot(count + lane)] = list[Order::RowSlot(count - 1)];
  }
  __syncwarp();
  return padded;
}

__device__ inline void MultiplyAdd(float4 value, float4 low, float4 high, float (&sums)[kPixels][kLaneChannels]) {
  const float v[kPixels] = {value.x, value.y, value.z, value.w};
  const float w[kLaneChannels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int p = 0; p < kPixels; ++p) {
#pragma unroll
    for (int k = 0; k < kLaneChannels; ++k) sums[p][k] = fmaf(v[p], w[k], sums[p][k]);
  }
}

// With 4 lanes over 32 channels two parts of the warp read weights in one shared-memory pass. Odd parts read the upper
// half of a row first, so that the two meet in different banks; their sums are swapped back at the end.
template <int kLanes>
__device__ bool SwapsHalves() {
  return kLanes == 4 && (threadIdx.x / kLanes) % 2 != 0;
}

// sums[pixel][channel] += values x kernel rows of a list, for channels 4 * lane + k and, with k >= 4, as many again
// behind the lower half of the row.
template <typename T, int kLanes>
__device__ void Accumulate(const T* kernel, const float4* values, const uint32_t* list, int count,
                           float (&sums)[kPixels][kLaneChannels]) {
  using Order = ListOrder<kLanes>;
  const int lane = threadIdx.x % kWarp, part = lane / kLanes;
  const int swap = SwapsHalves<kLanes>() ? kLanes * 4 : 0;
  const auto* low = reinterpret_cast<const char*>(kernel + lane % kLanes * 4 + swap);
  const auto* high = reinterpret_cast<const char*>(kernel + lane % kLanes * 4 + kLanes * 4 - swap);
#pragma unroll 1
  for (int i = 0; i < count; i += Order::kMultiple) {
    uint32_t rows[4];
    if constexpr (Order::kRun == 4) {
      *reinterpret_cast<uint4*>(rows) = *reinterpret_cast<const uint4*>(list + i + part * 4);
    } else {
      *reinterpret_cast<uint2*>(rows) = *reinterpret_cast<const uint2*>(list + i + part * 2);
    }
#pragma unroll
    for (int e = 0; e < Order::kRun; ++e) {
      MultiplyAdd(values[i + e * Order::kParts + part], Load4(reinterpret_cast<const T*>(low + rows[e])),
                  Load4(reinterpret_cast<const T*>(high + rows[e])), sums);
    }
  }
}

// Adds up the parts of a warp. Parts exchange halves: of the four pixels, then of the two that are left, then (8 parts)
// of the channels, so that each ends with its own share in front.
template <int kLanes>
__device__ void MergeParts(float (&s)[kPixels][kLaneChannels]) {
  constexpr int kParts = kWarp / kLanes;
  const int lane = threadIdx.x % kWarp;
  // Keeps one of a pair and adds the partner's.
  auto exchange = [&](float low, float high, int distance) {
    const bool upper = lane & distance;
    return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
  };
#pragma unroll
  for (int i = 0; i < kPixels * 4; ++i) {
    const float low = s[i / 4][i % 4], high = s[i / 4][i % 4 + 4];
    s[i / 4][i % 4] = SwapsHalves<kLanes>() ? high : low;
    s[i / 4][i % 4 + 4] = SwapsHalves<kLanes>() ? low : high;
  }
#pragma unroll
  for (int k = 0; k < kLaneChannels; ++k) {
    s[0][k] = exchange(s[0][k], s[2][k], kWarp / 2);
    s[1][k] = exchange(s[1][k], s[3][k], kWarp / 2);
    if (kParts >= 4) s[0][k] = exchange(s[0][k], s[1][k], kWarp / 4);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (kParts >= 8) s[0][k] = exchange(s[0][k], s[0][k + 4], kWarp / 8);
  }
}

__device__ inline void StoreOrAdd(float* p, const float* v, bool add) {
  auto* to = reinterpret_cast<float4*>(p);
  const float4 sum = make_float4(v[0], v[1], v[2], v[3]);
  *to = add ? *to + sum : sum;
}

// Writes the sums of all warps to tile[pixel][feature]; those that share a group add up one after the other.
template <typename T, int kLanes>
__device__ void StoreSums(const ConvTask<T>& task, float (&sums)[kGroupsPerWarp][kPixels][kLaneChannels], float* tile) {
  constexpr int kParts = kWarp / kLanes;
  constexpr int kKept = kParts == 2 ? 2 : 1;  // pixels of a lane
  const ConvPlan& plan = task.plan;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int g = 0; g < kGroupsPerWarp; ++g) {
    if (threadIdx.x / kWarp + g * plan.warps < plan.groups * plan.row_parts) MergeParts<kLanes>(sums[g]);
  }
  for (int part = 0; part < plan.row_parts; ++part) {
    if (part > 0) __syncthreads();
#pragma unroll
    for (int g = 0; g < kGroupsPerWarp; ++g) {
      const Quotient item = Divide(threadIdx.x / kWarp + g * plan.warps, task.by_groups);
      if (item.quotient != part) continue;
#pragma unroll
      for (int p = 0; p < kKept; ++p) {
        const int pixel = FindPixel(task, item.remainder, lane / (kWarp / kPixels * kKept) * kKept + p).index;
        if (pixel < 0) continue;
        float* row = tile + pixel * kLanes * kLaneChannels + lane % kLanes * 4;
        if (kParts >= 8) row += (lane / kLanes) % 2 * kLanes * 4;
        StoreOrAdd(row, sums[g][p], part > 0);
        if (kParts < 8) StoreOrAdd(row + kLanes * 4, sums[g][p] + 4, part > 0);
      }
    }
  }
}

// One pooled or plain result: the activated convolution results of its window, reduced. conv(y, x) gives 4 channels.
// Averages add up by rows, so that rounding grows with the sides of a window and not with its area.
template <typename T, typename Conv>
__device__ __forceinline__ float4 PoolWindow(const ConvTask<T>& task, const int (&first)[2], Conv conv) {
  const float start = task.average ? 0.f : -INFINITY;
  float result[4] = {start, start, start, start};
  const int y_end = min(first[0] + task.window[0], task.conv[0]), x_end = min(first[1] + task.window[1], task.conv[1]);
  for (int y = max(first[0], 0); y < y_end; ++y) {
    float row[4] = {start, start, start, start};
    for (int x = max(first[1], 0); x < x_end; ++x) {
      const float4 v = conv(y, x);
      const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) row[k] = task.average ? row[k] + value[k] : MaxOrNan(row[k], value[k]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) result[k] = task.average ? result[k] + row[k] : MaxOrNan(result[k], row[k]);
  }
#pragma unroll
  for (float& r : result) r *= task.pool_scale;
  return {result[0], result[1], result[2], result[3]};
}

// Sums of the splits, bias, residual, ReLU, pool, out, for the share-th of `shares` parts of the tile's outputs.
// partial(split) points to the tile [pixel, feature] of one split; `helpers` (1 or 4) lanes share its loads.
template <typename T, int kLanes, bool kPool, typename Partial>
__device__ __forceinline__ void Epilogue(const ConvTask<T>& task, const BlockPlace& b, int share, int shares,
                                         Partial partial) {
  constexpr int kQuarters = kLanes * kLaneChannels / 4;
  const ConvPlan& plan = task.plan;
  const int helpers = plan.splits >= 4 ? 4 : 1, helper = threadIdx.x % helpers;
  const unsigned team = (helpers == 4 ? 15u : 1u) << (threadIdx.x % kWarp - helper);
  const int total = b.images * plan.tile_out[0] * plan.tile_out[1] * kQuarters;
  const int each = (total + shares - 1) / shares, end = min(total, (share + 1) * each);
  for (int i = share * each + threadIdx.x / helpers; i < end; i += blockDim.x / helpers) {
    const int feature = i % kQuarters * 4;
    const Quotient tile_x = Divide(i / kQuarters, task.by_tile_out[1]);
    const Quotient tile_y = Divide(tile_x.quotient, task.by_tile_out[0]);
    const int y = b.out[0] + tile_y.remainder, x = b.out[1] + tile_x.remainder, image = tile_y.quotient;
    const int valid = min(b.features - feature, 4);
    if (valid <= 0 || y >= task.out_size[0] || x >= task.out_size[1]) continue;
    const int64_t at =
        (((b.image + image) * task.out_size[0] + y) * task.out_size[1] + x) * task.features + b.feature + feature;
    float4 extra = {0.f, 0.f, 0.f, 0.f};
    if (task.bias) {
      const T* bias = task.bias + static_cast<int64_t>(b.stack) * task.features + b.feature + feature;
      extra = LoadUpTo4(bias, valid, plan.vector_out);
    }
    if (!kPool && task.residual) extra = extra + LoadUpTo4(task.residual + at, valid, plan.vector_out);
    auto conv = [&](int conv_y, int conv_x) {
      const int place = ((image * plan.tile_conv[0] + conv_y - b.conv[0]) * plan.tile_conv[1] + conv_x - b.conv[1]) *
                            plan.tile_features() +
                        feature;
      float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kMaxSplits / 4; ++i) {  // all loads in flight at once
        const int split = helper + i * helpers;
        if (split < plan.splits) sum = sum + Load4(partial(split) + place);
      }
      for (int distance = 1; distance < helpers; distance *= 2) {
        sum = sum + make_float4(__shfl_xor_sync(team, sum.x, distance), __shfl_xor_sync(team, sum.y, distance),
                                __shfl_xor_sync(team, sum.z, distance), __shfl_xor_sync(team, sum.w, distance));
      }
      sum = sum + extra;
      return task.relu ? make_float4(Relu(sum.x), Relu(sum.y), Relu(sum.z), Relu(sum.w)) : sum;
    };
    float4 result;
    if constexpr (kPool) {
      const int first[2] = {y * task.window_stride[0] - task.window_pad[0],
                            x * task.window_stride[1] - task.window_pad[1]};
      result = PoolWindow(task, first, conv);
    } else {
      result = conv(y, x);
    }
    if (helper == 0) StoreUpTo4(task.out + at, result, valid, plan.vector_out);
  }
}

// Brings the block's sums together with those of its splits and writes the outputs.
template <typename T, int kLanes, bool kPool>
__device__ void Finish(const ConvTask<T>& task, const BlockPlace& b, float* tile,
                       float (&sums)[kGroupsPerWarp][kPixels][kLaneChannels]) {
  const ConvPlan& plan = task.plan;
  if (plan.reduction == Reduction::kWorkspace) {
    const int64_t tile_elements = static_cast<int64_t>(plan.tile_pixels()) * plan.tile_features();
    StoreSums<T, kLanes>(task, sums,
                         task.partial + (static_cast<int64_t>(b.tile) * plan.splits + b.split) * tile_elements);
    return;
  }
  __syncthreads();  // the stages become the tile of sums
  StoreSums<T, kLanes>(task, sums, tile);
#if __CUDA_ARCH__ >= 900
  if (plan.reduction == Reduction::kCluster) {
    auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    Epilogue<T, kLanes, kPool>(task, b, b.split, plan.splits,
                               [&](int split) -> const float* { return cluster.map_shared_rank(tile, split); });
    cluster.sync();  // a block's sums stay until all have read them
    return;
  }
#endif
  __syncthreads();
  Epilogue<T, kLanes, kPool>(task, b, 0, 1, [&](int) -> const float* { return tile; });
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

template <typename T, int kLanes, bool kPool>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    ConvKernel(const __grid_constant__ ConvTask<T> task, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(128) unsigned char shared[];
  const ConvPlan& plan = task.plan;
  const BlockPlace b = Locate(task, blockIdx.x);
  const BlockMemory<T> m = Carve<T>(shared, plan);
  const int taps = task.kernel_height * task.kernel_width;
  const int first_chunk = Divide(b.split * plan.channel_chunks, task.by_splits).quotient * plan.tap_chunks;
  const int last_chunk = Divide((b.split + 1) * plan.channel_chunks, task.by_splits).quotient * plan.tap_chunks;
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    InitBarrier(m.full);
    InitBarrier(m.full + 1);
  }
#endif
  Stage<T, kLanes>(task, map, b, m, first_chunk);
  FindGroups(task, b, m);
  FindRows(task, m, 0, min(plan.chunk_taps, taps));

  float sums[kGroupsPerWarp][kPixels][kLaneChannels] = {};
  for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
    WaitForCopies<1>();  // for the patch; kernel rows may still be on their way while lists are made
    __syncthreads();
    const int channel_chunk = plan.tap_chunks == 1 ? chunk : chunk / plan.tap_chunks;
    const int tap = (chunk - channel_chunk * plan.tap_chunks) * plan.chunk_taps;
    if (plan.tap_chunks > 1) {
      FindRows(task, m, tap, min(plan.chunk_taps, taps - tap));
      __syncthreads();
    }
    const int rows = min(plan.chunk_taps, taps - tap) << plan.chunk_shift;
    const T* patch = StageOf(plan, m.patch, plan.patch_bytes, channel_chunk);
    const T* kernel = StageOf(plan, m.kernel, plan.kernel_bytes, chunk);
#pragma unroll
    for (int g = 0; g < kGroupsPerWarp; ++g) {
      const Quotient item = Divide(threadIdx.x / kWarp + g * plan.warps, task.by_groups);
      const int first_row = item.quotient * plan.part_rows, some_rows = min(plan.part_rows, rows - first_row);
      const int4 base = item.quotient < plan.row_parts ? m.group_base[item.remainder] : make_int4(-1, -1, -1, -1);
      int count = 0;
      if (base.x >= 0 && some_rows > 0) {
        count = Compress<T, kLanes>(patch, m.row_offset, base, first_row, some_rows, m.values, m.rows);
      }
      if (g == 0) {
        WaitForKernel(plan, m, chunk, chunk - first_chunk);
        if (chunk + 1 < last_chunk) Stage<T, kLanes>(task, map, b, m, chunk + 1);
      }
      Accumulate<T, kLanes>(kernel, m.values, m.rows, count, sums[g]);
      __syncwarp();  // the next list takes this one's place
    }
  }
  Finish<T, kLanes, kPool>(task, b, m.sums, sums);
}

// The second step of Reduction::kWorkspace: one block per (tile, feature tile).
template <typename T, int kLanes, bool kPool>
__global__ void __launch_bounds__(256) ReduceKernel(const __grid_constant__ ConvTask<T> task) {
  const ConvPlan& plan = task.plan;
  const BlockPlace b = Locate(task, blockIdx.x * plan.splits);
  const int64_t tile_elements = static_cast<int64_t>(plan.tile_pixels()) * plan.tile_features();
  const float* tile = task.partial + static_cast<int64_t>(b.tile) * plan.splits * tile_elements;
  Epilogue<T, kLanes, kPool>(task, b, 0, 1, [&](int split) { return tile + split * tile_elements; });
}

template <typename T>
void SetDividers(ConvTask<T>* t) {
  const ConvPlan& plan = t->plan;
  t->by_features = Divider(t->features);
  t->by_out_width = Divider(t->out_size[1]);
  t->by_kernel_width = Divider(t->kernel_width);
  if (plan.warps == 0) return;  // no tiles
  t->by_splits = Divider(plan.splits);
  t->by_channel_tiles = Divider(static_cast<int64_t>(plan.channel_tiles) * t->groups);
  t->by_group_tiles = Divider(plan.channel_tiles);
  for (int i = 0; i < 3; ++i) t->by_tiles[i] = Divider(plan.tiles[i]);
  for (int i = 0; i < 2; ++i) {
    t->by_tile_conv[i] = Divider(plan.tile_conv[i]);
    t->by_tile_out[i] = Divider(plan.tile_out[i]);
    t->by_tile_patch[i] = Divider(plan.tile_patch[i]);
    if (plan.quads[0]) t->by_quads[i] = Divider(plan.quads[i]);
  }
  t->by_groups = Divider(plan.groups);
}

template <typename T>
ConvTask<T> MakeConvTask(const ConvCall& call, const ConvPlan& plan, void* workspace) {
  const ConvArgs& a = call.args;
  ConvTask<T> t{};
  t.x = static_cast<const T*>(call.x);
  t.kernel = static_cast<const T*>(call.kernel);
  t.bias = static_cast<const T*>(call.bias);
  t.residual = static_cast<const T*>(call.residual);
  t.out = static_cast<T*>(call.out);
  t.partial = static_cast<float*>(workspace);
  t.plan = plan;
  t.images_per_stack = a.images / a.stacks;
  t.height = static_cast<int>(a.size[0]);
  t.width = static_cast<int>(a.size[1]);
  t.channels = static_cast<int>(a.channels);
  t.group_channels = static_cast<int>(a.group_channels);
  t.features = static_cast<int>(a.features);
  t.groups = static_cast<int>(a.groups);
  t.group_features = t.features / t.groups;
  t.kernel_height = static_cast<int>(a.kernel_size[0]);
  t.kernel_width = static_cast<int>(a.kernel_size[1]);
  for (int i = 0; i < 2; ++i) {
    t.stride[i] = static_cast<int>(a.stride[i]);
    t.pad_low[i] = static_cast<int>(a.pad_low[i]);
    t.dilation[i] = static_cast<int>(a.dilation[i]);
    t.conv[i] = static_cast<int>(a.conv_size[i]);
    t.out_size[i] = static_cast<int>(a.out_size[i]);
    const bool pooled = a.pool != Pool::kNone;
    t.window[i] = pooled ? static_cast<int>(a.window[i]) : 1;
    t.window_stride[i] = pooled ? static_cast<int>(a.window_stride[i]) : 1;
    t.window_pad[i] = pooled ? static_cast<int>(a.window_pad_low[i]) : 0;
  }
  t.relu = a.activation == Activation::kRelu;
  t.average = a.pool == Pool::kAverage;
  t.pool_scale = t.average ? static_cast<float>(1.0 / (static_cast<double>(a.window[0]) * a.window[1])) : 1.f;
  SetDividers(&t);
  return t;
}

template <typename T, int kLanes, bool kPool>
ffi::Error LaunchLanes(const ConvTask<T>& task, const CUtensorMap& map, int64_t blocks, cudaStream_t stream) {
  const ConvPlan& plan = task.plan;
  const auto kernel = ConvKernel<T, kLanes, kPool>;
  ffi::Error error = CheckCuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes), "ConvKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks * plan.splits));
  config.blockDim = dim3(plan.warps * kWarp);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = plan.splits;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = plan.reduction == Reduction::kCluster ? 1 : 0;
  if (plan.splits > 8 && plan.reduction == Reduction::kCluster) {
    error = CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "ConvKernel");
    if (error.failure()) return error;
  }
  error = CheckCuda(cudaLaunchKernelEx(&config, kernel, task, map), "ConvKernel");
  if (error.failure() || plan.reduction != Reduction::kWorkspace) return error;
  ReduceKernel<T, kLanes, kPool><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(task);
  return CheckCuda(cudaGetLastError(), "ReduceKernel");
}

// Launches a call under a plan that has warps > 0.
template <typename T, bool kPool>
ffi::Error LaunchConv(const ConvCall& call, const ConvPlan& plan, void* workspace, cudaStream_t stream) {
  const ConvTask<T> task = MakeConvTask<T>(call, plan, workspace);
  const CUtensorMap map = MakeKernelMap(call, plan);
  const int64_t blocks = call.args.stacks * plan.tiles[0] * static_cast<int64_t>(plan.tiles[1]) * plan.tiles[2] *
                         plan.channel_tiles * call.args.groups;
  if (plan.lanes == 16) return LaunchLanes<T, 16, kPool>(task, map, blocks, stream);
  if (plan.lanes == 8) return LaunchLanes<T, 8, kPool>(task, map, blocks, stream);
  return LaunchLanes<T, 4, kPool>(task, map, blocks, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_WINDOW_TILE_CUH_
