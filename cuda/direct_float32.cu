// The direct convolution of float32: TF32 on tensor cores, or FFMA where the call is to be precise.
#include "direct_kernel.cuh"
#include "direct_launch.cuh"

namespace jsc {

template <>
ffi::Error LaunchDirectPlan<float>(const ConvCall& call, const DirectPlan& plan, void* workspace, cudaStream_t stream) {
  using Fast = DirectTunings<float>;
  using Precise = PreciseTunings;
  if (plan.precise) {
    if (plan.tile == DirectTile::kFlat) return LaunchDirect<Precise::Flat, float>(call, plan, workspace, stream);
    if (plan.tile == DirectTile::kSmall) return LaunchDirect<Precise::Small, float>(call, plan, workspace, stream);
    if (plan.tile == DirectTile::kLarge) return LaunchDirect<Precise::Large, float>(call, plan, workspace, stream);
    return LaunchDirect<Precise::Narrow, float>(call, plan, workspace, stream);
  }
  if (plan.tile == DirectTile::kSmall) return LaunchDirect<Fast::Small, float>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kTall) return LaunchDirect<Fast::Tall, float>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kLarge) return LaunchDirect<Fast::Large, float>(call, plan, workspace, stream);
  return LaunchDirect<Fast::Narrow, float>(call, plan, workspace, stream);
}

}  // namespace jsc
