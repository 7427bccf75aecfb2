// What a block of a pair (chain/pair.cuh) copies to shared memory. Pixels of its cluster's tile, of which each block
// brings a share to all; weights of both kernels, through a pipeline.
#ifndef JSC_CUDA_CHAIN_PAIR_COPIES_CUH_
#define JSC_CUDA_CHAIN_PAIR_COPIES_CUH_

#include "cuda/chain/pair_task.cuh"

namespace jsc {

struct PairBarriers {
  uint64_t pixels_full[kMaxPairSteps], full[kMaxPairSlots], empty[kMaxPairSlots], sums_full;
};

#if __CUDA_ARCH__ >= 900
// CopyBox to the same place in each block of the cluster whose bit is set, counted at the barrier in the same place.
__device__ inline void CopyBoxToBlocks(void* shared, const CUtensorMap* map, int out_channel, int channel, int tap,
                                       uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(out_channel), "r"(channel), "r"(tap), "r"(SharedAddress(barrier)), "h"(blocks)
      : "memory");
}

// A block's share of a tile's pixels, which come to all blocks of its cluster: of one step where there are more blocks.
template <class U, typename T>
__device__ __forceinline__ void AskForPixels(const PairTask<T>& task, const PairMaps& maps, int tile, int rank,
                                             unsigned char* pixels, PairBarriers& barriers) {
  const Quotient part = Divide(rank, task.by_steps);  // of task.sharing of a step
  if (part.quotient >= task.sharing) return;
  const auto blocks = static_cast<uint16_t>((1u << task.blocks) - 1);
#pragma unroll 1
  for (int step = part.remainder; step < task.steps; step += task.blocks) {
#pragma unroll 1
    for (int row = part.quotient * task.box_rows; row < U::kPixels; row += task.sharing * task.box_rows) {
      const auto copy = [&](int stage, const CUtensorMap* map) {
        CopyBoxToBlocks(pixels + stage * U::kStageBytes + row * kRowBytes, map, step * U::kStepChannels,
                        tile * task.tile_pixels + row, 0, barriers.pixels_full + step, blocks);
      };
      copy(step, &maps.x);
      if (U::kTf32x3 && task.copies_low) copy(task.steps + step, &maps.low);
    }
  }
}

// The copies of a block, by a warp.
template <class U, typename T>
__device__ __forceinline__ void AskForPair(const PairTask<T>& task, const PairMaps& maps, int tile, int rank,
                                           unsigned char* pixels, unsigned char* weights, PairBarriers& barriers) {
  const int out_channel_tiles = task.out_channels / U::kOutChannels,
            items = task.steps + out_channel_tiles * U::kBlocks;
  StagePlace to;
  int next_tile = 0, next_block = 0;  // of the second kernel
  const auto ask = [&](int item) {
    uint64_t* full = barriers.full + to.stage;
    unsigned char* slot = weights + to.stage * U::kWeightBytes;
    WaitForBytes(barriers.empty + to.stage, to.parity ^ 1);
    const bool is_next = item >= task.steps;
    const int out_channel = is_next ? next_tile * U::kOutChannels : rank * U::kOutChannels;
    const int channel = is_next ? rank * U::kOutChannels + next_block * U::kStepChannels : item * U::kStepChannels;
    if (IsElected()) {
      ExpectBytes(full, U::kWeightBytes);
#pragma unroll
      for (int box = 0; box < U::kOutChannels / U::kBox; ++box) {
        CopyBox(slot + box * U::kBoxBytes, is_next ? &maps.next_kernel : &maps.kernel, out_channel + box * U::kBox,
                channel, 0, full);
      }
    }
    to.Advance(task.slots);
    if (is_next && ++next_block == U::kBlocks) {
      next_block = 0;
      ++next_tile;
    }
  };
  const int early = min(task.slots, items);
#pragma unroll 1
  for (int item = 0; item < early; ++item) ask(item);
  if (IsElected()) {
    // Every tile's cluster fetches its share of the rows that its block reads of the next kernel.
    const int tiles = static_cast<int>(gridDim.x) / task.blocks;
    const uint32_t bytes =
        static_cast<uint32_t>(U::kOutChannels * task.out_channels) * static_cast<uint32_t>(sizeof(T));
    const uint32_t share = (bytes / tiles + 15) / 16 * 16, from = min(tile * share, bytes);
    const char* rows = reinterpret_cast<const char*>(task.next_kernel +
                                                     static_cast<int64_t>(rank) * U::kOutChannels * task.out_channels);
    if (from < bytes) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows + from), "r"(min(share, bytes - from))
                   : "memory");
    }
    FetchAhead(task.gate);
  }
  WaitForCluster();   // all its blocks expect these pixels
  ArriveAtCluster();  // again, as the others do when they are done with the pixels
  WaitForKernelBefore();
  LetNextKernelStart();
  if (IsElected()) AskForPixels<U>(task, maps, tile, rank, pixels, barriers);
  __syncwarp();
#pragma unroll 1
  for (int item = early; item < items; ++item) ask(item);
}

// The stages of weights as one of the warps that multiply walks through them.
template <class U>
struct PairStages {
  PairBarriers& barriers;
  uint32_t weights;
  int slots;
  StagePlace at;

  __device__ __forceinline__ void Wait() const { WaitForBytes(barriers.full + at.stage, at.parity); }
  __device__ __forceinline__ uint32_t Slot() const { return weights + at.stage * U::kWeightBytes; }
  __device__ __forceinline__ uint32_t Empty() const { return SharedAddress(barriers.empty + at.stage); }
  static __device__ __forceinline__ void Free(uint32_t empty) {
    if (empty != 0 && threadIdx.x % kWarp == 0) Arrive(empty);
  }
  __device__ __forceinline__ void Advance() { at.Advance(slots); }
};
#endif

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_COPIES_CUH_
