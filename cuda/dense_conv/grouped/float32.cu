// The direct convolution of groups of few channels, float32: TF32 or two parts of TF32.
#include "cuda/dense_conv/grouped/kernel.cuh"
#include "cuda/dense_conv/grouped/launch.h"

namespace jsc {

template <>
ffi::Error LaunchGroupPlan<float>(const DeviceCall& call, const GroupPlan& plan, cudaStream_t stream) {
  return plan.parts ? LaunchGroupTiles<float, true>(call, plan, stream)
                    : LaunchGroupTiles<float, false>(call, plan, stream);
}

}  // namespace jsc
