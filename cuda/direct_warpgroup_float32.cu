// The convolution by warpgroup products of float32, as TF32.
#include "direct_warpgroup.cuh"
#include "direct_warpgroup.h"

namespace jsc {
namespace {

template <int kPixels>
ffi::Error LaunchTeams(const ConvCall& call, const WarpgroupPlan& plan, const PartsMaps& maps, cudaStream_t stream) {
  return LaunchWarpgroup<WarpgroupTile<float, 64, kPixels, false, PartsMail::kNone, false, 2>, float>(call, plan, maps,
                                                                                                      stream);
}

}  // namespace

ffi::Error WarpgroupFloat32(const ConvCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream) {
  if (plan.teams > 1) return (plan.pixels == 112 ? LaunchTeams<112> : LaunchTeams<56>)(call, plan, maps, stream);
  return LaunchWarpgroupTile<float>(call, plan, maps, stream);
}

}  // namespace jsc
