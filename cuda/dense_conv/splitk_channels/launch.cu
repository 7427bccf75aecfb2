// The direct convolution of small maps by slices of channels, float32: TF32 or two parts of TF32.
#include "cuda/dense_conv/splitk_channels/kernel.cuh"
#include "cuda/dense_conv/splitk_channels/launch.h"

namespace jsc {

ffi::Error LaunchSplitKChannelsPlan(const DeviceCall& call, const SplitKChannelsPlan& plan,
                                    const SplitKChannelsMaps& maps, cudaStream_t stream) {
  const auto launch = plan.tf32x3 ? LaunchSplitKChannelsTile<float, true> : LaunchSplitKChannelsTile<float, false>;
  return launch(call, plan, maps, stream);
}

}  // namespace jsc
