// The convolution by warpgroup products of float32, as TF32.
#include "direct_warpgroup.cuh"
#include "direct_warpgroup.h"

namespace jsc {

ffi::Error WarpgroupFloat32(const ConvCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream) {
  return LaunchWarpgroupTile<float>(call, plan, maps, stream);
}

}  // namespace jsc
