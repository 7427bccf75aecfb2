// The direct convolution of few channels, of bfloat16.
#include "direct_image.cuh"

namespace jsc {

template <>
ffi::Error LaunchImagePlan<__nv_bfloat16>(const ConvCall& call, const ImagePlan& plan, cudaStream_t stream) {
  return LaunchImageTile<__nv_bfloat16, false>(call, plan, stream);
}

}  // namespace jsc
