// The direct convolution of few channels, of bfloat16.
#include "cuda/dense_conv/few_channels/kernel.cuh"

namespace jsc {

template <>
ffi::Error LaunchFewChannelsPlan<__nv_bfloat16>(const DeviceCall& call, const FewChannelsPlan& plan,
                                                cudaStream_t stream) {
  return LaunchFewChannelsTile<__nv_bfloat16, false>(call, plan, stream);
}

}  // namespace jsc
