#include <algorithm>
#include <cmath>

#include "cpu/plan/plan_search.h"
#include "model_constants.h"

namespace jsc {
namespace {

// Cycles of one core, in the unit of plan/window_plan.cc: only their ratios matter. They are "cpu scatter" of
// dispatch/model.json:
//   kPixel      reading one pixel of x, ...
//   kCompress   ... each vector of it ...
//   kListed     ... and each non-zero
//   kChannel    one channel's list in one strip: the end of its loop is a branch miss
//   kScattered  one vector of weights added to one vector of sums
//   kRow        one vector of the kernel from the outer cache, ...
//   kRowAgain   ... and for the strips that follow
//   kPlace      zeroing one vector of sums and writing its result
//   kTask       of a task, whatever it does
//   kUneven     of a task: how long threads wait for the last one
using namespace model::cpu_scatter;
using model::cpu_threads::kWake;

// What does not depend on the cut into tasks.
struct Layer {
  double density;
  int64_t lanes, taps, blocks, parts;
  int64_t rows, columns;   // results of one stack, through its images
  int64_t places_per_row;  // sums
  double in_rows_per_row;  // rows of x per row of results, without what tiles share
  int64_t shared_rows;     // rows of x that neighbouring tiles share
  int64_t row_bytes;       // sums of one row of results
  double entries_per_row;  // non-zeros per row of x
};

double ListCycles(const ConvArgs& a, const Layer& l, double in_rows) {
  const double vectors = static_cast<double>(CeilDiv(a.group_channels, l.lanes));
  return in_rows * (a.size[1] * (kPixel + kCompress * vectors) + kListed * l.entries_per_row);
}

double BlockCycles(const ConvArgs& a, const Layer& l, const ConvPlan& p, double in_rows) {
  const double taps_vectors = static_cast<double>(l.taps * p.vectors);
  const double strips = std::max(1.0, in_rows / p.strip_rows);
  const double loops = l.taps == 9 ? 1 : l.taps;
  const double kernel = taps_vectors * (kRow + kRowAgain * (strips - 1)) + kChannel * loops * strips;
  const double places = in_rows * l.places_per_row * p.vectors;
  return a.group_channels * kernel + kScattered * taps_vectors * in_rows * l.entries_per_row + kPlace * places;
}

// Time until the last thread is done. Threads that work on the same tile each list its non-zeros.
double Cycles(const ConvArgs& a, const Layer& l, const ConvPlan& p, int64_t threads) {
  const double in_rows = p.tile_rows * l.in_rows_per_row + (p.row_tiles > 1 ? l.shared_rows : 0);
  const int64_t rounds = CeilDiv(p.tasks, threads), tiles = l.parts * p.row_tiles;
  const int64_t lists = p.block_tiles == 1 ? rounds : std::min(tiles, rounds);
  const double task = p.task_blocks * BlockCycles(a, l, p, in_rows) + kTask;
  const double cycles = lists * ListCycles(a, l, in_rows) + rounds * task;
  return threads > 1 && p.tasks > 1 ? cycles + kWake + kUneven * task : cycles;
}

Layer LayerOf(const ConvArgs& a, const ConvPlan& p, int64_t accumulator_bytes, double density) {
  Layer l{};
  l.density = density;
  l.lanes = p.block / p.vectors;
  l.taps = a.kernel_size[0] * a.kernel_size[1];
  l.blocks = CeilDiv(std::max<int64_t>(1, a.out_channels / a.groups), p.block);
  l.parts = a.stacks * a.groups;
  l.rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]);
  l.columns = std::max<int64_t>(1, a.out_size[1]);
  l.places_per_row = a.conv_size[1] + (a.kernel_size[1] - 1) * a.dilation[1];
  l.in_rows_per_row = static_cast<double>(a.size[0]) / std::max<int64_t>(1, a.out_size[0]);
  l.shared_rows = (a.kernel_size[0] - 1) * a.dilation[0] + std::max<int64_t>(0, a.window[0] - a.window_stride[0]);
  l.row_bytes = l.places_per_row * p.block * accumulator_bytes;
  l.entries_per_row = density * a.size[1] * a.group_channels;
  return l;
}

// Most rows of x in a tile whose sums and lists stay in L2.
int64_t FittingRows(const ConvArgs& a, const Layer& l, const Machine& machine) {
  const double touched = l.entries_per_row * 8 + l.row_bytes;
  const double room = static_cast<double>(a.size[1] * a.group_channels * 8);
  return static_cast<int64_t>(std::min(0.5 * machine.l2_bytes / touched, 64e6 / std::max(1.0, room)));
}

}  // namespace

bool CanScatter(const ConvArgs& a) {
  constexpr int64_t kMost = 1 << 16;  // a list's key holds column and channel in 16 bits each
  if (a.stride[0] != 1 || a.stride[1] != 1 || a.group_channels >= kMost || a.size[1] >= kMost) return false;
  // An entry's offset into the sums has 32 bits. Tiles are cut to fit L2, but have one row of results at least, and
  // that may be a pool over a whole map.
  constexpr double kMostBytes = 1u << 31, kPlaceBytes = 256;  // four vectors
  double places = 1;
  for (int i = 0; i < 2; ++i) {
    const double reach = static_cast<double>(a.kernel_size[i] - 1) * static_cast<double>(a.dilation[i]);
    const int64_t results = i == 0 ? std::min(a.window[0], a.conv_size[0]) : a.conv_size[1];
    places *= static_cast<double>(results) + 2 * reach + std::abs(static_cast<double>(a.pad_low[i]));
  }
  return places * kPlaceBytes < kMostBytes;
}

ConvPlan MakeScatterPlan(const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, double density) {
  const int64_t lanes = machine.vector_bytes / accumulator_bytes;
  const int64_t needed = CeilDiv(std::max<int64_t>(1, a.out_channels / a.groups), lanes);
  // A 3x3 kernel lies in registers: 18 of 32 or 9 of 16.
  const int64_t most = a.kernel_size[0] * a.kernel_size[1] == 9 ? (machine.many_registers ? 2 : 1) : 4;
  ConvPlan p{};
  p.loop = ConvLoop::kScatter;
  p.vectors = needed == 1 || most == 1 ? 1 : needed == 2 || most == 2 ? 2 : 4;
  p.block = p.vectors * lanes;
  p.tile_cols = std::max<int64_t>(1, a.out_size[1]);
  p.col_tiles = 1;
  const Layer l = LayerOf(a, p, accumulator_bytes, density);
  const int64_t reach = (a.kernel_size[0] - 1) * a.dilation[0];
  p.strip_rows = std::max<int64_t>(1, machine.l1_bytes / std::max<int64_t>(1, l.row_bytes) - reach);
  const int64_t fit = std::max<int64_t>(1, FittingRows(a, l, machine) / std::max(0.1, l.in_rows_per_row));
  const int64_t fewest = CeilDiv(l.rows, std::min(fit, l.rows));
  return SearchTasks(p, {l.rows, l.blocks, l.parts, fewest}, machine.threads,
                     [&](const ConvPlan& cut) { return Cycles(a, l, cut, machine.threads); });
}

}  // namespace jsc
