// The kernel families as the handlers see them. Each returns an error that names the kernel, or success; `device` is
// the ordinal of the call's device and is current.
#ifndef JSC_CUDA_KERNELS_H_
#define JSC_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "conv_args.h"
#include "coo_plan.h"
#include "coo_star_args.h"
#include "segment_args.h"

namespace jsc {

// Scratch memory of a call; bytes may be 0.
struct Workspace {
  void* data;  // [bytes]
  size_t bytes;
};

ffi::Error Ecr(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream);                // ecr.cu
ffi::Error Pecr(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream);               // pecr.cu
ffi::Error Coo(const ConvCall& call, CooPlan plan, Workspace workspace, int device, cudaStream_t stream);  // coo.cu
ffi::Error Direct(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream);             // direct.cu
ffi::Error Dense(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream);              // dense.cu
ffi::Error PerOutput(const ConvCall& call, cudaStream_t stream, bool skip_zeros);  // per_output.cu
// Ecr or Direct, without a pool: adaptive.cc. gate: which side is for which density; `above` is not read.
ffi::Error Adaptive(const ConvCall& call, const Gate& gate, Workspace workspace, int device, cudaStream_t stream);

// Whether Direct takes the pool of a call into a kernel that is made for it.
bool DirectPools(const ConvCall& call, int device);

ffi::Error Chain(const SegmentCall& call, int device, cudaStream_t stream);  // chain.cu: a kernel for each layer

// coo_star.cu
ffi::Error CooFromDense(const CooStarArgs& args, const void* x, void* values, void* positions, void* counts,
                        cudaStream_t stream);
ffi::Error CooToDense(const CooStarArgs& args, const void* values, const void* positions, const void* counts, void* x,
                      cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_KERNELS_H_
