// Room: the custom calls of CUDA, and the planners' binding for Python. This header has the kernel families as handlers
// see them. Each function returns an error that names the kernel, or success. `device` is the ordinal of the call's
// device, which is current. May change: handlers and their checks; names and attributes of custom calls are recorded in
// compiled programs. Tests: tests/cuda/test_native.py, tests/dispatch/test_candidates.py.
#ifndef JSC_CUDA_FFI_KERNELS_H_
#define JSC_CUDA_FFI_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/chain/call.h"
#include "cuda/core/device_call.h"
#include "cuda/sparse/coo/plan.h"
#include "native/coo_lists.h"
#include "native/coo_star_args.h"

namespace jsc {

// Scratch memory of a call; bytes may be 0.
struct Workspace {
  void* data;  // [bytes]
  size_t bytes;
};

Error Ecr(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream);   // sparse/ecr/ecr.cu
Error Pecr(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream);  // sparse/ecr/pecr.cu
Error Coo(const DeviceCall& call, const CooChoice& choice, Workspace workspace, int device,
          cudaStream_t stream);  // sparse/coo/coo.cu
// The same of stored lists, which are read in x's place.
Error CooOfLists(const DeviceCall& call, const CooChoice& choice, const CooLists& lists, Workspace workspace,
                 int device, cudaStream_t stream);  // sparse/coo/stored.cu
Error Direct(const DeviceCall& call, Workspace workspace, int device,
             cudaStream_t stream);  // dense_conv/dense_conv.cu
Error Dense(const DeviceCall& call, Workspace workspace, int device,
            cudaStream_t stream);                                               // sparse/matvec/rows.cu
Error PerOutput(const DeviceCall& call, cudaStream_t stream, bool skip_zeros);  // sparse/per_output.cu
// Ecr or Direct, without a pool (sparse/adaptive.cc). gate: which side is for which density; `above` is not read.
Error Adaptive(const DeviceCall& call, const Gate& gate, Workspace workspace, int device, cudaStream_t stream);

// The error of a call that is told a candidate that does not fit it.
inline Error NoSuchTile() {
  return Error(ErrorCode::kInvalidArgument, "candidate: no kernel has this tile for the call on this device");
}

// Whether Direct takes the pool of a call into a kernel that is made for it.
bool DirectPools(const DeviceCall& call, int device);

Error Chain(const ChainCall& call, int device, cudaStream_t stream);  // chain/chain.cu: a kernel for each layer

// sparse/coo/coo_star.cu
Error CooFromDense(const CooStarArgs& args, const void* x, void* values, void* positions, void* counts,
                   cudaStream_t stream);
Error CooToDense(const CooStarArgs& args, const void* values, const void* positions, const void* counts, void* x,
                 cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_FFI_KERNELS_H_
