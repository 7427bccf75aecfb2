// A segment as its kernel gets it: layers, cut into work for clusters, and the phases between barriers of the grid.
#ifndef JSC_CUDA_SEGMENT_TASK_CUH_
#define JSC_CUDA_SEGMENT_TASK_CUH_

#include "common.cuh"
#include "segment_maps.h"
#include "segment_plan.h"

namespace jsc {

constexpr int kRingBytes = 196608, kSumBytes = 32768, kWindowBytes = 128 * 8;

// A convolution or a max pool; a pool uses the sizes, `reach` (its window) and no kernel.
template <typename T>
struct alignas(16) SegmentLayer {
  const T* x;         // [N, H, W, C]
  const T* kernel;    // [kh, kw, C, K]
  const T* bias;      // [K] or null
  const T* residual;  // [N, Ho, Wo, K] or null
  T* out;             // [N, Ho, Wo, K]
  SegmentKind kind;
  int relu;
  int pixels;  // results without their channels: N * Ho * Wo
  int height, width, channels, features;
  int stride[2], pad_low[2], dilation[2];
  int reach[2];  // kernel size * dilation
  int narrow;    // channels are copied element by element
  // A tile is (32 << warps_p) pixels x (32 << warps_f) filters; 1 << warps_k warps share its reduction.
  int warps_p, warps_f, warps_k;
  int splits_log;        // blocks of a cluster that share a tile
  int pieces_per_split;  // of the reduction axis
  int pieces, tiles, units;
  Divider by_feature_tiles, by_out_height, by_out_width, by_kernel_width;
  Divider by_channels, by_tap_pieces;  // elements, and pieces, of a tap
};

struct SegmentPhase {
  short first, count;  // layers that run side by side
  int units;           // of all of them: what a cluster does at a time
};

template <typename T>
struct SegmentTask {
  SegmentMaps maps[kSegmentLayers];
  SegmentLayer<T> layers[kSegmentLayers];
  SegmentPhase phases[kSegmentLayers];
  int phase_count, clusters;
  unsigned* arrivals;  // [1], zero at the start: blocks that came to a barrier of the grid, over all phases
};

// A phase in shared memory. Descriptors are there before they are needed: a first read of a kernel parameter costs
// some 700 cycles, and each layer's lie in four lines.
template <typename T>
struct SegmentSlot {
  SegmentPhase phase;
  SegmentLayer<T> layers[kSegmentBeside];
};

constexpr int kSlotBytes = sizeof(SegmentSlot<float>);
constexpr int kSegmentStages = 6;  // at most
constexpr int kSegmentShared = kRingBytes + kSumBytes + kWindowBytes + 2 * kSlotBytes + kSegmentStages * 8;
static_assert(kSegmentShared <= 232448 && sizeof(SegmentTask<float>) <= 32764);

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_TASK_CUH_
