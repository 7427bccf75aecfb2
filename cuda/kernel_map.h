// The kernel as the copy engine of Hopper and later devices sees it.
#ifndef JSC_CUDA_KERNEL_MAP_H_
#define JSC_CUDA_KERNEL_MAP_H_

#include <cuda.h>

#include "conv_args.h"
#include "conv_plan.h"

namespace jsc {

// Whether the driver can make tensor maps.
bool HasKernelMaps();

// Fills a map of kernel as [S * kh * kw, C / groups, K] whose box is one stage of the plan: [chunk taps, chunk
// channels, tile features]. False where the driver refuses.
bool MakeKernelMap(const ConvCall& call, const ConvPlan& plan, CUtensorMap* map);

}  // namespace jsc

#endif  // JSC_CUDA_KERNEL_MAP_H_
