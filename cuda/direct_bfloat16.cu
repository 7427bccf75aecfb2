// The direct convolution of bfloat16, on tensor cores.
#include "direct_deep.cuh"
#include "direct_kernel.cuh"
#include "direct_launch.cuh"

namespace jsc {

template <>
ffi::Error LaunchDirectPlan<__nv_bfloat16>(const ConvCall& call, const DirectPlan& plan, void* workspace,
                                           cudaStream_t stream) {
  ffi::Error error;
  if (LaunchDeepPlan<__nv_bfloat16, false>(call, plan, stream, &error)) return error;
  using Fast = DirectTunings<__nv_bfloat16>;
  if (plan.tile == DirectTile::kSmall) return LaunchDirect<Fast::Small, __nv_bfloat16>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kTall) return LaunchDirect<Fast::Tall, __nv_bfloat16>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kLarge) return LaunchDirect<Fast::Large, __nv_bfloat16>(call, plan, workspace, stream);
  return LaunchDirect<Fast::Narrow, __nv_bfloat16>(call, plan, workspace, stream);
}

}  // namespace jsc
