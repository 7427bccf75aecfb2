// The convolution by warpgroup products of float16.
#include "cuda/dense_conv/wgmma/kernel.cuh"
#include "cuda/dense_conv/wgmma/launch.h"

namespace jsc {

ffi::Error WarpgroupFloat16(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream) {
  return LaunchWarpgroupTile<__half>(call, plan, maps, stream);
}

}  // namespace jsc
