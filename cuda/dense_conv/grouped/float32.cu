// The direct convolution of groups of few channels, float32: TF32 or two parts of TF32.
#include "cuda/dense_conv/grouped/kernel.cuh"
#include "cuda/dense_conv/grouped/launch.h"

namespace jsc {

template <>
ffi::Error LaunchGroupedPlan<float>(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream) {
  return plan.tf32x3 ? LaunchGroupedTiles<float, true>(call, plan, stream)
                     : LaunchGroupedTiles<float, false>(call, plan, stream);
}

}  // namespace jsc
