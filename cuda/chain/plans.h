// What the tuning of chains (jax_sparse_conv/_src/dispatch/) and their lowering (jax_sparse_conv/_src/fusion/chains.py)
// ask the planner.
#ifndef JSC_CUDA_CHAIN_PLANS_H_
#define JSC_CUDA_CHAIN_PLANS_H_

#include <vector>

#include "cuda/dense_conv/plan/wgmma_plan.h"
#include "native/layer.h"

namespace jsc {

// Every plan of the engine wgmma that a layer of a chain may have, the best first. Plans of clusters larger than the
// model chooses come last. Plans have the layer's pool where there is one with it. layer and pool as ArgsOfLayer takes
// them. std::invalid_argument where they make no sense.
std::vector<WgmmaPlan> ChainPlans(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool,
                                  int element_bytes, bool precise, const DeviceInfo& device);

// Whether the kernel of a layer in a chain takes the pool behind it, with this tile (kTileFields of chain/call.h):
// what Chain will do on the device. layer and pool as above; precise: as Precision::kHighest is, of any type.
// std::invalid_argument likewise.
bool ChainTakesPool(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool,
                    const std::vector<int64_t>& tile, int element_bytes, bool precise, const DeviceInfo& device);

// Whether one kernel runs two 1x1 convolutions of a chain, pixels x in_channels -> channels -> output channels: what
// Chain will do on the device where buffers lie apart. Errors likewise.
bool ChainPairs(int64_t pixels, int64_t in_channels, int64_t channels, int64_t out_channels, int element_bytes,
                bool precise, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_PLANS_H_
