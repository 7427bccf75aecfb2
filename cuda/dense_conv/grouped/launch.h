// Launches the engine grouped. The template is instantiated once per element type (cuda/instantiate.cu.in).
#ifndef JSC_CUDA_DENSE_CONV_GROUPED_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_GROUPED_LAUNCH_H_

#include "cuda/core/launch.cuh"
#include "cuda/dense_conv/plan/grouped_plan.h"

namespace jsc {

template <typename T>
Error LaunchGroupedPlan(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_GROUPED_LAUNCH_H_
