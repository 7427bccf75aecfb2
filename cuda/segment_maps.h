// A layer of a segment as the copy engine sees it.
#ifndef JSC_CUDA_SEGMENT_MAPS_H_
#define JSC_CUDA_SEGMENT_MAPS_H_

#include <cuda.h>

#include "segment_plan.h"

namespace jsc {

struct SegmentMaps {
  CUtensorMap x;       // [N, H, W, C] by windows (im2col): boxes of a tile's pixels x a piece of channels
  CUtensorMap kernel;  // [kh * kw, C, K], or [1, kh * kw * C, K]: boxes of a piece of channels x 128 bytes of filters
};

// False where the driver refuses.
bool MakeSegmentMaps(const SegmentStep& step, const SegmentWork& work, ffi::DataType dtype, bool precise,
                     SegmentMaps* maps);

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_MAPS_H_
