// The direct convolution of float32: TF32 on tensor cores, or where the call is to be precise two parts of TF32 or
// FFMA.
#include "cuda/dense_conv/mma/kernel.cuh"
#include "cuda/dense_conv/mma/launch.cuh"
#include "cuda/dense_conv/mma/small_map.cuh"

namespace jsc {
namespace {

// The tunings of float32-accurate products, by either engine.
template <class Tunings>
ffi::Error LaunchPrecise(const DeviceCall& call, const DirectPlan& plan, void* workspace, cudaStream_t stream) {
  using Flat = typename Tunings::Flat;
  using Small = typename Tunings::Small;
  using Large = typename Tunings::Large;
  if (plan.tile == DirectTile::kFlat) return LaunchDirect<Flat, float>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kSmall) return LaunchDirect<Small, float>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kLarge) return LaunchDirect<Large, float>(call, plan, workspace, stream);
  return LaunchDirect<typename Tunings::Narrow, float>(call, plan, workspace, stream);
}

}  // namespace

template <>
ffi::Error LaunchDirectPlan<float>(const DeviceCall& call, const DirectPlan& plan, void* workspace,
                                   cudaStream_t stream) {
  using Fast = DirectTunings<float>;
  ffi::Error error;
  const bool split = plan.engine == Engine::kSplitTensorCores;
  if (split ? LaunchDeepPlan<float, true>(call, plan, stream, &error)
            : LaunchDeepPlan<float, false>(call, plan, stream, &error)) {
    return error;
  }
  if (plan.engine == Engine::kSplitTensorCores) return LaunchPrecise<SplitTunings>(call, plan, workspace, stream);
  if (plan.engine == Engine::kOuterProduct) return LaunchPrecise<PreciseTunings>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kSmall) return LaunchDirect<Fast::Small, float>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kTall) return LaunchDirect<Fast::Tall, float>(call, plan, workspace, stream);
  if (plan.tile == DirectTile::kLarge) return LaunchDirect<Fast::Large, float>(call, plan, workspace, stream);
  return LaunchDirect<Fast::Narrow, float>(call, plan, workspace, stream);
}

}  // namespace jsc
