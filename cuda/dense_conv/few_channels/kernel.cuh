// Engine few_channels: dense convolution of up to four input channels, as first layers have them. Details:
// docs/design/kernels/few_channels.md.
//
// Computes out[pixel][output channel] = pool(relu(sum over taps and channels of x * kernel + bias + residual)).
// Layout: NHWC and HWIO. With few channels a row of the window is a run of kernel width x channels neighbouring
//   elements of a row of x. The reduction runs over such rows, in pairs of elements (FewChannelsPlan).
// Why this tiling: all pixels under a tile are staged once, in rows, by copies of 16 bytes, or of 4 where rows are no
//   multiple of that. Fragments are gathered from there, at an address a result and a table entry a pair. With runs of
//   eight results an odd number of channels meets no bank twice. Weights are staged once for all tiles of a block, in
//   the order of fragments. What is staged is already rounded to TF32, or split for 3xTF32. A lane's sums are
//   neighbouring output channels, so results leave from registers, 16 bytes a lane.
// Pools: a max pool takes its windows from a tile in shared memory. Results beside the tile are computed twice.
// Not finite: a weight of zero beside the window, a 3xTF32 split of infinity, and values that round up to infinity make
//   NaN where none belongs. So a warp's results that are not all finite are computed again by FFMA, one by one.
// Bound by: launch and first copies, then the results' way to L2; at HIGHEST mma.sync.
// Tests: tests/cuda/test_direct.py.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_KERNEL_CUH_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_KERNEL_CUH_

#include "cuda/dense_conv/few_channels/launch.h"
#include "cuda/dense_conv/few_channels/results.cuh"

namespace jsc {

// One tile of results, whose pixels are staged.
template <class U, typename T>
__device__ __forceinline__ void ComputeTile(const FewChannelsTask<T>& task, const FewChannelsPlace& at,
                                            unsigned char* shared, FewChannelsWriter<U, T>& writer) {
  constexpr int kStaged = StagedBytes<U, T>();
  const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int runs = task.tile[0] * static_cast<int>(task.by_runs.divisor);
  const int tile_out_channel = lane / 4 * FewChannelsSums<U, T>::kCount;
#pragma unroll 1
  for (int first = warp * kFewChannelsWarpRuns; first < runs; first += warps * kFewChannelsWarpRuns) {
    const unsigned char* pixels[kFewChannelsWarpRuns];
#pragma unroll
    for (int run = 0; run < kFewChannelsWarpRuns; ++run) {
      const Quotient place = Divide(min(first + run, runs - 1), task.by_runs);
      const int x = place.remainder * kFewChannelsRun + lane / 4;
      pixels[run] =
          shared + task.patch_at +
          (place.quotient * task.stride[0] * task.pitch + x * task.stride[1] * task.channels + at.shift) * kStaged;
    }
    FewChannelsSums<U, T> sums;
    sums.Multiply(task, shared, pixels);
    if (!__all_sync(0xffffffffu, sums.Finite())) {
      WriteRunsAgain<U>(task, at, first, runs, tile_out_channel, writer);
    } else if (task.target == FewChannelsTarget::kPlain) {
      WriteRuns<FewChannelsTarget::kPlain>(at, first, runs, tile_out_channel, sums, writer);
    } else if (task.target == FewChannelsTarget::kPool) {
      WriteRuns<FewChannelsTarget::kPool>(at, first, runs, tile_out_channel, sums, writer);
    } else {
      WriteRuns<FewChannelsTarget::kOther>(at, first, runs, tile_out_channel, sums, writer);
    }
  }
}

template <class U, typename T>
__global__ void __launch_bounds__(U::kMostThreads, U::kResident)
    FewChannelsKernel(const __grid_constant__ FewChannelsTask<T> task) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int2 scratch[kFewChannelsWarps];
  if (!PassesGate(task.gate)) return;
  const int out_channel = static_cast<int>(blockIdx.y) * task.tile_out_channels;
  if (task.gate.in_chain) {  // an image is the first that a chain reads, so there is nobody to overlap with
    if (threadIdx.x == 0) FetchAhead(task.gate);
    WaitForKernelBefore();
    LetNextKernelStart();
  }
  const int step = static_cast<int>(gridDim.x);
  int tile = static_cast<int>(blockIdx.x);
  FewChannelsPlace at = FindFewChannelsPlace(task, tile);
  // Where a block has one tile, and no 3xTF32, its pixels are copied to where they are read.
  unsigned char *patch = shared + task.patch_at, *raw = shared + task.raw_at;
  CopyWeights(task, out_channel, shared + task.pool_at);
  CopyPatch(task, at, raw);
  CommitCopies();
  StageTable<U>(task, out_channel, shared);
  WaitForCopies<0>();
  __syncthreads();
  OrderWeights<U>(task, shared + task.pool_at, shared);
  FewChannelsWriter<U, T> writer{task, shared, out_channel};
#pragma unroll 1
  while (true) {
    RoundPatch<U>(task, raw, patch);
    __syncthreads();
    const FewChannelsPlace here = at;
    tile += step;
    if (tile < task.tiles) {  // copied while this one is multiplied
      at = FindFewChannelsPlace(task, tile);
      CopyPatch(task, at, raw);
      CommitCopies();
    }
    ComputeTile(task, here, shared, writer);
    if (task.pools) {
      __syncthreads();
      writer.WritePool(here);
    }
    if (tile >= task.tiles) break;
    WaitForCopies<0>();
    __syncthreads();  // the next pixels are there, and these are read
  }
  WriteCounts(task.counts, GridBlock(), writer.tally.Row(), scratch);
  LeaveGate(task.gate);
}

template <class U, typename T>
Error LaunchFewChannels(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream) {
  constexpr auto kKernel = FewChannelsKernel<U, T>;
  Error error = Prepare<kKernel>("ImageKernel");
  if (error.failure()) return error;
  FewChannelsTask<T> task = MakeFewChannelsTask<T>(call, plan);
  if (U::kTf32x3 && call.low.written) *call.low.written = true;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.out_channel_tiles),
                        static_cast<unsigned>(call.args.stacks));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps * kWarp));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  task.counts = CountsOf(call.counts, static_cast<int64_t>(config.gridDim.x) * config.gridDim.y * config.gridDim.z);
  constexpr int kBytes = FewChannelsSums<U, T>::kCount * static_cast<int>(sizeof(T));  // that a lane stores at once
  const bool plain = task.out_bytes >= kBytes && !task.residual && !call.counts;
  task.target = task.pools ? FewChannelsTarget::kPool : plain ? FewChannelsTarget::kPlain : FewChannelsTarget::kOther;
  if (MayOverlap<kKernel>(&config, call.in_front)) task.gate.overlaps = true;
  LaunchAttributes attributes(0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  return CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "ImageKernel");
}

// A call of elements T by the tile that its plan has.
template <typename T, bool kTf32x3>
Error LaunchFewChannelsTile(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream) {
  if (plan.out_channels == 64) {
    return plan.paired ? LaunchFewChannels<FewChannelsTile<64, kTf32x3, true>, T>(call, plan, stream)
                       : LaunchFewChannels<FewChannelsTile<64, kTf32x3, false>, T>(call, plan, stream);
  }
  return plan.paired ? LaunchFewChannels<FewChannelsTile<32, kTf32x3, true>, T>(call, plan, stream)
                     : LaunchFewChannels<FewChannelsTile<32, kTf32x3, false>, T>(call, plan, stream);
}

template <typename T>
Error LaunchFewChannelsPlan(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    if (plan.tf32x3) return LaunchFewChannelsTile<T, true>(call, plan, stream);
  }
  return LaunchFewChannelsTile<T, false>(call, plan, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_KERNEL_CUH_
