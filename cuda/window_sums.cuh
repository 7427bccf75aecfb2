// What follows the sums: parts and splits come together, then bias, residual, ReLU and pool.
#ifndef JSC_CUDA_WINDOW_SUMS_CUH_
#define JSC_CUDA_WINDOW_SUMS_CUH_

#include <cooperative_groups.h>

#include "window_lists.cuh"
#include "window_stage.cuh"

namespace jsc {

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

}  // namespace jsc

#endif  // JSC_CUDA_WINDOW_SUMS_CUH_
