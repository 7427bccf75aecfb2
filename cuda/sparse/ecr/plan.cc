// The planner of ECR and PECR: every tile, output channel tile and number of splits, by a model of cycles.
#include "cuda/sparse/ecr/plan.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <vector>

#include "cuda/core/model.h"
#include "cuda/core/plan_search.h"

namespace jsc {
namespace {

constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
constexpr int kMaxBox = 256;  // elements of a tensor map's box along one axis

int RoundUp(int64_t a, int64_t b) { return static_cast<int>(Whole(a, b)); }

// Logarithm of the most elements, up to 16 bytes, that divide all of `sizes`: what one asynchronous copy may take.
int CopyShift(int element_bytes, std::initializer_list<int64_t> sizes) {
  int shift = 0;
  for (bool fits = true; (element_bytes << (shift + 1)) <= 16; ++shift) {
    for (int64_t size : sizes) fits = fits && size % (2 << shift) == 0;
    if (!fits) break;
  }
  return shift;
}

void ChooseChunks(const ConvArgs& args, EcrPlan* plan) {
  const int taps = static_cast<int>(args.kernel_size[0] * args.kernel_size[1]);
  plan->chunk_taps = std::min(taps, plan->max_rows);
  plan->tap_chunks = static_cast<int>(DivideUp(taps, plan->chunk_taps));
  const int64_t per_split = DivideUp(args.group_channels, plan->splits);
  plan->chunk_shift = 0;
  while ((2 << plan->chunk_shift) * plan->chunk_taps <= plan->max_rows && (1 << plan->chunk_shift) < per_split) {
    ++plan->chunk_shift;
  }
  plan->chunk_channels = 1 << plan->chunk_shift;
  plan->channel_chunks = static_cast<int>(DivideUp(args.group_channels, plan->chunk_channels));
}

void ChooseGroups(EcrPlan* plan) {
  const bool even = plan->tile_conv[0] % 2 == 0 && plan->tile_conv[1] % 2 == 0;
  for (int i = 0; i < 2; ++i) plan->quads[i] = even ? plan->tile_conv[i] / 2 : 0;
  plan->groups = static_cast<int>(DivideUp(plan->tile_pixels(), kPixels));
}

// Blocks that share an SM.
int Resident(const DeviceInfo& device, int warps, int64_t shared_bytes) {
  return static_cast<int>(
      std::clamp<int64_t>(device.shared_memory_sm / (shared_bytes + 1024), 1, std::max(1, kMaxWarps / warps)));
}

// What the model knows; names and order are those of model.json.
struct EcrCosts {
  double listed;       // share of list candidates that are entries
  double lane, entry;  // cycles of shared memory for an entry: for each lane, and its value and row offset
  double candidate;
  double chain_entry, chain_lane, chain_candidate;  // what a warp waits for
  double end, cluster_end, results;                 // of a block, of one in a cluster, results in a cycle
  double stream_bytes;                              // of kernel rows, that the L2 cache gives an SM in a cycle
  double overlap;                                   // share of the shorter of two kinds of work that is not hidden
  double chunk, wave, launch;
  Microseconds us;
};

// Cycles of a call, for a feature map of about 80 % zeros. What the blocks of an SM ask of its shared memory and
// of the L2 cache adds up; what a warp waits for on its own (the chain) comes on top.
double Cycles(const ConvArgs& args, int element_bytes, const DeviceInfo& device, const EcrPlan& plan, int64_t blocks) {
  const EcrCosts& costs = ModelOf<EcrCosts, model::kEcr>(0);
  const double rows = static_cast<double>(args.kernel_size[0] * args.kernel_size[1]) *
                      DivideUp(plan.channel_chunks, plan.splits) * plan.chunk_channels;
  const double entry = plan.lanes * costs.lane + costs.entry;  // of shared memory: weights, values, row offsets
  const double compute = rows * plan.groups * (costs.listed * entry + costs.candidate);
  const int rounds = static_cast<int>(DivideUp(plan.groups * plan.row_parts, plan.warps));
  const double chain = rounds * rows / plan.row_parts *
                       (costs.listed * (costs.chain_entry + costs.chain_lane * plan.lanes) + costs.chain_candidate);
  const int chunks = static_cast<int>(DivideUp(plan.channel_chunks, plan.splits)) * plan.tap_chunks;
  const double reduce = (plan.splits == 1 ? costs.end : costs.cluster_end) +
                        plan.tile_pixels() * plan.tile_out_channels() / costs.results;

  const int resident = Resident(device, plan.warps, plan.shared_bytes);
  int64_t places = device.multiprocessors;  // for one block each
  if (plan.reduction == Reduction::kCluster) places = std::max(device.clusters[plan.splits], 1) * plan.splits;
  const int64_t layers = DivideUp(blocks, places);  // blocks that an SM runs
  const int64_t waves = DivideUp(layers, resident);
  const double together = std::min<double>(layers, resident);
  const double busy = compute * together;
  // Kernel rows that all blocks of a wave pull through the L2 cache.
  const double wave_blocks = std::min<double>(blocks, static_cast<double>(places) * resident);
  const double stream =
      wave_blocks * rows * plan.tile_out_channels() * element_bytes / (costs.stream_bytes * device.multiprocessors);
  const double wave = std::max(busy, stream) + costs.overlap * std::min(busy, stream) + chain + chunks * costs.chunk +
                      reduce + costs.wave;
  return waves * wave + costs.launch;
}

}  // namespace

double EcrMicroseconds(const EcrPlan& plan, const ConvArgs& a, int element_bytes, const DeviceInfo& device) {
  return ModelOf<EcrCosts, model::kEcr>(0).us.Of(plan.cycles, OperandBytes(a, element_bytes), device);
}

bool CompleteEcrPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                     EcrPlan* plan) {
  const bool pooled = args.pool != Pool::kNone;
  int64_t patch_pixels = plan->tile_images, tiles = args.stacks;
  for (int i = 0; i < 2; ++i) {
    const int64_t conv = pooled ? (plan->tile_out[i] - 1) * args.window_stride[i] + args.window[i] : plan->tile_out[i];
    const int64_t patch = (conv - 1) * args.stride[i] + (args.kernel_size[i] - 1) * args.dilation[i] + 1;
    patch_pixels *= std::min<int64_t>(patch, 1 << 20);
    if (conv > kMaxWarps * kGroupsPerWarp * kPixels || patch_pixels > 1 << 20) return false;
    plan->tile_conv[i] = static_cast<int>(conv);
    plan->tile_patch[i] = static_cast<int>(patch);
    plan->tiles[1 + i] = static_cast<int>(DivideUp(args.out_size[i], plan->tile_out[i]));
    tiles *= plan->tiles[1 + i];
  }
  const int64_t per_stack = DivideUp(args.images / args.stacks, plan->tile_images);
  plan->channel_tiles = static_cast<int>(DivideUp(args.out_channels / args.groups, plan->tile_out_channels()));
  tiles *= per_stack * plan->channel_tiles;
  if (per_stack > kMaxBlocks || tiles > kMaxBlocks / args.groups / plan->splits) return false;
  plan->tiles[0] = static_cast<int>(per_stack);
  const int64_t blocks = tiles * args.groups;

  ChooseGroups(plan);
  const int items = plan->groups * plan->row_parts;
  if (plan->warps == 0) plan->warps = std::min(items, kMaxWarps);
  plan->warps = std::max(plan->warps, static_cast<int>(DivideUp(items, kGroupsPerWarp)));
  if (plan->warps > kMaxWarps) return false;
  ChooseChunks(args, plan);
  if (plan->splits > plan->channel_chunks) return false;
  plan->reduction = plan->splits == 1        ? Reduction::kNone
                    : device.clusters[1] > 0 ? Reduction::kCluster
                                             : Reduction::kWorkspace;
  const int64_t sums_bytes = static_cast<int64_t>(sizeof(float)) * plan->groups * kPixels * plan->tile_out_channels();
  if (plan->reduction == Reduction::kWorkspace &&
      blocks * plan->splits * sums_bytes > static_cast<int64_t>(workspace_bytes)) {
    return false;
  }

  plan->copy_x_shift = CopyShift(element_bytes, {args.channels, args.group_channels, plan->chunk_channels});
  plan->copy_kernel_shift = CopyShift(element_bytes, {args.out_channels, args.out_channels / args.groups});
  plan->bulk = device.clusters[1] > 0 && device.tensor_maps && (element_bytes << plan->copy_kernel_shift) == 16;
  plan->stream = plan->bulk && plan->tap_chunks == 1 && (element_bytes << plan->copy_x_shift) == 16 &&
                 (args.groups == 1 || args.group_channels % plan->chunk_channels == 0) &&
                 std::max({plan->tile_patch[0], plan->tile_patch[1], plan->tile_images}) <= kMaxBox;
  plan->vector_out = plan->copy_kernel_shift >= 2;
  const int rows = plan->chunk_taps * plan->chunk_channels;
  plan->part_rows = static_cast<int>(DivideUp(rows, plan->row_parts));
  plan->list_rows = RoundUp(plan->part_rows, kListMultiple);
  plan->kernel_bytes = RoundUp(static_cast<int64_t>(rows + 1) * plan->tile_out_channels() * element_bytes, 128);
  plan->patch_bytes = RoundUp(std::min<int64_t>(patch_pixels * plan->chunk_channels * element_bytes, 1 << 28), 128);
  const bool cluster = plan->reduction == Reduction::kCluster;
  plan->share_quads = static_cast<int>(DivideUp(plan->tile_out_channels() / 4, cluster ? plan->splits : 1));
  plan->helpers = plan->splits <= 4 ? 1 : plan->splits <= 8 ? 2 : 4;
  plan->inbox_bytes = cluster ? RoundUp(16 * plan->splits * plan->groups * kPixels * plan->share_quads, 128) : 0;
  plan->head_bytes = RoundUp(kCornerBytes + plan->warps * kGroupsPerWarp * kItemBytes, 128);
  const int64_t stage_bytes = static_cast<int64_t>(plan->kernel_bytes) + plan->patch_bytes;
  const int64_t other_bytes = plan->head_bytes + static_cast<int64_t>(plan->warps) * plan->list_rows * 20 +
                              (rows + kWarp) * 4 + kMaxStages * 20;
  // What takes the place of the stages in the end: the sums of all parts, and the DSMEM slots at the latest.
  const int64_t end_bytes = plan->head_bytes + plan->inbox_bytes + plan->row_parts * sums_bytes;
  auto bytes = [&](int stages, int late) {
    return std::max(stages * stage_bytes + other_bytes + (late ? 0 : plan->inbox_bytes), end_bytes);
  };
  auto resident = [&](int stages, int late) {
    return bytes(stages, late) > device.shared_memory ? 0 : Resident(device, plan->warps, bytes(stages, late));
  };
  const int chunks = static_cast<int>(DivideUp(plan->channel_chunks, plan->splits)) * plan->tap_chunks;
  plan->stages = std::min(chunks, 2);
  plan->late_inbox = resident(plan->stages, 0) < resident(plan->stages, 1);
  // More stages where they cost no block its place.
  while (plan->stream && plan->stages < std::min(chunks, kMaxStages) &&
         resident(plan->stages + 1, plan->late_inbox) == resident(plan->stages, plan->late_inbox)) {
    ++plan->stages;
  }
  if (bytes(plan->stages, plan->late_inbox) > device.shared_memory) return false;
  plan->shared_bytes = static_cast<int>(bytes(plan->stages, plan->late_inbox));
  plan->cycles = Cycles(args, element_bytes, device, *plan, blocks * plan->splits);
  return true;
}

void VisitEcrPlans(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                   const std::function<void(const EcrPlan&)>& visit) {
  // Warps to a group and rows to a stage: small stages let two blocks share an SM.
  constexpr int kRowChoices[][2] = {
      {1, kMaxChunkRows}, {2, kMaxChunkRows}, {4, kMaxChunkRows}, {1, kMaxChunkRows / 2}, {2, kMaxChunkRows / 2}};
  const int64_t out_channels = args.out_channels / args.groups;
  if (out_channels < 4) return;  // a list that so few channels use costs more than it saves
  // Sizes of a tile along one axis: the fewest outputs that cut it into 1, 2, 3, ... tiles.
  auto sizes = [](int64_t size) {
    std::vector<int> distinct;
    for (int64_t parts = 1; parts <= size; ++parts) {
      const int part = static_cast<int>(DivideUp(size, parts));
      if (part <= 32 && (distinct.empty() || part < distinct.back())) distinct.push_back(part);
    }
    return distinct;
  };
  const std::vector<int> heights = sizes(args.out_size[0]), widths = sizes(args.out_size[1]);
  const int64_t per_stack = args.images / args.stacks;
  for (int lanes : {16, 8, 4}) {
    if (lanes > 4 && out_channels <= lanes * kLaneChannels / 2) continue;
    for (int splits : {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16}) {
      for (int height : heights) {
        for (int width : widths) {
          const bool whole = height == args.out_size[0] && width == args.out_size[1];  // then a tile may hold several
          for (int images = 1; images == 1 || (whole && images <= std::min<int64_t>(per_stack, 16)); images *= 2) {
            for (const auto& [row_parts, max_rows] : kRowChoices) {
              const Candidate tile{Family::kEcr, {lanes, splits, images, height, width, row_parts, max_rows}};
              const EcrPlan plan = EcrPlanOf(tile, args, element_bytes, workspace_bytes, device);
              if (plan.warps > 0) visit(plan);
            }
          }
        }
      }
    }
  }
}

EcrPlan EcrPlanOf(const Candidate& candidate, const ConvArgs& args, int element_bytes, size_t workspace_bytes,
                  const DeviceInfo& device) {
  const auto& [lanes, splits, images, height, width, row_parts, max_rows] = candidate.tile;
  const bool has_kernel = (lanes == 4 || lanes == 8 || lanes == 16) && splits >= 1 && splits <= kMaxSplits &&
                          (row_parts == 1 || row_parts == 2 || row_parts == 4) &&
                          (max_rows == kMaxChunkRows || max_rows == kMaxChunkRows / 2);
  if (!has_kernel || images < 1 || height < 1 || width < 1 || height > args.out_size[0] || width > args.out_size[1]) {
    return {};
  }
  const bool is_whole = height == args.out_size[0] && width == args.out_size[1];
  if (images > 1 && (!is_whole || images > args.images / args.stacks)) return {};
  if (args.out_channels / args.groups < 4 || std::max({images, height, width}) > 32) return {};
  EcrPlan plan{};
  plan.lanes = lanes;
  plan.splits = splits;
  plan.tile_images = images;
  plan.tile_out[0] = height;
  plan.tile_out[1] = width;
  plan.row_parts = row_parts;
  plan.max_rows = max_rows;
  return CompleteEcrPlan(args, element_bytes, workspace_bytes, device, &plan) ? plan : EcrPlan{};
}

EcrPlan ChooseEcrPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device) {
  return Cheapest<EcrPlan>(
      [&](const auto& visit) { VisitEcrPlans(args, element_bytes, workspace_bytes, device, visit); });
}

size_t EcrWorkspaceBytes(int64_t images, int64_t conv_height, int64_t conv_width, int64_t out_channels) {
  // Splitting pays while there are fewer than some 256 blocks of 64 results x 128 output channels.
  constexpr int64_t kBlock = 64 * 128, kBlocks = 256, kMaxSplits = 16;
  const int64_t elements = images * conv_height * conv_width * std::max<int64_t>(out_channels, 32);
  if (elements <= 0 || elements > kBlock * kBlocks / 2) return 0;
  const int64_t splits = std::clamp<int64_t>(kBlocks * kBlock / elements, 2, kMaxSplits);
  return static_cast<size_t>(2 * splits * elements) * sizeof(float);  // twice: tiles hang over the edges
}

}  // namespace jsc
