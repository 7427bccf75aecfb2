// The convolution by warpgroup products of float32 at HIGHEST: TF32 in two parts.
#include "direct_warpgroup.cuh"
#include "direct_warpgroup.h"

namespace jsc {
namespace {

// Whether a tile's kernel begins with the registers that its threads then hand to each other: what a compiler makes of
// launch bounds is not promised, and a thread waits for ever for registers that are not there.
template <class U>
bool HasRegisters() {
  static const bool has = [] {
    cudaFuncAttributes code{};
    return cudaFuncGetAttributes(&code, WarpgroupKernel<U, float>) == cudaSuccess && code.numRegs == U::kRegisters;
  }();
  return has;
}

// Patches have splitters where all of a chain does: beside kernels without, whose registers are cut otherwise, theirs
// leave no room on a multiprocessor's partitions, and kernels do not overlap.
template <int kFilters, int kPixels, PartsMail kMail = PartsMail::kNone>
ffi::Error Launch(const ConvCall& call, const WarpgroupPlan& plan, const WarpgroupMaps& maps, cudaStream_t stream) {
  using Splitting = WarpgroupTile<float, kFilters, kPixels, true, kMail, true>;
  if (plan.patch && call.among_patches && HasRegisters<Splitting>()) {
    return LaunchWarpgroup<Splitting, float>(call, plan, maps, stream);
  }
  return LaunchWarpgroup<WarpgroupTile<float, kFilters, kPixels, true, kMail>, float>(call, plan, maps, stream);
}

}  // namespace

ffi::Error WarpgroupHighest(const ConvCall& call, const WarpgroupPlan& plan, const WarpgroupMaps& maps,
                            cudaStream_t stream) {
  if (plan.filters == 128) return Launch<128, 112>(call, plan, maps, stream);
  if (plan.pixels == 112) {
    return plan.by_mail ? Launch<64, 112, PartsMail::kKept>(call, plan, maps, stream)
                        : Launch<64, 112>(call, plan, maps, stream);
  }
  if (plan.roomy) return Launch<64, 56, PartsMail::kRoomy>(call, plan, maps, stream);
  return plan.by_mail ? Launch<64, 56, PartsMail::kKept>(call, plan, maps, stream)
                      : Launch<64, 56>(call, plan, maps, stream);
}

}  // namespace jsc
