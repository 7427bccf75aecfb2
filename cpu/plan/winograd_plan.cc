// How a 3x3 convolution by Winograd's algorithm is cut into tasks, in the terms of plan/plan.h.
#include <algorithm>
#include <limits>

#include "cpu/plan/plan_search.h"
#include "model_constants.h"

namespace jsc {
namespace {

// Cycles in the unit of plan/dense_conv_plan.cc: only their ratios matter. They are "cpu winograd" of
// dispatch/model.json:
//   kMultiplyAdd              of one vector, ...
//   kMultiplyAddFewRegisters  ... where there are 16 registers: the other loops take longer there, too
//   kPixels                   transforming one vector of channels of a square's pixels, ...
//   kWeights                  ... one vector of the kernel's 3x3 weights, ...
//   kResults                  ... and one vector of a square's sums
//   kTask                     of a task, whatever it does
//   kChannelsLeast            in and out: transforms of fewer cost as much as they save
using namespace model::cpu_winograd;
using model::cpu_threads::kWake;

constexpr int64_t kSquare = 2, kPoints = 16;
constexpr int64_t kTogether = 6;  // squares that go through the weights together, as registers allow, or as many places
constexpr int64_t kBeyond = 8;  // times L2: transformed pixels are read one behind the other, so they may lie beyond it

int64_t SquaresAcross(const ConvArgs& a) { return CeilDiv(std::max<int64_t>(1, a.conv_size[1]), kSquare); }

// Rows of squares whose transformed pixels a tile may have.
int64_t FittingRows(const ConvArgs& a, const Machine& machine) {
  const int64_t point = SquaresAcross(a) * std::max<int64_t>(1, a.group_channels) * static_cast<int64_t>(sizeof(float));
  return kBeyond * machine.l2_bytes / (kPoints * point);
}

}  // namespace

bool CanRunWinograd(const ConvCall& call, const Machine& machine) {
  const ConvArgs& a = call.args;
  for (int i = 0; i < 2; ++i) {
    if (a.kernel_size[i] != 3 || a.stride[i] != 1 || a.dilation[i] != 1) return false;
  }
  const bool fits = call.may_be_dense && call.dtype == DataType::F32 && a.group_channels > 0;
  return fits && FittingRows(a, machine) > 0;
}

ConvPlan MakeWinogradPlan(const ConvArgs& a, const Machine& machine) {
  constexpr int64_t kBytes = sizeof(float);
  const int64_t out_channels = std::max<int64_t>(1, a.out_channels / a.groups);
  const int64_t lanes = machine.vector_bytes / kBytes;
  ConvPlan p{};
  p.loop = ConvLoop::kWinograd;
  p.vectors = std::min<int64_t>(machine.many_registers ? 4 : 2, CeilDiv(out_channels, lanes));
  p.windows = 1;
  p.block = p.vectors * lanes;
  p.chunk_taps = a.kernel_size[0];
  // A quarter of L2 has the transformed weights of a chunk.
  const int64_t fit = std::max<int64_t>(lanes, machine.l2_bytes / 4 / (kPoints * p.block * kBytes) / lanes * lanes);
  p.chunk_channels = std::min(fit, std::max<int64_t>(1, a.group_channels));
  p.tile_cols = std::max<int64_t>(1, a.out_size[1]);
  p.col_tiles = 1;
  const int64_t rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]);
  const int64_t blocks = CeilDiv(out_channels, p.block), channels = std::max<int64_t>(1, a.group_channels);
  const int64_t height = CeilDiv(a.conv_size[0], std::max<int64_t>(1, a.out_size[0]));  // of a row of results
  const auto squares_of = [&](int64_t tile_rows) { return SquaresAcross(a) * CeilDiv(tile_rows * height, kSquare); };
  const double multiply_add = machine.many_registers ? kMultiplyAdd : kMultiplyAddFewRegisters;
  const double pixels = kPixels * static_cast<double>(CeilDiv(channels, lanes));
  const auto cycles = [&](const ConvPlan& cut) {
    const double squares = static_cast<double>(squares_of(cut.tile_rows));
    const double places = static_cast<double>(CeilDiv(squares_of(cut.tile_rows), kTogether) * kTogether);
    const double weights = kWeights + kPoints * places * multiply_add;  // of a channel and a vector
    const double block =
        static_cast<double>(p.vectors) * (static_cast<double>(channels) * weights + squares * kResults);
    const double task = kTask + squares * pixels + static_cast<double>(cut.task_blocks) * block;
    const double rounds = static_cast<double>(CeilDiv(cut.tasks, machine.threads));
    return machine.threads > 1 && cut.tasks > 1 ? rounds * task + kWake : rounds * task;
  };
  const int64_t most = std::clamp<int64_t>(FittingRows(a, machine) * kSquare / height, 1, rows);
  p = SearchTasks(p, {rows, blocks, a.stacks * a.groups, CeilDiv(rows, most)}, machine.threads, cycles);
  const double fewest = static_cast<double>(std::min(channels, out_channels));
  if (fewest < kChannelsLeast) p.cycles = std::numeric_limits<double>::infinity();
  return p;
}

}  // namespace jsc
