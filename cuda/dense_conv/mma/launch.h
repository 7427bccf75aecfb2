// Launches the engines mma and small_map. The template is instantiated once per element type (cuda/instantiate.cu.in).
#ifndef JSC_CUDA_DENSE_CONV_MMA_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_MMA_LAUNCH_H_

#include "cuda/core/launch.cuh"
#include "cuda/dense_conv/plan/mma_plan.h"

namespace jsc {

template <typename T>
Error LaunchMmaPlan(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_LAUNCH_H_
