// The engine wgmma for float32 at HIGHEST: 3xTF32.
#include "cuda/dense_conv/wgmma/kernel.cuh"

namespace jsc {
namespace {

template <int kOutChannels, int kPixels, Tf32x3Slots kSlots = Tf32x3Slots::kNone>
Error Launch(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  const auto launch = call.low.x ? LaunchWgmma<WgmmaTile<float, kOutChannels, kPixels, true, kSlots, true>, float>
                                 : LaunchWgmma<WgmmaTile<float, kOutChannels, kPixels, true, kSlots>, float>;
  if (call.low.written) *call.low.written = true;
  return launch(call, plan, maps, stream);
}

// Blocks of two consumer groups: not in chains, so without low parts in memory.
template <int kPixels>
Error LaunchConsumerGroups(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  const auto launch = plan.uses_slots
                          ? LaunchWgmma<WgmmaTile<float, 64, kPixels, true, Tf32x3Slots::kSpilled, false, 2>, float>
                          : LaunchWgmma<WgmmaTile<float, 64, kPixels, true, Tf32x3Slots::kNone, false, 2>, float>;
  return launch(call, plan, maps, stream);
}

}  // namespace

Error LaunchWgmmaHighest(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  if (plan.consumer_groups > 1)
    return (plan.pixels == 112 ? LaunchConsumerGroups<112> : LaunchConsumerGroups<56>)(call, plan, maps, stream);
  if (plan.out_channels == 128) return Launch<128, 112>(call, plan, maps, stream);
  if (plan.pixels == 112) {
    if (plan.double_accumulators) return Launch<64, 112, Tf32x3Slots::kDoubleAccumulators>(call, plan, maps, stream);
    return plan.uses_slots ? Launch<64, 112, Tf32x3Slots::kSpilled>(call, plan, maps, stream)
                           : Launch<64, 112>(call, plan, maps, stream);
  }
  if (plan.pixels == 64) return Launch<64, 64>(call, plan, maps, stream);
  if (plan.double_accumulators) return Launch<64, 56, Tf32x3Slots::kDoubleAccumulators>(call, plan, maps, stream);
  return plan.uses_slots ? Launch<64, 56, Tf32x3Slots::kSpilled>(call, plan, maps, stream)
                         : Launch<64, 56>(call, plan, maps, stream);
}

}  // namespace jsc
