// Launches a planned direct convolution; instantiated once per element type, in a file each, so that they compile
// apart.
#ifndef JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_

#include "cuda/core/common.cuh"
#include "cuda/dense_conv/plan/mma_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchDirectPlan(const DeviceCall& call, const DirectPlan& plan, void* workspace, cudaStream_t stream);

template <>
ffi::Error LaunchDirectPlan<float>(const DeviceCall&, const DirectPlan&, void*, cudaStream_t);
template <>
ffi::Error LaunchDirectPlan<__nv_bfloat16>(const DeviceCall&, const DirectPlan&, void*, cudaStream_t);
template <>
ffi::Error LaunchDirectPlan<__half>(const DeviceCall&, const DirectPlan&, void*, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_
