// What dense blocks the kernels take, host code without CUDA: asked for each call (block_call.cc), and by Python before
// there is one (ffi/planner_limits.cc).
#ifndef JSC_CUDA_DENSENET_LIMITS_H_
#define JSC_CUDA_DENSENET_LIMITS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace jsc {

constexpr int kGrowth = 32;                  // channels that a layer adds
constexpr int kMiddle = 128;                 // channels between its convolutions
constexpr int kDenseChannels = 32;           // channels of x that come together; C0 is a multiple
constexpr int64_t kMaxBlockChannels = 4096;  // of the block's map
constexpr int kBlockSharedBytes = 200'000;   // that blocks of the GPU may have, as the largest tiles need

struct DenseBlockSizes {
  int64_t images, height, width, channels;          // of x
  std::vector<std::pair<int64_t, int64_t>> layers;  // M and G of each
  int64_t out_channels = 0;                         // of the transition that follows
  bool pools = false;                               // whether one does
};

// Why a block cannot be one call, or nothing.
std::string WhyNotDenseBlock(const DenseBlockSizes& sizes);

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LIMITS_H_
