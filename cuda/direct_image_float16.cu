// The direct convolution of few channels, of float16.
#include "direct_image.cuh"

namespace jsc {

template <>
ffi::Error LaunchImagePlan<__half>(const ConvCall& call, const ImagePlan& plan, cudaStream_t stream) {
  return LaunchImageTile<__half, false>(call, plan, stream);
}

}  // namespace jsc
