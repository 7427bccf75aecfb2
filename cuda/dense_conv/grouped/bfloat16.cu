// The direct convolution of groups of few channels, bfloat16.
#include "cuda/dense_conv/grouped/kernel.cuh"
#include "cuda/dense_conv/grouped/launch.h"

namespace jsc {

template <>
ffi::Error LaunchGroupedPlan<__nv_bfloat16>(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream) {
  return LaunchGroupedTiles<__nv_bfloat16, false>(call, plan, stream);
}

}  // namespace jsc
