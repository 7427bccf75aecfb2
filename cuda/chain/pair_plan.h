// How two 1x1 convolutions of a chain as one kernel (chain/pair.cuh) are cut.
#ifndef JSC_CUDA_CHAIN_PAIR_PLAN_H_
#define JSC_CUDA_CHAIN_PAIR_PLAN_H_

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kPairOutChannels = 64;  // of a pipeline stage, and middle channels of a block
constexpr int kPairPiece = 16;        // output channels of the second layer that a block completes together
constexpr int kMaxPairSteps = 8, kMaxPairSlots = 12;  // of pixels; stages of weights

struct PairShape {
  int64_t pixels, in_channels, channels, out_channels;  // channels: of the middle, which is the first one's result
};

struct PairPlan {
  int blocks;             // of a cluster, which has a tile; 0: no plan
  int tiles, pixels;      // pixels: that a kernel's tile has room for
  int tile_pixels;        // that it has
  int box_rows, sharing;  // pixels of a copy; blocks that share a step's pixels
  int slots, middle_at, weights_at, shared_bytes;
};

// Whether some GPU may have one kernel for a pair, of whatever type: its operands are then kept (fusion/schedule.py).
bool MayBePair(const PairShape& shape);

// How a pair is cut on a device. A plan without blocks says that two kernels are better. tf32x3: float32 at HIGHEST.
PairPlan ChoosePairPlan(const PairShape& shape, int element_bytes, bool tf32x3, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_PLAN_H_
