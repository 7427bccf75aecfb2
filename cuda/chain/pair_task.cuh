// A pair (chain/pair.cuh) as its kernel gets it.
#ifndef JSC_CUDA_CHAIN_PAIR_TASK_CUH_
#define JSC_CUDA_CHAIN_PAIR_TASK_CUH_

#include "cuda/chain/pair.h"
#include "cuda/dense_conv/wgmma/cluster_reduction.cuh"
#include "cuda/dense_conv/wgmma/tf32x3.cuh"

namespace jsc {

// A block has 64 middle channels of kPixels pixels; two warpgroups multiply, the last warp asks for copies. kTf32x3:
// float32-accurate products (dense_conv/wgmma/tf32x3.cuh).
template <typename T, int kPixels_, bool kTf32x3_ = false>
struct PairTile {
  static constexpr int kPixels = kPixels_, kOutChannels = kPairOutChannels;
  static constexpr bool kTf32x3 = kTf32x3_;
  static constexpr int kConsumers = 256, kThreads = kConsumers + kWarp;
  // Blocks of an SM that registers suffice for.
  static constexpr int kResident = kTf32x3 && kPixels > 32 ? 1 : 2;
  static constexpr int kStepChannels = kRowBytes / static_cast<int>(sizeof(T)), kBox = kStepChannels;
  static constexpr int kBoxBytes = kStepChannels * kRowBytes,
                       kWeightBytes = kOutChannels / kBox * kBoxBytes;           // of a slot
  static constexpr int kStageBytes = kPixels * kRowBytes;                        // kStepChannels channels of all pixels
  static constexpr int kBlocks = kOutChannels / kStepChannels;                   // of kStepChannels middle channels
  static constexpr int kRows = kPixels / kPatchWidth, kFirst = (kRows + 1) / 2;  // kFirst: the first warpgroup's rows
};

template <typename T>
struct PairTask {
  const T *bias, *next_bias;  // of the middle and of the result, or null
  const T* residual;          // [pixels, channels] or null
  const T *x, *kernel;        // [pixels, in_channels], [in_channels, channels]
  const T* next_kernel;       // [channels, output channels]
  T* middle;                  // [pixels, channels]
  T* out;                     // [pixels, output channels]
  T *low_middle, *low_out;    // at 3xTF32: as middle and out, or null
  Gate gate;
  int pixels, tile_pixels, channels, out_channels;
  int in_channels, steps;            // of x; blocks of kStepChannels of them
  int blocks, pieces;                // of a cluster; of 16 output channels of a tile's results, that a block completes
  int box_rows, sharing;             // pixels of a copy, and blocks that share a step's
  int slots;                         // stages of the weights
  int middle_at, weights_at;         // bytes from the first stage of pixels on
  bool relu, next_relu, copies_low;  // copies_low: at 3xTF32, those of x are in memory
  Divider by_blocks, by_steps;
};

struct PairMaps {
  CUtensorMap x;                    // [1, pixels, C], boxes of box_rows pixels x 128 bytes of channels
  CUtensorMap low;                  // of x's low parts, as x
  CUtensorMap kernel, next_kernel;  // as WgmmaMaps::kernel
};

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_TASK_CUH_
