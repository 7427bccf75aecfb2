// Launches a convolution by slices of channels (direct_slice.cuh).
#ifndef JSC_CUDA_DIRECT_SLICE_H_
#define JSC_CUDA_DIRECT_SLICE_H_

#include <cuda_runtime_api.h>

#include "slice_maps.h"

namespace jsc {

// call.args: as FlattenedArgs gives them
ffi::Error LaunchSlicePlan(const ConvCall& call, const SlicePlan& plan, const SliceMaps& maps, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_SLICE_H_
