// The convolution by warpgroup products of bfloat16.
#include "cuda/dense_conv/wgmma/kernel.cuh"
#include "cuda/dense_conv/wgmma/launch.h"

namespace jsc {

ffi::Error WgmmaBfloat16(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  return LaunchWgmmaTile<__nv_bfloat16>(call, plan, maps, stream);
}

}  // namespace jsc
