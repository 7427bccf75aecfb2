// Sizes of a DenseNet layer's kernel: what a cluster computes, how its warps share that, and where it lies in shared
// memory.
#ifndef JSC_CUDA_DENSENET_BLOCK_SHAPE_CUH_
#define JSC_CUDA_DENSENET_BLOCK_SHAPE_CUH_

#include "cuda/dense_conv/wgmma/copies.cuh"
#include "cuda/densenet/block.h"

namespace jsc {

// Passed to a kernel by value.
struct DenseLayerMaps {
  CUtensorMap x;        // [N, C0 / 32, H, W, 32], boxes of a stage's chunks x a tile and the pixels around it x 32
  CUtensorMap block;    // [N, C / 32, H, W, 32] of the result, the same
  CUtensorMap newest;   // the same of one chunk
  CUtensorMap kernel1;  // [1, C, kMiddle], boxes of a stage's channels x 16
  CUtensorMap weights;  // the same of one chunk
  CUtensorMap kernel2;  // [9, kMiddle, kGrowth], boxes of 9 x a block's middle channels x 16
};

template <typename T>
struct DenseLayerTask {
  const T* scale;    // [C]
  const T* shift;    // [C]
  const T* bias;     // [kMiddle]
  const T* kernel1;  // [C, kMiddle]
  const T* input;    // [N * H * W, C0]
  const T* x;        // the same, to be copied into out by this layer, or null
  T* out;            // [N, H, W, total]; this layer writes channels [C, C + kGrowth)
  int first_channels, channels, total;
  int early_channels;  // of C, that no kernel writes that may still run
  int height, width, pixels;
  int tile_height, tile_width, tiles_y, tiles_x;
  unsigned by_box_width, by_tile_width;  // 2^16 / width, rounded up
};

// kSplit: blocks of a cluster, each with its middle channels. kBoxTiles, kOutTiles: pixels of the tile with those
// around it, and of its results, in eights. kStageChunks: chunks of 32 channels in a stage, each with its own group of
// warps. A copy costs the producer some 100 cycles, however large it is. kStages: stages in shared memory. kResident:
// blocks of an SM that there are registers for. kWide: a warp makes all middle channels of the block, and all results,
// of fewer pixels, which it then loads and splits once. kTight: less shared memory, so that two blocks of a large tile
// fit.
template <typename T_, bool kPrecise_, int kSplit_, int kBoxTiles, int kOutTiles_, int kStageChunks_, int kStages_,
          int kResident_, bool kWide = false, bool kTight_ = false>
struct DenseShape {
  using T = T_;
  static constexpr bool kPrecise = kPrecise_;
  static constexpr int kSplit = kSplit_, kOutTiles = kOutTiles_, kStageChunks = kStageChunks_, kStages = kStages_;
  static constexpr int kResident = kResident_;
  static constexpr bool kTight = kTight_;
  static constexpr int kWarps = 8, kConsumers = kWarps * 32, kThreads = kConsumers + 64;
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kStep = kPrecise ? 16 : 32 / kBytes;  // channels of a product
  static constexpr int kMids = kMiddle / kSplit, kMidTiles = kMids / 16;

  // 1x1: warps share a chunk's channels, middle channels (unless wide) and pixels.
  static constexpr int kWarpMids = kWide ? kMidTiles : 1, kMidWarps = kMidTiles / kWarpMids;  // in sixteens
  static constexpr int kSteps = kDenseChannels / kStep;
  static constexpr int kDepthWarps = kMidTiles == 1 ? kSteps : 2;
  static constexpr int kPixelWarps = kWarps / kMidWarps / kDepthWarps / kStageChunks;
  static constexpr int kSums = kDepthWarps * kStageChunks;  // of a pixel and middle channel
  static constexpr int kWarpSteps = kSteps / kDepthWarps;
  static constexpr int kWarpTiles = (kBoxTiles + kPixelWarps - 1) / kPixelWarps;
  static constexpr int kRows = kWarpTiles * kPixelWarps * 8;
  // Of the newest chunk, which all share.
  static constexpr int kNewTiles = (kWarpTiles + kStageChunks - 1) / kStageChunks;
  static_assert(kSums * kPixelWarps * kMidWarps == kWarps);
  // 3x3: the same of taps and middle channels, results and pixels.
  static constexpr int kOutChannelTiles = kGrowth / 16;
  static constexpr int kWarpOutChannels = kWide ? kOutChannelTiles : 1,
                       kOutChannelWarps = kOutChannelTiles / kWarpOutChannels;
  static constexpr int kOutPixelWarps = kOutTiles > 8 ? 2 * kWarpOutChannels : 1;
  static constexpr int kOutDepthWarps = kWarps / kOutChannelWarps / kOutPixelWarps;
  static constexpr int kOutSteps = 9 * kMids / kStep;
  static constexpr int kOutWarpTiles = (kOutTiles + kOutPixelWarps - 1) / kOutPixelWarps;
  static constexpr int kOutRows = kOutWarpTiles * kOutPixelWarps * 8;

  static constexpr int kRowBytes = kDenseChannels * kBytes;                      // of a pixel in a stage
  static constexpr int kWeightBytes = kMidTiles * kDenseChannels * 16 * kBytes;  // of a chunk
  static constexpr int kChunkBytes = (kRows * kRowBytes + kWeightBytes + 1023) / 1024 * 1024;
  static constexpr int kStageBytes = (kStageChunks * (kRows * kRowBytes + kWeightBytes) + 1023) / 1024 * 1024;
  static constexpr int kMidStride = kMids * kBytes + 16;  // of a pixel, so that eight rows meet all banks
  static constexpr int kSumStride = kMids + 4, kOutStride = kGrowth + 4;  // of a pixel's sums
  static constexpr int kQuads = kOutTiles * 8 * kGrowth / 4;              // results of a tile, in fours
  static constexpr int kSlotQuads = (kQuads + kSplit - 1) / kSplit;
  static constexpr int kTapBytes = 9 * kMids * 16 * kBytes;  // of 16 results

  // Shared memory, from an address that is a multiple of 1024. Sums take the place of the stages; where it is tight,
  // the newest chunk is in the pipeline too and sums come to where it was, behind the sums.
  static constexpr int kPipelineBytes = kStages * kStageBytes;
  static constexpr int kSlotBytes = kSplit * kSlotQuads * 16;
  static constexpr int kOutSumBytes = kOutDepthWarps * kOutRows * kOutStride * 4;
  static constexpr int kNewStage = kPipelineBytes;  // unless tight
  static constexpr int kTightBytes = (kOutSumBytes + kSlotBytes + 1023) / 1024 * 1024;
  static constexpr int kKernel2 =
      !kTight ? kNewStage + kChunkBytes : (kPipelineBytes > kTightBytes ? kPipelineBytes : kTightBytes);
  static constexpr int kSlots = kTight ? kOutSumBytes : kKernel2 + kOutChannelTiles * kTapBytes;
  static constexpr int kMid =  // [pixel, middle channel]
      kTight ? kKernel2 + kOutChannelTiles * kTapBytes : kSlots + kSlotBytes;
  static constexpr int kBias = kMid + kRows * kMidStride;
  static constexpr int kScale = kBias + kMids * kBytes;  // [C], then shift [C]
  static_assert(kRows * kRowBytes % 256 == 0 && kTapBytes % 256 == 0 && kKernel2 % 256 == 0 && kScale % 16 == 0);
  static_assert(kSlots % 16 == 0 && (!kTight || kStageChunks == 1));
  static_assert(kKernel2 >= kSums * kRows * kSumStride * 4 && kKernel2 >= kOutSumBytes);
  static_assert(kTight || kNewStage >= kSums * kRows * kSumStride * 4);

  static constexpr int SharedBytes(int channels) { return kScale + 2 * channels * kBytes + 1024; }
};

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_BLOCK_SHAPE_CUH_
