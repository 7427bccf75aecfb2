// Launches a planned direct convolution of groups of few channels (dense_conv/grouped/kernel.cuh); a file for each
// element type, so that they compile apart.
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_GROUPED_LAUNCH_H_

#include "cuda/core/common.cuh"
#include "cuda/dense_conv/plan/grouped_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchGroupedPlan(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream);

template <>
ffi::Error LaunchGroupedPlan<float>(const DeviceCall&, const GroupedPlan&, cudaStream_t);
template <>
ffi::Error LaunchGroupedPlan<__nv_bfloat16>(const DeviceCall&, const GroupedPlan&, cudaStream_t);
template <>
ffi::Error LaunchGroupedPlan<__half>(const DeviceCall&, const GroupedPlan&, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_LAUNCH_H_
