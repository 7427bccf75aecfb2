// The convolution by warpgroup products of float16.
#include "direct_warpgroup.cuh"
#include "direct_warpgroup.h"

namespace jsc {

ffi::Error WarpgroupFloat16(const ConvCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream) {
  return LaunchWarpgroupTile<__half>(call, plan, maps, stream);
}

}  // namespace jsc
