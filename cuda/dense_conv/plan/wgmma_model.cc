// The model of the engine wgmma: cycles of a plan. Kernels alone and kernels in chains have constants of their own.
#include <algorithm>
#include <cmath>

#include "cuda/core/model.h"
#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {
namespace {

// Cycles that a step of a tile costs: a block alone, which waits for its copies, and each of the blocks that keep an SM
// busy.
struct StepCycles {
  double alone, busy;
};

// What the model knows of a kind of products, alone or in a chain; names and order are those of model.json.
struct Costs {
  StepCycles steps[2][5];  // of 64 and 128 output channels, and 56, 96, 112, 192 and 224 pixels, 3xTF32 has 64 for 96
  struct {
    double block, wave, tap_wait;  // launch, first copies and last results; blocks behind others' on an SM;
  } each;                          // a step whose pixels are under one tap
  StepCycles row;                  // of pixels that are copied for a step
  struct {
    double alone, others,
        sent;  // of a block alone on its SM and with its tile; of others; of blocks that send their sums
  } end;       // of 4,096 sums, as busy_end below
  struct {
    double base, split, round, no_slots;  // no_slots: of small tiles at 3xTF32 that have no room for it
  } reading;                              // other blocks' sums
  struct {
    double base, split, kilobyte, slot;  // slot: of a warp
  } slots;
  struct {
    double cache, memory;  // of an SM from the L2 cache, of the device
  } bytes;                 // a cycle
  struct {
    double tile, end, busy_end, tap_wait, memory_bytes;
  } persistent;                // of a persistent kernel
  double windows;              // boxes of pixels cost so much more than those of weights
  double double_accumulators;  // share of a step of 64 x 112 at 3xTF32 with registers for the sums of two steps
  struct {
    double step[2], row[2], join;  // of tiles of 56 and 112 pixels; adding up both consumer groups' sums
  } consumer_groups;
  double sharing;  // in a chain, of blocks that share SMs with those in front
  Microseconds us;
};

const Costs& CostsOf(ProductKind kind, bool in_chain) {
  return in_chain ? ModelOf<Costs, model::kWgmmaChain>(kind) : ModelOf<Costs, model::kWgmma>(kind);
}

// rows: of pixels, copied for a step. In a chain weights, and the kernels in front and behind, ask for the same memory
// and SMs.
StepCycles CyclesOfStep(const WgmmaPlan& plan, const Costs& costs, double rows) {
  constexpr int kPixels[] = {56, 96, 112, 192, 224};
  const int high = plan.pixels == 112;
  if (plan.consumer_groups > 1) {
    return {costs.consumer_groups.step[high] + costs.consumer_groups.row[high] * rows, 0};
  }
  int tile = 0;
  while (kPixels[tile] < plan.pixels) ++tile;  // tiles of 64 pixels are where others have those of 96
  const StepCycles &step = costs.steps[plan.out_channels == 128][tile], &row = costs.row;
  if (plan.double_accumulators && high)
    return {step.alone * costs.double_accumulators + row.alone * rows, 0};  // a block an SM
  return {step.alone + row.alone * rows, step.busy + row.busy * rows};
}

// Cycles of two kinds of work that go on at the same time: hardly more than the longer, unless they are as long.
double Both(double a, double b) { return std::cbrt(a * a * a + b * b * b); }

// Times that blocks of a cluster wait for sums of each other, when WgmmaKernel reads eight at a time.
int ReadingRounds(const WgmmaPlan& plan) {
  const int64_t rows = DivideUp(plan.pixels / kPatchWidth, plan.splits);
  const int64_t rounds = plan.splits == 2   ? DivideUp(rows, 4)
                         : plan.splits <= 4 ? DivideUp(rows, 2)
                                            : rows * DivideUp(plan.splits, 8);
  return static_cast<int>(rounds);
}

// From a block's last product, or from its sums in shared memory, to the last result.
double ClusterReductionCycles(const WgmmaPlan& plan, const Costs& costs) {
  if (plan.splits == 1) return 0;
  if (plan.tf32x3 || !plan.uses_slots) {  // 3xTF32 was fitted before it had slots, no_slots was not
    const auto& reading = costs.reading;
    const bool lacks_slots = plan.tf32x3 && plan.pixels <= 64 && plan.splits > 2 && !plan.uses_slots;
    const double rounds = reading.split * plan.splits + reading.round * ReadingRounds(plan);
    return reading.base + rounds + (lacks_slots ? reading.no_slots : 0);
  }
  const auto& slots = costs.slots;
  const double slots_per_sender = WgmmaSlotsPerSender(plan, 1),
               of_warp = std::ceil(slots_per_sender * 16 / plan.out_channels);
  return slots.base + slots.split * plan.splits + slots.kilobyte * slots_per_sender * plan.splits / 2 +
         slots.slot * of_warp;
}

}  // namespace

double WgmmaMicroseconds(const WgmmaPlan& plan, const ConvArgs& a, int element_bytes, bool in_chain,
                         const DeviceInfo& device) {
  const Microseconds& us = CostsOf(KindOf(a, element_bytes), in_chain).us;
  return us.Of(plan.cycles, OperandBytes(a, element_bytes), device);
}

int WgmmaSlotsPerSender(const WgmmaPlan& plan, int rows) {
  return static_cast<int>(DivideUp(plan.pixels / kPatchWidth / rows * (plan.out_channels / 16), plan.splits));
}

double WgmmaCycles(const WgmmaPlan& plan, const ConvArgs& a, int element_bytes, bool in_chain, int64_t tiles,
                   const DeviceInfo& device) {
  const Costs& costs = CostsOf(KindOf(a, element_bytes), in_chain);
  const int64_t places =
      plan.splits > 1 ? static_cast<int64_t>(device.clusters[plan.splits]) * plan.splits : device.multiprocessors;
  const int64_t resident = std::min<int64_t>(
      WgmmaResident(plan.out_channels, plan.pixels, element_bytes, plan.tf32x3, plan.double_accumulators),
      device.shared_memory_sm / (plan.shared_bytes + 1024));
  const int64_t blocks = tiles * plan.splits;
  const double launch = costs.each.block + (in_chain && blocks > device.multiprocessors ? costs.sharing : 0);
  const auto layers = static_cast<double>(DivideUp(blocks, places));
  const auto waves = static_cast<double>(DivideUp(DivideUp(blocks, places), resident));
  const double rows = plan.patch ? static_cast<double>(plan.patch_high * plan.patch_wide) / plan.taps
                                 : costs.windows * plan.pixels;  // of pixels, copied for a step
  const bool by_taps = !plan.patch && plan.taps > 1;
  const StepCycles step = CyclesOfStep(plan, costs, rows);
  const double steps = plan.steps_per_split, alone = step.alone + (by_taps ? costs.each.tap_wait : 0);
  const double of_pixels = !plan.tf32x3 ? costs.windows * rows : in_chain ? 2 * rows : rows;  // low parts come too
  const double copied = static_cast<double>(blocks) * steps * (plan.out_channels + of_pixels) * kRowBytes;
  const double copying = copied / (costs.bytes.cache * device.multiprocessors);
  const double sums = plan.out_channels * plan.pixels / 4096.0;
  const double bytes = OperandBytes(a, element_bytes);
  if (plan.scheduler.blocks > 0) {  // a block's epilogues overlap other blocks' products, and its own copies
    const auto& persistent = costs.persistent;
    const double own = waves * (steps * alone + persistent.tile + persistent.end * sums);
    const double busy = step.busy + (by_taps ? persistent.tap_wait : 0);
    const double work = std::max({layers * (steps * busy + persistent.busy_end * sums), own, copying});
    return launch + Both(work, bytes / persistent.memory_bytes);
  }
  const bool is_alone = plan.tf32x3 ? plan.out_channels == 128 : plan.splits == 1 && layers == 1;
  const double of_sums = is_alone                          ? costs.end.alone
                         : !plan.tf32x3 && plan.uses_slots ? costs.end.sent
                                                           : costs.end.others;
  const double ends = layers * of_sums * sums + (waves > 1 ? waves * costs.each.wave : 0);
  const double join = plan.consumer_groups > 1 ? costs.consumer_groups.join : 0;
  const double work = std::max({layers * steps * step.busy, waves * steps * alone, copying}) + ends + join +
                      waves * ClusterReductionCycles(plan, costs);
  if (plan.tf32x3) return launch + std::max(work, bytes / costs.bytes.memory);
  return launch + Both(work, bytes / costs.bytes.memory);
}

}  // namespace jsc
