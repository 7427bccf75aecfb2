// One layer of a DenseNet block as a kernel, for few images. Details: docs/design/kernels/dense_block.md.
//
//   mid = relu(relu(scale * x + shift) * kernel1 + bias1), 1x1, C -> 128
//   out[channels C to C + 32] = mid * kernel2, 3x3, 128 -> 32
//
// Layout: NHWC. x is channels [0, C) of the block's own result, rows of `total` channels, but for the first C0, which
//   are read where they came from. A cluster has a tile of results and makes all of mid that it needs, so mid of the
//   halo is made twice or more often. Nothing passes between clusters but out.
// How a cluster shares it: each block makes 16 or 32 of the 128 middle channels, over all of C, and keeps them. It
//   multiplies them with their part of kernel2. Blocks send each other these sums, each result to a DSMEM slot of one
//   block, which adds them in the order of the blocks (bitwise repeatable). That is the one exchange.
// Why: at batch 1 a layer is short, so what counts is what it waits for. Only the last 32 channels of x come from the
//   kernel in front. The kernel before that one is done when this one starts, since kernels let the next one start
//   after they have waited themselves. So all other channels are copied and multiplied while the kernel in front runs.
//   When that is done, 32 channels, the 3x3 and the exchange are left.
// float32 at HIGHEST: 3xTF32, as in dense_conv/mma/tf32x3.cuh. The products of 16 channels are summed from zero and
//   added by FADD. Sums that are not finite are computed again by FFMA.
// Bound by: the way of the last 32 channels through a layer.
// Lost: pixels copied once for all blocks of a cluster (multicast), with a pipeline in step over its blocks: 1.0 to 1.8
//   times as long; bfloat16 for the products with low parts: errors of 1.1e-6 for 2.7e-7, 5 % less time at 56x56 and 3
//   to 8 % more on small maps.
#ifndef JSC_CUDA_DENSENET_BLOCK_KERNEL_CUH_
#define JSC_CUDA_DENSENET_BLOCK_KERNEL_CUH_

#include "cuda/core/cluster_sums.cuh"
#include "cuda/core/epilogue.cuh"
#include "cuda/core/truncation.cuh"
#include "cuda/densenet/block_copies.cuh"
#include "cuda/densenet/block_engine.cuh"

namespace jsc {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void SyncConsumers(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// threadIdx.x, read again: what follows from it is computed where it is used, not kept in registers meanwhile.
__device__ __forceinline__ int ThreadAgain() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// float32 at HIGHEST: high and low parts of what is not finite leave NaN in the sums they reach. Those are computed
// again by FFMA. Not inlined: this runs where there are infinities or NaN.

// Four middle channels from `middle` on of pixel (y, x) of the tile's image.
template <class U>
__device__ __noinline__ float4 SumMidAgain(const DenseLayerTask<float>& task, const float* scale, int image, int y,
                                           int x, int middle) {
  WaitForKernelBefore();  // which wrote the newest channels
  const int pixel = (image * task.height + y) * task.width + x;
  const float *first = task.input + static_cast<int64_t>(pixel) * task.first_channels,
              *rest = task.out + static_cast<int64_t>(pixel) * task.total;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int c = 0; c < task.channels; ++c) {
    const float value = c < task.first_channels ? first[c] : rest[c];
    const float v = AtLeast(fmaf(value, scale[c], scale[task.channels + c]), 0.f);
    sum = MultiplyAdd(v, Load4(task.kernel1 + c * kMiddle + middle), sum);
  }
  return sum;
}

// Four output channels of a result, over the block's middle channels; mid: of the window's first pixel.
template <class U>
__device__ __noinline__ float4 SumTapsAgain(const unsigned char* shared, int mid, int box_width, int out_channel) {
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int tap = 0; tap < 9; ++tap) {
    const auto* v =
        reinterpret_cast<const float*>(shared + U::kMid + (mid + tap / 3 * box_width + tap % 3) * U::kMidStride);
    const auto* w = reinterpret_cast<const float*>(shared + U::kKernel2 + out_channel / 16 * U::kTapBytes) +
                    tap * U::kMids * 16 + out_channel % 16;
#pragma unroll 1
    for (int m = 0; m < U::kMids; ++m) sum = MultiplyAdd(v[m], Load4(w + m * 16), sum);
  }
  return sum;
}

// mid from the warps' sums [depth warp, pixel, middle channel]: bias, ReLU, and zero outside the map.
template <class U>
__device__ __forceinline__ void StoreMid(const DenseLayerTask<typename U::T>& task, const DensePlace& at,
                                         const float* sums, unsigned char* shared) {
  using T = typename U::T;
  constexpr int kQuads = U::kMids / 4;
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  const float4 added = Load4(reinterpret_cast<const T*>(shared + U::kBias) + quad * 4);
#pragma unroll
  for (int i = 0; i < (U::kRows * kQuads + U::kConsumers - 1) / U::kConsumers; ++i) {
    const int row = static_cast<int>(threadIdx.x) / kQuads + i * (U::kConsumers / kQuads);
    if (row >= U::kRows) break;
    float4 v = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int depth_warp = 0; depth_warp < U::kSums; ++depth_warp) {
      v = v + Load4(sums + (depth_warp * U::kRows + row) * U::kSumStride + quad * 4);
    }
    const int box_y = static_cast<int>(row * task.by_box_width >> 16), box_x = row - box_y * (task.tile_width + 2);
    const auto y = static_cast<unsigned>(at.y + box_y - 1), x = static_cast<unsigned>(at.x + box_x - 1);
    const bool inside =
        box_y < task.tile_height + 2 && y < static_cast<unsigned>(task.height) && x < static_cast<unsigned>(task.width);
    if constexpr (U::kPrecise) {
      v = Restored(v, 2 * kTruncatedByWarps);
      if (inside && !IsFinite(v)) {
        v = SumMidAgain<U>(task, reinterpret_cast<const float*>(shared + U::kScale), at.image, static_cast<int>(y),
                           static_cast<int>(x), at.rank * U::kMids + quad * 4);
      }
    }
    v = inside ? Finish(v, added, true) : make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (sizeof(T) == 4 && !U::kPrecise) v = RoundToTf32(v);
    Store4(reinterpret_cast<T*>(shared + U::kMid + row * U::kMidStride) + quad * 4, v);
  }
}

// The warps' sums [depth warp, pixel, output channel], each result to the block of the cluster that completes it.
template <class U>
__device__ __forceinline__ void SendSums(const DenseLayerTask<typename U::T>& task, int rank, const float* sums,
                                         unsigned char* shared, uint64_t* barrier) {
  constexpr int kOutChannelQuads = kGrowth / 4;
  const int thread = ThreadAgain(), quads = task.tile_height * task.tile_width * kOutChannelQuads;
#pragma unroll
  for (int i = 0; i < (U::kQuads + U::kConsumers - 1) / U::kConsumers; ++i) {
    const int quad = thread + i * U::kConsumers;
    if (quad >= quads) break;
    auto* slots = reinterpret_cast<float4*>(shared + U::kSlots);
    const float* from = sums + quad / kOutChannelQuads * U::kOutStride + quad % kOutChannelQuads * 4;
    float4 v = AddParts<U::kOutDepthWarps>(reinterpret_cast<const float4*>(from), U::kOutRows * U::kOutStride / 4);
    if constexpr (U::kPrecise) {
      v = Restored(v, 2 * kTruncatedByWarps);
      if (!IsFinite(v)) {
        const int pixel = quad / kOutChannelQuads, row = static_cast<int>(pixel * task.by_tile_width >> 16);
        v = SumTapsAgain<U>(shared, pixel + row * 2, task.tile_width + 2, quad % kOutChannelQuads * 4);
      }
    }
    const int to = quad / U::kSlotQuads;
    SendToBlock(to, slots + rank * U::kSlotQuads + quad - to * U::kSlotQuads, v, barrier);
  }
}

// Adds what the blocks of the cluster have sent to this one.
template <class U>
__device__ __forceinline__ void StoreResults(const DenseLayerTask<typename U::T>& task, const DensePlace& at,
                                             const float4* slots) {
  using T = typename U::T;
  constexpr int kOutChannelQuads = kGrowth / 4;
  const int quads = task.tile_height * task.tile_width * kOutChannelQuads;
#pragma unroll 1
  for (int i = ThreadAgain(); i < U::kSlotQuads; i += U::kConsumers) {
    const int quad = at.rank * U::kSlotQuads + i;
    if (quad >= quads) break;
    const float4 v = AddParts<U::kSplit>(slots + i, U::kSlotQuads);
    const int pixel = quad / kOutChannelQuads, row = static_cast<int>(pixel * task.by_tile_width >> 16);
    const int y = at.y + row, x = at.x + pixel - row * task.tile_width;
    if (y >= task.height || x >= task.width) continue;
    const int64_t to = static_cast<int64_t>((at.image * task.height + y) * task.width + x) * task.total;
    Store4(task.out + to + task.channels + quad % kOutChannelQuads * 4, v);
  }
}

// x into the first channels of out.
template <class U>
__device__ __forceinline__ void CopyInput(const DenseLayerTask<typename U::T>& task) {
  constexpr int kPiece = 16 / U::kBytes;
  const int pieces = task.first_channels / kPiece;
  const int step = static_cast<int>(gridDim.x) * U::kConsumers;
#pragma unroll 2
  for (int i = static_cast<int>(blockIdx.x) * U::kConsumers + static_cast<int>(threadIdx.x); i < task.pixels * pieces;
       i += step) {
    const int pixel = i / pieces, piece = i - pixel * pieces;
    const uint4 words = reinterpret_cast<const uint4*>(task.x)[i];
    *reinterpret_cast<uint4*>(task.out + static_cast<int64_t>(pixel) * task.total + piece * kPiece) = words;
  }
}

// By warps that only copy: their part in the cluster's barriers.
template <class U>
__device__ __forceinline__ void LeaveCluster() {
  WaitForCluster();
  if constexpr (U::kTight) {
    ArriveAtCluster();
    WaitForCluster();
  }
}

// All that the warps that multiply do.
template <class U>
__device__ __forceinline__ void MakeResults(const DenseLayerTask<typename U::T>& task, const DensePlace& at,
                                            unsigned char* shared, DenseBarriers<U::kStages>& barriers) {
  using T = typename U::T;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const T* scale = reinterpret_cast<const T*>(shared + U::kScale);
  const T* shift = scale + task.channels;
  const int depth_warp = warp % U::kDepthWarps, mid_tile = warp / U::kDepthWarps % U::kMidWarps * U::kWarpMids;
  const int pixel_warp = warp / U::kDepthWarps / U::kMidWarps % U::kPixelWarps;
  const int stage_chunk = warp / U::kDepthWarps / U::kMidWarps / U::kPixelWarps;
  auto* sums_at = reinterpret_cast<float*>(shared);
  {
    float sums[U::kWarpMids][U::kWarpTiles][4] = {};
    WaitForBytes(&barriers.params, 0);
    const int box = (task.tile_height + 2) * (task.tile_width + 2), first_row = pixel_warp * U::kWarpTiles * 8;
    const int chunk_weights = kDenseChannels * 16 * U::kBytes;  // of 16 middle channels
    const DenseStages<U> stages(task);
    StagePlace from;
#pragma unroll 1
    for (int i = 0; i < stages.all; ++i) {
      const unsigned char* stage = shared + from.stage * U::kStageBytes;
      const int channel = stages.Channel(task, i) + stage_chunk * kDenseChannels;
      WaitForBytes(barriers.full + from.stage, from.parity);
      if (channel < (i < stages.of_x ? task.first_channels : task.early_channels)) {
        MultiplyChunk<U, 0, U::kWarpTiles>(stage,
                                           stage + U::kStageChunks * U::kRows * U::kRowBytes +
                                               (mid_tile * U::kStageChunks + stage_chunk) * chunk_weights,
                                           U::kStageChunks * chunk_weights, scale + channel, shift + channel,
                                           depth_warp, stage_chunk * box + first_row, sums);
      }
      __syncwarp();
      if (lane == 0) Arrive(SharedAddress(barriers.empty + from.stage));
      from.Advance(U::kStages);
    }
    if constexpr (!U::kTight) SyncConsumers(U::kConsumers);  // the stages are read
    if (task.early_channels < task.channels) {
      const unsigned char* stage = shared + (U::kTight ? from.stage * U::kStageBytes : U::kNewStage);
      WaitForBytes(&barriers.newest, 0);
      MultiplyNewest<U>(stage, stage + U::kRows * U::kRowBytes + mid_tile * chunk_weights, chunk_weights,
                        scale + task.early_channels, shift + task.early_channels, depth_warp, first_row, stage_chunk,
                        sums);
    }
    if constexpr (U::kTight) SyncConsumers(U::kConsumers);
    float* to =
        sums_at +
        ((stage_chunk * U::kDepthWarps + depth_warp) * U::kRows + pixel_warp * U::kWarpTiles * 8) * U::kSumStride +
        mid_tile * 16;
#pragma unroll
    for (int f = 0; f < U::kWarpMids; ++f) {
#pragma unroll
      for (int tile = 0; tile < U::kWarpTiles; ++tile) {
        StoreFragment<T>(to + tile * 8 * U::kSumStride + f * 16, U::kSumStride, sums[f][tile]);
      }
    }
  }
  SyncConsumers(U::kConsumers);
  StoreMid<U>(task, at, sums_at, shared);
  const int out_channel_tile = warp % U::kOutChannelWarps * U::kWarpOutChannels;
  const int out_depth_warp = warp / U::kOutChannelWarps % U::kOutDepthWarps;
  const int out_pixel = warp / U::kOutChannelWarps / U::kOutDepthWarps * U::kOutWarpTiles * 8;
  int rows[(U::kOutWarpTiles + 1) / 2];  // bytes, of each pixel's window
#pragma unroll
  for (int pair = 0; pair < (U::kOutWarpTiles + 1) / 2; ++pair) {
    int pixel = out_pixel + pair * 16 + lane / 16 * 8 + lane % 8;
    if (pixel >= task.tile_height * task.tile_width) pixel = 0;
    const int row = static_cast<int>(pixel * task.by_tile_width >> 16);
    rows[pair] = (pixel + row * 2) * U::kMidStride;
  }
  WaitForBytes(&barriers.kernel2, 0);
  SyncConsumers(U::kConsumers);
  WaitForCluster();                            // all blocks' slots are there
  if constexpr (U::kTight) ArriveAtCluster();  // once more: the first sums are read, so sums may come in their place
  {
    float sums[U::kWarpOutChannels][U::kOutWarpTiles][4] = {};
    MultiplyTaps<U>(shared + U::kKernel2 + out_channel_tile * U::kTapBytes, shared + U::kMid, task.tile_width + 2,
                    out_depth_warp, rows, sums);
    const int again = ThreadAgain() / 32;
    const int pixel = again / U::kOutChannelWarps / U::kOutDepthWarps * U::kOutWarpTiles * 8;
    float* to = sums_at + (again / U::kOutChannelWarps % U::kOutDepthWarps * U::kOutRows + pixel) * U::kOutStride +
                again % U::kOutChannelWarps * U::kWarpOutChannels * 16;
#pragma unroll
    for (int f = 0; f < U::kWarpOutChannels; ++f) {
#pragma unroll
      for (int tile = 0; tile < U::kOutWarpTiles; ++tile) {
        StoreFragment<T>(to + tile * 8 * U::kOutStride + f * 16, U::kOutStride, sums[f][tile]);
      }
    }
  }
  if constexpr (U::kTight) WaitForCluster();
  SyncConsumers(U::kConsumers);
  auto* slots = reinterpret_cast<float4*>(shared + U::kSlots);
  SendSums<U>(task, at.rank, sums_at, shared, &barriers.slots_full);
  WaitForBytes(&barriers.slots_full, 0);
  StoreResults<U>(task, at, slots);
}
#endif

template <class U>
__global__ void __launch_bounds__(U::kThreads, U::kResident)
    DenseLayerKernel(const __grid_constant__ DenseLayerTask<typename U::T> task,
                     const __grid_constant__ DenseLayerMaps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char unaligned[];
  __shared__ DenseBarriers<U::kStages> barriers;
  unsigned char* shared = unaligned + (-SharedAddress(unaligned) & 1023);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const DensePlace at = FindDensePlace<U>(task);
  if (threadIdx.x == U::kConsumers) {
#pragma unroll
    for (int i = 0; i < U::kStages; ++i) {
      InitBarrier(barriers.full + i);
      InitBarrier(barriers.empty + i, U::kWarps);
    }
    for (uint64_t* each : {&barriers.params, &barriers.kernel2, &barriers.newest, &barriers.slots_full})
      InitBarrier(each);
    FenceBarriers();
    const int quads = task.tile_height * task.tile_width * (kGrowth / 4) - at.rank * U::kSlotQuads;
    ExpectBytes(&barriers.slots_full, max(0, min(quads, U::kSlotQuads)) * U::kSplit * 16);
  }
  __syncthreads();
  ArriveAtCluster();
  if (warp == U::kWarps) {
    AskForEarly<U>(task, maps, at, shared, barriers);
    LeaveCluster<U>();
  } else if (warp == U::kWarps + 1) {
    AskForRest<U>(task, maps, at, shared, barriers);
    LeaveCluster<U>();
  } else {
    if (task.x != nullptr) CopyInput<U>(task);
    MakeResults<U>(task, at, shared, barriers);
  }
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_BLOCK_KERNEL_CUH_
