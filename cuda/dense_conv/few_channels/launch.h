// Launches a planned direct convolution of few channels; a file for each element type, so that they compile apart.
#ifndef JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_

#include "cuda/core/common.cuh"
#include "cuda/dense_conv/plan/few_channels_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchImagePlan(const DeviceCall& call, const ImagePlan& plan, cudaStream_t stream);

template <>
ffi::Error LaunchImagePlan<float>(const DeviceCall&, const ImagePlan&, cudaStream_t);
template <>
ffi::Error LaunchImagePlan<__nv_bfloat16>(const DeviceCall&, const ImagePlan&, cudaStream_t);
template <>
ffi::Error LaunchImagePlan<__half>(const DeviceCall&, const ImagePlan&, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_FEW_CHANNELS_LAUNCH_H_
