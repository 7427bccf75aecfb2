// The convolution by warpgroup products of bfloat16.
#include "cuda/dense_conv/wgmma/kernel.cuh"
#include "cuda/dense_conv/wgmma/launch.h"

namespace jsc {

ffi::Error WarpgroupBfloat16(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                             cudaStream_t stream) {
  return LaunchWarpgroupTile<__nv_bfloat16>(call, plan, maps, stream);
}

}  // namespace jsc
