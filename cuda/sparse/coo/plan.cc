#include "cuda/sparse/coo/plan.h"

#include <algorithm>
#include <limits>

namespace jsc {

int CooSharedBytes(const CooVariant& variant, int warps, int element_bytes) {
  // CooMemory of sparse/coo/lists.cuh, and the sums that take its place at the end.
  const int stages = 2 * warps * variant.taps() * kWarp * variant.out_channels * element_bytes;
  const int lists = kCooChunk * ((variant.positions() + 2) | 1) * 8;
  const int patch = variant.positions() * kCooChunk * element_bytes;
  const int counts = (warps + 1) * kCooChunk * 4;
  return std::max(stages + lists + patch + counts, warps * variant.pixels() * kWarp * variant.out_channels * 4);
}

std::string CompleteCooPlan(const ConvArgs& args, int element_bytes, size_t workspace_bytes, const DeviceInfo& device,
                            CooPlan* plan) {
  if (plan->variant < 0 || plan->variant >= kCooVariantCount || !CooCovers(kCooVariants[plan->variant], args)) {
    return "variant " + std::to_string(plan->variant) + " does not compute this kernel, stride and dilation";
  }
  const auto is_power = [](int n) { return n >= 1 && (n & (n - 1)) == 0; };
  const CooVariant& shape = kCooVariants[plan->variant];
  if (!is_power(plan->out_channel_warps) || !is_power(plan->slices) ||
      static_cast<int64_t>(plan->out_channel_warps) * plan->slices > shape.max_warps() || plan->splits < 1) {
    return "out_channel_warps and slices must be powers of two whose product is at most " +
           std::to_string(shape.max_warps()) + ", and splits at least 1";
  }
  const int64_t results = args.images * args.conv_size[0] * args.conv_size[1] * args.out_channels;
  plan->cluster = plan->splits > 1 && plan->splits <= kMaxSplits && device.clusters[plan->splits] > 0;
  if (plan->splits > 1 && !plan->cluster) {
    if (results > std::numeric_limits<int32_t>::max()) return "results of a split call must be fewer than 2^31";
    if (static_cast<uint64_t>(results) * plan->splits * sizeof(float) > workspace_bytes) {
      return "the workspace has " + std::to_string(workspace_bytes) + " bytes, " + std::to_string(plan->splits) +
             " splits take " + std::to_string(results * plan->splits * 4);
    }
  }
  const int64_t tile_out_channels = int64_t{kWarp} * plan->out_channel_warps * shape.out_channels;
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  plan->tiles[0] = static_cast<int>(up(args.conv_size[0], shape.height));
  plan->tiles[1] = static_cast<int>(up(args.conv_size[1], shape.width));
  plan->out_channel_tiles = static_cast<int>(up(args.out_channels / args.groups, tile_out_channels));
  const double blocks = static_cast<double>(args.images) * args.groups * plan->tiles[0] * plan->tiles[1] *
                        plan->out_channel_tiles * plan->splits;
  if (blocks > std::numeric_limits<int32_t>::max()) return "the call takes 2^31 blocks or more";
  plan->blocks = static_cast<int64_t>(blocks);
  plan->shared_bytes = CooSharedBytes(shape, plan->out_channel_warps * plan->slices, element_bytes);
  if (plan->shared_bytes > device.shared_memory) {
    return "a block needs " + std::to_string(plan->shared_bytes) + " bytes of shared memory, the device has " +
           std::to_string(device.shared_memory);
  }
  return "";
}

void VisitCooPlans(int variant, const ConvArgs& args, int element_bytes, const DeviceInfo& device,
                   const std::function<void(const CooPlan&)>& visit) {
  constexpr size_t kAnyWorkspace = std::numeric_limits<size_t>::max();
  const CooVariant& shape = kCooVariants[variant];
  for (int warps = 1; warps <= shape.max_warps(); warps *= 2) {
    if (warps > 1 && kWarp * shape.out_channels * (warps / 2) >= args.out_channels / args.groups) break;
    const int64_t most_slices = std::min<int64_t>(shape.max_warps() / warps, args.group_channels);
    for (int slices = 1; slices <= most_slices; slices *= 2) {
      for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
        CooPlan plan{};
        plan.variant = variant, plan.out_channel_warps = warps, plan.slices = slices, plan.splits = splits;
        if (!CompleteCooPlan(args, element_bytes, kAnyWorkspace, device, &plan).empty()) continue;
        // Splits are for few blocks, and each has eight channels or more.
        const bool is_few = plan.blocks <= int64_t{8} * device.multiprocessors;
        if (splits == 1 || (is_few && int64_t{8} * splits <= args.group_channels)) visit(plan);
      }
    }
  }
}

}  // namespace jsc
