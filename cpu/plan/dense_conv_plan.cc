// How the dense convolution is cut into tasks, in the terms of plan/plan.h: by vectors of output channels, or as dot
// products.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/plan/ceil_div.h"
#include "cpu/plan/plan.h"
#include "model_constants.h"

namespace jsc {
namespace {

// Cycles, roughly those of an AVX-512 core; only their ratios matter. They are "cpu direct" of dispatch/model.json:
//   kMultiplyAdd              of one vector, ...
//   kMultiplyAddFewRegisters  ... where there are 16 registers, which the sparse loops would rather have more of
//   kPackWeights              of one vector of the kernel
//   kPackPixels               of one element of x
//   kTask                     of a task, whatever it does
//   kPackLanes                of a vector, at most, by which packing pixels is faster than one by one
using namespace model::cpu_direct;
// And "cpu dots", of the same unit:
//   kChannelsMost              output channels that it may have, ...
//   kChannelsMostFewRegisters  ... where there are 16 registers
//   kProduct                   of one vector with one of weights, ...
//   kValue                     ... and reading that vector, ...
//   kSum                       ... and adding up the lanes of one result
//   kWeight                    packing one element of the kernel
namespace dots = model::cpu_dots;
using model::cpu_threads::kWake;

// Channels whose slice of the kernel takes about four fifths of L1, in multiples of 8 where there are that many.
int64_t ChunkChannels(const ConvArgs& a, const Machine& machine, int64_t block_bytes) {
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  const int64_t fit = std::max<int64_t>(1, machine.l1_bytes * 4 / 5 / block_bytes / taps);
  return std::min(fit >= 8 ? fit / 8 * 8 : fit, std::max<int64_t>(1, a.group_channels));
}

// Results of the convolution along one axis that `count` results need, pooled ones where there is a pool. Rows go on
// through the images of a stack, as those of a tile do.
int64_t ConvResults(const ConvArgs& a, int axis, int64_t count) {
  const int64_t size = std::max<int64_t>(1, a.conv_size[axis]), whole = std::max<int64_t>(1, a.out_size[axis]);
  const int64_t images = count / whole, rest = count % whole;
  const int64_t span = rest > 0 ? std::min(size, (rest - 1) * a.window_stride[axis] + a.window[axis]) : 0;
  return std::max<int64_t>(1, images * size + span);
}

// Windows of a task.
double WindowsOf(const ConvArgs& a, const ConvPlan& p) {
  return static_cast<double>(ConvResults(a, 0, p.tile_rows) * ConvResults(a, 1, p.tile_cols));
}

// Cycles of packing a task's pixels.
double PixelCycles(const ConvArgs& a, const ConvPlan& p, double lanes) {
  const int64_t height = ConvResults(a, 0, p.tile_rows), width = ConvResults(a, 1, p.tile_cols);
  const double rows = static_cast<double>(height * a.stride[0] + (a.kernel_size[0] - 1) * a.dilation[0]);
  const double columns = static_cast<double>(width * a.stride[1] + (a.kernel_size[1] - 1) * a.dilation[1]);
  return rows * columns * static_cast<double>(a.group_channels) * kPackPixels / std::min(kPackLanes, lanes);
}

// Of the sums. packed: the kernel need not be packed.
double TaskCycles(const ConvArgs& a, const ConvPlan& p, const Machine& machine, bool packed) {
  const double multiply_add = machine.many_registers ? kMultiplyAdd : kMultiplyAddFewRegisters;
  const double depth = static_cast<double>(a.kernel_size[0] * a.kernel_size[1] * a.group_channels);
  const double blocks = static_cast<double>(p.task_blocks), vectors = static_cast<double>(p.vectors);
  return blocks * depth * vectors * (WindowsOf(a, p) * multiply_add + (packed ? 0 : kPackWeights));
}

// The same as dot products.
double DotCycles(const ConvArgs& a, const ConvPlan& p, double lanes) {
  const bool is_run = a.dilation[1] == 1;  // a row of the kernel
  const double runs = static_cast<double>(a.kernel_size[0] * (is_run ? 1 : a.kernel_size[1]));
  const double depth = static_cast<double>((is_run ? a.kernel_size[1] : 1) * a.group_channels);
  const double vectors = runs * std::ceil(depth / lanes), rows = static_cast<double>(p.vectors);
  return WindowsOf(a, p) * (vectors * (dots::kValue + rows * dots::kProduct) + rows * dots::kSum) +
         runs * depth * rows * dots::kWeight;
}

// The cut of the least expected cycles, of which `cycles(plan)` are those of a task that has its pixels.
template <typename Cycles>
ConvPlan Cut(ConvPlan p, const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, bool in_place,
             const Cycles& task_cycles) {
  const int64_t rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]);
  const int64_t columns = std::max<int64_t>(1, a.out_size[1]);
  const int64_t blocks = CeilDiv(std::max<int64_t>(1, a.out_channels / a.groups), p.block);
  const double lanes = static_cast<double>(machine.vector_bytes / accumulator_bytes);
  ConvPlan best = p;
  best.cycles = std::numeric_limits<double>::infinity();
  for (int64_t splits = 1; splits <= std::min<int64_t>(blocks, 64); ++splits) {
    p.task_blocks = CeilDiv(blocks, splits);
    // Sums and packed pixels of a tile stay in L2.
    const int64_t window_bytes =
        (p.task_blocks * p.block + a.stride[0] * a.stride[1] * p.chunk_channels) * accumulator_bytes;
    const int64_t each = a.pool == Pool::kNone ? 1 : std::max<int64_t>(1, a.window_stride[0] * a.window_stride[1]);
    const int64_t fit = std::max<int64_t>(16, machine.l2_bytes * 6 / 10 / window_bytes / each);
    p.tile_cols = std::min(columns, fit);
    p.col_tiles = CeilDiv(columns, p.tile_cols);
    const int64_t least = CeilDiv(rows, std::clamp<int64_t>(fit / p.tile_cols, 1, rows));
    for (int64_t more = 0; more <= 2 * machine.threads; ++more) {
      p.tile_rows = CeilDiv(rows, std::min(least + more, rows));
      p.row_tiles = CeilDiv(rows, p.tile_rows);
      p.block_tiles = CeilDiv(blocks, p.task_blocks);
      p.tasks = a.stacks * a.groups * p.row_tiles * p.col_tiles * p.block_tiles;
      const double task = kTask + task_cycles(p) + (in_place ? 0 : PixelCycles(a, p, lanes));
      const double cycles = static_cast<double>(CeilDiv(p.tasks, machine.threads)) * task;
      if (cycles < best.cycles) {
        best = p;
        best.cycles = cycles;
      }
    }
  }
  if (best.tasks > 1 && machine.threads > 1) best.cycles += kWake;
  return best;
}

// Whether pixels are read in x and not packed.
bool ReadsInPlace(const ConvCall& call) {
  const ConvArgs& a = call.args;
  const bool is_point = a.kernel_size[0] * a.kernel_size[1] == 1;
  return is_point && a.pad_low[0] == 0 && a.pad_low[1] == 0 && call.scaled.scale == nullptr;
}

}  // namespace

ConvPlan MakeDirectPlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes) {
  const ConvArgs& a = call.args;
  const int64_t out_channels = std::max<int64_t>(1, a.out_channels / a.groups);
  const int64_t lanes = machine.vector_bytes / accumulator_bytes;
  ConvPlan p{};
  p.loop = ConvLoop::kDirect;
  p.vectors = std::min<int64_t>(machine.many_registers ? 4 : 2, CeilDiv(out_channels, lanes));
  p.windows = 1;
  const bool is_point = a.kernel_size[0] * a.kernel_size[1] == 1;
  const bool packed = call.packed != nullptr && is_point && machine.vector_bytes == 64 && accumulator_bytes == 4;
  if (packed) p.vectors = PackedBlock(a, false) / lanes;  // of 1x1, where pairs have the same
  p.block = p.vectors * lanes;
  p.chunk_taps = a.kernel_size[0];
  p.chunk_channels = ChunkChannels(a, machine, p.vectors * machine.vector_bytes);
  return Cut(p, a, machine, accumulator_bytes, ReadsInPlace(call),
             [&](const ConvPlan& cut) { return TaskCycles(a, cut, machine, packed); });
}

bool CanRunDots(const ConvCall& call, const Machine& machine) {
  const double most = machine.many_registers ? dots::kChannelsMost : dots::kChannelsMostFewRegisters;
  const ConvArgs& a = call.args;
  return call.may_be_dense && call.kernel != nullptr && a.groups == 1 && static_cast<double>(a.out_channels) <= most;
}

ConvPlan MakeDotPlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes) {
  const ConvArgs& a = call.args;
  const int64_t lanes = machine.vector_bytes / accumulator_bytes, taps = a.kernel_size[0] * a.kernel_size[1];
  ConvPlan p{};
  p.loop = ConvLoop::kDots;
  p.vectors = a.out_channels > 4 ? CeilDiv(a.out_channels, 2) * 2 : a.out_channels;  // the kernel has these
  p.windows = 1;
  // Pools read vectors of channels, others write one behind the other.
  p.block = std::max<int64_t>(1, a.out_channels);
  if (a.pool != Pool::kNone) p.block = CeilDiv(p.block, lanes) * lanes;
  p.chunk_taps = a.kernel_size[0];
  // A lane adds up some hundred products; the weights take half of L1.
  constexpr int64_t kMostProducts = 256;
  const int64_t fit = std::min(kMostProducts * lanes, machine.l1_bytes / 2 / (p.block * accumulator_bytes)) / taps;
  p.chunk_channels = std::min(std::max(lanes, fit / lanes * lanes), std::max<int64_t>(1, a.group_channels));
  return Cut(p, a, machine, accumulator_bytes, ReadsInPlace(call),
             [&](const ConvPlan& cut) { return DotCycles(a, cut, static_cast<double>(lanes)); });
}

}  // namespace jsc
