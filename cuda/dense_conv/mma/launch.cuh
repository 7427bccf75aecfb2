// Launches a planned direct convolution; instantiated once per element type, in a file each, so that they compile
// apart.
#ifndef JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_

#include "cuda/core/common.cuh"
#include "cuda/dense_conv/plan/mma_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchMmaPlan(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream);

template <>
ffi::Error LaunchMmaPlan<float>(const DeviceCall&, const MmaPlan&, void*, cudaStream_t);
template <>
ffi::Error LaunchMmaPlan<__nv_bfloat16>(const DeviceCall&, const MmaPlan&, void*, cudaStream_t);
template <>
ffi::Error LaunchMmaPlan<__half>(const DeviceCall&, const MmaPlan&, void*, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_
