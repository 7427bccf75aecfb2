// The convolution by warpgroup products of float32, as TF32.
#include "cuda/dense_conv/wgmma/kernel.cuh"
#include "cuda/dense_conv/wgmma/launch.h"

namespace jsc {

ffi::Error WgmmaFloat32(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream) {
  if (plan.consumer_groups > 1) {
    using Tile = WgmmaTile<float, 64, 112, false, Tf32x3Slots::kNone, false, 2>;
    return LaunchWgmma<Tile, float>(call, plan, maps, stream);
  }
  return LaunchWgmmaTile<float>(call, plan, maps, stream);
}

}  // namespace jsc
