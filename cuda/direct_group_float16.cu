// The direct convolution of groups of few channels, float16.
#include "direct_group.cuh"
#include "direct_group.h"

namespace jsc {

template <>
ffi::Error LaunchGroupPlan<__half>(const ConvCall& call, const GroupPlan& plan, cudaStream_t stream) {
  return LaunchGroupTiles<__half, false>(call, plan, stream);
}

}  // namespace jsc
