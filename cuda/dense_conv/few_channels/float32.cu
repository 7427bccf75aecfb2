// The direct convolution of few channels, of float32: TF32, or two parts of it where the call is to be precise.
#include "cuda/dense_conv/few_channels/kernel.cuh"

namespace jsc {

template <>
ffi::Error LaunchFewChannelsPlan<float>(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream) {
  if (plan.tf32x3) return LaunchFewChannelsTile<float, true>(call, plan, stream);
  return LaunchFewChannelsTile<float, false>(call, plan, stream);
}

}  // namespace jsc
