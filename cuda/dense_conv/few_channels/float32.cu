// The direct convolution of few channels, of float32: TF32, or two parts of it where the call is to be precise.
#include "cuda/dense_conv/few_channels/kernel.cuh"

namespace jsc {

template <>
ffi::Error LaunchImagePlan<float>(const DeviceCall& call, const ImagePlan& plan, cudaStream_t stream) {
  if (plan.parts) return LaunchImageTile<float, true>(call, plan, stream);
  return LaunchImageTile<float, false>(call, plan, stream);
}

}  // namespace jsc
