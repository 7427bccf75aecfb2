// The operands of the engine splitk_channels as TMA reads them: tensor maps.
#ifndef JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_MAPS_H_
#define JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_MAPS_H_

#include <cuda.h>

#include "cuda/dense_conv/plan/splitk_channels_plan.h"

namespace jsc {

// Passed to a kernel by value.
struct SplitKChannelsMaps {
  CUtensorMap x;       // [C / c, N, H, W, c], a slice of c channels; boxes of a warp's slices of a tile's pixels
  CUtensorMap kernel;  // [S * kh * kw, C / groups, K], boxes of a row of taps x a warp's channels x a tile's weights
};

// False where the driver refuses.
bool MakeSplitKChannelsMaps(const DeviceCall& call, const SplitKChannelsPlan& plan, SplitKChannelsMaps* maps);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_SPLITK_CHANNELS_MAPS_H_
