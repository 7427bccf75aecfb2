// Launches a planned direct convolution of few channels; a file for each element type, so that they compile apart.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_

#include "cuda/core/common.cuh"
#include "cuda/dense_conv/plan/few_channels_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchFewChannelsPlan(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream);

template <>
ffi::Error LaunchFewChannelsPlan<float>(const DeviceCall&, const FewChannelsPlan&, cudaStream_t);
template <>
ffi::Error LaunchFewChannelsPlan<__nv_bfloat16>(const DeviceCall&, const FewChannelsPlan&, cudaStream_t);
template <>
ffi::Error LaunchFewChannelsPlan<__half>(const DeviceCall&, const FewChannelsPlan&, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_
