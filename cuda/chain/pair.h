// Two 1x1 convolutions of a chain, the second of the first's result, as one kernel (chain/pair.cuh).
#ifndef JSC_CUDA_CHAIN_PAIR_H_
#define JSC_CUDA_CHAIN_PAIR_H_

#include <cuda_runtime_api.h>

#include "cuda/chain/pair_plan.h"

namespace jsc {

// middle = relu(x * kernel + bias + residual), out = relu(middle * next_kernel + next_bias)
struct PairCall {
  PairShape shape;
  DataType dtype;           // of every buffer
  bool precise;             // float32 as float32 rather than as TF32
  const void* x;            // [pixels, in_channels]
  const void* kernel;       // [in_channels, channels]
  const void* bias;         // [channels] or null
  const void* residual;     // [pixels, channels] or null
  const void* next_kernel;  // [channels, output channels]
  const void* next_bias;    // [output channels] or null
  void* middle;             // [pixels, channels]; may be the residual
  void* out;                // [pixels, output channels]
  const void* low_x;        // low parts as of LowParts, each null where there are none
  void *low_middle, *low_out;
  bool relu, next_relu;
  Gate gate;
  Footprint* in_front;
};

// Whether one kernel may have these buffers: they begin at whole 16 bytes, and nothing is written over what is read.
bool SuitsPair(const PairCall& call);

// Launches a planned pair; compiled for sm_90a alone.
Error LaunchPair(const PairCall& call, const PairPlan& plan, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PAIR_H_
