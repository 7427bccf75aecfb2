// The planner of the engine grouped: tiles of results, and groups of a block, by a model of cycles.
#include "cuda/dense_conv/plan/grouped_plan.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "cuda/core/model.h"
#include "cuda/core/plan_search.h"

namespace jsc {
namespace {

constexpr int64_t kMost = int64_t{1} << 30;  // pixels, and elements of shared memory's rows, have 32-bit numbers

// Bytes of a row whose neighbours do not share banks: eight pixels, or channels of 16-bit weights, in an odd number of
// 16 bytes; four channels of float32 weights in an odd number of 32 bytes.
int64_t ApartRow(int64_t bytes, int64_t step) { return step * (DivideUp(bytes, step) | 1); }

// What the model knows of a kind of products; names and order are those of model.json.
struct GroupedCosts {
  double product, fragment;  // cycles of a scheduler for a product, and for what else a fragment of pixels asks of it
  double latency;            // of a step, at the least
  double results;            // of a fragment's tile
  double few_warps;          // how much longer products take with few warps
  double launch, start, block, wave, tile;
  double pixel_bytes, weight_bytes, result_bytes;  // of a block, in a cycle
  double of_line;                                  // what is left of a line costs that share of what is copied
  double overlap;                                  // warps of a scheduler that hide each other's latency
  Microseconds us, chain_us;
};

const GroupedCosts& CostsOf(int element_bytes, bool tf32x3) {
  return ModelOf<GroupedCosts, model::kGrouped>(element_bytes == 2 ? k16Bit : tf32x3 ? kHighest : kTf32);
}

// Cycles until the last block is done.
double Cycles(const ConvArgs& a, int element_bytes, const GroupedPlan& plan, const DeviceInfo& device) {
  constexpr double kLine = 128, kSchedulers = 4;
  const GroupedCosts& costs = CostsOf(element_bytes, plan.tf32x3);
  const int rows = GroupedRows(plan.tiles, plan.tf32x3);
  const int64_t pixels = int64_t{plan.tile_images} * plan.tile_high * plan.tile_wide;
  const int64_t items = DivideUp(pixels, rows * 16) * plan.columns;
  const auto steps = static_cast<double>(DivideUp(plan.units, 2));
  const double other = rows * costs.fragment + plan.tiles * costs.tile, results = costs.results * rows * plan.tiles;
  const double step = costs.product * rows * plan.tiles * (plan.tf32x3 ? 3 : 1) + other;
  const double busy = static_cast<double>(items) * (steps * step + results) / kSchedulers;
  const double beside = std::min(costs.overlap, static_cast<double>(items) / kSchedulers);  // warps of a scheduler
  const double alone = static_cast<double>(DivideUp(items, kGroupedWarps)) *
                       (steps * std::max(beside * step * costs.few_warps, costs.latency + other) + results);
  const int64_t box = int64_t{plan.tile_images} * plan.box_high * plan.box_wide,
                out_channels = 8 * plan.tiles * plan.columns;
  const int64_t window = a.kernel_size[0] * a.kernel_size[1] * a.group_channels;
  const auto span = static_cast<double>(plan.groups * a.group_channels * element_bytes);
  const double copying =
      static_cast<double>(box) * (span + costs.of_line * std::max(0.0, kLine - span)) / costs.pixel_bytes +
      static_cast<double>(window * out_channels * element_bytes) / costs.weight_bytes +
      static_cast<double>(pixels * out_channels * element_bytes) / costs.result_bytes;
  const int64_t blocks = a.stacks * plan.image_tiles * plan.tiles_down * plan.tiles_across * plan.bundles;
  const int64_t layers = DivideUp(blocks, device.multiprocessors);
  const int64_t resident = std::max(1, std::min(kGroupedBlocks, device.shared_memory_sm / (plan.shared_bytes + 1024)));
  const auto waves = static_cast<double>(DivideUp(layers, resident));
  const auto together = static_cast<double>(std::min(layers, resident)), of_layers = static_cast<double>(layers);
  const double one = costs.start + copying * together + std::max(alone, together * busy);
  return costs.launch + of_layers * costs.block + std::max(waves * one, of_layers * std::max(copying, busy)) +
         waves * costs.wave;
}

}  // namespace

double GroupedMicroseconds(const GroupedPlan& plan, const ConvArgs& a, int element_bytes, bool in_chain,
                           const DeviceInfo& device) {
  const GroupedCosts& costs = CostsOf(element_bytes, plan.tf32x3);
  return (in_chain ? costs.chain_us : costs.us).Of(plan.cycles, OperandBytes(a, element_bytes), device);
}

int GroupedTiles(int64_t group_out_channels) {
  if (group_out_channels % 8 != 0) return 0;
  const int64_t tiles = group_out_channels / 8;
  if (tiles > 8) return 0;
  return tiles <= 5 || tiles == 7 ? static_cast<int>(tiles) : static_cast<int>(tiles / 2);
}

bool CompleteGroupedPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device, GroupedPlan* plan) {
  constexpr int64_t kMostBundles = 65535, kMostTiles = std::numeric_limits<int32_t>::max();
  const int64_t group_out_channels = a.out_channels / a.groups, images = a.images / a.stacks;
  plan->tiles = GroupedTiles(group_out_channels);
  if (plan->tiles == 0 || a.groups == 1 || a.pool != Pool::kNone) return false;
  if (a.group_channels * element_bytes % kUnitBytes != 0) return false;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t units = taps * (a.group_channels * element_bytes / kUnitBytes);
  if (units < 2 || units > kMostGroupedUnits) return false;
  plan->units = static_cast<int>(units);
  if (images * a.size[0] * a.size[1] > kMost || images * a.conv_size[0] * a.conv_size[1] > kMost) return false;
  const int64_t tile[] = {plan->tile_high, plan->tile_wide};
  int64_t box[2], tiles[2];
  for (int i = 0; i < 2; ++i) {
    if (std::abs(a.pad_low[i]) > kMost || a.conv_size[i] * a.stride[i] > kMost) return false;
    if (a.kernel_size[i] * a.dilation[i] > kMost) return false;
    box[i] = (tile[i] - 1) * a.stride[i] + (a.kernel_size[i] - 1) * a.dilation[i] + 1;
    tiles[i] = DivideUp(a.conv_size[i], tile[i]);
    if (box[i] > device.shared_memory) return false;
  }
  if (box[1] * a.channels > std::numeric_limits<int32_t>::max()) return false;  // elements of a row of a box
  plan->box_high = static_cast<int>(box[0]), plan->box_wide = static_cast<int>(box[1]);
  plan->tiles_down = static_cast<int>(tiles[0]), plan->tiles_across = static_cast<int>(tiles[1]);
  plan->image_tiles = static_cast<int>(DivideUp(images, plan->tile_images));
  const int64_t bundles = DivideUp(a.groups, plan->groups) * plan->out_channel_splits;
  const int64_t columns = group_out_channels / (8 * plan->tiles);  // of a group
  if (columns % plan->out_channel_splits != 0 || (plan->groups > 1 && plan->out_channel_splits > 1)) return false;
  plan->columns = static_cast<int>(plan->groups * columns / plan->out_channel_splits);
  if (bundles > kMostBundles || a.stacks * plan->image_tiles * tiles[0] * tiles[1] > kMostTiles) return false;
  plan->bundles = static_cast<int>(bundles);
  const int64_t out_channels = 8 * plan->tiles * plan->columns;
  const int64_t pixel_bytes = ApartRow(plan->groups * a.group_channels * element_bytes, 16);
  const int64_t weight_bytes = ApartRow(out_channels * element_bytes, element_bytes == 4 ? 32 : 16);
  const int64_t weights = taps * a.group_channels * weight_bytes, offsets = Whole(units * 4, 128);
  const int64_t pixels = plan->tile_images * box[0] * box[1] * pixel_bytes;
  const int64_t fragments = 16 * GroupedRows(plan->tiles, plan->tf32x3),
                of_tile = plan->tile_images * tile[0] * tile[1];
  const int64_t places = Whole(of_tile, fragments) * 8, head = offsets + places;  // two numbers a pixel
  if (head + weights + pixels > device.shared_memory) return false;
  plan->pixel_bytes = static_cast<int>(pixel_bytes), plan->weight_bytes = static_cast<int>(weight_bytes);
  plan->places_at = static_cast<int>(offsets), plan->weights_at = static_cast<int>(head);
  plan->pixels_at = static_cast<int>(head + weights);
  plan->shared_bytes = static_cast<int>(head + weights + pixels);
  plan->cycles = Cycles(a, element_bytes, *plan, device);
  return true;
}

void VisitGroupedPlans(const ConvArgs& a, int element_bytes, const DeviceInfo& device,
                       const std::function<void(const GroupedPlan&)>& visit) {
  const auto high = static_cast<int>(std::min<int64_t>(a.conv_size[0], 32));
  const auto wide = static_cast<int>(std::min<int64_t>(a.conv_size[1], 64));
  if (a.groups == 1 || !device.fast_tf32 || GroupedTiles(a.out_channels / a.groups) == 0) return;
  for (const int of_wide : {wide, (wide + 1) / 2, 7, 8, 14, 16, 28, 32}) {
    for (const int of_high : {high, (high + 1) / 2, 1, 2, 4, 7, 8, 14, 16}) {
      if (of_wide > wide || of_high > high) continue;
      for (const int images : {1, 2, 4, 8}) {
        for (int groups = 1; groups <= 8; groups *= 2) {
          for (const int out_channel_splits : {1, 2}) {
            const Candidate tile{Family::kGrouped, {images, of_high, of_wide, groups, out_channel_splits}};
            const GroupedPlan plan = GroupedPlanOf(tile, a, element_bytes, device);
            if (plan.tiles > 0) visit(plan);
          }
        }
      }
    }
  }
}

GroupedPlan GroupedPlanOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  constexpr int64_t kMostBytes = 256;                  // of a pixel's channels
  constexpr int kMostPixels = 512, kMostTogether = 8;  // of a block; images, and groups
  GroupedPlan plan{};
  plan.tf32x3 = element_bytes == 4 && a.precision == Precision::kHighest;
  plan.tile_images = candidate.tile[0], plan.tile_high = candidate.tile[1], plan.tile_wide = candidate.tile[2];
  plan.groups = candidate.tile[3], plan.out_channel_splits = candidate.tile[4];
  if (std::min({plan.tile_images, plan.tile_high, plan.tile_wide, plan.groups, plan.out_channel_splits}) < 1) return {};
  if (std::max(plan.tile_images, plan.groups) > kMostTogether || plan.out_channel_splits > 2) return {};
  if (plan.tile_high > a.conv_size[0] || plan.tile_wide > a.conv_size[1] || plan.groups > a.groups) return {};
  if (int64_t{plan.tile_high} * plan.tile_wide * plan.tile_images > kMostPixels) return {};
  const bool is_whole = plan.tile_wide == a.conv_size[1] && plan.tile_high == a.conv_size[0];
  if (plan.tile_images > 1 && !is_whole) return {};
  if (plan.groups > 1 && plan.groups * a.group_channels * element_bytes > kMostBytes) return {};
  if (a.groups == 1 || !device.fast_tf32 || !CompleteGroupedPlan(a, element_bytes, device, &plan)) return {};
  return plan;
}

GroupedPlan ChooseGroupedPlan(const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  return Cheapest<GroupedPlan>([&](const auto& visit) { VisitGroupedPlans(a, element_bytes, device, visit); });
}

}  // namespace jsc
