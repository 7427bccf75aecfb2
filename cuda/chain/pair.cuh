// Two 1x1 convolutions of a chain in one kernel: the last of a residual block, with its residual, and the first of the
// next block.
//
//   middle[pixel] = relu(x[pixel] * kernel + bias + residual[pixel]),  out[pixel] = relu(middle[pixel] * next + bias)
//
// Layout: output channels are the rows of a product, pixels its columns. A cluster has a tile of pixels, and each of
//   its blocks 64 of the middle's channels. A block multiplies all of x by its weights, completes and writes these
//   channels, and keeps them in shared memory as operand of the next product. That gives each block sums of all results
//   over its 64 channels. The blocks send them to DSMEM slots (as in wgmma/cluster_reduction.cuh), 16 output channels
//   of all pixels at a time, and add them in the order of the blocks. Both kernels come through one pipeline: stages of
//   64 output channels x 128 bytes of channels, the first kernel's before the kernel in front is done. The two
//   warpgroups have half of each step's channels in the first product, and every second 64 output channels in the next.
// Why: in a chain every kernel costs 3 to 4 us that do not depend on its products: its start behind the one in front,
//   first pixels, cluster reduction and epilogue. 1x1 layers need no pixels but their own, so two of them can share
//   these, and the residual network's largest map is not read again.
// Bound by: that, once for two layers, and the cluster reduction: what 16 blocks send each other comes at 14 bytes a
// cycle.
// Lost: tiles of 112 pixels for 56x56, whose registers leave the kernels beside them no room.
// Tests: tests/fusion/test_chain_pairs.py.
#ifndef JSC_CUDA_CHAIN_PAIR_CUH_
#define JSC_CUDA_CHAIN_PAIR_CUH_

#include "cuda/chain/pair_results.cuh"

namespace jsc {

template <class U, typename T>
__global__ void __launch_bounds__(U::kThreads, U::kResident)
    PairKernel(const __grid_constant__ PairTask<T> task, const __grid_constant__ PairMaps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared[];
  __shared__ PairBarriers barriers;
  unsigned char* pixels = shared + (-SharedAddress(shared) & (kSwizzleBytes - 1));
  unsigned char *middle = pixels + task.middle_at, *weights = pixels + task.weights_at;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
  const Quotient place = Divide(blockIdx.x, task.by_blocks);
  const int rank = place.remainder, first_pixel = place.quotient * task.tile_pixels;
  const int own_pixels = min(task.tile_pixels, task.pixels - first_pixel);
  if (warp == U::kConsumers / kWarp) {
    if (lane == 0) {
      PrefetchMap(maps.kernel);
      PrefetchMap(maps.x);
      if (U::kTf32x3 && task.copies_low) PrefetchMap(maps.low);
#pragma unroll
      for (int i = 0; i < kMaxPairSlots; ++i) {
        InitBarrier(barriers.full + i);
        InitBarrier(barriers.empty + i, U::kConsumers / kWarp);
      }
#pragma unroll
      for (uint64_t& full : barriers.pixels_full) InitBarrier(&full);
      InitBarrier(&barriers.sums_full);
      FenceBarriers();
      const int stage_bytes = U::kTf32x3 && task.copies_low ? 2 * U::kStageBytes : U::kStageBytes;
      for (int step = 0; step < task.steps; ++step) ExpectBytes(barriers.pixels_full + step, stage_bytes);
      ExpectBytes(&barriers.sums_full, task.pieces * task.blocks * ((own_pixels + 1) / 2) * 8 * 16);
    }
    __syncwarp();
    asm volatile("bar.arrive 1, %0;" ::"n"(U::kThreads) : "memory");
    ArriveAtCluster();
    AskForPair<U, T>(task, maps, place.quotient, rank, pixels, weights, barriers);
    __syncwarp();
    WaitForCluster();
    return;
  }
  const int group = warp / 4;
  // As TransposeQuad leaves them: a lane's pixel of a row, and the first of its four output channels of a warp's 16 or,
  // TF32, 32.
  const int column = lane % 4 * 2 + lane / 4 % 2;
  const auto tile_out_channel_of = [&](int w) {
    if constexpr (sizeof(T) == 4) return w / 2 * 32 + (w % 2 * 2 + lane / 16 + lane / 8 % 2 * 4) * 4;
    return w * 16 + lane / 8 % 2 * 8 + lane / 16 * 4;
  };
  const float next_least = task.next_relu ? 0.f : -INFINITY;
  Middle<U, T> results(task, rank, group, first_pixel, own_pixels);
  asm volatile("bar.sync 1, %0;" ::"n"(U::kThreads) : "memory");
  ArriveAtCluster();
  WaitForCluster();
  WaitForKernelBefore();
  results.LoadRest();
  float sums[U::kPixels / 2];
  PairStages<U> stages{barriers, SharedAddress(weights), task.slots};
  if constexpr (U::kTf32x3) {
    MultiplyFirstTf32x3<U>(stages, barriers, SharedAddress(pixels), task.steps, !task.copies_low, group, sums);
  } else {
    FirstProduct<U, T>::Multiply(stages, barriers, SharedAddress(pixels), task.steps, group, sums);
  }
  ArriveAtCluster();  // done with the pixels, in whose place the sums come: the products that read them have ended
  float4 own[U::kFirst] = {};
  if (group == 0) {
    AddHalves<U, 0>(sums, reinterpret_cast<float4*>(middle), own);
  } else {
    AddHalves<U, 1>(sums, reinterpret_cast<float4*>(middle), own);
  }
  if constexpr (U::kTf32x3) CompleteFirst<U>(results, first_pixel, rank, own);
  results.Write(own, SharedAddress(middle));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 2, %0;" ::"n"(U::kConsumers) : "memory");
  const int out_channel_tiles = task.out_channels / U::kOutChannels;
#pragma unroll 1
  for (int tile = 0; tile < out_channel_tiles; ++tile) {
    if (tile % 2 != group) {
#pragma unroll 1
      for (int i = 0; i < U::kBlocks; ++i) {
        stages.Wait();
        PairStages<U>::Free(stages.Empty());
        stages.Advance();
      }
      continue;
    }
    if constexpr (U::kTf32x3) {
      MultiplyNextTf32x3<U>(stages, SharedAddress(middle), sums);
      CompleteNext<U>(results, first_pixel, rank, tile, sums);
    } else {
      NextProduct<U, T>::Multiply(stages, SharedAddress(middle), sums);
    }
    if (tile == group) WaitForCluster();
    const Quotient piece = Divide(tile * 4 + warp % 4, task.by_blocks);
    const uint32_t slot =
        SharedAddress(pixels) + ((piece.quotient * task.blocks + rank) * U::kRows * kWarp + lane) * 16;
    const uint32_t to = InBlock(slot, piece.remainder);
    const uint32_t full = InBlock(SharedAddress(&barriers.sums_full), piece.remainder);
#pragma unroll
    for (int row = 0; row < U::kRows; ++row) {
      const float* v = sums + row * 4;
      SendIfBelow(to + row * (kWarp * 16), {v[0], v[1], v[2], v[3]}, full, row * kPatchWidth + lane % 4 * 2,
                  own_pixels);
    }
  }
  if (group >= out_channel_tiles) WaitForCluster();
  const auto out_channel_of = [&](int i) {
    const int piece = rank + i / U::kRows * task.blocks;
    return piece / 4 * U::kOutChannels + tile_out_channel_of(piece % 4);
  };
  const int rows = task.pieces * U::kRows;
  const auto bias_of = [&](int i) {
    return task.next_bias && i < rows ? Load4(task.next_bias + out_channel_of(i)) : float4{0.f, 0.f, 0.f, 0.f};
  };
  float4 next_bias = bias_of(warp);
  WaitForBytes(&barriers.sums_full, 0);
#pragma unroll 1
  for (int i = warp; i < rows; i += U::kConsumers / kWarp) {
    const int row = i % U::kRows, pixel = row * kPatchWidth + column;
    const auto* received =
        reinterpret_cast<const float4*>(pixels) + (i / U::kRows * task.blocks * U::kRows + row) * kWarp + lane;
    const float4 sum = AddParts(received, U::kRows * kWarp, task.blocks);
    const float4 result = AtLeast(TransposeQuad<T>(sum) + next_bias, next_least);
    const int64_t element = static_cast<int64_t>(first_pixel + pixel) * task.out_channels + out_channel_of(i);
    Store4If(task.out + element, result, pixel < own_pixels);
    if constexpr (U::kTf32x3) Store4If(task.low_out + element, LowPart(result), task.low_out && pixel < own_pixels);
    next_bias = bias_of(i + U::kConsumers / kWarp);
  }
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_CUH_
