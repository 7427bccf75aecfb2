// COO* convolution (Xiang et al. 2022, section 3.4): convolution, bias, residual and ReLU over lists of the non-zeros
// of each tile and channel of x. Details: docs/design/kernels/coo_star.md.
//
// What: a block computes TH x TW results for 32 * out_channel_warps * KT output channels, KT of them per thread. All
// their sums stay in registers (output stationary).
//
// How, per chunk of 32 input channels of the block (1 and 2 in sparse/coo/lists.cuh):
//   1. The tile's patch of x with its halo comes to shared memory by cp.async, during the chunk before.
//   2. Convert: a lane owns a channel, each warp a run of positions. They count, synchronise, and write (value,
//      position) to the channel's list, in the order of position. Every list has room for all positions, so there is no
//      prefix sum over lists and no atomic.
//   3. Multiply: the warps of a slice take the channels whose share of the chunk's non-zeros falls to it. So slices
//      share work and not channels. A channel's weights stream through two buffers of a warp by cp.async, each lane its
//      own. They are in registers while sparse/coo/micro.cuh runs over the list.
// Then (sparse/coo/sums.cuh) the slices' sums are added in shared memory and the block writes results. With splits > 1
// its partial sums are reduced once more: blocks of a cluster read each other's shared memory; without clusters sums go
// through the workspace and CooReduceKernel. The order is fixed either way and there are no atomics, so results repeat
// bit for bit.
//
// Stored lists of a CooStar take the place of 1 and 2 (sparse/coo/stored.cuh). A call may hold several variants, of
// which the density of x lets one run (sparse/coo/density_range.cuh).
//
// Layout: x NHWC, kernel HWIO. Threads lie along output channels, so weights, sums and results are coalesced.
//
// Bound by: an entry costs 8 instructions around its FFMAs (16 inside a 4x4 tile with KT = 4, 11 inside 7x7 with KT =
// 2) and some 80 cycles of latency, which other warps hide. At high sparsity by weights: R * R words for each tile,
// channel and output channel, whatever the non-zeros.
#include "cuda/sparse/coo/kernel.cuh"

namespace jsc {

Error Coo(const DeviceCall& call, const CooChoice& choice, Workspace workspace, int device, cudaStream_t stream) {
  if (choice.has_dense) {
    DeviceCall dense = call;
    dense.gate.nonzeros = choice.nonzeros;
    dense.gate.rows = choice.rows;
    dense.gate.threshold = choice.dense_above;
    dense.gate.above = true;
    if (Error error = Direct(dense, workspace, device, stream); error.failure()) return error;
  }
  return DispatchDtype(call.dtype, [&](auto element) {
    return LaunchCooVariants<decltype(element), false>(call, choice, nullptr, workspace, device, stream);
  });
}

}  // namespace jsc
