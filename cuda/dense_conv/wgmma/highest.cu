// The convolution by warpgroup products of float32 at HIGHEST: TF32 in two parts.
#include "cuda/dense_conv/wgmma/kernel.cuh"
#include "cuda/dense_conv/wgmma/launch.h"

namespace jsc {
namespace {

template <int kFilters, int kPixels, PartsMail kMail = PartsMail::kNone>
ffi::Error Launch(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps, cudaStream_t stream) {
  const auto launch = call.small.x ? LaunchWarpgroup<WarpgroupTile<float, kFilters, kPixels, true, kMail, true>, float>
                                   : LaunchWarpgroup<WarpgroupTile<float, kFilters, kPixels, true, kMail>, float>;
  if (call.small.written) *call.small.written = true;
  return launch(call, plan, maps, stream);
}

// Blocks of two teams: not in chains, so without small parts in memory.
template <int kPixels>
ffi::Error LaunchTeams(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps, cudaStream_t stream) {
  const auto launch = plan.by_mail
                          ? LaunchWarpgroup<WarpgroupTile<float, 64, kPixels, true, PartsMail::kKept, false, 2>, float>
                          : LaunchWarpgroup<WarpgroupTile<float, 64, kPixels, true, PartsMail::kNone, false, 2>, float>;
  return launch(call, plan, maps, stream);
}

}  // namespace

ffi::Error WarpgroupHighest(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream) {
  if (plan.teams > 1) return (plan.pixels == 112 ? LaunchTeams<112> : LaunchTeams<56>)(call, plan, maps, stream);
  if (plan.filters == 128) return Launch<128, 112>(call, plan, maps, stream);
  if (plan.pixels == 112) {
    if (plan.roomy) return Launch<64, 112, PartsMail::kRoomy>(call, plan, maps, stream);
    return plan.by_mail ? Launch<64, 112, PartsMail::kKept>(call, plan, maps, stream)
                        : Launch<64, 112>(call, plan, maps, stream);
  }
  if (plan.pixels == 64) return Launch<64, 64>(call, plan, maps, stream);
  if (plan.roomy) return Launch<64, 56, PartsMail::kRoomy>(call, plan, maps, stream);
  return plan.by_mail ? Launch<64, 56, PartsMail::kKept>(call, plan, maps, stream)
                      : Launch<64, 56>(call, plan, maps, stream);
}

}  // namespace jsc
