// The convolution by warpgroup products of bfloat16.
#include "direct_warpgroup.cuh"
#include "direct_warpgroup.h"

namespace jsc {

ffi::Error WarpgroupBfloat16(const ConvCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                             cudaStream_t stream) {
  return LaunchWarpgroupTile<__nv_bfloat16>(call, plan, maps, stream);
}

}  // namespace jsc
