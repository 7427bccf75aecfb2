// How the layers of a segment are cut: the tile of each, and how many blocks of a cluster share its reduction.
#ifndef JSC_CUDA_SEGMENT_PLAN_H_
#define JSC_CUDA_SEGMENT_PLAN_H_

#include <string>

#include "conv_plan.h"
#include "segment_args.h"

namespace jsc {

constexpr int kSegmentThreads = 256, kSegmentWarps = kSegmentThreads / 32;
constexpr int kSegmentLayers = 64, kSegmentBeside = 4;  // of a call, whose parameters are 32 KB at most; of a phase
constexpr int kSegmentCluster = 8;                      // blocks that can share a tile
constexpr int kWarpSide = 32;                           // a warp has 32 pixels x 32 filters
constexpr int kPieceBytes = 128;                        // of a pixel's channels: one piece of the reduction axis

// A tile is (32 << warps_p) pixels x (32 << warps_f) filters; 1 << warps_k warps and 1 << splits_log blocks share its
// reduction.
struct SegmentCut {
  int warps_p, warps_f, warps_k, splits_log;
};

// What follows from a cut.
struct SegmentWork {
  SegmentCut cut;
  bool narrow;            // channels do not come in whole 16 bytes, or are fewer than a piece has
  int tap_pieces;         // pieces of one tap's channels, or of the whole reduction axis
  int pieces, per_split;  // of the reduction axis
  int feature_tiles, tiles, units;
  double cycles;  // what the model expects
};

// The best cut under the model in segment_plan.cc, for clusters that run at once.
SegmentWork ChooseSegmentCut(const SegmentStep& step, int element_bytes, bool precise, int clusters);

// Why the kernel cannot run a call, or an empty string.
std::string WhyNoSegment(const SegmentCall& call, const DeviceInfo& device);

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_PLAN_H_
