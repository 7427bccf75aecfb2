// ECR: convolution, bias, residual and ReLU over lists of the non-zeros of each group of windows: window_tile.cuh.
//
// The paper's ECR compresses each window of one channel and one image into values, indices and a count, and gives a
// thread one sparse dot product. Here the window spans a chunk of channels and the list serves 32 to 128 output
// channels. The index is the offset of a kernel row, so the kernel is never rearranged.
#include "cuda/ffi/kernels.h"
#include "cuda/sparse/ecr/window_tile.cuh"

namespace jsc {

Error Ecr(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const EcrPlan plan = CachedEcrPlan(call, sizeof(T), workspace.bytes, device);
    if (plan.warps == 0 && call.candidate.family == Family::kEcr) return NoSuchTile();
    if (plan.warps == 0) return PerOutput(call, stream, true);
    return LaunchConv<T, false>(call, plan, workspace.data, stream);
  });
}

}  // namespace jsc
