// The direct convolution of few channels, of float16.
#include "cuda/dense_conv/few_channels/kernel.cuh"

namespace jsc {

template <>
ffi::Error LaunchImagePlan<__half>(const DeviceCall& call, const ImagePlan& plan, cudaStream_t stream) {
  return LaunchImageTile<__half, false>(call, plan, stream);
}

}  // namespace jsc
