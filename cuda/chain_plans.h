// What the search for tiles of chains (jax_sparse_conv/chain_tiles.py) and the lowering of one (segments.py) ask the
// planner.
#ifndef JSC_CUDA_CHAIN_PLANS_H_
#define JSC_CUDA_CHAIN_PLANS_H_

#include <vector>

#include "warpgroup_plan.h"

namespace jsc {

// Every plan that a layer of a chain may have by warpgroup products, the best first, and behind all that the model may
// choose those of larger clusters; with its pool where there is a plan with it. layer: N, H, W, C, kh, kw, K, rows and
// columns of strides, padding (low, high of H, then of W) and dilation, groups. pool: rows and columns of window,
// strides and padding of a max pool behind it, or nothing. std::invalid_argument where they make no sense.
std::vector<WarpgroupPlan> ChainPlans(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool,
                                      int element_bytes, bool precise, int device);

// Whether the kernel of a layer in a chain takes the pool behind it, with this tile (kTileFields of segment_args.h):
// what Chain will do on the device. layer and pool as above; precise: as Precision::kHighest is, of any type.
// std::invalid_argument likewise, std::runtime_error where there is no such device.
bool ChainTakesPool(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool,
                    const std::vector<int64_t>& tile, int element_bytes, bool precise, int device);

// Whether one kernel runs two 1x1 convolutions of a chain, pixels x in_channels -> channels -> features: what Chain
// will do on the device where buffers lie apart. Errors likewise.
bool ChainPairs(int64_t pixels, int64_t in_channels, int64_t channels, int64_t features, int element_bytes,
                bool precise, int device);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PLANS_H_
