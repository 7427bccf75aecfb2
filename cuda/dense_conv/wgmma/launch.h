// Launches a planned convolution by warpgroup products; a file for each element type, compiled for sm_90a alone.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/dense_conv/wgmma/maps.h"

namespace jsc {

ffi::Error WarpgroupFloat32(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream);
// The same at HIGHEST: products of parts.
ffi::Error WarpgroupHighest(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream);
ffi::Error WarpgroupBfloat16(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                             cudaStream_t stream);
ffi::Error WarpgroupFloat16(const DeviceCall& call, const WarpgroupPlan& plan, const PartsMaps& maps,
                            cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_
