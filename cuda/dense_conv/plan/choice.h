// Room: the dense convolution. A folder per engine: mma (with small_map), splitk_channels, grouped, wgmma,
// few_channels; plan/ has the planners, host code without CUDA. This header says which engine serves a call. May
// change: tiles and models, while results stay bitwise repeatable; to add an engine add its kernel, plan and a row
// here. Details: docs/design/kernels/index.md. Tests: tests/cuda/test_direct.py, tests/golden/test_golden.py.
#ifndef JSC_CUDA_DENSE_CONV_PLAN_CHOICE_H_
#define JSC_CUDA_DENSE_CONV_PLAN_CHOICE_H_

#include <string>
#include <vector>

#include "cuda/dense_conv/plan/few_channels_plan.h"
#include "cuda/dense_conv/plan/grouped_plan.h"
#include "cuda/dense_conv/plan/mma_plan.h"
#include "cuda/dense_conv/plan/splitk_channels_plan.h"
#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {

// The plans, in the order in which engines are taken: few_channels, splitk_channels, grouped, wgmma, mma. One has a
// plan where it is expected to be faster than what follows, or where its tile was asked for. What follows serves where
// the driver refuses a buffer.
struct DenseConvChoice {
  FewChannelsPlan few_channels;
  MmaPlan mma;
  WgmmaPlan wgmma;
  SplitKChannelsPlan splitk_channels;
  GroupedPlan grouped;
  double us = 0;  // that the best is expected to take
  bool has_plan() const {
    return few_channels.out_channels > 0 || splitk_channels.out_channels > 0 || grouped.tiles > 0 ||
           wgmma.out_channels > 0 || mma.tile != MmaTile::kNone;
  }
};

// candidate: the one to have, or kByModel for the best by the models. In a chain the models also choose where the
// candidate does not fit; else there is no plan then.
DenseConvChoice ChooseKernel(const ConvArgs& args, int element_bytes, size_t workspace_bytes, bool in_chain,
                             const Candidate& candidate, const DeviceInfo& device);

// A candidate that fits a call, and the microseconds that its model expects.
struct Rated {
  Candidate candidate;
  double us;
};

// Every candidate of the dense kernels that fits a call outside of chains.
std::vector<Rated> DenseCandidates(const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                                   const DeviceInfo& device);

// The kernel that runs.
Candidate CandidateOf(const DenseConvChoice& choice);

// What the models expect of a candidate outside of chains; 0 where it does not fit.
double MicrosecondsOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                      const DeviceInfo& device);

// The group and kind of model.json whose constants the model of a candidate takes; empty where it does not fit.
struct ModelName {
  std::string group, kind;
};
ModelName ModelNameOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                      const DeviceInfo& device);

// Whether the chosen kernel of a call with a pool takes the pool, rather than one behind it.
bool PoolsInKernel(const DenseConvChoice& choice, const ConvArgs& args);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_CHOICE_H_
