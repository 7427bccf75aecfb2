// PECR: convolution, bias, ReLU and max or average pooling in one kernel: window_tile.cuh.
//
// The paper's PECR lists the windows of one pooling window together and pools in the threads that computed them. Here a
// block computes every convolution result that its tile of pooled outputs needs, once, into shared memory, and pools
// from there. So windows may overlap. With 2x2 windows a list serves exactly one of them. Where windows overlap,
// results on the border of two blocks' tiles are computed twice (3x3 with stride 2: 21 of 121 results for a tile of 5x5
// outputs). Keeping them would cost a pass of the whole unpooled result through global memory.
#include "cuda/ffi/kernels.h"
#include "cuda/sparse/ecr/window_tile.cuh"

namespace jsc {

Error Pecr(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const EcrPlan plan = CachedEcrPlan(call, sizeof(T), workspace.bytes, device);
    if (plan.warps == 0 && call.candidate.family == Family::kEcr) return NoSuchTile();
    if (plan.warps == 0) return PerOutput(call, stream, true);
    return LaunchConv<T, true>(call, plan, workspace.data, stream);
  });
}

}  // namespace jsc
