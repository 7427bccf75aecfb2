// How a call is cut for the engines mma and small_map: which compiled tile, and how many blocks split its reduction.
#ifndef JSC_CUDA_DENSE_CONV_PLAN_MMA_PLAN_H_
#define JSC_CUDA_DENSE_CONV_PLAN_MMA_PLAN_H_

#include <functional>

#include "cuda/core/device_call.h"
#include "cuda/core/device_info.h"
#include "cuda/dense_conv/plan/mma_tuning.h"

namespace jsc {

constexpr int kMaxTableTaps = 256;  // of a tuning with a table in shared memory

// The tunings of the extension. A chunk is 128 bytes of a pixel's channels, whatever their type.
template <typename T>
struct MmaTunings {
  static constexpr int kChunk = 128 / static_cast<int>(sizeof(T));
  template <int kImages, int kOutChannels, int kX, int kY, int kStages>
  using Tensor = Tuning<Engine::kTensorCores, kImages, kOutChannels, kX, kY, kChunk, kStages>;
  using Small = Tensor<4, 8, 16, 8, sizeof(T) == 4 ? 4 : 3>;  // 64 pixels x 64 output channels, 4 warps
  using Tall = Tensor<8, 8, 16, 8, 3>;                        // 128 x 64, 4 warps
  using Large = Tensor<8, 8, 16, 16, 3>;                      // 128 x 128, 8 warps
  using Narrow = Tuning<Engine::kTensorCores, 4, 8, 16, 8, kChunk, 3, false, Addresses::kTable>;  // 64 x 64, any sizes
};

// The same for float32-accurate products, which is what precision HIGHEST means, by tensor cores and by FFMA.
struct Tf32x3Tunings {
  static constexpr int kChunk = 32;
  template <int kImages, int kX, int kY, int kStages>
  using Tensor = Tuning<Engine::kTf32x3, kImages, 8, kX, kY, kChunk, kStages>;
  using Flat = Tensor<2, 16, 8, 4>;                                                          // 32 x 64
  using Small = Tensor<4, 16, 8, 3>;                                                         // 64 x 64
  using Large = Tensor<8, 16, 16, 3>;                                                        // 128 x 128
  using Narrow = Tuning<Engine::kTf32x3, 4, 8, 16, 8, kChunk, 3, false, Addresses::kTable>;  // 64 x 64
};

struct PreciseTunings {
  static constexpr int kChunk = 32;
  using Flat = Tuning<Engine::kOuterProduct, 4, 4, 8, 16, kChunk, 3>;                              // 32 x 64
  using Small = Tuning<Engine::kOuterProduct, 8, 4, 8, 16, kChunk, 3>;                             // 64 x 64
  using Large = Tuning<Engine::kOuterProduct, 8, 8, 16, 16, kChunk, 3>;                            // 128 x 128
  using Narrow = Tuning<Engine::kOuterProduct, 8, 4, 8, 16, kChunk, 3, false, Addresses::kTable>;  // 64 x 64, any sizes
};

// kSmallMap: output channels x pixels of the engine small_map. kSmallMapNarrow: 16 x 8, any sizes.
enum class MmaTile : int {
  kNone,
  kSmall,
  kTall,
  kLarge,
  kNarrow,
  kFlat,
  kSmallMap16x8,
  kSmallMap16x16,
  kSmallMap32x16,
  kSmallMapNarrow
};

constexpr bool IsSmallMap(MmaTile tile) { return tile >= MmaTile::kSmallMap16x8; }

struct MmaPlan {
  MmaTile tile;   // kNone: PerOutput has to serve
  Engine engine;  // kTensorCores, and for float32-accurate products kTf32x3 or kOuterProduct
  int splits;     // blocks that split the reduction axis of one tile
  Reduction reduction;
  int pixel_tiles, out_channel_tiles;  // of a stack and group
  int chunks, chunks_per_split;        // of the reduction axis
  double cycles;                       // what the model expects
};

// Every plan that fits a call; with_small_map: with tiles of the engine small_map, which is for calls that are in no
// chain. tile of a candidate: MmaTile, splits.
void VisitMmaPlans(const ConvArgs& args, int element_bytes, size_t workspace_bytes, bool with_small_map,
                   const DeviceInfo& device, const std::function<void(const MmaPlan&)>& visit);

// The plan of a candidate, or one of MmaTile::kNone where it does not fit.
MmaPlan MmaPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                  const DeviceInfo& device);

// The ProductKind of a plan, by which its model has constants.
int MmaKind(const MmaPlan& plan, int element_bytes);

// The time that its cycles stand for, comparable to other engines'.
double MmaMicroseconds(const MmaPlan& plan, const ConvArgs& args, int element_bytes, bool in_chain,
                       const DeviceInfo& device);

// Cuts a call whose plan has a tile and splits into chunks and tiles; false where that does not fit.
bool CompleteMmaPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                     MmaPlan* plan);

// Workspace that a call with these sizes may use on a device without clusters.
size_t MmaWorkspaceBytes(int64_t pixels, int64_t out_channels, int64_t depth);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_CONV_PLAN_MMA_PLAN_H_
