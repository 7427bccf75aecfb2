// A convolution by its dense or by its sparse kernels, as the density of x asks, without asking the host.
//
// Both are enqueued, with opposite gates on the same counts (core/density.cuh), and the kernels of one side return at
// once. The dense side comes first, as most maps are for it. It starts 0.2 to 1.1 us earlier that way, the other 0.1 to
// 0.9 us later (H200, float32 at HIGHEST).
//
// Bound by: what the closed side costs: launch, one read of the counts and the way out of its blocks. Lost: a third
// kernel for a pool behind the dense side, launched to overlap it too (10 to 27 us more than XLA's pool).
#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"
#include "cuda/ffi/kernels.h"

namespace jsc {

Error Adaptive(const DeviceCall& call, const Gate& gate, Workspace workspace, int device, cudaStream_t stream) {
  if (call.args.pool != Pool::kNone) {
    return Error(ErrorCode::kInvalidArgument, "jsc_adaptive has no pool; jsc_pecr has");
  }
  DeviceCall sparse = call, dense = call;
  sparse.gate = dense.gate = gate;
  dense.gate.above = true;
  sparse.gate.overlaps = GetDeviceInfo(device).clusters[1] > 0;  // Hopper and later have both
  Error error = Direct(dense, workspace, device, stream);
  return error.failure() ? error : Ecr(sparse, workspace, device, stream);
}

}  // namespace jsc
