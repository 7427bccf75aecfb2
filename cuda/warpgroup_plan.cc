// The analytical model that cuts a convolution by warpgroup products: every tile and number of splits, by counted
// cycles.
#include "warpgroup_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <vector>

namespace jsc {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxStacks = 65535;  // the grid's third axis
constexpr int kMaxBox = 256;           // pixels of a box along an axis
constexpr int kMaxCorner = 127;        // of an im2col map's corners
constexpr int kMaxStride = 8;
constexpr int kMostSplits = 16, kMostRead = 8;  // blocks of a cluster by mail, and where they read each other's sums
constexpr int kMaxReach = 255;                  // of the taps of an im2col map
constexpr int kTileFilters[] = {64, 128};
constexpr int kTilePixels[] = {56, 64, 96, 112, 192, 224};  // 64 in parts alone

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

int RoundUp(int bytes) { return static_cast<int>(DivideUp(bytes, kSwizzleBytes)) * kSwizzleBytes; }

// Whether a plan's kind of products has kernels of its tile.
bool HasKernel(const WarpgroupPlan& plan) {
  if (!plan.parts) return plan.pixels != 64;
  return plan.pixels == 112 || (plan.pixels <= 64 && plan.filters == 64);
}

// Whether the copy engine can describe the windows of a call.
bool FitsIm2col(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    const int64_t upper = (a.conv_size[i] - 1) * a.stride[i] - a.pad_low[i] - (a.size[i] - 1);
    if (std::abs(a.pad_low[i]) > kMaxCorner || std::abs(upper) > kMaxCorner || a.stride[i] > kMaxStride ||
        (a.kernel_size[i] - 1) * a.dilation[i] > kMaxReach) {
      return false;
    }
  }
  return true;
}

// Whether a tile's filters are of one group, and no step reaches into the channels of the next: there is nothing that
// keeps infinities in those from the sums.
bool FitsGroups(const ConvArgs& a, int filters, int deep) {
  return a.groups == 1 || (a.features / a.groups % filters == 0 && a.group_channels % deep == 0);
}

Turns FindTurns(const ConvArgs& a, const WarpgroupPlan& plan, int resident, const DeviceInfo& device) {
  const int64_t at_once = static_cast<int64_t>(resident) * device.multiprocessors;
  const int64_t tiles = static_cast<int64_t>(plan.pixel_tiles) * plan.feature_tiles;
  if (plan.splits > 1 || plan.parts || tiles * a.stacks <= at_once) return {0, 1};
  const bool whole = a.stacks == 1 && device.multiprocessors % resident == 0;
  return {static_cast<int>(std::max<int64_t>(at_once / a.stacks, 1)), whole ? resident : 1};
}

// Shares the `room` of a team among both rings. steps, blocks: of channels, of all tiles that a block takes.
bool FindStages(int room, int steps, int blocks, WarpgroupPlan* plan) {
  const int filter_bytes = plan->filters * kRowBytes, of_team = plan->steps_of_team();
  if (plan->patch) {
    plan->pixel_stages = std::min(2, blocks);
    const int left = room - plan->pixel_stages * plan->pixel_bytes;
    plan->filter_stages = std::min({kMaxRing, left / filter_bytes, steps});
    const int least = plan->pixels == 64 ? 2 : 3;  // three blocks of 64 x 64 on a multiprocessor cover for each other
    return left >= 0 && plan->filter_stages >= std::min(least, of_team);
  }
  const int stages = std::min({kMaxRing, room / (plan->pixel_bytes + filter_bytes), steps});
  plan->pixel_stages = plan->filter_stages = stages;
  return stages >= std::min(2, of_team);
}

// Whether blocks that share steps send each other their sums. In parts four that have tiles of 64 x 112 read them in
// one go, which is as fast and in whole networks faster, unless they are roomy; a tile of 128 x 112 takes all registers
// there are.
bool MeetByMail(const WarpgroupPlan& plan) {
  if (!HasMail(plan.pixels)) return false;
  if (plan.roomy) return plan.splits > 2;
  if (plan.parts && plan.pixels > 56) return plan.filters == 64 && plan.splits > 4;
  return plan.splits > 2;
}

// What blocks of products in parts that have a multiprocessor each take of it. In a chain registers for the sums of two
// steps, which leave room for the kernels in front and behind (64 x 112 only where all clusters run at once). Else two
// teams, where all clusters run at once and a block has more than a few steps.
void TakeMultiprocessor(int64_t clusters, bool in_chain, const DeviceInfo& device, WarpgroupPlan* plan) {
  constexpr int kFewSteps = 2;  // of a block, for two teams
  if (!plan->parts || plan->filters > 64 || plan->pixels == 64) return;
  const bool at_once = clusters <= device.clusters[plan->splits];
  plan->roomy = in_chain && (plan->pixels == 56 || at_once);
  if (!in_chain && at_once && plan->steps_per_split > kFewSteps) plan->teams = 2;
}

// The most pieces of mail that come to a block from each block of its cluster (warpgroup_mail.cuh), and their rows.
int MailPieces(const WarpgroupPlan& plan, int rows) {
  return static_cast<int>(DivideUp(plan.pixels / kPatchWidth / rows * (plan.filters / 16), plan.splits));
}

// Lays out a block's shared memory: rings and, in their place when they are done with, sums or mail; or mail behind
// them where that leaves rings deep enough. Behind all, what is kept of a block's mail where registers are short.
bool LayOut(int room, int steps, int blocks, bool pools, WarpgroupPlan* plan) {
  constexpr int kDeepEnough = 4, kMailRowBytes = 512;  // stages; a warp's sums of a row
  const int kept = plan->by_mail && plan->parts && !plan->roomy ? kKeptBytes * plan->filters * 2 : 0;
  WarpgroupPlan apart = *plan;
  if (!FindStages((room - kept) / plan->teams, steps, blocks, plan)) {
    if (kept == 0) return false;
    plan->by_mail = false;  // there may be room for the rings alone
    return LayOut(room, steps, blocks, pools, plan);
  }
  plan->mail_at = 0;
  const int rings = plan->teams * plan->ring_bytes(), rows = pools ? 2 : 1;
  const int sums = plan->pixels * (plan->filters + 4) * static_cast<int>(sizeof(float));
  if (!plan->by_mail) {
    plan->shared_bytes = kSwizzleBytes + (plan->turns.blocks > 0 ? rings : std::max(rings, sums));
    return true;
  }
  const int mail = MailPieces(*plan, rows) * rows * plan->splits * kMailRowBytes;
  const int repaired = plan->parts ? sums : 0;  // where sums are computed again, once the stages are read
  plan->shared_bytes = kSwizzleBytes + std::max({rings, mail, repaired});
  if (FindStages((room - kept - mail) / plan->teams, steps, blocks, &apart) &&
      apart.filter_stages >= std::min(plan->filter_stages, kDeepEnough) && apart.ring_bytes() >= repaired) {
    *plan = apart;
    plan->mail_at = plan->teams * plan->ring_bytes();
    plan->shared_bytes = kSwizzleBytes + plan->mail_at + mail;
  }
  plan->kept_at = plan->shared_bytes - kSwizzleBytes;
  plan->shared_bytes += kept;
  return true;
}

// Cycles that a step of a tile costs: a block alone, which waits for its copies, and each of the blocks that keep a
// multiprocessor busy.
struct StepCycles {
  double alone, busy;
};

// rows: of pixels, copied for a step. In a chain filters, and the kernels in front and behind, ask for the same memory
// and multiprocessors.
StepCycles CyclesOfStep(const WarpgroupPlan& plan, int element_bytes, bool in_chain, double rows) {
  // By elements of 2 and 4 bytes, 64 and 128 filters, 56, 96, 112, 192 and 224 pixels.
  constexpr StepCycles kSteps[2][2][5] = {{{{228, 211}, {581, 236}, {273, 264}, {319, 557}, {528, 487}},
                                           {{305, 305}, {505, 414}, {255, 452}, {507, 663}, {634, 1105}}},
                                          {{{339, 191}, {692, 376}, {329, 268}, {286, 421}, {393, 471}},
                                           {{400, 317}, {595, 405}, {499, 396}, {595, 769}, {583, 943}}}};
  // 64 x 56, 64 x 64, 64 x 112 and 128 x 112 in parts, alone and in a chain.
  constexpr StepCycles kParts[2][4] = {{{516, 345}, {546, 356}, {780, 721}, {1144, 1175}},
                                       {{490, 385}, {520, 340}, {755, 640}, {1110, 1110}}};
  constexpr double kRoomy = 0.86;  // of 64 x 112 alone, with registers for the sums of two steps
  // 64 x 56 and 64 x 112 alone by two teams, and for each row of pixels.
  constexpr struct {
    double step, row;
  } kOfTeams[2] = {{339, 2.8}, {590, 1.9}};
  // For each row of pixels: split, or in a chain with small parts that come like the pixels, as those of all maps but
  // its first do.
  constexpr StepCycles kRow[2] = {{3.2, 2.0}, {0, 0.4}};
  // Of a block alone in a chain, by elements, filters and 56 or 112 pixels.
  constexpr double kChain[2][2][2] = {{{191, 269}, {305, 256}}, {{343, 311}, {391, 499}}};
  const int wide = plan.filters == 128, high = plan.pixels == 112, size = element_bytes == 4;
  if (plan.parts) {
    const StepCycles& step = kParts[in_chain][plan.pixels == 56 ? 0 : plan.pixels == 64 ? 1 : 2 + wide];
    const StepCycles& row = kRow[in_chain];
    if (plan.roomy && high) return {step.alone * kRoomy + row.alone * rows, 0};  // a block a multiprocessor
    if (plan.teams > 1) return {kOfTeams[high].step + kOfTeams[high].row * rows, 0};
    return {step.alone + row.alone * rows, step.busy + row.busy * rows};
  }
  constexpr int kWholePixels[] = {56, 96, 112, 192, 224};
  int tile = 0;
  while (kWholePixels[tile] < plan.pixels) ++tile;
  StepCycles step = kSteps[size][wide][tile];
  if (in_chain && (high || plan.pixels == 56)) step.alone = kChain[size][wide][high];
  return step;
}

// Cycles of two kinds of work that go on at the same time: hardly more than the longer, unless they are as long.
double Both(double a, double b) { return std::cbrt(a * a * a + b * b * b); }

// Times that blocks of a cluster wait for sums of each other, when WarpgroupKernel reads eight at a time.
int MeetingRounds(const WarpgroupPlan& plan) {
  const int64_t rows = DivideUp(plan.pixels / kPatchWidth, plan.splits);
  const int64_t rounds = plan.splits == 2   ? DivideUp(rows, 4)
                         : plan.splits <= 4 ? DivideUp(rows, 2)
                                            : rows * DivideUp(plan.splits, 8);
  return static_cast<int>(rounds);
}

// From a block's last product, or from its sums in shared memory, to the last result.
double MeetingCycles(const WarpgroupPlan& plan, bool in_chain) {
  if (plan.splits == 1) return 0;
  if (plan.parts || !plan.by_mail) {  // parts were fitted before they had mail
    constexpr double kMeet = 290, kSplit = 36, kRound = 380;
    constexpr double kNoMail = 600;  // of small tiles in parts, not fitted: VGG-19 takes 64 x 112 by mail for it
    const bool lacks_mail = plan.parts && plan.pixels <= 64 && plan.splits > 2 && !plan.by_mail;
    return kMeet + kSplit * plan.splits + kRound * MeetingRounds(plan) + (lacks_mail ? kNoMail : 0);
  }
  struct Mail {
    double meet, split, kilobyte, piece;  // piece: of a warp
  };
  const Mail mail = in_chain ? Mail{280, 23, 19, 210} : Mail{872, 31, 15, 124};
  const double pieces = MailPieces(plan, 1), of_warp = std::ceil(pieces * 16 / plan.filters);
  return mail.meet + mail.split * plan.splits + mail.kilobyte * pieces * plan.splits / 2 + mail.piece * of_warp;
}

// Cycles until the last block is done, comparable to those of direct_plan.cc (1,500 a microsecond). The figures fit
// 2,700 times of 21 layers at batch 1, 8 and 32 on an H200; the plan chosen loses 1 % there on average and 9 % at
// most. Mail, and what differs in chains: 3,000 times of 15 layers at batch 1, 0.5 % and 7 % in chains of equal layers,
// 1 % and 12 % alone. Since then the loops have become shorter; with these figures TF32 still loses 1 % (11 % at most)
// alone and 2 % (13 %) in chains of equal layers, of 12,000 times of 72 layers. Steps of 16 bits, and in parts those of
// kernels alone, are fitted to those again: 1.2 % (17 %) and 0.3 % (12 %) alone, 0.3 % (6 %) in chains of 16 bits.
// Steps of parts in a chain are older, and kRow there is the best of four for whole chains; those of two teams are
// fitted to times of five tiles of two depths, the end of 128 x 112 in parts to 899 times of 127 layers that take 33 us
// and more, batch 2 to 128: 0.4 % (5 %, without one that takes less than its launch).
double Cycles(const WarpgroupPlan& plan, const ConvArgs& a, int element_bytes, bool in_chain, int64_t tiles,
              const DeviceInfo& device) {
  constexpr double kBlock = 4750, kCacheBytes = 58, kWindows = 1.22, kTapWait = 20, kJoin = 450;
  const double of_mail = in_chain ? 690 : 618, of_parts = plan.filters == 128 && !in_chain ? 1305 : 870;
  const double tile_end = plan.parts ? of_parts : plan.by_mail ? of_mail : 740;
  const double next_wave = plan.parts ? 3400 : 2130;
  const int64_t places =
      plan.splits > 1 ? static_cast<int64_t>(device.clusters[plan.splits]) * plan.splits : device.multiprocessors;
  const int64_t resident =
      std::min<int64_t>(WarpgroupResident(plan.filters, plan.pixels, element_bytes, plan.parts, plan.roomy),
                        device.shared_memory_sm / (plan.shared_bytes + 1024));
  const int64_t blocks = tiles * plan.splits;
  const auto layers = static_cast<double>(DivideUp(blocks, places));
  const auto waves = static_cast<double>(DivideUp(DivideUp(blocks, places), resident));
  const double rows = plan.patch ? static_cast<double>(plan.patch_high * plan.patch_wide) / plan.taps
                                 : kWindows * plan.pixels;  // of pixels, copied for a step
  const StepCycles step = CyclesOfStep(plan, element_bytes, in_chain, rows);
  const double steps = plan.steps_per_split, alone = step.alone + (!plan.patch && plan.taps > 1 ? kTapWait : 0);
  // Boxes of pixels cost more than those of filters; small parts come too.
  const double of_pixels = !plan.parts ? 1.22 * rows : in_chain ? 2 * rows : rows;
  const double copied = static_cast<double>(blocks) * steps * (plan.filters + of_pixels) * kRowBytes;
  const double copying = copied / (kCacheBytes * device.multiprocessors), sums = plan.filters * plan.pixels / 4096.0;
  const double maps = static_cast<double>(
      a.images * (a.size[0] * a.size[1] * a.channels + a.conv_size[0] * a.conv_size[1] * a.features));
  const double kernel = static_cast<double>(a.stacks * plan.taps * a.group_channels * a.features);
  const double bytes = (maps + kernel) * element_bytes;
  if (plan.turns.blocks > 0) {  // a block's ends meet other blocks' products, and its own copies
    constexpr double kTurn = 434, kSums = 1077, kBusySums = 611, kWindowsWait = 30;
    const double own = waves * (steps * alone + kTurn + kSums * sums);
    const double busy = step.busy + (!plan.patch && plan.taps > 1 ? kWindowsWait : 0);
    return kBlock + Both(std::max({layers * (steps * busy + kBusySums * sums), own, copying}), bytes / 2518);
  }
  const double work = std::max({layers * steps * step.busy, waves * steps * alone, copying});
  const double ends = layers * tile_end * sums + (waves > 1 ? waves * next_wave : 0) + (plan.teams > 1 ? kJoin : 0);
  const double meeting = waves * MeetingCycles(plan, in_chain);
  if (plan.parts) return kBlock + std::max(work + ends + meeting, bytes / 2080);
  return kBlock + Both(work + ends + meeting, bytes / 2383);
}

// Tiles of a stack that are patches of a map, or 0 where patches do not fit.
int64_t CutIntoPatches(const ConvArgs& a, WarpgroupPlan* plan) {
  const int64_t rows = plan->pixels / kPatchWidth;
  const int64_t high = rows + (a.kernel_size[0] - 1) * a.dilation[0];
  const int64_t wide = kPatchWidth + (a.kernel_size[1] - 1) * a.dilation[1];
  if (a.stride[0] != 1 || a.stride[1] != 1 || plan->taps == 1 || std::max(high, wide) > kMaxBox) return 0;
  plan->patch_high = static_cast<int>(high);
  plan->patch_wide = static_cast<int>(wide);
  plan->pixel_bytes = RoundUp(plan->patch_high * plan->patch_wide * kRowBytes);
  plan->tiles_high = static_cast<int>(DivideUp(a.conv_size[0], rows));
  plan->tiles_wide = static_cast<int>(DivideUp(a.conv_size[1], kPatchWidth));
  return a.images / a.stacks * plan->tiles_high * plan->tiles_wide;
}

// Tiles of a stack that are consecutive pixels of its images, or 0 where the copy engine cannot bring their windows.
int64_t CutIntoWindows(const ConvArgs& a, WarpgroupPlan* plan) {
  if (!FitsIm2col(a)) return 0;
  plan->pixel_bytes = plan->pixels * kRowBytes;
  plan->tiles_high = plan->tiles_wide = 1;
  return DivideUp(a.images / a.stacks * a.conv_size[0] * a.conv_size[1], plan->pixels);
}

// Completes a plan that has a tile, `patch` and splits; false where it does not fit.
bool CompleteWarpgroupPlan(const ConvArgs& a, int element_bytes, bool in_chain, const DeviceInfo& device,
                           WarpgroupPlan* plan) {
  if (plan->splits > 1 && device.clusters[plan->splits] == 0) return false;
  const bool pools = a.pool != Pool::kNone;
  if (pools && (!plan->patch || plan->pixels / kPatchWidth % 2 != 0 || !PoolsPairs(a))) return false;
  plan->parts = element_bytes == 4 && a.precision == Precision::kHighest;
  if (!HasKernel(*plan)) return false;
  const int deep = kRowBytes / element_bytes;
  if (!FitsGroups(a, plan->filters, deep)) return false;
  plan->taps = static_cast<int>(a.kernel_size[0] * a.kernel_size[1]);
  const int64_t steps = DivideUp(a.group_channels, deep) * plan->taps;
  if (steps > kMaxCount || plan->splits > steps) return false;
  plan->steps = static_cast<int>(steps);
  plan->steps_per_split = static_cast<int>(DivideUp(steps, plan->splits));
  if (DivideUp(steps, plan->steps_per_split) != plan->splits) return false;  // a split would be empty
  const int64_t tiles = plan->patch ? CutIntoPatches(a, plan) : CutIntoWindows(a, plan);
  if (tiles == 0) return false;
  if (plan->parts) plan->pixel_bytes *= 2;  // small parts beside the pixels
  const int64_t feature_tiles = DivideUp(a.features, plan->filters);
  if (tiles * feature_tiles > kMaxCount / plan->splits) return false;
  plan->pixel_tiles = static_cast<int>(tiles);
  plan->feature_tiles = static_cast<int>(feature_tiles);
  constexpr int kStatic = 2048;  // shared memory of barriers, and what the system keeps of a block
  // Where there is a multiprocessor for each block, it takes what leaves room for as large a one of the next kernel;
  // two teams take all, as nothing overlaps them.
  const int64_t clusters = tiles * feature_tiles * a.stacks;  // or blocks, without splits
  const bool is_alone = clusters * plan->splits <= device.multiprocessors;
  plan->teams = 1;
  if (is_alone) TakeMultiprocessor(clusters, in_chain, device, plan);
  plan->by_mail = MeetByMail(*plan);
  const int resident = WarpgroupResident(plan->filters, plan->pixels, element_bytes, plan->parts, plan->roomy);
  const int beside = plan->teams > 1 ? 1 : plan->roomy ? 2 : is_alone ? std::min(resident, 2) : resident;
  const int room = std::min(device.shared_memory, device.shared_memory_sm / beside) - kStatic - kSwizzleBytes;
  const int64_t blocks = std::min<int64_t>(steps / plan->taps, plan->steps_per_split / plan->taps + 2);
  plan->turns = FindTurns(a, *plan, resident, device);
  const int64_t turns = plan->turns.blocks > 0 ? 2 : 1;  // or more
  const int most = static_cast<int>(std::min<int64_t>(turns * plan->steps_of_team(), kMaxRing));
  if (!LayOut(room, most, static_cast<int>(turns * blocks), pools, plan)) return false;
  if (plan->splits > kMostRead && !plan->by_mail) return false;
  plan->cycles = Cycles(*plan, a, element_bytes, in_chain, clusters, device);
  return true;
}

// Every plan of at most so many splits.
std::vector<WarpgroupPlan> PlansUpTo(int most_splits, const ConvArgs& a, int element_bytes, bool in_chain,
                                     const DeviceInfo& device) {
  std::vector<WarpgroupPlan> plans;
  for (bool patch : {false, true}) {
    for (int filters : kTileFilters) {
      for (int pixels : kTilePixels) {
        for (int splits = 1; splits <= most_splits; ++splits) {
          const TileChoice tile{filters, pixels, patch, splits};
          const WarpgroupPlan plan = WarpgroupPlanOf(tile, a, element_bytes, in_chain, device);
          if (plan.filters > 0) plans.push_back(plan);
        }
      }
    }
  }
  return plans;
}

// What holds for every tile: maps and kernels that the copy engine can describe, and pixels that have numbers.
bool FitsWarpgroups(const ConvArgs& a, int element_bytes) {
  const int64_t step = 16 / element_bytes;  // elements of 16 bytes, which the copy engine asks of rows
  if (a.channels % step != 0 || a.features % step != 0) return false;
  constexpr int64_t kSlack = 1 << 10;  // numbers of pixels beyond the last, in a tile
  const int64_t results = a.images * a.conv_size[0] * a.conv_size[1];
  return results <= kMaxCount - kSlack && a.images * a.size[0] * a.size[1] <= kMaxCount - kSlack &&
         a.stacks <= kMaxStacks && a.conv_size[1] * a.features <= kMaxCount && kPatchWidth * a.features <= kMaxCount;
}

}  // namespace

bool PoolsPairs(const ConvArgs& a) {
  for (int i = 0; i < 2; ++i) {
    if (a.window[i] != 2 || a.window_stride[i] != 2 || a.window_pad_low[i] != 0) return false;
    if (a.out_size[i] != a.conv_size[i] / 2) return false;  // padded behind
  }
  return a.pool != Pool::kNone;
}

bool IsWarpgroupTile(const TileChoice& tile) {
  const auto has = [](const auto& list, int value) {
    return std::find(std::begin(list), std::end(list), value) != std::end(list);
  };
  return has(kTileFilters, tile.filters) && has(kTilePixels, tile.pixels) && tile.splits >= 1 &&
         tile.splits <= (HasMail(tile.pixels) ? kMostSplits : kMostRead);
}

WarpgroupPlan WarpgroupPlanOf(const TileChoice& tile, const ConvArgs& a, int element_bytes, bool in_chain,
                              const DeviceInfo& device) {
  constexpr double kSharing = 478;  // in a chain, of blocks that share multiprocessors with those in front
  if (!IsWarpgroupTile(tile) || !FitsWarpgroups(a, element_bytes)) return {};
  WarpgroupPlan plan{};
  plan.filters = tile.filters;
  plan.pixels = tile.pixels;
  plan.patch = tile.patch;
  plan.splits = tile.splits;
  if (!CompleteWarpgroupPlan(a, element_bytes, in_chain, device, &plan)) return {};
  const int64_t blocks = int64_t{plan.pixel_tiles} * plan.feature_tiles * plan.splits * a.stacks;
  if (in_chain && !plan.parts && blocks > device.multiprocessors) plan.cycles += kSharing;
  return plan;
}

std::vector<WarpgroupPlan> WarpgroupPlans(const ConvArgs& a, int element_bytes, bool in_chain,
                                          const DeviceInfo& device) {
  return PlansUpTo(kMostSplits, a, element_bytes, in_chain, device);
}

WarpgroupPlan ChooseWarpgroupPlan(const ConvArgs& a, int element_bytes, bool in_chain, const DeviceInfo& device) {
  WarpgroupPlan best{};
  best.cycles = std::numeric_limits<double>::infinity();
  for (const WarpgroupPlan& plan : PlansUpTo(kModelSplits, a, element_bytes, in_chain, device)) {
    if (plan.cycles < best.cycles) best = plan;
  }
  return best;
}

}  // namespace jsc
