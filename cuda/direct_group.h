// Launches a planned direct convolution of groups of few channels (direct_group.cuh); a file for each element type, so
// that they compile apart.
#ifndef JSC_CUDA_DIRECT_GROUP_H_
#define JSC_CUDA_DIRECT_GROUP_H_

#include "common.cuh"
#include "group_plan.h"

namespace jsc {

template <typename T>
ffi::Error LaunchGroupPlan(const ConvCall& call, const GroupPlan& plan, cudaStream_t stream);

template <>
ffi::Error LaunchGroupPlan<float>(const ConvCall&, const GroupPlan&, cudaStream_t);
template <>
ffi::Error LaunchGroupPlan<__nv_bfloat16>(const ConvCall&, const GroupPlan&, cudaStream_t);
template <>
ffi::Error LaunchGroupPlan<__half>(const ConvCall&, const GroupPlan&, cudaStream_t);

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_GROUP_H_
