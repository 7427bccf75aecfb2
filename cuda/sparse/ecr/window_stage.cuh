// How the patch of x and the kernel rows of a chunk get to shared memory, and who waits for them.
#ifndef JSC_CUDA_SPARSE_ECR_WINDOW_STAGE_CUH_
#define JSC_CUDA_SPARSE_ECR_WINDOW_STAGE_CUH_

#include "cuda/sparse/ecr/kernel_map.h"
#include "cuda/sparse/ecr/window_place.cuh"

namespace jsc {

// Asks for the patch [tile image, patch row, patch column, chunk channel] of channels [first, first + chunk_channels).
template <typename T, int kWidth>
__device__ void StagePatch(const ConvTask<T>& task, const BlockPlace& b, T* patch, int first) {
  const EcrPlan& plan = task.plan;
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

// Asks for the kernel rows [chunk tap, chunk channel, tile output channel] of taps [first_tap, first_tap + taps).
template <typename T, int kLanes, int kWidth>
__device__ void StageKernel(const ConvTask<T>& task, const BlockPlace& b, T* rows, int first_tap, int taps, int first) {
  const EcrPlan& plan = task.plan;
  const int unit_shift = kWidth ? (sizeof(T) == 4 ? 2 : 3) : plan.copy_kernel_shift;
  constexpr int kOutChannelShift = kLanes == 16 ? 7 : kLanes == 8 ? 6 : 5;
  const int units_shift = kOutChannelShift - unit_shift;
  const int total = taps << plan.chunk_shift << units_shift;
  const T* corner = task.kernel + b.out_channel +
                    (static_cast<int64_t>(b.stack) * task.kernel_height * task.kernel_width * task.group_channels +
                     static_cast<int64_t>(first_tap) * task.group_channels + first) *
                        task.out_channels;
#pragma unroll 2
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int row = i >> units_shift, out_channel = (i & ((1 << units_shift) - 1)) << unit_shift;
    const int tap = row >> plan.chunk_shift, channel = row & (plan.chunk_channels - 1);
    const bool valid = first + channel < task.group_channels && out_channel < b.out_channels;
    const T* source = corner + ((tap * task.group_channels + channel) * task.out_channels + out_channel);
    CopyAsync<kWidth>(rows + (i << unit_shift), valid ? source : task.kernel, static_cast<int>(sizeof(T)) << unit_shift,
                      valid);
  }
}

#if __CUDA_ARCH__ >= 900
// One thread asks TMA for the kernel rows of a chunk.
template <typename T>
__device__ void FetchRows(const ConvTask<T>& task, const TensorMaps& maps, const FetchCorner& corner,
                          const BlockMemory<T>& m, int stage, int channel, int tap) {
  const EcrPlan& plan = task.plan;
  ExpectBytes(m.rows_full + stage,
              (plan.chunk_taps << plan.chunk_shift) * plan.tile_out_channels() * static_cast<int>(sizeof(T)));
  CopyBox(StageOf(m.kernel, plan.kernel_bytes, stage), &maps.kernel, corner.out_channel, channel, corner.tap + tap,
          m.rows_full + stage);
}

// One thread asks TMA for chunk number `chunk`, patch and kernel rows. Needs plan.stream.
template <typename T>
__device__ void Fetch(const ConvTask<T>& task, const TensorMaps& maps, const FetchCorner& corner,
                      const BlockMemory<T>& m, int chunk, int stage) {
  const EcrPlan& plan = task.plan;
  const int channel = chunk << plan.chunk_shift;
  ExpectBytes(m.patch_full + stage, (plan.tile_images * plan.tile_patch[0] * plan.tile_patch[1] << plan.chunk_shift) *
                                        static_cast<int>(sizeof(T)));
  CopyBox(StageOf(m.patch, plan.patch_bytes, stage), &maps.x, corner.channel + channel, corner.x, corner.y,
          corner.image, m.patch_full + stage);
  FetchRows(task, maps, corner, m, stage, channel, 0);
}

__device__ inline void PrefetchMaps(const TensorMaps& maps) {
  PrefetchMap(maps.x);
  PrefetchMap(maps.kernel);
}

// The first chunks of a block, and the barriers.
template <bool kStream, typename T>
__device__ void FetchFirst(const ConvTask<T>& task, const TensorMaps& maps, const BlockPlace& b,
                           const BlockMemory<T>& m, int first_chunk, int last_chunk) {
  const EcrPlan& plan = task.plan;
#pragma unroll 1
  for (int i = 0; i < plan.stages; ++i) {
    InitBarrier(m.rows_full + i);
    if (!kStream) continue;
    InitBarrier(m.patch_full + i);
    m.done[i] = 0;
  }
  if (plan.reduction == Reduction::kCluster) {
    const int quads = min(max(plan.tile_out_channels() / 4 - b.split * plan.share_quads, 0), plan.share_quads);
    InitBarrier(m.inbox_full);
    ExpectBytes(m.inbox_full, plan.splits * plan.groups * kPixels * quads * static_cast<int>(sizeof(float4)));
  }
  const FetchCorner corner = {b.out_channel,
                              b.stack * task.kernel_height * task.kernel_width,
                              b.group * task.group_channels,
                              b.conv[1] * task.stride[1] - task.pad_low[1],
                              b.conv[0] * task.stride[0] - task.pad_low[0],
                              static_cast<int>(b.image)};
  FenceBarriers();
#pragma unroll 1
  for (int i = 0; kStream && i < min(plan.stages, last_chunk - first_chunk); ++i) {
    Fetch(task, maps, corner, m, first_chunk + i, i);
  }
  *m.corner = corner;
}

// The calling warp is done with a chunk; the last warp to say so asks for the chunk that takes the stage next.
template <typename T>
__device__ void Release(const ConvTask<T>& task, const TensorMaps& maps, const BlockMemory<T>& m, int chunk,
                        int last_chunk, int stage) {
  const EcrPlan& plan = task.plan;
  if (chunk + plan.stages >= last_chunk) return;
  __syncwarp();
  if (threadIdx.x % kWarp != 0) return;
  const auto others = static_cast<uint32_t>(plan.warps - 1);
  if (CountRelease(m.done + stage, others) == others) Fetch(task, maps, *m.corner, m, chunk + plan.stages, stage);
}
#endif

// Asks for chunk number `chunk` of the block's input channels and kernel positions: two groups of copies. Not for plans
// with `stream`.
template <typename T, int kLanes>
__device__ void Stage(const ConvTask<T>& task, const TensorMaps& maps, const BlockMemory<T>& m, int chunk, int stage) {
  const EcrPlan& plan = task.plan;
  const BlockPlace b = Locate(task, BlockIndex());
  const int channel_chunk = plan.tap_chunks == 1 ? chunk : chunk / plan.tap_chunks;
  const int tap_chunk = chunk - channel_chunk * plan.tap_chunks;
  const int channel = channel_chunk << plan.chunk_shift, tap = tap_chunk * plan.chunk_taps;
  const int taps = min(plan.chunk_taps, task.kernel_height * task.kernel_width - tap);
  T* patch = StageOf(m.patch, plan.patch_bytes, channel_chunk & (plan.stages - 1));
  T* rows = StageOf(m.kernel, plan.kernel_bytes, stage);
  if (tap_chunk > 0) {  // the patch is there
  } else if (static_cast<int>(sizeof(T)) << plan.copy_x_shift == 16) {
    StagePatch<T, 16>(task, b, patch, channel);
  } else {
    StagePatch<T, 0>(task, b, patch, channel);
  }
  CommitCopies();
#if __CUDA_ARCH__ >= 900
  if (plan.bulk) {
    if (threadIdx.x == 0) FetchRows(task, maps, *m.corner, m, stage, channel, tap);
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

// Waits until the patch of a chunk is in shared memory, without `stream` also until all warps are done with the chunk
// before; round counts how often the stage was used before.
template <bool kStream, typename T>
__device__ void WaitForPatch(const BlockMemory<T>& m, int stage, int round) {
#if __CUDA_ARCH__ >= 900
  if (kStream) {
    WaitForBytes(m.patch_full + stage, round & 1);
    return;
  }
#endif
  WaitForCopies<1>();
  __syncthreads();
}

// The same for kernel rows.
template <bool kStream, typename T>
__device__ void WaitForKernel(const EcrPlan& plan, const BlockMemory<T>& m, int stage, int round) {
#if __CUDA_ARCH__ >= 900
  if (kStream || plan.bulk) {
    WaitForBytes(m.rows_full + stage, round & 1);
    return;
  }
#endif
  WaitForCopies<0>();
  __syncthreads();
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_WINDOW_STAGE_CUH_
