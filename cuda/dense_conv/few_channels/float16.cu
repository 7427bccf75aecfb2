// The direct convolution of few channels, of float16.
#include "cuda/dense_conv/few_channels/kernel.cuh"

namespace jsc {

template <>
ffi::Error LaunchFewChannelsPlan<__half>(const DeviceCall& call, const FewChannelsPlan& plan, cudaStream_t stream) {
  return LaunchFewChannelsTile<__half, false>(call, plan, stream);
}

}  // namespace jsc
