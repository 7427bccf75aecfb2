// The planner of the engine splitk_channels: tiles, and the channels of a tile in slices, by a model of cycles.
#include "cuda/dense_conv/plan/splitk_channels_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cuda/core/model.h"
#include "cuda/core/plan_search.h"

namespace jsc {
namespace {

// What the model needs to know of a compiled tile; registers for TF32 and for 3xTF32.
struct SplitKChannelsShape {
  int out_channels, columns, warps;
  int registers[2];
};

constexpr SplitKChannelsShape kShapes[] = {
    {16, 4, 4, {48, 80}},  {32, 2, 4, {56, 80}},  {32, 2, 8, {56, 80}},
    {32, 4, 4, {80, 120}}, {32, 4, 8, {80, 120}}, {32, 7, 4, {120, 192}},
};

// What the model knows of TF32 and of 3xTF32; names and order are those of model.json.
struct SplitKChannelsCosts {
  struct {
    double alone, busy;  // cycles of a slice under one tap: of a warp alone on its scheduler; of the scheduler
  } step[std::size(kShapes)];
  double block, wide_block;            // of any block, and of one of eight warps besides
  double row;                          // of taps
  double bytes;                        // that an SM gets in a cycle
  double sums;                         // for each KB of partial sums
  double cluster, member, slot_bytes;  // of a cluster: of itself, of each block, and for each 100 sums of eight results
  double placed;                       // share of the SMs: clusters are not spread evenly over them
  double room;                         // share of the rest that clusters find, because they share SMs
  Microseconds us;
};

const SplitKChannelsCosts& CostsOf(bool tf32x3) {
  return ModelOf<SplitKChannelsCosts, model::kSplitkChannels>(tf32x3 ? 1 : 0);
}

double Cycles(const ConvArgs& a, int element_bytes, const SplitKChannelsShape& shape, const SplitKChannelsPlan& plan,
              const DeviceInfo& device) {
  constexpr int64_t kRegisters = 65536, kThreads = 2048, kReserved = 2048;
  const SplitKChannelsCosts& costs = CostsOf(plan.tf32x3);
  const auto& step = costs.step[&shape - kShapes];
  const double places =
      plan.splits == 1 ? device.multiprocessors : costs.placed * device.clusters[plan.splits] * plan.splits;
  const double blocks =
      1.0 * a.images * plan.tiles_down * plan.tiles_across * plan.out_channel_tiles * a.groups * plan.splits;
  const double layers = std::ceil(blocks / places);  // of blocks, on an SM
  const int64_t threads = kWarp * plan.warps;
  const int64_t resident =
      std::max<int64_t>(1, std::min({device.shared_memory_sm / (plan.shared_bytes + kReserved), kThreads / threads,
                                     kRegisters / (threads * shape.registers[plan.tf32x3])}));
  // Where blocks wait for others the figures below are up to 3.8 times too fast: larger layers have other kernels.
  if (layers > static_cast<double>(resident)) return std::numeric_limits<double>::infinity();
  // The fullest SM is not all that waits, and clusters that share SMs find a little more room.
  const double room = places + (plan.splits > 1 ? costs.room * (costs.placed * device.multiprocessors - places) : 0);
  const double load = blocks <= places ? 1 : (std::max(2.0, std::ceil(blocks / room)) + blocks / room) / 2;
  const double rows = static_cast<double>(a.kernel_size[0]), slices = plan.slices * plan.warps;
  const double steps = rows * a.kernel_size[1] * plan.slices;
  const double pixels = slices * plan.box_high * plan.box_wide * kSliceBytes;
  const double weights =
      slices * rows * a.kernel_size[1] * (kSliceBytes / element_bytes) * plan.out_channels * element_bytes;
  const double first = load * (pixels + weights / rows) / costs.bytes;
  const double rest = load * (weights - weights / rows) / costs.bytes;
  const double loop = std::max(steps * step.alone, load * plan.warps / 4 * steps * step.busy);
  const double sums = plan.out_channels * plan.columns;  // of eight results
  double cycles = costs.block + (plan.warps > 4 ? costs.wide_block : 0) + first + std::max(loop, rest) +
                  costs.row * rows + load * costs.sums * plan.warps * sums * 32 / 1000;
  if (plan.splits > 1) cycles += costs.cluster + costs.member * plan.splits + costs.slot_bytes * sums / 100;
  return cycles;
}

bool Fits(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  return a.pool == Pool::kNone && element_bytes == 4 && device.clusters[1] > 0;
}

}  // namespace

ConvArgs FlattenedArgs(const ConvArgs& args) {
  ConvArgs a = args;
  for (int i = 0; i < 2; ++i) {
    if (a.kernel_size[i] != 1 || a.stride[i] != 1 || a.pad_low[i] != 0 || a.conv_size[i] != a.size[i]) return args;
  }
  if (a.pool != Pool::kNone) return args;
  a.size[1] = a.images / std::max<int64_t>(a.stacks, 1) * a.size[0] * a.size[1];
  a.size[0] = 1;
  a.images = a.stacks;
  for (int i = 0; i < 2; ++i) a.conv_size[i] = a.out_size[i] = a.size[i];
  return a;
}

bool CompleteSplitKChannelsPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device,
                                SplitKChannelsPlan* plan) {
  constexpr int64_t kMaxBox = 256, kAtom = 1024, kMaxGrid = 65535;
  const int64_t channels = kSliceBytes / element_bytes, all = DivideUp(a.group_channels, channels);
  if (a.channels % channels != 0 || a.group_channels % channels != 0) return false;
  if (a.out_channels * element_bytes % 16 != 0 || a.kernel_size[0] > kMostKernelRows) return false;
  const int64_t slices = DivideUp(all, plan->splits * plan->warps);
  if (DivideUp(all, slices * plan->warps) != plan->splits) return false;  // a block would have none
  if (a.groups > 1 &&
      (all != slices * plan->splits * plan->warps || a.out_channels / a.groups % plan->out_channels != 0)) {
    return false;
  }
  // Coordinates, and numbers of results, have 32 bits.
  constexpr int64_t kMost = int64_t{1} << 30;
  if (a.images * a.conv_size[0] * a.conv_size[1] > kMost || a.images * a.size[0] * a.size[1] > kMost) return false;
  const int64_t tile[] = {plan->tile_high, plan->tile_wide}, images = a.images / a.stacks;
  int64_t box[2], tiles[2];
  for (int i = 0; i < 2; ++i) {
    box[i] = (tile[i] - 1) * a.stride[i] + (a.kernel_size[i] - 1) * a.dilation[i] + 1;
    tiles[i] = DivideUp(a.conv_size[i], tile[i]);
    if (box[i] > kMaxBox || std::abs(a.pad_low[i]) > kMost || a.conv_size[i] * a.stride[i] > kMost) return false;
  }
  if (tile[0] * tile[1] > plan->columns * 8 || slices * plan->warps * channels > kMaxBox || a.kernel_size[1] > kMaxBox)
    return false;
  plan->slices = static_cast<int>(slices);
  plan->box_high = static_cast<int>(box[0]), plan->box_wide = static_cast<int>(box[1]);
  plan->tiles_down = static_cast<int>(tiles[0]), plan->tiles_across = static_cast<int>(tiles[1]);
  plan->out_channel_tiles = static_cast<int>(DivideUp(a.out_channels / a.groups, plan->out_channels));
  if (a.stacks * images * tiles[0] * tiles[1] > kMaxGrid || plan->out_channel_tiles * a.groups > kMaxGrid) return false;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t unit = kWarp * plan->out_channels / 8 * 4, units = 2 * plan->columns;
  const int64_t of_block = slices * plan->warps;
  const int64_t operands =
      of_block * (taps * channels * plan->out_channels * element_bytes + box[0] * box[1] * kSliceBytes);
  const int64_t slot_bytes = plan->splits > 1 ? DivideUp(units, plan->splits) * plan->splits * unit : 0;
  plan->sums_at = static_cast<int>(Whole(operands, 16));
  plan->slots_at = static_cast<int>(plan->sums_at + plan->warps * units * unit);
  plan->shared_bytes = static_cast<int>(plan->slots_at + slot_bytes);
  if (plan->slots_at + slot_bytes + 2 * kAtom > device.shared_memory) return false;
  return true;
}

double SplitKChannelsMicroseconds(const SplitKChannelsPlan& plan, const ConvArgs& a, int element_bytes,
                                  const DeviceInfo& device) {
  return CostsOf(plan.tf32x3).us.Of(plan.cycles, OperandBytes(a, element_bytes), device);
}

void VisitSplitKChannelsPlans(const ConvArgs& a, int element_bytes, const DeviceInfo& device,
                              const std::function<void(const SplitKChannelsPlan&)>& visit) {
  if (!Fits(a, element_bytes, device)) return;
  const auto wide = static_cast<int>(std::min<int64_t>(a.conv_size[1], 64));
  for (const SplitKChannelsShape& shape : kShapes) {
    const int room = shape.columns * 8;
    for (const int of_wide : {wide, (wide + 1) / 2, 7, 8, 14, 16, 28, 32, 56}) {
      SplitKChannelsPlan plan{};
      plan.out_channels = shape.out_channels, plan.columns = shape.columns, plan.warps = shape.warps;
      plan.tf32x3 = a.precision == Precision::kHighest;
      plan.tile_wide = std::min({of_wide, wide, room});
      plan.tile_high = static_cast<int>(std::min<int64_t>(room / plan.tile_wide, a.conv_size[0]));
      for (plan.splits = 1; plan.splits <= kMaxChannelSplits; ++plan.splits) {
        if (!CompleteSplitKChannelsPlan(a, element_bytes, device, &plan)) continue;
        plan.cycles = Cycles(a, element_bytes, shape, plan, device);
        if (std::isfinite(plan.cycles)) visit(plan);
      }
    }
  }
}

SplitKChannelsPlan SplitKChannelsPlanOf(const Candidate& candidate, const ConvArgs& a, int element_bytes,
                                        const DeviceInfo& device) {
  SplitKChannelsPlan plan{};
  plan.out_channels = candidate.tile[0], plan.columns = candidate.tile[1], plan.warps = candidate.tile[2];
  plan.tile_high = candidate.tile[3], plan.tile_wide = candidate.tile[4], plan.splits = candidate.tile[5];
  plan.tf32x3 = a.precision == Precision::kHighest;
  if (!Fits(a, element_bytes, device) || plan.splits < 1 || plan.splits > kMaxChannelSplits) return {};
  if (plan.tile_high < 1 || plan.tile_wide < 1 || std::max(plan.tile_high, plan.tile_wide) > 64) return {};
  for (const SplitKChannelsShape& shape : kShapes) {
    const bool is_it =
        shape.out_channels == plan.out_channels && shape.columns == plan.columns && shape.warps == plan.warps;
    if (!is_it || !CompleteSplitKChannelsPlan(a, element_bytes, device, &plan)) continue;
    plan.cycles = Cycles(a, element_bytes, shape, plan, device);
    return plan;
  }
  return {};
}

SplitKChannelsPlan ChooseSplitKChannelsPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  return Cheapest<SplitKChannelsPlan>(
      [&](const auto& visit) { VisitSplitKChannelsPlans(a, element_bytes, device, visit); });
}

}  // namespace jsc
