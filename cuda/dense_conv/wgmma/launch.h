// Launches the engine wgmma, compiled for sm_90a alone.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_
#define JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "cuda/dense_conv/wgmma/maps.h"

namespace jsc {

// TF32 and 16 bits. Instantiated once per element type (cuda/instantiate.cu.in).
template <typename T>
Error LaunchWgmmaPlan(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream);

// float32 at HIGHEST: 3xTF32 (dense_conv/wgmma/highest.cu).
Error LaunchWgmmaHighest(const DeviceCall& call, const WgmmaPlan& plan, const Tf32x3Maps& maps, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_LAUNCH_H_
