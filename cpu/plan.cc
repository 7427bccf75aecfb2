#include "plan.h"

#include <algorithm>

namespace jsc {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Input channels per chunk: the packed slice takes about three quarters of L1, in whole vectors of channels.
int64_t ChunkChannels(const ConvArgs& a, const Machine& machine, int64_t taps, int64_t row_bytes, double density) {
  const int64_t budget = machine.l1_bytes * 4 / 5;
  const int64_t fit = std::max<int64_t>(1, budget / row_bytes / taps);
  (void)density;
  int64_t channels = fit >= 16 ? fit / 16 * 16 : fit >= 8 ? fit / 8 * 8 : fit;
  const int64_t chunks = CeilDiv(a.group_channels, channels);
  if (chunks == 1) channels = a.group_channels;
  return std::max<int64_t>(1, channels);
}

}  // namespace

ConvPlan MakePlan(const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, double density) {
  ConvPlan p{};
  const int64_t features = std::max<int64_t>(1, a.features / a.groups);
  const int64_t lanes = machine.vector_bytes / accumulator_bytes;
  p.vectors = std::min<int64_t>(4, CeilDiv(features, lanes));
  p.windows = p.vectors >= 3 ? 2 : p.vectors == 2 ? 4 : 8;
  p.block = p.vectors * lanes;
  const int64_t row_bytes = p.block * accumulator_bytes;
  constexpr int64_t kMaxTaps = 1024;
  p.chunk_taps = std::clamp<int64_t>(kMaxTaps / a.kernel_size[1], 1, a.kernel_size[0]);
  p.chunk_channels = ChunkChannels(a, machine, p.chunk_taps * a.kernel_size[1], row_bytes, density);

  const int64_t rows = a.images / a.stacks * a.out_size[0];
  const int64_t blocks = CeilDiv(features, p.block);
  const int64_t conv_cols = std::max<int64_t>(1, std::min(a.conv_size[1], a.out_size[1] * a.window_stride[1]));
  const int64_t conv_rows_per_row = std::max<int64_t>(1, std::min(a.conv_size[0], a.window_stride[0]));
  constexpr int64_t kTileWindows = 1024;
  p.tile_cols = std::max<int64_t>(1, a.out_size[1]);
  if (conv_cols > kTileWindows) p.tile_cols = std::max<int64_t>(1, kTileWindows / a.window_stride[1]);
  const int64_t row_windows = std::min(conv_cols, kTileWindows) * conv_rows_per_row;
  p.tile_rows = std::clamp<int64_t>(kTileWindows / row_windows, 1, std::max<int64_t>(1, rows));
  p.task_blocks = std::min<int64_t>(blocks, 4);

  p.col_tiles = CeilDiv(a.out_size[1], p.tile_cols);
  p.row_tiles = CeilDiv(rows, p.tile_rows);
  p.block_tiles = CeilDiv(blocks, p.task_blocks);
  p.tasks = a.stacks * a.groups * p.row_tiles * p.col_tiles * p.block_tiles;
  return p;
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
  task.block_end = std::min(task.block_begin + plan.task_blocks, CeilDiv(a.features / a.groups, plan.block));
  task.col_begin = col_tile * plan.tile_cols;
  task.col_end = std::min(task.col_begin + plan.tile_cols, a.out_size[1]);
  task.row_begin = row_tile * plan.tile_rows;
  task.row_end = std::min(task.row_begin + plan.tile_rows, a.images / a.stacks * a.out_size[0]);
  return task;
}

}  // namespace jsc
