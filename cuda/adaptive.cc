// A convolution by its sparse or by its dense kernels, whichever the density of x calls for, without asking the host.
//
// Both are enqueued, with opposite gates on the same counts (density.cuh): the kernels of one side return at once.
//
// Bound by: what the closed side costs, launch, one read of the counts and the way out of its blocks.
// Lost: a third kernel for a pool behind Direct, launched to overlap it too (10 to 27 us more than XLA's pool; why was
// not found).
#include "conv_plan.h"
#include "kernels.h"

namespace jsc {

ffi::Error Adaptive(const ConvCall& call, const Gate& gate, Workspace workspace, int device, cudaStream_t stream) {
  if (call.args.pool != Pool::kNone) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_adaptive has no pool; jsc_pecr has");
  }
  ConvCall sparse = call, dense = call;
  sparse.gate = dense.gate = gate;
  dense.gate.above = true;
  dense.gate.overlaps = GetDeviceInfo(device).clusters[1] > 0;  // Hopper and later have both
  ffi::Error error = Ecr(sparse, workspace, device, stream);
  return error.failure() ? error : Direct(dense, workspace, device, stream);
}

}  // namespace jsc
