// A layer as Python names it to the planners: numbers without buffers.
#ifndef JSC_NATIVE_LAYER_H_
#define JSC_NATIVE_LAYER_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "native/call.h"

namespace jsc {

// Most elements of a map or kernel. Most rows and columns of a map or window, most strides and padding.
constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max(), kFar = 1 << 13;

// layer: N, H, W, C, kh, kw, K, rows and columns of strides, padding (low, high of H, then of W) and dilation, groups;
// a seventeenth entry is 1 where a residual is added.
// pool: rows and columns of window, strides and padding of a pool behind it, or nothing; a ninth entry is 2 for an
// average pool, 1 for a max pool, which it is without one. std::invalid_argument where they make no sense.
ConvArgs ArgsOfLayer(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, bool precise);

}  // namespace jsc

#endif  // JSC_NATIVE_LAYER_H_
