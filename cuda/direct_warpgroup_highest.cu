// The convolution by warpgroup products of float32 at HIGHEST: TF32 in two parts.
#include "direct_warpgroup.cuh"
#include "direct_warpgroup.h"

namespace jsc {

ffi::Error WarpgroupHighest(const ConvCall& call, const WarpgroupPlan& plan, const WarpgroupMaps& maps,
                            cudaStream_t stream) {
  if (plan.filters == 128)
    return LaunchWarpgroup<WarpgroupTile<float, 128, 112, true>, float>(call, plan, maps, stream);
  if (plan.pixels == 112) return LaunchWarpgroup<WarpgroupTile<float, 64, 112, true>, float>(call, plan, maps, stream);
  return LaunchWarpgroup<WarpgroupTile<float, 64, 56, true>, float>(call, plan, maps, stream);
}

}  // namespace jsc
