// Which of the direct convolution's kernels serves a call: dense_conv/mma/kernel.cuh and dense_conv/mma/small_map.cuh
// (products of a warp), dense_conv/splitk_channels/kernel.cuh, dense_conv/grouped/kernel.cuh,
// dense_conv/wgmma/kernel.cuh or dense_conv/few_channels/kernel.cuh, by what their models expect.
#ifndef JSC_CUDA_DENSE_CONV_PLAN_CHOICE_H_
#define JSC_CUDA_DENSE_CONV_PLAN_CHOICE_H_

#include <vector>

#include "cuda/dense_conv/plan/few_channels_plan.h"
#include "cuda/dense_conv/plan/grouped_plan.h"
#include "cuda/dense_conv/plan/mma_plan.h"
#include "cuda/dense_conv/plan/splitk_channels_plan.h"
#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {

// Of the kernels, in the order in which they are taken: image, slice, group, warpgroup, direct. That of few channels
// has a plan wherever it can be taken, slices and groups where they are expected to be faster than what follows, and
// warpgroups where they are, the only ones with the pool, or asked for by their tile.
struct DenseConvChoice {
  FewChannelsPlan few_channels;
  MmaPlan mma;
  WgmmaPlan wgmma;
  SplitKChannelsPlan splitk_channels;
  GroupedPlan grouped;
  bool has_plan() const {
    return few_channels.out_channels > 0 || splitk_channels.out_channels > 0 || grouped.tiles > 0 ||
           wgmma.out_channels > 0 || mma.tile != MmaTile::kNone;
  }
};

// candidate: the one to have, or kByModel for the best by the models. In a chain the models also choose where the
// candidate does not fit; else there is no plan then.
DenseConvChoice ChooseKernel(const ConvArgs& args, int element_bytes, size_t workspace_bytes, bool in_chain,
                             const Candidate& candidate, const DeviceInfo& device);

// A candidate that fits a call, and the cycles that its planner's model expects.
struct Rated {
  Candidate candidate;
  double cycles;
};

// Every candidate of the dense kernels that fits a call outside of chains.
std::vector<Rated> DenseCandidates(const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                                   const DeviceInfo& device);

// Whether the chosen kernel of a call with a pool takes the pool, rather than one behind it.
bool PoolsInKernel(const DenseConvChoice& choice, const ConvArgs& args);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_CHOICE_H_
