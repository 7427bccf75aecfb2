// Room: COO* convolution (Xiang et al. 2022). plan: how a call is cut; coo.cu: the convolution, stored.cu: of stored
//   lists; coo_star.cu: the format. The cut is chosen by dispatch/coo/cost_model.py, of those that are listed here, and
//   comes as an attribute of the call. Here it is checked and completed.
// May change: rows of native/coo_variants.h, tiles; results repeat bit for bit. Details:
// docs/design/kernels/coo_star.md.
// Tests: tests/formats/, tests/dispatch/test_cost_model.py.
#ifndef JSC_CUDA_SPARSE_COO_PLAN_H_
#define JSC_CUDA_SPARSE_COO_PLAN_H_

#include <cstddef>
#include <functional>
#include <string>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"
#include "native/coo_variants.h"

namespace jsc {

constexpr int kCooChunk = kWarp;  // channels whose lists a block holds at a time: one lane each

struct CooPlan {
  int variant;            // row of kCooVariants
  int out_channel_warps;  // of a block, side by side along output channels
  int slices;             // groups of warps that share a tile's lists, each with its part of the work
  int splits;             // blocks that share a tile's channels
  int tiles[2];           // along height and width
  int out_channel_tiles;  // of a group
  int64_t blocks;
  bool cluster;      // the splits of a tile are one cluster, else they are added through the workspace
  int shared_bytes;  // of a block
};

// Variants of a call, each for a range of densities of x: number i up to densities[i], the last one beyond.
constexpr int kMostCooVariants = 4;

struct CooChoice {
  int count = 1;
  CooPlan plans[kMostCooVariants] = {};  // as CompleteCooPlan wants them
  float densities[kMostCooVariants - 1] = {};
  bool has_dense = false;             // beyond dense_above Direct runs, and no variant
  float dense_above = 0.f;            // of the density
  const int32_t* nonzeros = nullptr;  // [rows, 2] (non-zeros, elements) of parts of x, where they decide
  int rows = 0;
};

// Channels of each split but the last: a multiple of 8, so that copies of x stay aligned.
constexpr int CooSplitChannels(const ConvArgs& a, int64_t splits) {
  const int64_t each = (a.group_channels + splits - 1) / splits;
  return static_cast<int>((each + 7) / 8 * 8);
}

// Bytes of shared memory of a block of so many warps.
int CooSharedBytes(const CooVariant& variant, int warps, int element_bytes);

// Every plan of a variant, a row of kCooVariants, that a device can run and that leaves no warp without work, whatever
// the workspace. args: of a call that the variant covers.
void VisitCooPlans(int variant, const ConvArgs& args, int element_bytes, const DeviceInfo& device,
                   const std::function<void(const CooPlan&)>& visit);

// Fills in a plan of which variant, out_channel_warps, slices and splits are set. Returns a sentence if it cannot
// run.
std::string CompleteCooPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                            CooPlan* plan);

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_COO_PLAN_H_
