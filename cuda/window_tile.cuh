// Convolution over lists of non-zeros: the kernel that ecr.cu and pecr.cu share. Its steps are in window_stage.cuh,
// window_lists.cuh and window_sums.cuh.
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

#include "kernel_map.h"
#include "window_lists.cuh"
#include "window_stage.cuh"
#include "window_sums.cuh"

namespace jsc {

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
  ClearZeroRows<T, kLanes>(plan, m);
  FindGroups(task, b, m);
  FindRows(task, m, 0, min(plan.chunk_taps, taps));

  const int zero_row = plan.chunk_taps << plan.chunk_shift;
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
        count = Compress<T, kLanes>(patch, m.row_offset, base, first_row, some_rows, zero_row, m.values, m.rows);
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

template <typename T, int kLanes, bool kPool>
ffi::Error LaunchLanes(const ConvTask<T>& task, const CUtensorMap& map, int64_t blocks, cudaStream_t stream) {
  const ConvPlan& plan = task.plan;
  constexpr auto kKernel = ConvKernel<T, kLanes, kPool>;
  ffi::Error error = Prepare<kKernel>("ConvKernel");
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
  error = CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, map), "ConvKernel");
  if (error.failure() || plan.reduction != Reduction::kWorkspace) return error;
  ReduceKernel<T, kLanes, kPool><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(task);
  return CheckCuda(cudaGetLastError(), "ReduceKernel");
}

// Launches a call under a plan that has warps > 0.
template <typename T, bool kPool>
ffi::Error LaunchConv(const ConvCall& call, const ConvPlan& plan, void* workspace, cudaStream_t stream) {
  const ConvTask<T> task = MakeConvTask<T>(call, plan, workspace);
  CUtensorMap map{};
  if (plan.bulk && !MakeKernelMap(call, plan, &map)) {
    return ffi::Error(ffi::ErrorCode::kInternal, "ConvKernel: cuTensorMapEncodeTiled refused the kernel's sizes");
  }
  const int64_t blocks = call.args.stacks * plan.tiles[0] * static_cast<int64_t>(plan.tiles[1]) * plan.tiles[2] *
                         plan.channel_tiles * call.args.groups;
  if (plan.lanes == 16) return LaunchLanes<T, 16, kPool>(task, map, blocks, stream);
  if (plan.lanes == 8) return LaunchLanes<T, 8, kPool>(task, map, blocks, stream);
  return LaunchLanes<T, 4, kPool>(task, map, blocks, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_WINDOW_TILE_CUH_
