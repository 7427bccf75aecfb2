// The planner of the engine few_channels, by a model of cycles.
#include "cuda/dense_conv/plan/few_channels_plan.h"

#include <algorithm>
#include <array>
#include <limits>

#include "cuda/core/model.h"
#include "cuda/core/plan_search.h"

namespace jsc {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGrid = 65535;
constexpr int64_t kReadAhead = 2048;   // bytes of weights beyond the last, which are read but not used
constexpr int64_t kStaticBytes = 128;  // of shared memory that the kernel has beside
constexpr int kMaxRows = 16;           // of a tile
constexpr int64_t kMaxRow = 1 << 16;   // elements of a staged row

int RoundUp(int64_t value, int multiple) { return static_cast<int>(Whole(value, multiple)); }

bool Fits(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  if (a.groups != 1 || a.channels > kMostFewChannels || a.channels < 1 || a.pool == Pool::kAverage) return false;
  if (a.dilation[0] != 1 || a.dilation[1] != 1) return false;
  if (element_bytes == 4 && a.precision == Precision::kHighest && !device.fast_tf32) return false;
  const int64_t pixels = a.images * std::max({a.size[0] * a.size[1], a.conv_size[0] * a.conv_size[1], int64_t{1}});
  return a.images > 0 && a.out_size[0] > 0 && a.out_size[1] > 0 && a.stacks <= kMaxGrid &&
         pixels * kMostFewChannels < kMaxCount && a.out_channels <= kMaxRow &&
         a.kernel_size[0] * a.kernel_size[1] <= kMaxRow;
}

// What the model needs to know of a block.
struct BlockShape {
  int64_t warp_tiles, blocks, resident,
      tiles;             // of warps, at runs of a tile; of the grid; that run at once; of a block
  int64_t patch_pieces;  // 16 bytes each
};

// What the model knows of a kind of products; names and order are those of model.json.
struct FewChannelsCosts {
  double tile, order_round, copy_round, end_warp_tile, pool_round, block;
  double piece, warp_tile, pooled;  // instructions of a warp for 16 bytes of pixels, of a warp's tile for 32 output
                                    // channels, and of a pool for a run of them
  double issue;                     // cycles of an instruction
  Microseconds us;
};

const FewChannelsCosts& CostsOf(int element_bytes, bool tf32x3) {
  return ModelOf<FewChannelsCosts, model::kFewChannels>(element_bytes == 2 ? k16Bit : tf32x3 ? kHighest : kTf32);
}

// Cycles until the last block is done, by what the busiest SM has to do.
double Cycles(const ConvArgs& a, int element_bytes, const DeviceInfo& device, const FewChannelsPlan& plan,
              const BlockShape& block) {
  const FewChannelsCosts& costs = CostsOf(element_bytes, plan.tf32x3);
  const bool wide = element_bytes == 4, pooled = a.pool != Pool::kNone;
  const int64_t layers = DivideUp(block.blocks, device.multiprocessors);  // blocks that an SM runs
  const auto waves = static_cast<double>(DivideUp(layers, block.resident));
  const auto together = static_cast<double>(std::min(layers, block.resident));
  const auto warp_tiles = static_cast<double>(block.warp_tiles), pieces = static_cast<double>(block.patch_pieces);
  const int threads = plan.warps * kWarp;
  const auto rounds = [](int64_t all, int64_t at_once) { return static_cast<double>(DivideUp(all, at_once)); };

  // Of a warp's tile: cycles of a tensor core for its products, and of shared memory for what they read.
  const double steps = plan.pairs * element_bytes / 16.0, fragments = plan.out_channels / 16.0,
               terms = plan.tf32x3 ? 3 : 1;
  const double products = steps * fragments * kFewChannelsWarpRuns * terms * 8;
  const double reads = steps * ((fragments * 4 + 8) * (plan.tf32x3 ? 2 : 1) + (wide ? 1 : 2));
  const double work = std::max({together * warp_tiles * products / 4, together * warp_tiles * reads,
                                rounds(block.warp_tiles, plan.warps) * products});
  // Instructions of the SM's warps beside them.
  const double per_warp_tile = plan.out_channels / 32 * costs.warp_tile;
  const double runs = plan.tile[0] * plan.tile[1] / kFewChannelsRun;
  const double issue = together / 4 *
                       (pieces * costs.piece / 32 + warp_tiles * per_warp_tile +
                        (pooled ? runs * plan.out_channels * costs.pooled / 32 : 0));
  const int64_t row_pieces = plan.pitch * element_bytes / 16;
  const double copies = rounds(plan.patch_rows, plan.warps) * rounds(row_pieces, kWarp);
  const double pool =
      pooled ? rounds(int64_t{plan.tile_out[0]} * plan.tile_out[1] * plan.out_channels * element_bytes / 16, threads)
             : 0;
  const double end = rounds(block.warp_tiles, plan.warps) * plan.out_channels / 32;
  const double tile = costs.tile + work + costs.issue * issue + costs.copy_round * copies + costs.end_warp_tile * end +
                      costs.pool_round * pool;
  const double order =
      costs.order_round * rounds(int64_t{plan.pairs} * plan.out_channels * element_bytes / 16, threads);
  const double start = costs.block * std::max(0.0, static_cast<double>(block.blocks) / device.multiprocessors - 1);
  return start + waves * (order + static_cast<double>(block.tiles) * tile);
}

}  // namespace

double FewChannelsMicroseconds(const FewChannelsPlan& plan, const ConvArgs& a, int element_bytes,
                               const DeviceInfo& device) {
  return CostsOf(element_bytes, plan.tf32x3).us.Of(plan.cycles, OperandBytes(a, element_bytes), device);
}

bool CompleteFewChannelsPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device, FewChannelsPlan* plan) {
  const int piece = 16 / element_bytes;
  const bool pooled = a.pool != Pool::kNone;
  plan->tf32x3 = element_bytes == 4 && a.precision == Precision::kHighest;
  const int64_t row_elements = a.kernel_size[1] * a.channels;
  plan->paired = a.stride[1] * a.channels % 2 == 0;
  plan->lead = plan->paired ? static_cast<int>((a.pad_low[1] * a.channels % 2 + 2) % 2) : 0;
  plan->row_pairs = static_cast<int>(DivideUp(row_elements + plan->lead, 2));
  plan->pairs = RoundUp(a.kernel_size[0] * plan->row_pairs, kFewChannelsChunkPairs);
  int64_t patch[2], tiles = 1;
  for (int i = 0; i < 2; ++i) {
    plan->tile[i] =
        pooled ? static_cast<int>((plan->tile_out[i] - 1) * a.window_stride[i] + a.window[i]) : plan->tile_out[i];
    if (i == 1) plan->tile[1] = RoundUp(plan->tile[1], kFewChannelsRun);
    patch[i] = (plan->tile[i] - 1) * a.stride[i] + a.kernel_size[i];
    if (plan->tile[i] > kMaxRow || patch[i] > kMaxRow) return false;
    plan->tiles[i] = static_cast<int>(DivideUp(a.out_size[i], plan->tile_out[i]));
    tiles *= plan->tiles[i];
  }
  tiles *= a.images / a.stacks;
  plan->patch_rows = static_cast<int>(patch[0]);
  plan->pitch = RoundUp(patch[1] * a.channels + piece + 1, piece);
  plan->out_channel_tiles = static_cast<int>(DivideUp(a.out_channels, plan->out_channels));
  const int out_channels = plan->out_channels;
  const int runs = plan->tile[0] * plan->tile[1] / kFewChannelsRun;
  const int64_t warp_tiles = DivideUp(runs, kFewChannelsWarpRuns), passes = DivideUp(warp_tiles, kFewChannelsWarps);
  plan->warps = static_cast<int>(DivideUp(warp_tiles, passes));
  const int copies = plan->tf32x3 ? 2 : 1;
  plan->table_at = plan->pairs * 2 * out_channels * element_bytes * copies;
  plan->bias_at = plan->table_at + (plan->pairs + kFewChannelsAhead) * 4;
  plan->raw_at = plan->bias_at + out_channels * 4;
  const int64_t raw_bytes = int64_t{plan->pitch} * plan->patch_rows * element_bytes;
  const int64_t pool_bytes = pooled ? int64_t{runs} * kFewChannelsRun * (out_channels + 4) * 4 : 0;
  const int64_t weight_bytes = a.kernel_size[0] * row_elements * (out_channels * element_bytes + 16);
  if (tiles > kMaxCount / 64 || plan->out_channel_tiles > kMaxGrid) return false;
  const int64_t others = plan->out_channel_tiles * a.stacks;
  BlockShape block{warp_tiles, 0, 0, 0, raw_bytes / 16};
  // A block that has several tiles copies the pixels of one while it multiplies another, so apart.
  for (bool apart : {plan->tf32x3, true}) {
    const int64_t patch_at = plan->raw_at + (apart ? raw_bytes : 0), pool_at = patch_at + raw_bytes * copies;
    const int64_t bytes = std::max(pool_at + std::max(pool_bytes, weight_bytes), plan->table_at + kReadAhead);
    if (bytes + kStaticBytes > device.shared_memory) return false;
    plan->patch_at = static_cast<int>(patch_at);
    plan->pool_at = static_cast<int>(pool_at);
    plan->shared_bytes = static_cast<int>(bytes);
    const int by_memory = device.shared_memory_sm / (plan->shared_bytes + 1024);
    const int by_registers = FewChannelsWarpsResident(out_channels, plan->tf32x3) / plan->warps;
    block.resident = std::max(1, std::min(by_memory, by_registers));
    block.tiles = DivideUp(tiles, std::max<int64_t>(1, block.resident * device.multiprocessors / others));
    if (apart || block.tiles == 1) break;
  }
  plan->blocks = static_cast<int>(DivideUp(tiles, block.tiles));
  block.blocks = plan->blocks * others;
  plan->cycles = Cycles(a, element_bytes, device, *plan, block);
  return true;
}

void VisitFewChannelsPlans(const ConvArgs& a, int element_bytes, const DeviceInfo& device,
                           const std::function<void(const FewChannelsPlan&)>& visit) {
  if (!Fits(a, element_bytes, device)) return;
  const int64_t columns_step = a.pool == Pool::kNone ? kFewChannelsRun : 1;
  for (int out_channels : {32, 64}) {
    if (out_channels > std::max<int64_t>(32, a.out_channels)) continue;
    for (int64_t columns = columns_step; columns < a.out_size[1] + columns_step; columns += columns_step) {
      for (int rows = 1; rows <= std::min<int64_t>(kMaxRows, a.out_size[0]); ++rows) {
        FewChannelsPlan plan{};
        plan.out_channels = out_channels;
        plan.tile_out[0] = rows;
        plan.tile_out[1] = static_cast<int>(columns);
        if (CompleteFewChannelsPlan(a, element_bytes, device, &plan)) visit(plan);
      }
    }
  }
}

FewChannelsPlan FewChannelsPlanOf(const Candidate& candidate, const ConvArgs& a, int element_bytes,
                                  const DeviceInfo& device) {
  const auto [out_channels, rows, columns] = std::array{candidate.tile[0], candidate.tile[1], candidate.tile[2]};
  const int64_t step = a.pool == Pool::kNone ? kFewChannelsRun : 1;
  FewChannelsPlan plan{};
  plan.out_channels = out_channels;
  plan.tile_out[0] = rows;
  plan.tile_out[1] = columns;
  const bool has_kernel = out_channels == 32 || out_channels == 64;
  if (!has_kernel || rows < 1 || rows > kMaxRows || columns < 1 || columns > kMaxRow || columns % step != 0) return {};
  if (!Fits(a, element_bytes, device) || !CompleteFewChannelsPlan(a, element_bytes, device, &plan)) return {};
  return plan;
}

FewChannelsPlan ChooseFewChannelsPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  return Cheapest<FewChannelsPlan>([&](const auto& visit) { VisitFewChannelsPlans(a, element_bytes, device, visit); });
}

}  // namespace jsc
