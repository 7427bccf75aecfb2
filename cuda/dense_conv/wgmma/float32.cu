// The convolution by warpgroup products of float32, as TF32.
#include "cuda/dense_conv/wgmma/kernel.cuh"
#include "cuda/dense_conv/wgmma/launch.h"

namespace jsc {

ffi::Error WarpgroupFloat32(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream) {
  if (plan.teams > 1) {
    using Tile = WarpgroupTile<float, 64, 112, false, PartsMail::kNone, false, 2>;
    return LaunchWarpgroup<Tile, float>(call, plan, maps, stream);
  }
  return LaunchWarpgroupTile<float>(call, plan, maps, stream);
}

}  // namespace jsc
