// Which dense layers the kernel of one row (row.cuh) takes, host code without CUDA, with the sizes of its tiles that
// this depends on.
#ifndef JSC_CUDA_SPARSE_MATVEC_ROW_LIMITS_H_
#define JSC_CUDA_SPARSE_MATVEC_ROW_LIMITS_H_

#include "cuda/core/device_info.h"

namespace jsc {

constexpr int kDenseWarps = 16;
constexpr int kDenseThreads = kDenseWarps * kWarp;
constexpr int kLaneBytes = 16;      // of output channels that a lane loads at once
constexpr int kMaxLaneShift = 5;    // of tiles: segments of at most 2^5 lanes
constexpr int kMaxParts = 8;        // blocks of a cluster
constexpr int kPieceShift = 8;      // of x: blocks of a cluster have pieces of 256 channels cyclically
constexpr int kAveragedAtOnce = 8;  // pixels that a thread asks for together, where x is the average of a map

// Whether rows of x and of the kernel come in whole 16 bytes.
constexpr bool HasWholePieces(int64_t channels, int64_t out_channels, int64_t element_bytes) {
  return channels * element_bytes % kLaneBytes == 0 && out_channels * element_bytes % kLaneBytes == 0;
}

// Whether x has room in a block's shared memory, beside all else.
constexpr bool FitsRow(int64_t channels, int64_t element_bytes, int64_t shared_memory) {
  constexpr int64_t kElse = 1 << 16;
  return channels * element_bytes + kElse <= shared_memory;
}

// Blocks of a cluster that share the channels of a map whose pixels they average: all, if the largest clusters run at
// once with the widest tiles.
inline int AverageParts(int64_t out_channels, int64_t element_bytes, const DeviceInfo& device) {
  return DivideUp(out_channels * element_bytes, kLaneBytes << kMaxLaneShift) <= device.clusters[kMaxParts] ? kMaxParts
                                                                                                           : 1;
}

// Rounds that a block takes over the average, of so many pixels that its threads ask for together and a piece of the
// channels.
inline int64_t AverageRounds(int64_t pixels, int64_t channels, int64_t out_channels, int64_t element_bytes,
                             const DeviceInfo& device) {
  constexpr int64_t kPiece = 1 << kPieceShift, kPixels = kDenseThreads / (kPiece / 4) * kAveragedAtOnce;
  return DivideUp(pixels, kPixels) * DivideUp(channels, kPiece * AverageParts(out_channels, element_bytes, device));
}

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_MATVEC_ROW_LIMITS_H_
