// How a direct convolution is cut: which of the compiled tunings, and how many blocks share a tile's reduction.
#ifndef JSC_CUDA_DENSE_CONV_PLAN_MMA_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_MMA_PLAN_H_

#include <functional>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"
#include "cuda/dense_conv/plan/mma_tuning.h"

namespace jsc {

// The tunings of the extension. A chunk is 128 bytes of a pixel's channels, whatever their type.
template <typename T>
struct DirectTunings {
  static constexpr int kChunk = 128 / static_cast<int>(sizeof(T));
  template <int kImages, int kFilters, int kX, int kY, int kStages>
  using Tensor = Tuning<Engine::kTensorCores, kImages, kFilters, kX, kY, kChunk, kStages>;
  using Small = Tensor<4, 8, 16, 8, sizeof(T) == 4 ? 4 : 3>;  // 64 pixels x 64 filters, 4 warps
  using Tall = Tensor<8, 8, 16, 8, 3>;                        // 128 x 64, 4 warps
  using Large = Tensor<8, 8, 16, 16, 3>;                      // 128 x 128, 8 warps
  using Narrow = Tuning<Engine::kTensorCores, 4, 8, 16, 8, kChunk, 3, false, Addresses::kTable>;  // 64 x 64, any sizes
};

// The same for float32-accurate products, which is what precision HIGHEST means, by tensor cores and by FFMA.
struct SplitTunings {
  static constexpr int kChunk = 32;
  template <int kImages, int kX, int kY, int kStages>
  using Tensor = Tuning<Engine::kSplitTensorCores, kImages, 8, kX, kY, kChunk, kStages>;
  using Flat = Tensor<2, 16, 8, 4>;                                                                    // 32 x 64
  using Small = Tensor<4, 16, 8, 3>;                                                                   // 64 x 64
  using Large = Tensor<8, 16, 16, 3>;                                                                  // 128 x 128
  using Narrow = Tuning<Engine::kSplitTensorCores, 4, 8, 16, 8, kChunk, 3, false, Addresses::kTable>;  // 64 x 64
};

struct PreciseTunings {
  static constexpr int kChunk = 32;
  using Flat = Tuning<Engine::kOuterProduct, 4, 4, 8, 16, kChunk, 3>;                              // 32 x 64
  using Small = Tuning<Engine::kOuterProduct, 8, 4, 8, 16, kChunk, 3>;                             // 64 x 64
  using Large = Tuning<Engine::kOuterProduct, 8, 8, 16, 16, kChunk, 3>;                            // 128 x 128
  using Narrow = Tuning<Engine::kOuterProduct, 8, 4, 8, 16, kChunk, 3, false, Addresses::kTable>;  // 64 x 64, any sizes
};

// kDeep: filters x pixels of the kernel whose warps share the reduction axis; kDeepNarrow: 16 x 8, any sizes.
enum class DirectTile : int {
  kNone,
  kSmall,
  kTall,
  kLarge,
  kNarrow,
  kFlat,
  kDeep16x8,
  kDeep16x16,
  kDeep32x16,
  kDeepNarrow
};

constexpr bool IsDeep(DirectTile tile) { return tile >= DirectTile::kDeep16x8; }

struct DirectPlan {
  DirectTile tile;  // kNone: PerOutput has to serve
  Engine engine;    // kTensorCores, and for float32-accurate products kSplitTensorCores or kOuterProduct
  int splits;       // blocks that share the reduction axis of one tile
  Reduction reduction;
  int pixel_tiles, feature_tiles;  // of a stack and group
  int chunks, chunks_per_split;    // of the reduction axis
  double cycles;                   // what the model expects
};

// Every plan that fits a call; with_deep: with tiles of the kernel whose warps share the axis, which is for calls that
// are in no chain. tile of a candidate: DirectTile, splits.
void VisitDirectPlans(const ConvArgs& args, int element_bytes, size_t workspace_bytes, bool with_deep,
                      const DeviceInfo& device, const std::function<void(const DirectPlan&)>& visit);

// The plan of a candidate, or one of DirectTile::kNone where it does not fit.
DirectPlan DirectPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                        const DeviceInfo& device);

// The best plan under the model in dense_conv/plan/mma_plan.cc. with_deep: with tiles of the kernel whose warps share
// the axis, which is for calls that are in no chain.
DirectPlan ChooseDirectPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, bool with_deep,
                            const DeviceInfo& device);

// Cuts a call whose plan has a tile and splits into chunks and tiles; false where that does not fit.
bool CompleteDirectPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                        DirectPlan* plan);

// Workspace that a call with these sizes may use on a device without clusters.
size_t DirectWorkspaceBytes(int64_t pixels, int64_t features, int64_t depth);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_MMA_PLAN_H_
