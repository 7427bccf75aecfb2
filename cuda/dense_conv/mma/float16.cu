// The direct convolution of float16, on tensor cores.
#include "cuda/dense_conv/mma/kernel.cuh"
#include "cuda/dense_conv/mma/launch.cuh"
#include "cuda/dense_conv/mma/small_map.cuh"

namespace jsc {

template <>
ffi::Error LaunchDirectPlan<__half>(const DeviceCall& call, const DirectPlan& plan, void* workspace,
                                    cudaStream_t stream) {
  ffi::Error error;
  if (LaunchDeepPlan<__half, false>(call, plan, stream, &error)) return error;
  using Fast = DirectTunings<__half>;
  if (plan.tile == DirectTile::kSmall) return LaunchDirect<Fast::Small, __half>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kTall) return LaunchDirect<Fast::Tall, __half>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kLarge) return LaunchDirect<Fast::Large, __half>(call, plan, workspace, stream);
  return LaunchDirect<Fast::Narrow, __half>(call, plan, workspace, stream);
}

}  // namespace jsc
