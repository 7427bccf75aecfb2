// What TMA brings to a block of a DenseNet layer's kernel, issued by two warps. One goes through the channels that are
// there when the kernel starts, in a pipeline. The other brings parameters and waits for the kernel in front.
#ifndef JSC_CUDA_DENSENET_BLOCK_COPIES_CUH_
#define JSC_CUDA_DENSENET_BLOCK_COPIES_CUH_

#include "cuda/core/programmatic_launch.cuh"
#include "cuda/densenet/block_shape.cuh"

namespace jsc {

template <int kStages>
struct DenseBarriers {
  uint64_t full[kStages], empty[kStages];
  uint64_t params, kernel2, newest, slots_full;
};

// The tile of a cluster.
struct DensePlace {
  int image, y, x, rank;
};

template <class U>
__device__ __forceinline__ DensePlace FindDensePlace(const DenseLayerTask<typename U::T>& task) {
  const int cluster = static_cast<int>(blockIdx.x) / U::kSplit, row = cluster / task.tiles_x;
  return {row / task.tiles_y, row % task.tiles_y * task.tile_height, cluster % task.tiles_x * task.tile_width,
          static_cast<int>(blockIdx.x) % U::kSplit};
}

#if __CUDA_ARCH__ >= 900
// kernel1's part of so many chunks.
template <class U>
__device__ __forceinline__ void AskForWeights(const CUtensorMap* map, unsigned char* to, int chunks, int channel,
                                              int rank, uint64_t* barrier) {
#pragma unroll
  for (int i = 0; i < U::kMidTiles; ++i) {
    CopyBox(to + i * chunks * (kDenseChannels * 16 * U::kBytes), map, rank * U::kMids + i * 16, channel, 0, barrier);
  }
}

// The stages of a kernel: chunks of x, then of the block as far as they are there; the last of either may hold more
// than is used.
template <class U>
struct DenseStages {
  static constexpr int kChannels = U::kStageChunks * kDenseChannels;
  int of_x, all;
  __device__ __forceinline__ explicit DenseStages(const DenseLayerTask<typename U::T>& task) {
    of_x = (task.first_channels + kChannels - 1) / kChannels;
    all = of_x + (task.early_channels - task.first_channels + kChannels - 1) / kChannels;
  }
  __device__ __forceinline__ int Channel(const DenseLayerTask<typename U::T>& task, int stage) const {
    return stage < of_x ? stage * kChannels : task.first_channels + (stage - of_x) * kChannels;
  }
};

// The chunk of the kernel before: what is there when the kernel starts, and the rest.
template <class U>
__device__ __forceinline__ void AskForNewWeights(const DenseLayerTask<typename U::T>& task, const DenseLayerMaps& maps,
                                                 const DensePlace& at, unsigned char* stage,
                                                 DenseBarriers<U::kStages>& barriers) {
  ExpectBytes(&barriers.newest, (task.tile_height + 2) * (task.tile_width + 2) * U::kRowBytes + U::kWeightBytes);
  AskForWeights<U>(&maps.weights, stage + U::kRows * U::kRowBytes, 1, task.early_channels, at.rank, &barriers.newest);
  PrefetchMap(maps.newest);
}

template <class U>
__device__ __forceinline__ void AskForNewPixels(const DenseLayerTask<typename U::T>& task, const DenseLayerMaps& maps,
                                                const DensePlace& at, unsigned char* stage,
                                                DenseBarriers<U::kStages>& barriers) {
  CopyBox(stage, &maps.newest, 0, at.x - 1, at.y - 1, task.early_channels / kDenseChannels, at.image, &barriers.newest);
}

// By one warp: the channels that are there when the kernel starts; where shared memory is tight, those of the kernel
// before too, behind them in the pipeline.
template <class U>
__device__ __forceinline__ void AskForEarly(const DenseLayerTask<typename U::T>& task, const DenseLayerMaps& maps,
                                            const DensePlace& at, unsigned char* shared,
                                            DenseBarriers<U::kStages>& barriers) {
  const int box_bytes = (task.tile_height + 2) * (task.tile_width + 2) * U::kRowBytes;
  const DenseStages<U> stages(task);
  StagePlace to;
#pragma unroll 1
  for (int i = 0; i < stages.all; ++i) {
    uint64_t* full = barriers.full + to.stage;
    WaitForBytes(barriers.empty + to.stage, to.parity ^ 1);
    if (IsElected()) {
      unsigned char* stage = shared + to.stage * U::kStageBytes;
      const int channel = stages.Channel(task, i);
      ExpectBytes(full, U::kStageChunks * (box_bytes + U::kWeightBytes));
      CopyBox(stage, i < stages.of_x ? &maps.x : &maps.block, 0, at.x - 1, at.y - 1, channel / kDenseChannels, at.image,
              full);
      AskForWeights<U>(&maps.kernel1, stage + U::kStageChunks * U::kRows * U::kRowBytes, U::kStageChunks, channel,
                       at.rank, full);
    }
    to.Advance(U::kStages);
  }
  if (!U::kTight || task.early_channels == task.channels) return;
  WaitForBytes(barriers.empty + to.stage, to.parity ^ 1);
  unsigned char* stage = shared + to.stage * U::kStageBytes;
  if (IsElected()) AskForNewWeights<U>(task, maps, at, stage, barriers);
  __syncwarp();
  WaitForKernelBefore();
  if (IsElected()) AskForNewPixels<U>(task, maps, at, stage, barriers);
}

// By one warp: everything that is copied once, and unless that is done above the channels of the kernel before.
template <class U>
__device__ __forceinline__ void AskForRest(const DenseLayerTask<typename U::T>& task, const DenseLayerMaps& maps,
                                           const DensePlace& at, unsigned char* shared,
                                           DenseBarriers<U::kStages>& barriers) {
  using T = typename U::T;
  const bool has_newest = !U::kTight && task.early_channels < task.channels;
  if (IsElected()) {
    const int row_bytes = task.channels * U::kBytes;
    ExpectBytes(&barriers.params, 2 * row_bytes + U::kMids * U::kBytes);
    CopyBytes(shared + U::kScale, task.scale, row_bytes, &barriers.params);
    CopyBytes(shared + U::kScale + row_bytes, task.shift, row_bytes, &barriers.params);
    CopyBytes(shared + U::kBias, task.bias + at.rank * U::kMids, U::kMids * U::kBytes, &barriers.params);
    ExpectBytes(&barriers.kernel2, U::kOutChannelTiles * U::kTapBytes);
#pragma unroll
    for (int i = 0; i < U::kOutChannelTiles; ++i) {
      CopyBox(shared + U::kKernel2 + i * U::kTapBytes, &maps.kernel2, i * 16, at.rank * U::kMids, 0, &barriers.kernel2);
    }
    if (has_newest) AskForNewWeights<U>(task, maps, at, shared + U::kNewStage, barriers);
  }
  __syncwarp();
  WaitForKernelBefore();
  LetNextKernelStart();  // not before: it reads at once what the kernel before has written
  if (has_newest && IsElected()) AskForNewPixels<U>(task, maps, at, shared + U::kNewStage, barriers);
}
#endif

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_BLOCK_COPIES_CUH_
