// Launches the engine few_channels. The template is instantiated once per element type (cuda/instantiate.cu.in).
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_

#include "cuda/core/launch.cuh"
#include "cuda/dense_conv/plan/few_channels_plan.h"

namespace jsc {

template <typename T>
Error LaunchFewChannelsPlan(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_
