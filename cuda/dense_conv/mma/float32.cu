// The direct convolution of float32: TF32 on tensor cores, or where the call is to be precise two parts of TF32 or
// FFMA.
#include "cuda/dense_conv/mma/kernel.cuh"
#include "cuda/dense_conv/mma/launch.cuh"
#include "cuda/dense_conv/mma/small_map.cuh"

namespace jsc {
namespace {

// The tunings of float32-accurate products, by either engine.
template <class Tunings>
ffi::Error LaunchPrecise(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream) {
  using Flat = typename Tunings::Flat;
  using Small = typename Tunings::Small;
  using Large = typename Tunings::Large;
  if (plan.tile == MmaTile::kFlat) return LaunchMma<Flat, float>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kSmall) return LaunchMma<Small, float>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kLarge) return LaunchMma<Large, float>(call, plan, workspace, stream);
  return LaunchMma<typename Tunings::Narrow, float>(call, plan, workspace, stream);
}

}  // namespace

template <>
ffi::Error LaunchMmaPlan<float>(const DeviceCall& call, const MmaPlan& plan, void* workspace, cudaStream_t stream) {
  using Fast = MmaTunings<float>;
  ffi::Error error;
  const bool split = plan.engine == Engine::kTf32x3;
  if (split ? LaunchSmallMapPlan<float, true>(call, plan, stream, &error)
            : LaunchSmallMapPlan<float, false>(call, plan, stream, &error)) {
    return error;
  }
  if (plan.engine == Engine::kTf32x3) return LaunchPrecise<Tf32x3Tunings>(call, plan, workspace, stream);
  if (plan.engine == Engine::kOuterProduct) return LaunchPrecise<PreciseTunings>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kSmall) return LaunchMma<Fast::Small, float>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kTall) return LaunchMma<Fast::Tall, float>(call, plan, workspace, stream);
  if (plan.tile == MmaTile::kLarge) return LaunchMma<Fast::Large, float>(call, plan, workspace, stream);
  return LaunchMma<Fast::Narrow, float>(call, plan, workspace, stream);
}

}  // namespace jsc
