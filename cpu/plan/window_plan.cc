#include "cpu/plan/plan.h"

#include <algorithm>
#include <limits>

#include "cpu/plan/ceil_div.h"
#include "model_constants.h"

namespace jsc {
namespace {

// What the choice between plans needs to know of a layer.
struct Work {
  int64_t rows, columns;   // results of one stack: rows through all images, columns
  double windows_per_row;  // convolution results per row of results, a whole row wide
  int64_t parts;           // stacks * groups
  double threads;
  double end;        // of a list: cycles
  double more_taps;  // of a window in one chunk, than nine
  // Of one candidate plan:
  int64_t blocks;      // of output channels
  int64_t chunks;      // of kernel rows and channels
  double entries;      // expected list length of a window in one chunk
  double slice_lines;  // vectors of one packed slice
  double doublings;    // of the slice beyond what L1 holds
};

// Cycles, fitted to single layers of 85 and 95 % zeros on one AVX-512 core; only their ratios matter. They are "cpu
// windows" of dispatch/model.json:
//   kList        compressing, counting, ordering and copying one window's list, ...
//   kListTap     ... the pixel at each of its taps beyond nine, ...
//   kListEntry   ... and each of its entries
//   kSum         loading and storing one vector of sums, per window and chunk
//   kShort       more where windows are single pixels: the branch miss at the end of a list
//   kEntry       value and offset of one entry, per block
//   kVector      one multiply-add with a weight from L1
//   kVectorMiss  more for each doubling of the slice beyond L1
//   kPacked      one vector of the kernel, from the outer cache into a slice in L1
//   kPackedMiss  more for each doubling of the slice beyond L1
//   kTask        of a task, whatever it does
//   kUneven      of a task: how much the zeros of tiles differ
using namespace model::cpu_windows;
using model::cpu_threads::kWake;

double TaskCycles(const Work& w, const ConvPlan& p) {
  const double windows = p.tile_rows * w.windows_per_row * p.tile_cols / w.columns;
  const double lists = windows * (kList + kListTap * w.more_taps + kListEntry * w.entries);
  const double vector = kVector + kVectorMiss * w.doublings;
  const double sums = windows * (w.end + kSum * p.vectors + (kEntry + vector * p.vectors) * w.entries);
  const double packing = w.slice_lines * (kPacked + kPackedMiss * w.doublings);
  return kTask + w.chunks * (lists + p.task_blocks * (sums + packing));
}

// Time until the last thread is done.
double PlanCycles(const Work& w, const ConvPlan& p) {
  const double task = TaskCycles(w, p);
  if (p.tasks == 1) return task;
  const double rounds = static_cast<double>(CeilDiv(p.tasks, static_cast<int64_t>(w.threads)));
  const double uneven = p.row_tiles * p.col_tiles > 1 ? kUneven * task : 0;
  return rounds * task + uneven + (w.threads > 1 ? kWake : 0);
}

void CountTasks(const Work& w, ConvPlan& p) {
  p.row_tiles = CeilDiv(w.rows, p.tile_rows);
  p.col_tiles = CeilDiv(w.columns, p.tile_cols);
  p.block_tiles = CeilDiv(w.blocks, p.task_blocks);
  p.tasks = w.parts * p.row_tiles * p.col_tiles * p.block_tiles;
}

// The cheapest way to cut the work into tasks whose sums and lists stay in L2. Returns its cycles.
double CutIntoTasks(const Work& w, const Machine& machine, int64_t accumulator_bytes, ConvPlan& plan) {
  double best = std::numeric_limits<double>::infinity();
  ConvPlan p = plan;
  for (int64_t splits = 1; splits <= std::min<int64_t>(w.blocks, 64); ++splits) {
    const int64_t task_blocks = CeilDiv(w.blocks, splits);
    if (task_blocks == p.task_blocks) continue;  // more splits of the same size
    p.task_blocks = task_blocks;
    const double window_bytes = task_blocks * p.block * accumulator_bytes + w.entries * (accumulator_bytes + 4);
    const double fit = std::max(16.0, 0.6 * machine.l2_bytes / window_bytes);
    p.tile_cols = w.windows_per_row <= fit ? w.columns : std::max<int64_t>(1, w.columns * fit / w.windows_per_row);
    const int64_t most_rows = std::clamp<int64_t>(fit / w.windows_per_row, 1, w.rows);
    const int64_t tiles = CeilDiv(w.rows, most_rows);
    for (int64_t more = 0; more <= 2 * w.threads; more += 1 + more / 4) {
      p.tile_rows = CeilDiv(w.rows, std::min(tiles + more, w.rows));
      CountTasks(w, p);
      const double cycles = PlanCycles(w, p);
      if (cycles < best) {
        best = cycles;
        plan = p;
      }
    }
  }
  return best;
}

// Channels whose slice takes `budget` bytes, in multiples of 8 where there are that many.
int64_t ChunkChannels(const ConvArgs& a, int64_t budget, int64_t taps, int64_t block_bytes) {
  const int64_t fit = std::max<int64_t>(1, budget / block_bytes / taps);
  const int64_t whole = fit >= 8 ? fit / 8 * 8 : fit;
  return std::min(whole, std::max<int64_t>(1, a.group_channels));
}

// What does not depend on the plan.
Work WorkOf(const ConvArgs& a, const Machine& machine) {
  Work w{};
  w.rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]);
  w.columns = std::max<int64_t>(1, a.out_size[1]);
  const double across = std::max<int64_t>(1, std::min(a.conv_size[1], a.out_size[1] * a.window_stride[1]));
  w.windows_per_row = across * std::max<int64_t>(1, std::min(a.conv_size[0], a.window_stride[0]));
  w.parts = a.stacks * a.groups;
  w.threads = static_cast<double>(machine.threads);
  w.end = a.kernel_size[0] * a.kernel_size[1] == 1 ? kShort : 0;
  return w;
}

}  // namespace

ConvPlan MakePlan(const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, double density) {
  const int64_t out_channels = std::max<int64_t>(1, a.out_channels / a.groups);
  const int64_t lanes = machine.vector_bytes / accumulator_bytes;
  constexpr int64_t kMaxTaps = 1024;
  constexpr int64_t kMostProducts = 1024;  // in one chain of additions, where longer ones lose digits
  // Chunks decide the order of each sum, so they are chosen for a fixed number of threads: results do not depend on it.
  Machine typical = machine;
  typical.threads = 2;
  ConvPlan best{}, p{};
  p.chunk_taps = std::clamp<int64_t>(kMaxTaps / a.kernel_size[1], 1, a.kernel_size[0]);
  const int64_t taps = p.chunk_taps * a.kernel_size[1];
  Work w = WorkOf(a, typical);
  w.more_taps = static_cast<double>(std::max<int64_t>(0, taps - 9));
  Work best_work = w;
  double best_cycles = std::numeric_limits<double>::infinity();
  // Four vectors a block, or two: a narrow block or a slice beyond L1 makes lists longer, which pays where they are
  // short.
  const int64_t most_vectors = std::min<int64_t>(4, CeilDiv(out_channels, lanes));
  for (p.vectors = most_vectors; p.vectors >= std::min<int64_t>(2, most_vectors); --p.vectors) {
    if (p.vectors == 3 && most_vectors == 4) continue;
    p.windows = p.vectors >= 3 ? 2 : p.vectors == 2 ? 4 : 8;
    p.block = p.vectors * lanes;
    p.chunk_channels = 0;
    w.blocks = CeilDiv(out_channels, p.block);
    for (int64_t doublings = 0; doublings <= 3 && p.chunk_channels < a.group_channels; ++doublings) {
      const int64_t budget = machine.l1_bytes * 4 / 5 << doublings;
      p.chunk_channels = std::min(ChunkChannels(a, budget, taps, p.vectors * machine.vector_bytes),
                                  std::max<int64_t>(1, kMostProducts / taps));
      p.task_blocks = 0;
      w.chunks = CeilDiv(a.group_channels, p.chunk_channels) * CeilDiv(a.kernel_size[0], p.chunk_taps);
      w.entries = static_cast<double>(p.chunk_channels * taps) * density;
      w.slice_lines = static_cast<double>(p.chunk_channels * taps * p.vectors);
      w.doublings = static_cast<double>(doublings);
      const double cycles = CutIntoTasks(w, typical, accumulator_bytes, p);
      if (cycles < best_cycles) {
        best_cycles = cycles;
        best = p;
        best_work = w;
      }
    }
  }
  best_work.threads = static_cast<double>(machine.threads);
  best.task_blocks = 0;
  best.cycles = CutIntoTasks(best_work, machine, accumulator_bytes, best);
  return best;
}

ConvTask TaskAt(const ConvCall& call, const ConvPlan& plan, int64_t index) {
  const ConvArgs& a = call.args;
  ConvTask task{};
  task.call = &call;
  task.plan = &plan;
  const auto take = [&index](int64_t count) {
    const int64_t part = index % count;
    index /= count;
    return part;
  };
  const int64_t block_tile = take(plan.block_tiles);
  const int64_t col_tile = take(plan.col_tiles);
  const int64_t row_tile = take(plan.row_tiles);
  task.group = take(a.groups);
  task.stack = index;
  task.block_begin = block_tile * plan.task_blocks;
  task.block_end = std::min(task.block_begin + plan.task_blocks, CeilDiv(a.out_channels / a.groups, plan.block));
  task.col_begin = col_tile * plan.tile_cols;
  task.col_end = std::min(task.col_begin + plan.tile_cols, a.out_size[1]);
  task.row_begin = row_tile * plan.tile_rows;
  task.row_end = std::min(task.row_begin + plan.tile_rows, a.images / a.stacks * a.out_size[0]);
  return task;
}

}  // namespace jsc
