// Two 1x1 convolutions of a chain, the second of the first's result, as one kernel (pair.cuh).
#ifndef JSC_CUDA_PAIR_H_
#define JSC_CUDA_PAIR_H_

#include <cuda_runtime_api.h>

#include "conv_plan.h"

namespace jsc {

constexpr int kPairFilters = 64;                      // of a slot of the ring, and middle channels of a block
constexpr int kPairPiece = 16;                        // filters of the second layer that a block completes together
constexpr int kMaxPairSteps = 8, kMaxPairSlots = 12;  // of pixels; of filters

struct PairShape {
  int64_t pixels, in_channels, channels, features;  // channels: of the middle, which is the first one's result
};

// middle = relu(x * kernel + bias + residual), out = relu(middle * next_kernel + next_bias)
struct PairCall {
  PairShape shape;
  ffi::DataType dtype;      // of every buffer
  bool precise;             // float32 as float32 rather than as TF32
  const void* x;            // [pixels, in_channels]
  const void* kernel;       // [in_channels, channels]
  const void* bias;         // [channels] or null
  const void* residual;     // [pixels, channels] or null
  const void* next_kernel;  // [channels, features]
  const void* next_bias;    // [features] or null
  void* middle;             // [pixels, channels]; may be the residual
  void* out;                // [pixels, features]
  const void* small_x;      // small parts as of SmallParts, each null where there are none
  void *small_middle, *small_out;
  bool relu, next_relu;
  Gate gate;
  Footprint* in_front;
};

struct PairPlan {
  int blocks;             // of a cluster, which has a tile; 0: no plan
  int tiles, pixels;      // pixels: that a kernel's tile has room for
  int tile_pixels;        // that it has
  int box_rows, sharing;  // pixels of a copy; blocks that share a step's pixels
  int slots, middle_at, filters_at, shared_bytes;
};

// How a pair is cut on a device, or a plan without blocks where it is not to be: then there are two kernels. parts:
// float32-accurate products.
PairPlan ChoosePairPlan(const PairShape& shape, int element_bytes, bool parts, const DeviceInfo& device);

// Whether one kernel may have these buffers: they begin at whole 16 bytes, and nothing is written over what is read.
bool SuitsPair(const PairCall& call);

// Launches a planned pair; compiled for sm_90a alone.
ffi::Error LaunchPair(const PairCall& call, const PairPlan& plan, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_PAIR_H_
