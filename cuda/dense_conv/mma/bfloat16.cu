// The direct convolution of bfloat16, on tensor cores.
#include "cuda/dense_conv/mma/kernel.cuh"
#include "cuda/dense_conv/mma/launch.cuh"
#include "cuda/dense_conv/mma/small_map.cuh"

namespace jsc {

template <>
ffi::Error LaunchMmaPlan<__nv_bfloat16>(const DeviceCall& call, const MmaPlan& plan, void* workspace,
                                        cudaStream_t stream) {
  ffi::Error error;
  if (LaunchSmallMapPlan<__nv_bfloat16, false>(call, plan, stream, &error)) return error;
  using Fast = MmaTunings<__nv_bfloat16>;
  if (plan.tile == MmaTile::kSmall) return LaunchMma<Fast::Small, __nv_bfloat16>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kTall) return LaunchMma<Fast::Tall, __nv_bfloat16>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kLarge) return LaunchMma<Fast::Large, __nv_bfloat16>(call, plan, workspace, stream);
  return LaunchMma<Fast::Narrow, __nv_bfloat16>(call, plan, workspace, stream);
}

}  // namespace jsc
