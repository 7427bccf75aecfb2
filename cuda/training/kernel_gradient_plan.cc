#include "cuda/training/kernel_gradient_plan.h"

#include <algorithm>
#include <cstdlib>

#include "model_constants.h"
#include "native/layer.h"

namespace jsc {
namespace {

constexpr int64_t kMost = int64_t{1} << 31;
constexpr int kReserved = 2 * kSwizzleBytes;  // of shared memory: where the swizzle's repeat begins, and barriers

// The model's constants are "kernel gradient" of dispatch/model.json, chosen by hand after times of plans of layers
// with 32 images on an H200 (`tune --gradients`; `python -m benchmarks gradient_regret` says what its choices lose).
namespace times = model::kernel_gradient;

constexpr double kTileCycles = 384;  // of an SM's tensor cores, for a tile's products of a step
constexpr double kSharedRate = 128;  // bytes of shared memory that an SM reads or writes in a cycle
constexpr int kCopyWarps = 4;        // that share a step's copies

// Of the bytes of a stage: those of x, then of the cotangent, then both parts of the transposed cotangent.
int StageBytes(const KernelGradientPlan& plan) {
  const int x = plan.x_boxes * plan.rows * plan.x_pitch * kRowBytes;
  return x + 3 * kGradientSide * kRowBytes;
}

double StepCycles(const KernelGradientPlan& plan) {
  const double tiles = plan.tiles * (plan.shares_channels ? 1 : 2), cotangent = kGradientSide * kRowBytes;
  const double copied = static_cast<double>(plan.x_boxes) * plan.rows * plan.x_columns * kRowBytes + cotangent;
  // Each tile reads the transposed cotangent in half of its products' cycles, and x.
  const double shared = tiles * (kTileCycles / 2 + cotangent / kSharedRate) + (3 * cotangent + copied) / kSharedRate;
  const double copies = static_cast<double>(plan.rows * DivideUp(plan.x_boxes + 2, kCopyWarps));
  const double longest = std::max({times::kSharedMemory * shared, copied / times::kL2Bytes, times::kCopy * copies});
  return longest * (plan.shares_channels ? times::kSharing : 1) + times::kRow * plan.rows + times::kStep;
}

// Of the box's sizes what follows from its columns. It has as many rows as fit.
bool CutBoxes(const ConvArgs& a, int columns, const DeviceInfo& device, KernelGradientPlan* plan) {
  const int64_t all_rows = a.images * a.conv_size[0];
  plan->columns = columns;
  const int64_t stride = a.kernel_size[1] == 1 ? 1 : a.stride[1];  // columns of x without taps are not copied
  const int64_t taps = plan->by_taps ? plan->tiles : 1;
  const int64_t x_columns = (columns - 1) * stride + 1 + (taps - 1) * a.dilation[1];
  constexpr int64_t kMostColumns = 256;  // of a copy
  if (x_columns > kMostColumns) return false;
  plan->x_columns = static_cast<int>(x_columns);
  plan->x_pitch = static_cast<int>(Whole(x_columns, 8));  // rows begin where the swizzle does
  const int fewest = plan->shares_channels ? 4 : 3;       // stages, with which the copies are a step ahead
  for (int64_t rows = std::min<int64_t>(kGradientPixels / columns, all_rows); rows > 0; rows /= 2) {
    plan->rows = static_cast<int>(rows);
    plan->stage_bytes = StageBytes(*plan);
    plan->stages = std::min(kMostGradientStages, (device.shared_memory - kReserved) / plan->stage_bytes);
    plan->steps = DivideUp(a.conv_size[1], columns) * DivideUp(all_rows, rows);
    if (plan->stages >= fewest) return plan->steps < kMost;
  }
  return false;
}

double Microseconds(const ConvArgs& a, const KernelGradientPlan& plan, int64_t splits, const DeviceInfo& device) {
  const double bytes = 4.0 * static_cast<double>(a.kernel_size[0] * a.kernel_size[1] * a.channels * a.out_channels);
  const double of_block = static_cast<double>(DivideUp(plan.steps, splits)) * StepCycles(plan) + times::kBlock;
  const double partials = static_cast<double>(splits) * (plan.shares_channels ? 2 : 1);
  return static_cast<double>(DivideUp(plan.kinds() * splits, device.multiprocessors)) * of_block / device.clock_hz *
             1e6 +
         times::kUsLaunch +
         (times::kPartials * partials + times::kResults) * bytes / device.memory_bytes_per_second * 1e6;
}

// Of the splits that fill the device some times over, the one that is expected to be fastest, with its time.
void CutSteps(const ConvArgs& a, const DeviceInfo& device, KernelGradientPlan* plan) {
  constexpr int64_t kMostWaves = 8;
  const int64_t kinds = plan->kinds(), fewest = DivideUp(kinds, device.multiprocessors);
  for (int64_t waves = fewest; waves <= fewest + kMostWaves; ++waves) {
    const int64_t splits = std::min(plan->steps, std::max<int64_t>(1, waves * device.multiprocessors / kinds));
    const double time = Microseconds(a, *plan, splits, device);
    if (plan->splits > 0 && time >= plan->microseconds) continue;
    plan->microseconds = time;
    plan->splits = static_cast<int>(splits);
  }
}

// Whether the kernel takes a call at all.
bool Suits(const ConvArgs& a, const DeviceInfo& device) {
  for (int i = 0; i < 2; ++i) {
    for (int64_t n : {a.size[i], a.kernel_size[i], a.stride[i], a.dilation[i], std::abs(a.pad_low[i])}) {
      if (n > kFar) return false;
    }
  }
  const bool is_strided_view = a.kernel_size[1] == 1 && a.stride[1] > 1;
  return device.wgmma && a.groups == 1 && a.stacks == 1 && a.channels % 4 == 0 && a.out_channels % 4 == 0 &&
         !(is_strided_view && a.pad_low[1] != 0) && a.images * a.conv_size[0] < kMost / 2 &&
         a.size[0] * a.size[1] * a.channels < kMost && a.conv_size[0] * a.conv_size[1] * a.out_channels < kMost;
}

int64_t MostTiles(const ConvArgs& a) {
  const int64_t tiles = a.kernel_size[1] > 1 ? a.kernel_size[1] : DivideUp(a.channels, kGradientSide);
  return std::min<int64_t>(kMostGradientTiles, tiles);
}

// All of a plan but its splits.
bool Cut(const ConvArgs& a, int tiles, bool shares, int columns, const DeviceInfo& device, KernelGradientPlan* plan) {
  plan->tiles = tiles;
  plan->by_taps = a.kernel_size[1] > 1;
  plan->shares_channels = shares;
  const int channels = kGradientSide * (plan->by_taps ? 1 : tiles) * (shares ? 1 : 2);
  plan->x_boxes = channels / kGradientBoxChannels;
  plan->channel_blocks = static_cast<int>(DivideUp(a.channels, channels));
  plan->out_channel_blocks = static_cast<int>(DivideUp(a.out_channels, kGradientSide));
  plan->tap_blocks = static_cast<int>(a.kernel_size[0] * (plan->by_taps ? DivideUp(a.kernel_size[1], tiles) : 1));
  return CutBoxes(a, columns, device, plan);
}

}  // namespace

std::vector<KernelGradientPlan> KernelGradientPlans(const ConvArgs& a, const DeviceInfo& device) {
  std::vector<KernelGradientPlan> plans;
  if (!Suits(a, device)) return plans;
  const bool by_taps = a.kernel_size[1] > 1;
  const int64_t widest = std::min<int64_t>(kGradientPixels, a.conv_size[1]);
  for (int tiles = by_taps ? static_cast<int>(MostTiles(a)) : 1; tiles <= MostTiles(a); ++tiles) {
    for (const bool shares : {true, false}) {
      for (int columns = 1; columns <= widest; ++columns) {
        KernelGradientPlan plan{};
        if (!Cut(a, tiles, shares, columns, device, &plan)) continue;
        CutSteps(a, device, &plan);
        plans.push_back(plan);
      }
    }
  }
  std::stable_sort(plans.begin(), plans.end(),
                   [](const auto& one, const auto& other) { return one.microseconds < other.microseconds; });
  return plans;
}

KernelGradientPlan KernelGradientPlanOf(const KernelGradientTile& tile, const ConvArgs& a, const DeviceInfo& device) {
  const bool has_tiles =
      a.kernel_size[1] > 1 ? tile.tiles == MostTiles(a) : tile.tiles >= 1 && tile.tiles <= MostTiles(a);
  const int64_t widest = std::min<int64_t>(kGradientPixels, a.conv_size[1]);
  KernelGradientPlan plan{};
  if (!Suits(a, device) || !has_tiles || tile.columns < 1 || tile.columns > widest || tile.splits < 1 ||
      !Cut(a, tile.tiles, tile.shares_channels, tile.columns, device, &plan) || tile.splits > plan.steps ||
      plan.kinds() * tile.splits >= kMost) {
    return {};
  }
  plan.splits = tile.splits;
  plan.microseconds = Microseconds(a, plan, plan.splits, device);
  return plan;
}

int64_t KernelGradientBytes(const ConvArgs& a, const KernelGradientPlan& plan) {
  if (plan.partials() < 2) return 0;
  return plan.partials() * a.kernel_size[0] * a.kernel_size[1] * a.channels * a.out_channels * int64_t{sizeof(float)};
}

}  // namespace jsc
