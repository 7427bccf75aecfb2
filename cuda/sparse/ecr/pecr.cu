// PECR: convolution, bias, ReLU and max or average pooling in one kernel. See sparse/ecr/window_tile.cuh.
//
// The paper's PECR lists the windows of one pooling window together and pools in the threads that computed them. Here a
// block computes every convolution result that its tile of pooled outputs needs, once, into shared memory and pools
// from there: windows may overlap, and with 2x2 windows a list serves exactly one of them. Only results on the border
// between the tiles of two blocks are computed twice where windows overlap (3x3 with stride 2: 121 results for a tile
// of 5x5 outputs, 21 of them its neighbours' too); keeping them would cost a pass of the whole unpooled result through
// global memory.
#include "cuda/ffi/kernels.h"
#include "cuda/sparse/ecr/window_tile.cuh"

namespace jsc {

ffi::Error Pecr(const DeviceCall& call, Workspace workspace, int device, cudaStream_t stream) {
  return DispatchDtype(call.dtype, [&](auto element) {
    using T = decltype(element);
    const EcrPlan plan = CachedEcrPlan(call, sizeof(T), workspace.bytes, device);
    if (plan.warps == 0 && call.candidate.family == Family::kEcr) return NoSuchTile();
    if (plan.warps == 0) return PerOutput(call, stream, true);
    return LaunchConv<T, true>(call, plan, workspace.data, stream);
  });
}

}  // namespace jsc
