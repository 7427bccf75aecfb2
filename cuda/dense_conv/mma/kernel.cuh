// Engine mma: dense convolution by warp products, after Cheng et al. 2018. Details: docs/design/kernels/mma.md.
//
// Computes out[pixel][output channel] = relu(sum over taps and channels of x * kernel + bias + residual), as an
//   implicit GEMM. Any window, stride, dilation and group works.
// Layout: rows of the GEMM are pixels of the whole batch, columns are output channels. The reduction axis runs over
//   taps and channels; `cached_pixels` rows of it are in shared memory at a time. Maps are NHWC and kernels HWIO.
// Why this tiling: each staged pixel serves threads_y threads and each staged weight threads_x of them, so the tile's
//   sides divide the traffic from L2. Accumulators in registers divide the traffic from shared memory likewise. Three
//   or four pipeline stages hide the latency of copies.
// Small maps: tiles are too few for all SMs, so the blocks of a cluster split the reduction axis of a tile (split-K).
//   Their sums are added in a fixed order, through DSMEM, or through workspace where there are no clusters.
// Bound by: at batch 1 launch, the fetch of code that runs once, and the cluster reduction. On large maps shared memory
//   and mma.sync, which reaches some two thirds of the rate of wgmma.
// Lost: pixels through L1, copies spread between multiplications, an unrolled prologue.
// May change: tiles and loops, while results stay bitwise repeatable. Tests: tests/cuda/test_direct.py.
#ifndef JSC_CUDA_DENSE_CONV_MMA_KERNEL_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_KERNEL_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/dense_conv/mma/sums.cuh"
#include "cuda/dense_conv/mma/tf32x3.cuh"

namespace jsc {

template <class U, typename T, bool kChecked>
__device__ __forceinline__ void MainLoop(const MmaTask<T>& task, const MmaPlace& at, int* table, unsigned char* stages,
                                         typename EngineOf<U, T>::Type& engine) {
  constexpr int kStage = U::template StageBytes<T>(), kAhead = U::kStages - 1;
  const int out_channels = task.group_out_channels - at.out_channel;
  const T* kernel = task.kernel + static_cast<int64_t>(at.stack) * task.depth * task.out_channels +
                    at.group * task.group_out_channels + at.out_channel;
  const PixelSource<U, T> pixels = FindPixels<U, T>(task, at, table);
  if constexpr (U::kAddresses == Addresses::kTable) __syncthreads();
  const bool in_chain = task.gate.in_chain;
  if (in_chain) {  // weights are there before the kernel in front is done
#pragma unroll 1
    for (int s = 0; s < kAhead && at.first_chunk + s < at.end_chunk; ++s) {
      CopyWeights<U, T, kChecked>(task, kernel, out_channels, at.first_chunk + s, stages + s * kStage);
    }
    if (threadIdx.x == 0) FetchAhead(task.gate);
    WaitForKernelBefore();
    LetNextKernelStart();
  }
#pragma unroll 1  // code that runs once is fetched once: unrolled, the first copies leave 300 cycles later
  for (int s = 0; s < kAhead; ++s) {
    if (at.first_chunk + s < at.end_chunk) {
      if (!in_chain) CopyWeights<U, T, kChecked>(task, kernel, out_channels, at.first_chunk + s, stages + s * kStage);
      CopyPixels<U, T, kChecked>(task, pixels, at.first_chunk + s, stages + s * kStage);
    }
    CommitCopies();
  }
  int stage = 0, next = kAhead;
#pragma unroll 1
  for (int chunk = at.first_chunk; chunk < at.end_chunk; ++chunk) {
    if constexpr (kAhead > 0) WaitForCopies<(kAhead > 0 ? kAhead - 1 : 0)>();
    __syncthreads();  // the chunk is there for all, and all are done with the stage that is filled next
    if (chunk + kAhead < at.end_chunk) {
      CopyPixels<U, T, kChecked>(task, pixels, chunk + kAhead, stages + next * kStage);
      CopyWeights<U, T, kChecked>(task, kernel, out_channels, chunk + kAhead, stages + next * kStage);
    }
    CommitCopies();
    if constexpr (kAhead == 0) {
      WaitForCopies<0>();
      __syncthreads();
    }
    engine.Multiply(stages + stage * kStage);
    stage = stage + 1 == U::kStages ? 0 : stage + 1;
    next = next + 1 == U::kStages ? 0 : next + 1;
  }
  __syncthreads();  // the tile's sums take the stages' place
}

// From the tile's sums in shared memory, [tile pixel, kSumStride], to results, alone or with the blocks that share the
// tile.
template <class U, typename T>
__device__ __forceinline__ void FinishTile(const MmaTask<T>& task, const MmaPlace& at, int tile_number,
                                           TileWriter<U, T>& writer, float* tile) {
  auto sum = [&](int pixel, int out_channel) {
    return *reinterpret_cast<const float4*>(tile + pixel * U::kSumStride + out_channel);
  };
  if (task.reduction == Reduction::kCluster) {
#if __CUDA_ARCH__ >= 900
    SyncCluster();
    writer.WriteTogether([&](int split, int pixel, int out_channel) {
      return Load4(OfBlock(tile, split) + pixel * U::kSumStride + out_channel);
    });
    SyncCluster();  // a block's sums stay until all have read them
    WriteCounts(task.counts, GridBlock(), writer.Written(), reinterpret_cast<int2*>(tile));
#endif
    return;
  }
  __syncthreads();
  if (task.reduction == Reduction::kNone) {
    writer.Write(sum);
    WriteCounts(task.counts, GridBlock(), writer.Written(), reinterpret_cast<int2*>(tile));
    return;
  }
  auto* partial = reinterpret_cast<float4*>(PartialTile<U>(task, at, tile_number, at.split));
  for (int i = threadIdx.x; i < U::kPixels * U::kOutChannels / 4; i += U::kThreads) {
    partial[i] = sum(i / (U::kOutChannels / 4), i % (U::kOutChannels / 4) * 4);
  }
}

// What an engine could not do, again by FFMA, from the start to the tile's sums in shared memory. Not inlined: it runs
// where there are infinities or NaN.
template <class U, typename T>
__device__ __noinline__ void MultiplyAgain(const MmaTask<T>& task, MmaPlace at, unsigned char* shared) {
  typename EngineOf<U, T>::Type engine;
  MainLoop<U, T, true>(task, at, reinterpret_cast<int*>(shared + U::template TableAt<T>()), shared, engine);
  engine.Store(reinterpret_cast<float*>(shared));
}

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads) MmaKernel(const __grid_constant__ MmaTask<T> task) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (!PassesGate(task.gate)) return;
  int* table = reinterpret_cast<int*>(shared + U::template TableAt<T>());
  const Quotient block = Divide(blockIdx.x, task.by_splits);
  const MmaPlace at = FindMmaPlace<U>(task, block.quotient, block.remainder);
  typename EngineOf<U, T>::Type engine;
  if constexpr (U::kChecks == Checks::kHoisted) {
    if (AllInside<U>(task, at)) {
      MainLoop<U, T, false>(task, at, table, shared, engine);
    } else {
      MainLoop<U, T, true>(task, at, table, shared, engine);
    }
  } else {
    MainLoop<U, T, true>(task, at, table, shared, engine);
  }
  const bool together = task.reduction == Reduction::kCluster;
  TileWriter<U, T> writer(task, at, together ? at.split : 0, together ? task.splits : 1);
  float* tile = reinterpret_cast<float*>(shared);
  if constexpr (U::kTf32x3) {
    engine.Restore(task.depth);
    if (__syncthreads_and(engine.Finite())) {
      engine.Store(tile);
    } else {
      MultiplyAgain<typename U::Plain, T>(task, at, shared);
    }
  } else {
    engine.Store(tile);
  }
  FinishTile<U>(task, at, block.quotient, writer, tile);
  LeaveGate(task.gate);
}

// The second step of Reduction::kWorkspace: one block per tile.
template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads) MmaReduceKernel(const __grid_constant__ MmaTask<T> task) {
  __shared__ int2 scratch[U::kThreads / kWarp];
  if (!PassesGate(task.gate)) return;
  const MmaPlace at = FindMmaPlace<U>(task, blockIdx.x, 0);
  const float* tile = PartialTile<U>(task, at, blockIdx.x, 0);
  TileWriter<U, T> writer(task, at, 0, 1);
  writer.WriteTogether([&](int split, int pixel, int out_channel) {
    return *reinterpret_cast<const float4*>(tile + (split * U::kPixels + pixel) * U::kOutChannels + out_channel);
  });
  WriteCounts(task.counts, GridBlock(), writer.Written(), scratch);
}

template <class U, typename T>
Error LaunchMma(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream) {
  constexpr auto kKernel = MmaKernel<U, T>;
  Error error = Prepare<kKernel>("DirectKernel");
  if (error.failure()) return error;
  MmaTask<T> task = MakeMmaTask<T>(call, plan, workspace);
  const dim3 tiles(static_cast<unsigned>(task.tiles), static_cast<unsigned>(call.args.groups),
                   static_cast<unsigned>(call.args.stacks));
  // Of a cluster every block writes results; with a workspace MmaReduceKernel does, a block a tile.
  task.counts = CountsOf(call.counts, static_cast<int64_t>(task.tiles) * call.args.groups * call.args.stacks *
                                          (plan.reduction == Reduction::kCluster ? plan.splits : 1));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(tiles.x * plan.splits, tiles.y, tiles.z);
  config.blockDim = dim3(U::kThreads);
  config.dynamicSmemBytes = U::template SharedBytes<T>(task.taps);
  config.stream = stream;
  if (MayOverlap<kKernel>(&config, call.in_front, true)) task.gate.overlaps = true;
  LaunchAttributes attributes(plan.reduction == Reduction::kCluster ? plan.splits : 0, task.gate);
  config.attrs = attributes.list;
  config.numAttrs = attributes.count;
  error = CheckCuda(cudaLaunchKernelEx(&config, kKernel, task), "DirectKernel");
  if (error.failure() || plan.reduction != Reduction::kWorkspace) return error;
  using Sides = TileSides<U::kPixels, U::kOutChannels>;
  MmaReduceKernel<Sides, T><<<tiles, Sides::kThreads, 0, stream>>>(task);
  return CheckCuda(cudaGetLastError(), "DirectReduceKernel");
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_KERNEL_CUH_
