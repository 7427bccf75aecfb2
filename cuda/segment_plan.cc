// The model that cuts the layers of a segment, every compiled shape of tile and number of splits, by counted cycles.
#include "segment_plan.h"

#include <algorithm>
#include <limits>

namespace jsc {
namespace {

// The eight warps of a block, over pixels, filters and the reduction (logarithms).
constexpr int kShapes[][3] = {{1, 1, 1}, {2, 1, 0}, {1, 2, 0}, {0, 1, 2}, {1, 0, 2}, {2, 0, 1}, {0, 2, 1}, {0, 0, 3}};
constexpr int64_t kFar = 1 << 13;  // windows and paddings stay below, so that places fit 16 bits
constexpr int kMaxCorner = 127, kMaxReach = 255, kMaxStride = 8;  // of the copy engine

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

SegmentWork Cut(const SegmentStep& step, int element_bytes, SegmentCut cut) {
  const int deep = kPieceBytes / element_bytes;
  const int64_t taps = step.window[0] * step.window[1], channels = step.x.size[3], features = step.out.size[3];
  const int64_t pixels = step.out.size[0] * step.out.size[1] * step.out.size[2];
  SegmentWork work{};
  work.cut = cut;
  work.narrow = channels * element_bytes % 16 != 0 || channels < deep;
  work.tap_pieces = static_cast<int>(DivideUp(work.narrow ? taps * channels : channels, deep));
  work.pieces = static_cast<int>(work.narrow ? work.tap_pieces : taps * work.tap_pieces);
  work.per_split = static_cast<int>(DivideUp(work.pieces, 1 << cut.splits_log));
  work.feature_tiles = static_cast<int>(DivideUp(features, kWarpSide << cut.warps_f));
  work.tiles = static_cast<int>(DivideUp(pixels, kWarpSide << cut.warps_p) * work.feature_tiles);
  work.units = static_cast<int>(DivideUp(work.tiles, kSegmentCluster >> cut.splits_log));
  return work;
}

// Cycles of a layer between two barriers of the grid. The figures are those of a ResNet-50 at batch 1 on an H200, by
// clocks read inside blocks.
double Cycles(const SegmentWork& work, int element_bytes, bool precise, int clusters) {
  constexpr double kFirstData = 1800, kWrite = 700, kStore = 900, kSplit = 1000, kCacheBytes = 41, kClusterBytes = 14;
  const double multiply = precise ? 2900 : element_bytes == 4 ? 900 : 770;  // of a piece, all warps at work
  const int rows = kWarpSide << work.cut.warps_p, columns = kWarpSide << work.cut.warps_f;
  const double rounds = static_cast<double>(DivideUp(work.units, clusters));
  const double multiplied = static_cast<double>(DivideUp(work.per_split, 1 << work.cut.warps_k)) * multiply;
  const double loaded = static_cast<double>(work.per_split) * (rows + columns) * kPieceBytes / kCacheBytes;
  const double asked = 80. * work.per_split / kSegmentWarps * (1 + columns * element_bytes / kPieceBytes);  // boxes
  const double met = work.cut.splits_log > 0 ? kSplit + rows * columns * 4 / kClusterBytes : 0;
  return rounds * (kFirstData + std::max(multiplied, loaded) + asked + kStore + kWrite + met);
}

std::string WhyNot(const SegmentStep& step, int element_bytes) {
  const int64_t channels = step.x.size[3], features = step.out.size[3];
  if (features * element_bytes % 16) return "K=" + std::to_string(features) + " does not come in whole 16 bytes";
  if (step.groups != 1) return "it has " + std::to_string(step.groups) + " groups";
  const bool wide = channels * element_bytes % 16 == 0 && step.kind == SegmentKind::kConv;
  for (int i = 0; i < 2; ++i) {
    const int64_t reach = (step.window[i] - 1) * step.dilation[i];
    if (step.x.size[1 + i] > kFar || reach > kFar || std::abs(step.pad_low[i]) > kFar) return "its map is too large";
    if (!wide) continue;
    if (std::max(std::abs(step.pad_low[i]), std::abs(step.pad_high[i] - reach)) > kMaxCorner || reach > kMaxReach ||
        step.stride[i] > kMaxStride) {
      return "its window, stride or padding is beyond what the copy engine takes";
    }
  }
  return "";
}

}  // namespace

SegmentWork ChooseSegmentCut(const SegmentStep& step, int element_bytes, bool precise, int clusters) {
  SegmentWork best{};
  best.cycles = std::numeric_limits<double>::infinity();
  for (const auto& shape : kShapes) {
    if (element_bytes == 2 && shape[1] == 0) continue;  // filters come in boxes of 128 bytes
    for (int splits_log = 0; 1 << splits_log <= kSegmentCluster; ++splits_log) {
      SegmentWork work = Cut(step, element_bytes, {shape[0], shape[1], shape[2], splits_log});
      work.cycles = Cycles(work, element_bytes, precise, clusters);
      if (work.cycles < best.cycles) best = work;
    }
  }
  return best;
}

std::string WhyNoSegment(const SegmentCall& call, const DeviceInfo& device) {
  if (device.clusters[kSegmentCluster] == 0 || !device.tensor_maps) return "it needs clusters and a copy engine";
  if (call.steps.empty() || call.steps.size() > kSegmentLayers) {
    return "it has " + std::to_string(call.steps.size()) + " layers, not 1 to " + std::to_string(kSegmentLayers);
  }
  int beside = 0;
  for (size_t i = 0; i < call.steps.size(); ++i) {
    const SegmentStep& step = call.steps[i];
    const bool same = i > 0 && call.steps[i - 1].phase == step.phase;
    beside = same ? beside + 1 : 1;
    const bool pool = step.kind == SegmentKind::kMaxPool || (same && call.steps[i - 1].kind == SegmentKind::kMaxPool);
    if (beside > (pool ? 1 : kSegmentBeside)) return "too many layers run beside layer " + std::to_string(i);
    const std::string why = WhyNot(step, call.dtype == ffi::DataType::F32 ? 4 : 2);
    if (!why.empty()) return "layer " + std::to_string(i) + ": " + why;
  }
  return "";
}

}  // namespace jsc
