// Launches a planned convolution by warpgroup products; a file for each element type, compiled for sm_90a alone.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/dense_conv/wgmma/maps.h"

namespace jsc {

ffi::Error WgmmaFloat32(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream);
// The same at HIGHEST: products of parts.
ffi::Error WgmmaHighest(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream);
ffi::Error WgmmaBfloat16(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream);
ffi::Error WgmmaFloat16(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_
