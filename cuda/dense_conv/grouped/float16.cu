// The direct convolution of groups of few channels, float16.
#include "cuda/dense_conv/grouped/kernel.cuh"
#include "cuda/dense_conv/grouped/launch.h"

namespace jsc {

template <>
ffi::Error LaunchGroupedPlan<__half>(const DeviceCall& call, const GroupedPlan& plan, cudaStream_t stream) {
  return LaunchGroupedTiles<__half, false>(call, plan, stream);
}

}  // namespace jsc
