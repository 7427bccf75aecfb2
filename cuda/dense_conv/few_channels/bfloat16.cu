// The direct convolution of few channels, of bfloat16.
#include "cuda/dense_conv/few_channels/kernel.cuh"

namespace jsc {

template <>
ffi::Error LaunchImagePlan<__nv_bfloat16>(const DeviceCall& call, const ImagePlan& plan, cudaStream_t stream) {
  return LaunchImageTile<__nv_bfloat16, false>(call, plan, stream);
}

}  // namespace jsc
