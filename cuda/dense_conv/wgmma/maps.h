// The operands of the engine wgmma as TMA reads them: tensor maps.
#ifndef JSC_CUDA_DENSE_CONV_WGMMA_MAPS_H_
#define JSC_CUDA_DENSE_CONV_WGMMA_MAPS_H_

#include <cuda.h>

#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {

// Passed to a kernel by value.
struct WgmmaMaps {
  CUtensorMap x;  // [N, H, W, C], boxes of a patch, or (im2col) of a tile's windows, x 128 bytes of channels
  // [S * kh * kw, K / f, C / groups, f] where HasWholeWeights, boxes of all weights of a tile's step; else [S * kh *
  // kw, C / groups, K]; boxes of a block of channels x f output channels, 128 bytes.
  CUtensorMap kernel;
};

// With the low parts of x.
struct Tf32x3Maps : WgmmaMaps {
  CUtensorMap low;  // as x
};

// `small` is left out where the call has none. False where the driver refuses.
bool MakeWgmmaMaps(const DeviceCall& call, const WgmmaPlan& plan, Tf32x3Maps* maps);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_WGMMA_MAPS_H_
