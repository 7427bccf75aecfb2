// Room: ECR and PECR, convolution over lists of non-zeros (Xu et al. 2023). This kernel serves sparse/ecr/ecr.cu and
//   sparse/ecr/pecr.cu. Its steps are in window_place.cuh, window_stage.cuh, window_lists.cuh and window_sums.cuh.
//   Details: docs/design/kernels/ecr_pecr.md. Tests: tests/primitive/test_kernels.py.
// Computes out = pool(activation(conv(x, kernel) + bias + residual)) for one tile of outputs and 32, 64 or 128 output
//   channels per block. With `splits` > 1 several blocks split the input channels of a tile (split-K).
// How, per chunk of input channels (and kernel positions):
//   1. Stage: the tile's patch of x and the chunk's kernel rows come to shared memory ahead of their use, as one TMA
//      box each (sm_90, kStream) or by cp.async. The patch is zero outside the image, so nothing after it checks
//      bounds. With kStream a warp waits for the stages it needs, and the last warp to leave a stage asks for the next
//      chunk there. Otherwise the block synchronises once per chunk.
//   2. Compress: a warp takes a group of 4 results (2x2 where the tile is even). It writes the list of (kernel row, 4
//      values) for which any of the 4 values is non-zero: 32 candidates per ballot, places by popc, no atomics.
//   3. Accumulate: per entry two 16-byte loads of the row's weights a lane, one broadcast of 4 values, 32 FFMA. With
//      fewer than 32 lanes over the channels, parts of the warp take entries alternately. No branches on data: an empty
//      window is a list of length 0.
// Epilogue: sums come together in shared memory as float32. Then bias, residual, ReLU, pool and one write. In a cluster
//   every block sends each of the others that one's share of the output channels to a DSMEM slot, from registers. The
//   order of summation is fixed, so results repeat bit for bit.
// Layout: x NHWC, kernel HWIO. Patch [pixel][chunk channel], kernel rows [tap][chunk channel][tile output channel].
// Why groups of 4: a list entry costs its weights' shared-memory cycles however many pixels use it. On real maps at 82
//   % zeros 4 pixels share .33 of all rows against .16 for one: half the weight traffic per result for twice the FFMA.
// Bound by: instruction issue (some 150 instructions for 128 FFMA of a list, 100 to 200 to make one) and shared memory
//   (about 10.5 cycles per 32 FFMA of a warp against 8 of FFMA), which are close. At batch 1 by latency: on an H200 a
//   block of 512->512 14x14 has its first patch after 4,500 cycles, and its last sums 5,000 before its end.
// Lost: 4 channels a lane (10 to 15 % slower); 28 warps with one group each in 72 registers instead of 16 with two in
//   128 (25 % slower at batch 32); one bulk copy per kernel row (60 cycles of issue each); cp.async for kernel rows
//   (12.0 us against 10.6); clusters of 8 that need more than 15 places with an SM each (two waves).
#ifndef JSC_CUDA_SPARSE_ECR_WINDOW_TILE_CUH_
#define JSC_CUDA_SPARSE_ECR_WINDOW_TILE_CUH_

#include "cuda/core/tensor_map.h"
#include "cuda/sparse/ecr/kernel_map.h"
#include "cuda/sparse/ecr/window_lists.cuh"
#include "cuda/sparse/ecr/window_stage.cuh"
#include "cuda/sparse/ecr/window_sums.cuh"

namespace jsc {

// kStream: both patch and kernel rows come by TMA, and a warp waits for stages, not for the other warps.
template <typename T, int kLanes, bool kPool, bool kStream>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    ConvKernel(const __grid_constant__ ConvTask<T> task, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (!PassesGate(task.gate)) return;
#if __CUDA_ARCH__ >= 900
  if (kStream && threadIdx.x == 0) PrefetchMaps(maps);
#endif
  const EcrPlan& plan = task.plan;
  const BlockPlace b = Locate(task, BlockIndex());
  const BlockMemory<T> m = Carve<T>(shared, plan);
  const int taps = task.kernel_height * task.kernel_width;
  const int first_chunk = Divide(b.split * plan.channel_chunks, task.by_splits).quotient * plan.tap_chunks;
  const int last_chunk = Divide((b.split + 1) * plan.channel_chunks, task.by_splits).quotient * plan.tap_chunks;
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) FetchFirst<kStream>(task, maps, b, m, first_chunk, last_chunk);
  if (plan.reduction == Reduction::kCluster && !plan.late_inbox) ArriveAtCluster();
#endif
  if (!kStream) Stage<T, kLanes>(task, maps, m, first_chunk, 0);
  if (TableThread() >= 0) {
    FindItems(task, b, m);
    FindRows(task, m, 0, min(plan.chunk_taps, taps));
    ClearZeroRows<T, kLanes>(plan, m);
  }
  if (kStream) __syncthreads();

  const int zero_row = plan.chunk_taps << plan.chunk_shift;
  float sums[kGroupsPerWarp][kPixels][kLaneChannels] = {};
  int stage = 0, round = 0;
  for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
    const int channel_chunk = kStream || plan.tap_chunks == 1 ? chunk : chunk / plan.tap_chunks;
    const int tap = kStream ? 0 : (chunk - channel_chunk * plan.tap_chunks) * plan.chunk_taps;
    const int rows = min(plan.chunk_taps, taps - tap) << plan.chunk_shift;
    const T* patch = StageOf(m.patch, plan.patch_bytes, kStream ? stage : channel_chunk & (plan.stages - 1));
    const T* kernel = StageOf(m.kernel, plan.kernel_bytes, stage);
    WaitForPatch<kStream>(m, stage, round);  // kernel rows may still be on their way while lists are made
    if (!kStream && plan.tap_chunks > 1) {
      if (TableThread() >= 0) FindRows(task, m, tap, rows >> plan.chunk_shift);
      __syncthreads();
    }
#pragma unroll
    for (int g = 0; g < kGroupsPerWarp; ++g) {
      const WarpItem& item = m.items[threadIdx.x / kWarp * kGroupsPerWarp + g];
      const int item_rows = min(item.rows, rows - item.first_row);
      int count = 0;
      if (item_rows > 0) {
        count = Compress<T, kLanes>(patch, m.row_offset, item, item_rows, zero_row, m.values, m.rows);
      }
      if (g == 0) {
        WaitForKernel<kStream>(plan, m, stage, round);
        if (!kStream && chunk + 1 < last_chunk) Stage<T, kLanes>(task, maps, m, chunk + 1, stage ^ 1);
      }
      Accumulate<T, kLanes>(kernel, m.values, m.rows, count, sums[g]);
      __syncwarp();  // the next list takes this one's place
    }
#if __CUDA_ARCH__ >= 900
    if (kStream) Release(task, maps, m, chunk, last_chunk, stage);
#endif
    if (++stage == plan.stages) {
      stage = 0;
      ++round;
    }
  }
  Finish<T, kLanes, kPool>(task, m, sums);
  LeaveGate(task.gate);
}

// The second step of Reduction::kWorkspace: one block per (tile, output channel tile).
template <typename T, int kLanes, bool kPool>
__global__ void __launch_bounds__(256) ReduceKernel(const __grid_constant__ ConvTask<T> task) {
  __shared__ int2 scratch[256 / kWarp];
  if (!PassesGate(task.gate)) return;
  const EcrPlan& plan = task.plan;
  const BlockPlace b = Locate(task, blockIdx.x * plan.splits);
  const int64_t tile_elements = static_cast<int64_t>(plan.groups) * kPixels * plan.tile_out_channels();
  const float* tile = task.partial + static_cast<int64_t>(b.tile) * plan.splits * tile_elements;
  const int2 written =
      Epilogue<T, kLanes, kPool>(task, b, 0, [] {}, [&](int split) { return tile + split * tile_elements; });
  WriteCounts(task.counts, blockIdx.x, written, scratch);
}

template <typename T, int kLanes, bool kPool, bool kStream>
Error LaunchLanes(const ConvTask<T>& task, const TensorMaps& maps, int64_t blocks, cudaStream_t stream) {
  const EcrPlan& plan = task.plan;
  constexpr auto kKernel = ConvKernel<T, kLanes, kPool, kStream>;
  Error error = Prepare<kKernel>("ConvKernel");
  if (error.failure()) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks * plan.splits));
  config.blockDim = dim3(plan.warps * kWarp);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  LaunchAttributes attributes(plan.reduction == Reduction::kCluster ? plan.splits : 0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  error = CheckCuda(cudaLaunchKernelEx(&config, kKernel, task, maps), "ConvKernel");
  if (error.failure() || plan.reduction != Reduction::kWorkspace) return error;
  ReduceKernel<T, kLanes, kPool><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(task);
  return CheckCuda(cudaGetLastError(), "ReduceKernel");
}

// Launches a call under a plan that has warps > 0.
template <typename T, bool kPool>
Error LaunchConv(const DeviceCall& call, const EcrPlan& plan, void* workspace, cudaStream_t stream) {
  ConvTask<T> task = MakeConvTask<T>(call, plan, workspace);
  TensorMaps maps{};
  if (!MakeTensorMaps(call, plan, &maps)) return MapsRefused("ConvKernel");
  const int64_t blocks = call.args.stacks * plan.tiles[0] * static_cast<int64_t>(plan.tiles[1]) * plan.tiles[2] *
                         plan.channel_tiles * call.args.groups;
  // Of a cluster every block writes results; with a workspace ReduceKernel does, a block a tile.
  task.counts = CountsOf(call.counts, plan.reduction == Reduction::kCluster ? blocks * plan.splits : blocks);
  auto launch = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    if (plan.stream) return LaunchLanes<T, kLanes, kPool, true>(task, maps, blocks, stream);
    return LaunchLanes<T, kLanes, kPool, false>(task, maps, blocks, stream);
  };
  if (plan.lanes == 16) return launch(std::integral_constant<int, 16>{});
  if (plan.lanes == 8) return launch(std::integral_constant<int, 8>{});
  return launch(std::integral_constant<int, 4>{});
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_ECR_WINDOW_TILE_CUH_
