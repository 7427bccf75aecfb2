// What follows the sums of ECR and PECR: parts of warps and splits come together, then bias, residual, ReLU and pool.
#ifndef JSC_CUDA_SPARSE_ECR_WINDOW_SUMS_CUH_
#define JSC_CUDA_SPARSE_ECR_WINDOW_SUMS_CUH_

#include "cuda/core/epilogue.cuh"
#include "cuda/sparse/ecr/window_lists.cuh"

namespace jsc {

// Adds up the sums of warps that share a group, in order, and hands emit(slot, half, sum) four results of a pixel,
// lower or upper half of the lane's channels. scratch is [part - 1, group, pixel, output channel].
template <typename T, int kLanes, typename Emit>
__device__ __forceinline__ void EmitSums(const ConvTask<T>& task, const WarpItem* items, int first_quad,
                                         float (&sums)[kGroupsPerWarp][kPixels][kLaneChannels], float4* scratch,
                                         Emit emit) {
  constexpr int kParts = kWarp / kLanes, kQuads = kLanes * kLaneChannels / 4;
  constexpr int kKept = kParts == 2 ? 2 : 1;   // pixels of a lane
  constexpr int kHalves = kParts < 8 ? 2 : 1;  // and quads of each
  const EcrPlan& plan = task.plan;
  const int first_pixel = threadIdx.x % kWarp / (kWarp / kPixels * kKept) * kKept;
  const int stride = plan.groups * kPixels * kQuads;
#pragma unroll 1
  for (int last = plan.row_parts > 1 ? 1 : 0; last >= 0; --last) {  // other parts to scratch, then the first part
    if (last == 0 && plan.row_parts > 1) __syncthreads();
#pragma unroll
    for (int g = 0; g < kGroupsPerWarp; ++g) {
      const WarpItem& item = items[g];
      if (item.part < 0 || (item.part > 0) != (last > 0)) continue;
      MergeParts<kLanes>(sums[g]);
#pragma unroll
      for (int i = 0; i < kKept * kHalves; ++i) {
        const float* v = sums[g][i / kHalves] + i % kHalves * 4;
        const int slot = item.group * kPixels + first_pixel + i / kHalves;
        float4* at = scratch + slot * kQuads + first_quad + i % kHalves * kLanes;
        float4 sum = make_float4(v[0], v[1], v[2], v[3]);
        if (item.part > 0) {
          at[(item.part - 1) * stride] = sum;
          continue;
        }
#pragma unroll 1
        for (int part = 1; part < plan.row_parts; ++part) sum = sum + at[(part - 1) * stride];
        emit(slot, i % kHalves, sum);
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

// Sums of the splits, bias, residual, ReLU, pool, out, for the share-th plan.share_quads quads of the tile's output
// channels; returns the non-zeros and elements that the thread wrote, where they are asked for. partial(split) points
// to [group, pixel, share quad, 4], there once wait() returned.
template <typename T, int kLanes, bool kPool, typename Wait, typename Partial>
__device__ __forceinline__ int2 Epilogue(const ConvTask<T>& task, const BlockPlace& b, int share, Wait wait,
                                         Partial partial) {
  constexpr int kQuads = kLanes * kLaneChannels / 4;
  const EcrPlan& plan = task.plan;
  const int helpers = plan.helpers, helper = threadIdx.x & (helpers - 1);
  const unsigned helper_mask = ((1u << helpers) - 1) << (threadIdx.x % kWarp - helper);
  bool waited = false;
  int2 written = {0, 0};
  const int total = b.images * plan.tile_out[0] * plan.tile_out[1] * plan.share_quads;
#pragma unroll 1
  for (int i = threadIdx.x >> plan.helpers / 2; i < total; i += blockDim.x >> plan.helpers / 2) {
    const Quotient pixel = plan.splits > 1 ? Divide(i, task.by_share_quads) : Quotient{i / kQuads, i % kQuads};
    const int out_channel = (share * plan.share_quads + pixel.remainder) * 4;
    const Quotient tile_x = Divide(pixel.quotient, task.by_tile_out[1]);
    const Quotient tile_y = Divide(tile_x.quotient, task.by_tile_out[0]);
    const int y = b.out[0] + tile_y.remainder, x = b.out[1] + tile_x.remainder, image = tile_y.quotient;
    const int valid = min(b.out_channels - out_channel, 4);
    if (valid <= 0 || y >= task.out_size[0] || x >= task.out_size[1]) continue;
    const int64_t at = (((b.image + image) * task.out_size[0] + y) * task.out_size[1] + x) * task.out_channels +
                       b.out_channel + out_channel;
    float4 extra = {0.f, 0.f, 0.f, 0.f};
    if (task.bias) {
      const T* bias = task.bias + static_cast<int64_t>(b.stack) * task.out_channels + b.out_channel + out_channel;
      extra = LoadUpTo4(bias, valid, plan.vector_out);
    }
    if (!kPool && task.residual) extra = extra + LoadUpTo4(task.residual + at, valid, plan.vector_out);
    if (!waited) wait();
    waited = true;
    auto conv = [&](int conv_y, int conv_x) {
      const int slot = FindSlot(task, image, conv_y - b.conv[0], conv_x - b.conv[1]);
      const int place = (slot * plan.share_quads + pixel.remainder) * 4;
      float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kMaxSplits / 4; ++i) {  // all loads in flight at once
        const int split = helper + i * helpers;
        if (split < plan.splits) sum = sum + Load4(partial(split) + place);
      }
      for (int distance = 1; distance < helpers; distance *= 2) {
        sum = sum +
              make_float4(__shfl_xor_sync(helper_mask, sum.x, distance), __shfl_xor_sync(helper_mask, sum.y, distance),
                          __shfl_xor_sync(helper_mask, sum.z, distance), __shfl_xor_sync(helper_mask, sum.w, distance));
      }
      return Finish(sum, extra, task.relu);
    };
    float4 result;
    if constexpr (kPool) {
      const int first[2] = {y * task.window_stride[0] - task.window_pad[0],
                            x * task.window_stride[1] - task.window_pad[1]};
      result = PoolWindow(task, first, conv);
    } else {
      result = conv(y, x);
    }
    if (helper == 0) {
      StoreUpTo4(task.out + at, result, valid, plan.vector_out);
      if (task.counts.rows) written = make_int2(written.x + CountNonzeros<T>(result, valid), written.y + valid);
    }
  }
  if (!waited) wait();  // a block stays until all that is sent to it has come
  return written;
}

// Brings the block's sums together with those of its splits and writes the outputs.
//
// In a cluster each block sends every other block its sums of that block's share of the output channels: one way,
// counted at the receiver, who waits for nothing else.
template <typename T, int kLanes, bool kPool>
__device__ void Finish(const ConvTask<T>& task, const BlockMemory<T>& m,
                       float (&sums)[kGroupsPerWarp][kPixels][kLaneChannels]) {
  constexpr int kQuads = kLanes * kLaneChannels / 4;
  const EcrPlan& plan = task.plan;
  const BlockPlace b = Locate(task, BlockIndex());
  const int slots = plan.groups * kPixels, lane = threadIdx.x % kWarp;
  const bool cluster = plan.reduction == Reduction::kCluster, workspace = plan.reduction == Reduction::kWorkspace;
  const int first_quad = lane % kLanes + (kLanes == 4 && lane / kLanes % 2 ? kLanes : 0);
  auto* scratch = reinterpret_cast<float4*>(m.sums);
  float4* tile = scratch + (plan.row_parts - 1) * slots * kQuads + first_quad;
  if (workspace) {
    const int64_t block = static_cast<int64_t>(b.tile) * plan.splits + b.split;
    tile = reinterpret_cast<float4*>(task.partial) + block * slots * kQuads + first_quad;
  }
  if (!cluster || plan.row_parts > 1) __syncthreads();  // the stages become scratch and tile
#if __CUDA_ARCH__ >= 900
  Quotient share[2] = {};
  float4* inbox = reinterpret_cast<float4*>(m.inbox) + b.split * slots * plan.share_quads;
  if (cluster) {
    for (int half = 0; half < 2; ++half) share[half] = Divide(first_quad + half * kLanes, task.by_share_quads);
    if (plan.late_inbox) ArriveAtCluster();
    WaitForCluster();  // all inboxes are open
  }
#endif
  EmitSums<T, kLanes>(task, m.items + threadIdx.x / kWarp * kGroupsPerWarp, first_quad, sums, scratch,
                      [&](int slot, int half, float4 sum) {
#if __CUDA_ARCH__ >= 900
                        if (cluster) {
                          float4* to = inbox + slot * plan.share_quads + share[half].remainder;
                          return SendToBlock(share[half].quotient, to, sum, m.inbox_full);
                        }
#endif
                        tile[slot * kQuads + half * kLanes] = sum;
                      });
  if (workspace) return;  // ReduceKernel follows
  auto wait = [&] {
#if __CUDA_ARCH__ >= 900
    if (cluster) WaitForBytes(m.inbox_full, 0);
#endif
  };
  if (!cluster) __syncthreads();
  const float* first = cluster ? m.inbox : m.sums + (plan.row_parts - 1) * slots * kQuads * 4;
  const int2 written = Epilogue<T, kLanes, kPool>(
      task, b, cluster ? b.split : 0, wait, [&](int split) { return first + split * slots * plan.share_quads * 4; });
  WriteCounts(task.counts, BlockIndex(), written, reinterpret_cast<int2*>(m.items));  // the items have served
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_WINDOW_SUMS_CUH_
