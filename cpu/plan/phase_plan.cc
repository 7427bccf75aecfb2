// How a 3x3 convolution with strides of 2 and a packed kernel is cut into tasks, in the terms of plan/plan.h.
#include <algorithm>

#include "cpu/plan/plan_search.h"
#include "model_constants.h"

namespace jsc {
namespace {

// Cycles of one core, in the unit of plan/window_plan.cc: only their ratios matter. They are "cpu phases" of
// dispatch/model.json:
//   kVisit       one pixel in a chunk, for one block: its bits and the branch miss at its list's end, ...
//   kEntry       ... each of its non-zeros, ...
//   kAdd         ... one multiply-add with a weight from L1 or L2, ...
//   kSum         ... and loading and storing one vector of sums
//   kLine        64 bytes of the kernel from the outer cache
//   kPlace       zeroing one vector of sums and writing its result
//   kTask        of a task, whatever it does
//   kUneven      of a task: how much their zeros differ
//   kEntriesFew  of a pixel in a chunk: fewer, and longer lists are worth more than a slice in L1
using namespace model::cpu_phases;
using model::cpu_threads::kWake;

// Rows and columns of pixels meet one tap and two by turns.
constexpr double kTaps = 9.0 / 4, kRows = 3.0 / 2;  // that a pixel meets, on average
constexpr int64_t kLanes = 16;                      // output channels of a vector, the only length that the loop has

}  // namespace

bool CanRunPhases(const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, bool packed, bool pairs) {
  constexpr int64_t kVectorBytes = 64;  // with which bits are found fast
  const bool fits = packed && machine.vector_bytes == kVectorBytes && accumulator_bytes == 4;
  if (PackedBlock(a, pairs) != (pairs ? 2 : 1) * kLanes) return false;  // pairs with few output channels
  for (int i = 0; i < 2; ++i) {
    // A pixel's phase is that of its place behind the padding, which a crop would make negative.
    if (a.kernel_size[i] != 3 || a.stride[i] != 2 || a.dilation[i] != 1 || a.pad_low[i] < 0) return false;
  }
  return fits;
}

ConvPlan MakePhasePlan(const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, double density,
                       bool pairs) {
  ConvPlan p{};
  p.loop = ConvLoop::kPhases;
  const int64_t slice = PackedBlock(a, pairs);
  const int64_t all = CeilDiv(a.out_channels / a.groups, slice) * slice / kLanes;  // vectors
  p.vectors = all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
  p.block = p.vectors * kLanes;
  // Of the phase that meets four kernel elements, the part of a slice that stays in L1; twice that makes short lists
  // longer, which are worth more.
  int64_t fit = machine.l1_bytes * 3 / 4 / (4 * p.block * accumulator_bytes) / kLanes * kLanes;
  if (density * static_cast<double>(fit) < kEntriesFew) fit *= 2;
  p.chunk_channels = std::min<int64_t>(std::clamp<int64_t>(fit, kLanes, 64), std::max<int64_t>(1, a.group_channels));
  p.tile_cols = std::max<int64_t>(1, a.out_size[1]);
  p.col_tiles = 1;
  const int64_t rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]), blocks = all / p.vectors;
  const double chunks = static_cast<double>(CeilDiv(a.group_channels, p.chunk_channels));
  const double in_rows = static_cast<double>(a.size[0]) / static_cast<double>(std::max<int64_t>(1, a.out_size[0]));
  const double vectors = static_cast<double>(p.vectors), width = static_cast<double>(a.size[1]);
  const double lines = static_cast<double>(a.group_channels) * 9 * vectors;
  const double sums_bytes = static_cast<double>((a.conv_size[1] + 2) * p.block * accumulator_bytes);
  const double x_bytes = in_rows * width * static_cast<double>(a.group_channels * accumulator_bytes);
  const int64_t most = std::clamp<int64_t>(
      static_cast<int64_t>(0.5 * static_cast<double>(machine.l2_bytes) / (sums_bytes + x_bytes)), 1, rows);
  const auto cycles = [&](const ConvPlan& cut) {
    const double mine = static_cast<double>(cut.tile_rows) * in_rows + (cut.row_tiles > 1 ? 1 : 0);
    const double visits = mine * width * chunks,
                 entries = density * mine * width * static_cast<double>(a.group_channels);
    const double block = visits * (kVisit + kSum * kRows * vectors) + entries * (kEntry + kAdd * kTaps * vectors) +
                         lines * kLine + static_cast<double>(cut.tile_rows * a.conv_size[1]) * vectors * kPlace;
    const double task = kTask + static_cast<double>(cut.task_blocks) * block;
    const double rounds = static_cast<double>(CeilDiv(cut.tasks, machine.threads));
    return machine.threads > 1 && cut.tasks > 1 ? rounds * task + kWake + kUneven * task : rounds * task;
  };
  return SearchTasks(p, {rows, blocks, a.stacks * a.groups, CeilDiv(rows, most)}, machine.threads, cycles);
}

}  // namespace jsc
