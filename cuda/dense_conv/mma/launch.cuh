// Which kernel of the engines mma and small_map a plan has.
#ifndef JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_
#define JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_

#include "cuda/dense_conv/mma/kernel.cuh"
#include "cuda/dense_conv/mma/launch.h"
#include "cuda/dense_conv/mma/small_map.cuh"

namespace jsc {

// The tiles of float32-accurate products, by 3xTF32 or by FFMA.
template <class Tunings>
Error LaunchPrecise(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream) {
  using Flat = typename Tunings::Flat;
  using Small = typename Tunings::Small;
  using Large = typename Tunings::Large;
  if (plan.tile == MmaTile::kFlat) return LaunchMma<Flat, float>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kSmall) return LaunchMma<Small, float>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kLarge) return LaunchMma<Large, float>(call, plan, workspace, stream);
  return LaunchMma<typename Tunings::Narrow, float>(call, plan, workspace, stream);
}

template <typename T>
Error LaunchMmaPlan(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream) {
  using Fast = MmaTunings<T>;
  Error error;
  if constexpr (sizeof(T) == 4) {
    const bool tf32x3 = plan.engine == Engine::kTf32x3;
    if (tf32x3 && LaunchSmallMapPlan<T, true>(call, plan, stream, &error)) return error;
    if (!tf32x3 && LaunchSmallMapPlan<T, false>(call, plan, stream, &error)) return error;
    if (tf32x3) return LaunchPrecise<Tf32x3Tunings>(call, plan, workspace, stream);
    if (plan.engine == Engine::kOuterProduct) return LaunchPrecise<PreciseTunings>(call, plan, workspace, stream);
  } else if (LaunchSmallMapPlan<T, false>(call, plan, stream, &error)) {
    return error;
  }
  if (plan.tile == MmaTile::kSmall) return LaunchMma<typename Fast::Small, T>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kTall) return LaunchMma<typename Fast::Tall, T>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kLarge) return LaunchMma<typename Fast::Large, T>(call, plan, workspace, stream);
  return LaunchMma<typename Fast::Narrow, T>(call, plan, workspace, stream);
}

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_MMA_LAUNCH_CUH_
