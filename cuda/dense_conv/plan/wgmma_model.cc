// The model of the engine wgmma: cycles of a plan, with figures that are fitted to times on an H200.
//
// Kernels alone and kernels in chains have figures of their own. Figures of 3xTF32, and of chains, are older than the
// others.
#include <algorithm>
#include <cmath>

#include "cuda/dense_conv/plan/wgmma_plan.h"

namespace jsc {
namespace {

// Cycles that a step of a tile costs: a block alone, which waits for its copies, and each of the blocks that keep an SM
// busy.
struct StepCycles {
  double alone, busy;
};

enum Kind { k16Bit, kTf32, kTf32x3 };

// Of kernels alone and in chains, by Kind, 64 and 128 output channels, and 56, 96, 112, 192 and 224 pixels, at 3xTF32
// 56, 64 and 112.
constexpr StepCycles kSteps[2][3][2][5] = {{{{{199, 176}, {262, 206}, {230, 230}, {320, 700}, {483, 480}},
                                             {{261, 262}, {436, 358}, {257, 407}, {642, 678}, {854, 888}}},
                                            {{{230, 172}, {295, 210}, {274, 232}, {286, 421}, {393, 453}},
                                             {{356, 262}, {513, 381}, {484, 395}, {745, 745}, {586, 882}}},
                                            {{{516, 345}, {546, 356}, {780, 721}}, {{}, {}, {1144, 1175}}}},
                                           {{{{191, 211}, {581, 236}, {269, 264}, {319, 557}, {528, 487}},
                                             {{305, 305}, {505, 414}, {256, 452}, {507, 663}, {634, 1105}}},
                                            {{{343, 191}, {692, 376}, {311, 268}, {286, 421}, {393, 471}},
                                             {{391, 317}, {595, 405}, {499, 396}, {595, 769}, {583, 943}}},
                                            {{{490, 385}, {520, 340}, {755, 640}}, {{}, {}, {1110, 1110}}}}};

// What else costs cycles, and bytes a cycle.
struct Costs {
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
  } bytes;
  struct {
    double tile, end, busy_end, tap_wait, memory_bytes;
  } persistent;  // of a persistent kernel
};

constexpr Costs k16BitAlone = {{4309, 1927, 35},     {0, 0},       {788, 614, 830},          {238, 25, 415, 0},
                               {192, 4.4, 3.8, 223}, {66.4, 4565}, {496, 801, 705, 34, 2635}};
constexpr Costs kTf32Alone = {{3761, 0, 14},       {0, 0},     {875, 809, 793},          {358, 35, 362, 0},
                              {353, 36, 6.3, 177}, {62, 4346}, {408, 704, 730, 30, 2838}};
constexpr Costs kTf32x3Alone = {{4750, 3400, 20}, {3.2, 2}, {1305, 870, 0}, {290, 36, 380, 600}, {}, {58, 2080}, {}};
constexpr Costs kInChain = {{4750, 2130, 20},   {0, 0},     {740, 740, 690},           {290, 36, 380, 0},
                            {280, 23, 19, 210}, {58, 2383}, {434, 1077, 611, 30, 2518}};
constexpr Costs kTf32x3InChain = {{4750, 3400, 20}, {0, 0.4}, {870, 870, 0}, {290, 36, 380, 600}, {}, {58, 2080}, {}};

// A step of both consumer groups and a row of its pixels, of tiles of 56 (at 3xTF32 alone) and 112, and adding up both
// consumer groups' sums.
struct ConsumerGroupCosts {
  double step[2], row[2], join;
};
constexpr ConsumerGroupCosts kConsumerGroups = {{0, 255}, {0, 0}, 672},
                             kConsumerGroupsTf32x3 = {{339, 590}, {2.8, 1.9}, 450};

Kind KindOf(const WgmmaPlan& plan, int element_bytes) {
  return plan.tf32x3 ? kTf32x3 : element_bytes == 4 ? kTf32 : k16Bit;
}

const Costs& CostsOf(Kind kind, bool in_chain) {
  if (in_chain) return kind == kTf32x3 ? kTf32x3InChain : kInChain;
  return kind == kTf32x3 ? kTf32x3Alone : kind == kTf32 ? kTf32Alone : k16BitAlone;
}

// rows: of pixels, copied for a step. In a chain weights, and the kernels in front and behind, ask for the same memory
// and SMs.
StepCycles CyclesOfStep(const WgmmaPlan& plan, Kind kind, bool in_chain, double rows) {
  constexpr int kPixels[] = {56, 96, 112, 192, 224};
  constexpr double kDoubleAccumulators = 0.86;  // of 64 x 112 at 3xTF32, with registers for the sums of two steps
  const int high = plan.pixels == 112;
  if (plan.consumer_groups > 1) {
    const ConsumerGroupCosts& consumer_groups = kind == kTf32x3 ? kConsumerGroupsTf32x3 : kConsumerGroups;
    return {consumer_groups.step[high] + consumer_groups.row[high] * rows, 0};
  }
  int tile = 0;
  while (kPixels[tile] < plan.pixels) ++tile;  // tiles of 64 pixels are where others have those of 96
  const StepCycles &step = kSteps[in_chain][kind][plan.out_channels == 128][tile], row = CostsOf(kind, in_chain).row;
  if (plan.double_accumulators && high)
    return {step.alone * kDoubleAccumulators + row.alone * rows, 0};  // a block an SM
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

int WgmmaSlotsPerSender(const WgmmaPlan& plan, int rows) {
  return static_cast<int>(DivideUp(plan.pixels / kPatchWidth / rows * (plan.out_channels / 16), plan.splits));
}

double WgmmaCycles(const WgmmaPlan& plan, const ConvArgs& a, int element_bytes, bool in_chain, int64_t tiles,
                   const DeviceInfo& device) {
  constexpr double kWindows = 1.22;  // boxes of pixels cost more than those of weights
  const Kind kind = KindOf(plan, element_bytes);
  const Costs& costs = CostsOf(kind, in_chain);
  const int64_t places =
      plan.splits > 1 ? static_cast<int64_t>(device.clusters[plan.splits]) * plan.splits : device.multiprocessors;
  const int64_t resident = std::min<int64_t>(
      WgmmaResident(plan.out_channels, plan.pixels, element_bytes, plan.tf32x3, plan.double_accumulators),
      device.shared_memory_sm / (plan.shared_bytes + 1024));
  const int64_t blocks = tiles * plan.splits;
  const auto layers = static_cast<double>(DivideUp(blocks, places));
  const auto waves = static_cast<double>(DivideUp(DivideUp(blocks, places), resident));
  const double rows = plan.patch ? static_cast<double>(plan.patch_high * plan.patch_wide) / plan.taps
                                 : kWindows * plan.pixels;  // of pixels, copied for a step
  const bool by_taps = !plan.patch && plan.taps > 1;
  const StepCycles step = CyclesOfStep(plan, kind, in_chain, rows);
  const double steps = plan.steps_per_split, alone = step.alone + (by_taps ? costs.each.tap_wait : 0);
  const double of_pixels = !plan.tf32x3 ? kWindows * rows : in_chain ? 2 * rows : rows;  // low parts come too
  const double copied = static_cast<double>(blocks) * steps * (plan.out_channels + of_pixels) * kRowBytes;
  const double copying = copied / (costs.bytes.cache * device.multiprocessors);
  const double sums = plan.out_channels * plan.pixels / 4096.0;
  const double maps = static_cast<double>(
      a.images * (a.size[0] * a.size[1] * a.channels + a.conv_size[0] * a.conv_size[1] * a.out_channels));
  const double kernel = static_cast<double>(a.stacks * plan.taps * a.group_channels * a.out_channels);
  const double bytes = (maps + kernel) * element_bytes;
  if (plan.scheduler.blocks > 0) {  // a block's epilogues overlap other blocks' products, and its own copies
    const auto& persistent = costs.persistent;
    const double own = waves * (steps * alone + persistent.tile + persistent.end * sums);
    const double busy = step.busy + (by_taps ? persistent.tap_wait : 0);
    const double work = std::max({layers * (steps * busy + persistent.busy_end * sums), own, copying});
    return costs.each.block + Both(work, bytes / persistent.memory_bytes);
  }
  const bool is_alone = plan.tf32x3 ? plan.out_channels == 128 : plan.splits == 1 && layers == 1;
  const double of_sums = is_alone                          ? costs.end.alone
                         : !plan.tf32x3 && plan.uses_slots ? costs.end.sent
                                                           : costs.end.others;
  const double ends = layers * of_sums * sums + (waves > 1 ? waves * costs.each.wave : 0);
  const double join = plan.consumer_groups > 1 ? (plan.tf32x3 ? kConsumerGroupsTf32x3 : kConsumerGroups).join : 0;
  const double work = std::max({layers * steps * step.busy, waves * steps * alone, copying}) + ends + join +
                      waves * ClusterReductionCycles(plan, costs);
  if (plan.tf32x3) return costs.each.block + std::max(work, bytes / costs.bytes.memory);
  return costs.each.block + Both(work, bytes / costs.bytes.memory);
}

}  // namespace jsc
