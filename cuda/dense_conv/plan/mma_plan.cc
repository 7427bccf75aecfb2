// The planner of the engines mma and small_map: every compiled tile and number of splits, by a model of cycles.
#include "cuda/dense_conv/plan/mma_plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "cuda/core/model.h"
#include "cuda/core/plan_search.h"

namespace jsc {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGrid = 65535;      // of groups and stacks, the grid's second and third axes
constexpr int kMinGroupOutChannels = 8;  // fewer, and most of a tile of 64 output channels is empty

// Cycles that a chunk of a tile costs: a block with an SM to itself, and one that shares it.
struct ChunkCycles {
  double alone, shared;
};

// What the models know of a kind of products; names and order are those of model.json.
struct MmaCosts {
  ChunkCycles flat, small, tall, large, narrow;
  double block, tile_end;           // launch and first data; of 4,096 results
  double cluster_reduction, split;  // of a cluster, and of each of its blocks
  double workspace;                 // more where sums meet in memory
  double cache_bytes;               // that an SM gets from the L2 cache in a cycle
  Microseconds us, chain_us;        // of kernels alone, and in chains
};
struct SmallMapCosts {
  ChunkCycles of_16x8, of_16x16, of_32x16, narrow;  // of a warp's step
  double block, next_wave;
  Microseconds us;
};

const MmaCosts& CostsOf(const MmaPlan& plan, int element_bytes) {
  return ModelOf<MmaCosts, model::kMma>(MmaKind(plan, element_bytes));
}

const SmallMapCosts& SmallMapCostsOf(const MmaPlan& plan, int element_bytes) {
  return ModelOf<SmallMapCosts, model::kSmallMap>(MmaKind(plan, element_bytes));
}

// What the model needs to know of a tuning.
struct TileShape {
  int pixels, out_channels, threads, chunk, stage_bytes, shared_bytes;
  int most_resident;  // blocks whose registers fit an SM
  ChunkCycles cycles;
};

template <class U, typename T>
TileShape ShapeOf(int64_t taps, int most_resident, ChunkCycles cycles) {
  const int table_taps =
      U::kAddresses == Addresses::kTable ? static_cast<int>(std::min<int64_t>(taps, kMaxTableTaps)) : 0;
  return {U::kPixels,
          U::kOutChannels,
          U::kThreads,
          U::kCachedPixels,
          U::template StageBytes<T>(),
          U::template SharedBytes<T>(table_taps),
          most_resident,
          cycles};
}

// T: a type of the elements' size.
template <typename T>
TileShape TensorShape(MmaTile tile, int64_t taps, const MmaCosts& costs) {
  using Tunings = MmaTunings<T>;
  switch (tile) {
    case MmaTile::kSmall:
      return ShapeOf<typename Tunings::Small, T>(taps, 4, costs.small);
    case MmaTile::kTall:
      return ShapeOf<typename Tunings::Tall, T>(taps, 3, costs.tall);
    case MmaTile::kLarge:
      return ShapeOf<typename Tunings::Large, T>(taps, 2, costs.large);
    default:
      return ShapeOf<typename Tunings::Narrow, T>(taps, 4, costs.narrow);
  }
}

TileShape ShapeOfPlan(const MmaPlan& plan, int element_bytes, int64_t taps) {
  const MmaCosts& costs = CostsOf(plan, element_bytes);
  if (plan.engine == Engine::kTensorCores) {
    return element_bytes == 4 ? TensorShape<float>(plan.tile, taps, costs)
                              : TensorShape<uint16_t>(plan.tile, taps, costs);
  }
  if (plan.engine == Engine::kTf32x3) {
    if (plan.tile == MmaTile::kFlat) return ShapeOf<Tf32x3Tunings::Flat, float>(taps, 4, costs.flat);
    if (plan.tile == MmaTile::kSmall) return ShapeOf<Tf32x3Tunings::Small, float>(taps, 3, costs.small);
    if (plan.tile == MmaTile::kLarge) return ShapeOf<Tf32x3Tunings::Large, float>(taps, 1, costs.large);
    return ShapeOf<Tf32x3Tunings::Narrow, float>(taps, 2, costs.narrow);
  }
  if (plan.tile == MmaTile::kFlat) return ShapeOf<PreciseTunings::Flat, float>(taps, 6, costs.flat);
  if (plan.tile == MmaTile::kSmall) return ShapeOf<PreciseTunings::Small, float>(taps, 4, costs.small);
  if (plan.tile == MmaTile::kLarge) return ShapeOf<PreciseTunings::Large, float>(taps, 1, costs.large);
  return ShapeOf<PreciseTunings::Narrow, float>(taps, 4, costs.narrow);
}

// What the model needs to know of a tile of small_map. Cycles are of a warp's step.
struct SmallMapShape {
  int pixels, out_channels, depth, warps, shared_bytes;
  ChunkCycles step;
};

template <class U>
SmallMapShape ShapeOfSmallMap(ChunkCycles step) {
  return {U::kPixels, U::kOutChannels, U::kDepth, U::kWarps, U::kSharedBytes, step};
}

// T: a type of the elements' size.
template <typename T>
SmallMapShape ShapeOfSmallMapTile(MmaTile tile, const SmallMapCosts& costs) {
  switch (tile) {
    case MmaTile::kSmallMap16x8:
      return ShapeOfSmallMap<SmallMapTuning<T, 16, 8, false>>(costs.of_16x8);
    case MmaTile::kSmallMap16x16:
      return ShapeOfSmallMap<SmallMapTuning<T, 16, 16, false>>(costs.of_16x16);
    case MmaTile::kSmallMap32x16:
      return ShapeOfSmallMap<SmallMapTuning<T, 32, 16, false>>(costs.of_32x16);
    default:
      return ShapeOfSmallMap<SmallMapTuning<T, 16, 8, false, false>>(costs.narrow);
  }
}

// As Cycles, of a tile of small_map.
double SmallMapCycles(const MmaPlan& plan, const SmallMapShape& shape, const SmallMapCosts& costs, int64_t tiles,
                      const DeviceInfo& device) {
  const int64_t resident =
      std::max(1, std::min(device.shared_memory_sm / (shape.shared_bytes + 1024), 2048 / (32 * shape.warps)));
  const int64_t layers = DivideUp(tiles, device.multiprocessors);
  const auto waves = static_cast<double>(DivideUp(layers, resident));
  const auto steps = static_cast<double>(DivideUp(plan.chunks, shape.warps));
  const double busy = static_cast<double>(layers) * steps * shape.step.shared;
  return costs.block + (waves - 1) * costs.next_wave + std::max(waves * steps * shape.step.alone, busy);
}

// Cycles until the last block is done. What the blocks of an SM ask of its arithmetic adds up, what one block waits for
// on its own does not, and the L2 cache gives all of them so many bytes a cycle.
double Cycles(const MmaPlan& plan, const TileShape& shape, const MmaCosts& costs, int64_t tiles,
              const DeviceInfo& device) {
  int64_t places = device.multiprocessors;
  if (plan.reduction == Reduction::kCluster) places = static_cast<int64_t>(device.clusters[plan.splits]) * plan.splits;
  const int by_memory = device.shared_memory_sm / (shape.shared_bytes + 1024);
  const int resident = std::max(1, std::min({by_memory, shape.most_resident, 2048 / shape.threads}));
  const int64_t blocks = tiles * plan.splits;
  const int64_t layers = DivideUp(blocks, places);  // blocks that an SM runs
  const int64_t waves = DivideUp(layers, resident);
  const double together = static_cast<double>(std::min<int64_t>(layers, resident)), chunks = plan.chunks_per_split;
  const double running = static_cast<double>(std::min<int64_t>(blocks, places * resident));
  const double loading = chunks * shape.stage_bytes * running / (costs.cache_bytes * device.multiprocessors);
  const double work = std::max({chunks * shape.cycles.alone, together * chunks * shape.cycles.shared, loading});
  const double tile = costs.tile_end * shape.pixels * shape.out_channels / 4096;
  const double cluster = (plan.splits > 1 ? costs.cluster_reduction + costs.split * plan.splits : 0) +
                         (plan.reduction == Reduction::kWorkspace ? costs.workspace : 0);
  return static_cast<double>(waves) * (costs.block + work + together * tile + cluster);
}

// Whether pixels of x, and elements from the first of a window to its last, have 32-bit numbers, with padding.
bool HasSmallNumbers(const ConvArgs& a) {
  int64_t reach[2], kernel[2];
  for (int i = 0; i < 2; ++i) {
    if (a.pad_low[i] > kMaxCount || a.pad_low[i] < -kMaxCount) return false;
    kernel[i] = a.kernel_size[i] * a.dilation[i];
    reach[i] = std::abs(a.pad_low[i]) + a.conv_size[i] * a.stride[i] + kernel[i];
    if (reach[i] > kMaxCount || kernel[i] >= kMaxCount / 2) return false;  // rows that lie nowhere are below those
  }
  const int64_t windows = a.images * a.size[0] * a.size[1] + reach[0] * a.size[1] + reach[1];
  return windows <= kMaxCount && (kernel[0] * a.size[1] + kernel[1]) * a.channels <= kMaxCount &&
         a.images * a.conv_size[0] * a.conv_size[1] <= kMaxCount;
}

// Cuts a call by a tile of small_map; false where that does not fit.
bool CompleteSmallMapPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device, MmaPlan* plan) {
  const SmallMapCosts& costs = SmallMapCostsOf(*plan, element_bytes);
  const SmallMapShape shape = element_bytes == 4 ? ShapeOfSmallMapTile<float>(plan->tile, costs)
                                                 : ShapeOfSmallMapTile<uint16_t>(plan->tile, costs);
  const int64_t depth = a.kernel_size[0] * a.kernel_size[1] * a.group_channels;
  const int64_t pixels = a.images / a.stacks * a.conv_size[0] * a.conv_size[1];
  const int64_t pixel_tiles = DivideUp(pixels, shape.pixels),
                out_channel_tiles = DivideUp(a.out_channels / a.groups, shape.out_channels);
  if (shape.shared_bytes > device.shared_memory || pixel_tiles * out_channel_tiles > kMaxCount) return false;
  if (!HasSmallNumbers(a)) return false;
  plan->splits = 1;
  plan->reduction = Reduction::kNone;
  plan->pixel_tiles = static_cast<int>(pixel_tiles);
  plan->out_channel_tiles = static_cast<int>(out_channel_tiles);
  plan->chunks = plan->chunks_per_split = static_cast<int>(DivideUp(depth, shape.depth));
  plan->cycles = SmallMapCycles(*plan, shape, costs, pixel_tiles * out_channel_tiles * a.groups * a.stacks, device);
  return true;
}

// At HIGHEST FFMA where tensor cores do TF32 at little more than its rate, since 3xTF32 needs three products for one.
// But FFMA adds product after product, and is off by 2.6e-6 after 18,432 of them.
Engine EngineFor(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  constexpr int64_t kMaxProducts = 8192;
  if (element_bytes != 4 || a.precision != Precision::kHighest) return Engine::kTensorCores;
  const bool is_long = a.kernel_size[0] * a.kernel_size[1] * a.group_channels > kMaxProducts;
  return device.fast_tf32 || is_long ? Engine::kTf32x3 : Engine::kOuterProduct;
}

// Whether numbers of pixels, of the reduction axis and of blocks fit the kernels.
bool HasTiles(const ConvArgs& a) {
  constexpr int64_t kSlack = 1 << 10;  // numbers of pixels beyond the last, in a tile
  const int64_t images = a.images / a.stacks, taps = a.kernel_size[0] * a.kernel_size[1];
  if (std::max(images * a.conv_size[0] * a.conv_size[1], images * a.size[0] * a.size[1]) > kMaxCount - kSlack ||
      taps * a.group_channels > kMaxCount - kSlack || a.groups > kMaxGrid || a.stacks > kMaxGrid) {
    return false;
  }
  return a.groups == 1 || a.out_channels / a.groups >= kMinGroupOutChannels;
}

}  // namespace

int MmaKind(const MmaPlan& plan, int element_bytes) {
  if (plan.engine == Engine::kOuterProduct) return kFfma;
  return plan.engine == Engine::kTf32x3 ? kHighest : element_bytes == 4 ? kTf32 : k16Bit;
}

double MmaMicroseconds(const MmaPlan& plan, const ConvArgs& a, int element_bytes, bool in_chain,
                       const DeviceInfo& device) {
  const MmaCosts& mma = CostsOf(plan, element_bytes);
  const Microseconds& us = IsSmallMap(plan.tile) ? SmallMapCostsOf(plan, element_bytes).us
                           : in_chain            ? mma.chain_us
                                                 : mma.us;
  return us.Of(plan.cycles, OperandBytes(a, element_bytes), device);
}

bool CompleteMmaPlan(const ConvArgs& a, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                     MmaPlan* plan) {
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1], depth = taps * a.group_channels;
  const int64_t images = a.images / a.stacks, pixels = images * a.conv_size[0] * a.conv_size[1];
  plan->reduction = plan->splits == 1                   ? Reduction::kNone
                    : device.clusters[plan->splits] > 0 ? Reduction::kCluster
                                                        : Reduction::kWorkspace;
  const TileShape shape = ShapeOfPlan(*plan, element_bytes, taps);
  const int64_t pixel_tiles = DivideUp(pixels, shape.pixels);
  const int64_t out_channel_tiles = DivideUp(a.out_channels / a.groups, shape.out_channels),
                chunks = DivideUp(depth, shape.chunk);
  if (pixel_tiles * out_channel_tiles > kMaxCount / plan->splits || plan->splits > chunks) return false;
  if (shape.shared_bytes > device.shared_memory) return false;
  plan->pixel_tiles = static_cast<int>(pixel_tiles);
  plan->out_channel_tiles = static_cast<int>(out_channel_tiles);
  plan->chunks = static_cast<int>(chunks);
  plan->chunks_per_split = static_cast<int>(DivideUp(chunks, plan->splits));
  if (DivideUp(chunks, plan->chunks_per_split) != plan->splits) return false;  // a split would be empty
  const int64_t tiles = pixel_tiles * out_channel_tiles * a.groups * a.stacks;
  const int64_t tile_bytes =
      static_cast<int64_t>(shape.pixels) * shape.out_channels * static_cast<int64_t>(sizeof(float));
  if (plan->reduction == Reduction::kWorkspace &&
      tiles * plan->splits * tile_bytes > static_cast<int64_t>(workspace_bytes)) {
    return false;
  }
  plan->cycles = Cycles(*plan, shape, CostsOf(*plan, element_bytes), tiles, device);
  return true;
}

void VisitMmaPlans(const ConvArgs& a, int element_bytes, size_t workspace_bytes, bool with_small_map,
                   const DeviceInfo& device, const std::function<void(const MmaPlan&)>& visit) {
  const auto visit_tile = [&](MmaTile tile, int splits) {
    const Candidate candidate{Family::kMma, {static_cast<int>(tile), splits}};
    const MmaPlan plan = MmaPlanOf(candidate, a, element_bytes, workspace_bytes, device);
    if (plan.tile != MmaTile::kNone) visit(plan);
  };
  for (MmaTile tile :
       {MmaTile::kSmallMap16x8, MmaTile::kSmallMap16x16, MmaTile::kSmallMap32x16, MmaTile::kSmallMapNarrow}) {
    if (with_small_map) visit_tile(tile, 1);
  }
  for (MmaTile tile : {MmaTile::kFlat, MmaTile::kSmall, MmaTile::kTall, MmaTile::kLarge, MmaTile::kNarrow}) {
    if (tile == MmaTile::kLarge && device.wgmma) continue;  // wgmma was faster in each of 33 layers
    for (int splits = 1; splits <= kMaxSplits; ++splits) visit_tile(tile, splits);
  }
}

MmaPlan MmaPlanOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                  const DeviceInfo& device) {
  const int number = candidate.tile[0], splits = candidate.tile[1];
  if (number <= static_cast<int>(MmaTile::kNone) || number > static_cast<int>(MmaTile::kSmallMapNarrow)) return {};
  if (splits < 1 || splits > kMaxSplits || !HasTiles(a)) return {};
  MmaPlan plan{};
  plan.tile = static_cast<MmaTile>(number);
  plan.engine = EngineFor(a, element_bytes, device);
  plan.splits = splits;
  const int64_t step = 16 / element_bytes, taps = a.kernel_size[0] * a.kernel_size[1];  // step: elements of a copy
  const bool wide = a.group_channels % step == 0 && a.out_channels / a.groups % step == 0;
  if (IsSmallMap(plan.tile)) {
    if ((plan.tile == MmaTile::kSmallMapNarrow) == wide || plan.engine == Engine::kOuterProduct || splits > 1)
      return {};
    return CompleteSmallMapPlan(a, element_bytes, device, &plan) ? plan : MmaPlan{};
  }
  if ((plan.tile == MmaTile::kNarrow) == wide || (!wide && taps > kMaxTableTaps)) return {};
  const MmaTile absent = plan.engine == Engine::kTensorCores ? MmaTile::kFlat : MmaTile::kTall;
  if (plan.tile == absent) return {};
  return CompleteMmaPlan(a, element_bytes, workspace_bytes, device, &plan) ? plan : MmaPlan{};
}

size_t MmaWorkspaceBytes(int64_t pixels, int64_t out_channels, int64_t depth) {
  // Splitting pays while there are fewer than some 256 blocks of 64 results x 64 output channels.
  constexpr int64_t kSide = 64, kBlocks = 256;
  const int64_t tiles = DivideUp(pixels, kSide) * DivideUp(out_channels, kSide);
  if (tiles <= 0 || tiles > kBlocks / 2 || depth <= kSide) return 0;
  const int64_t splits = std::min<int64_t>(kMaxSplits, DivideUp(kBlocks, tiles));
  return static_cast<size_t>(splits * tiles * kSide * kSide) * sizeof(float);
}

}  // namespace jsc
