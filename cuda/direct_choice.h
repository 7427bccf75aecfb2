// Which of the direct convolution's kernels serves a call: direct_kernel.cuh and direct_deep.cuh (products of a warp),
// direct_slice.cuh, direct_group.cuh, direct_warpgroup.cuh or direct_image.cuh, by what their models expect.
#ifndef JSC_CUDA_DIRECT_CHOICE_H_
#define JSC_CUDA_DIRECT_CHOICE_H_

#include "direct_image_plan.h"
#include "direct_plan.h"
#include "group_plan.h"
#include "slice_plan.h"
#include "warpgroup_plan.h"

namespace jsc {

// Of the kernels, in the order in which they are taken: image, slice, group, warpgroup, direct. That of few channels
// has a plan wherever it can be taken, slices and groups where they are expected to be faster than what follows, and
// warpgroups where they are, the only ones with the pool, or asked for by their tile.
struct DirectChoice {
  ImagePlan image;
  DirectPlan direct;
  WarpgroupPlan warpgroup;
  SlicePlan slice;
  GroupPlan group;
};

// tile: of warpgroups, or without filters for the best by their model.
DirectChoice ChooseKernel(const ConvArgs& args, int element_bytes, size_t workspace_bytes, bool in_chain,
                          const TileChoice& tile, const DeviceInfo& device);

// Whether the chosen kernel of a call with a pool takes the pool, rather than one behind it.
bool PoolsInKernel(const DirectChoice& choice, const ConvArgs& args);

}  // namespace jsc

#endif  // JSC_CUDA_DIRECT_CHOICE_H_
