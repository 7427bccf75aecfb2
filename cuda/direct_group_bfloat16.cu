// The direct convolution of groups of few channels, bfloat16.
#include "direct_group.cuh"
#include "direct_group.h"

namespace jsc {

template <>
ffi::Error LaunchGroupPlan<__nv_bfloat16>(const ConvCall& call, const GroupPlan& plan, cudaStream_t stream) {
  return LaunchGroupTiles<__nv_bfloat16, false>(call, plan, stream);
}

}  // namespace jsc
