// The direct convolution of float16, on tensor cores.
#include "cuda/dense_conv/mma/kernel.cuh"
#include "cuda/dense_conv/mma/launch.cuh"
#include "cuda/dense_conv/mma/small_map.cuh"

namespace jsc {

template <>
ffi::Error LaunchMmaPlan<__half>(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream) {
  ffi::Error error;
  if (LaunchSmallMapPlan<__half, false>(call, plan, stream, &error)) return error;
  using Fast = MmaTunings<__half>;
  if (plan.tile == MmaTile::kSmall) return LaunchMma<Fast::Small, __half>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kTall) return LaunchMma<Fast::Tall, __half>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kLarge) return LaunchMma<Fast::Large, __half>(call, plan, workspace, stream);
  return LaunchMma<Fast::Narrow, __half>(call, plan, workspace, stream);
}

}  // namespace jsc
