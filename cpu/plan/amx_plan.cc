// How the dense convolution by AMX is cut into tasks, in the terms of plan/plan.h.
#include <algorithm>

#include "cpu/plan/amx_cut.h"
#include "cpu/plan/ceil_div.h"
#include "cpu/plan/plan_search.h"
#include "model_constants.h"

namespace jsc {
namespace {

// Cycles in the unit of plan/dense_conv_plan.cc: only their ratios matter. They are "cpu amx" of dispatch/model.json:
//   kTile         of a product of two tiles, with its loads
//   kPackWeights  of one vector of the kernel
//   kPackPixels   of one vector of x
//   kSums         of one vector of sums that is read and stored again
//   kResult       of one vector of results
//   kTask         of a task, whatever it does
using namespace model::cpu_amx;
using model::cpu_threads::kWake;

// All channels if their slice of the kernel fits L1 beside pixels and sums, else those of half of it: cores share L1
// with other threads, and then the slice of the next chunk is on its way.
int64_t ChunkChannels(const ConvArgs& a, const Machine& machine, int64_t block) {
  const int64_t taps = std::max<int64_t>(1, a.kernel_size[0] * a.kernel_size[1]);
  const int64_t most = machine.l1_bytes / (4 * block) / taps, channels = std::max<int64_t>(1, a.group_channels);
  if (channels <= most * 4 / 5) return channels;
  return std::min(std::max(kAmxRows, most / 2 / kAmxRows * kAmxRows), channels);
}

}  // namespace

int64_t PairsOfProduct(int64_t run) {
  int64_t pairs = std::min(run, kAmxRows);
  while (pairs > 1 && run % pairs != 0) --pairs;
  return pairs;
}

AmxCut MakeAmxCut(const ConvCall& call, const ConvPlan& plan, int64_t width) {
  const ConvArgs& a = call.args;
  width = std::max<int64_t>(1, width);
  AmxCut cut{};
  cut.is_point = !call.lone_channel;
  for (int i = 0; i < 2; ++i) {
    cut.is_point &= a.kernel_size[i] == 1 && a.pad_low[i] == 0 && (a.conv_size[i] - 1) * a.stride[i] < a.size[i];
  }
  const bool moves_by_one = a.stride[0] == 1 && a.stride[1] == 1;
  const int64_t span = (width - 1) * a.stride[1] + (a.kernel_size[1] - 1) * a.dilation[1] + 1;
  const int64_t of_row = CeilDiv(width, kAmxRows);  // tiles of a row alone
  cut.by_rows = !cut.is_point && (!moves_by_one || of_row * kAmxRows <= span);
  if (cut.by_rows) {
    cut.tile_windows = CeilDiv(width, of_row);
    cut.columns = of_row * cut.tile_windows;
    return cut;
  }
  cut.columns = cut.is_point ? width : span;
  const int64_t all = (std::max<int64_t>(1, plan.tile_rows) - 1) * cut.columns + width;
  const bool are_full = cut.is_point || all >= 4 * kAmxRows;  // else few tiles, of about as many windows each
  cut.tile_windows = are_full ? kAmxRows : CeilDiv(all, CeilDiv(all, kAmxRows));
  return cut;
}

int64_t WindowsOf(const AmxCut& cut, int64_t rows, int64_t width) {
  return cut.by_rows ? width : (rows - 1) * cut.columns + width;
}

int64_t TilesOf(const AmxCut& cut, int64_t rows, int64_t width) {
  if (rows <= 0 || width <= 0) return 0;
  return (cut.by_rows ? rows : 1) * CeilDiv(WindowsOf(cut, rows, width), cut.tile_windows);
}

int64_t SumRowsOf(const AmxCut& cut, int64_t rows, int64_t width) {
  return cut.by_rows ? rows : CeilDiv(TilesOf(cut, rows, width) * cut.tile_windows, cut.columns);
}

ConvPlan MakeAmxPlan(const ConvCall& call, const Machine& machine, ConvLoop loop) {
  const ConvArgs& a = call.args;
  const int64_t out_channels = std::max<int64_t>(1, a.out_channels / a.groups);
  ConvPlan p{};
  p.loop = loop;
  p.vectors = out_channels > kAmxColumns ? 2 : 1;
  p.windows = kAmxRows;
  p.block = p.vectors * kAmxColumns;
  p.chunk_taps = a.kernel_size[0];
  p.chunk_channels = ChunkChannels(a, machine, p.block);
  p.tile_cols = std::max<int64_t>(1, a.out_size[1]);
  p.col_tiles = 1;
  const int64_t rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]);
  const int64_t blocks = CeilDiv(out_channels, p.block), chunks = CeilDiv(a.group_channels, p.chunk_channels);
  const int64_t height = CeilDiv(a.conv_size[0], std::max<int64_t>(1, a.out_size[0]));  // of a row of results
  const int64_t run = (a.dilation[1] == 1 ? a.kernel_size[1] : 1) * p.chunk_channels;
  const double depth = static_cast<double>(a.kernel_size[0] * a.kernel_size[1] * a.group_channels);
  const double steps = depth / static_cast<double>(PairsOfProduct(run));
  const auto cycles = [&](const ConvPlan& cut) {
    const AmxCut tiles = MakeAmxCut(call, cut, a.conv_size[1]);
    const int64_t conv_rows = cut.tile_rows * height;
    const double count = static_cast<double>(TilesOf(tiles, conv_rows, std::max<int64_t>(1, a.conv_size[1])));
    const double windows = count * static_cast<double>(tiles.tile_windows);
    const double pixels = static_cast<double>((conv_rows * a.stride[0] + a.kernel_size[0] - 1) * a.size[1]);
    const double products = count * steps * kTile + depth * kPackWeights;
    const double results = windows * (kResult + kSums * static_cast<double>(chunks - 1));
    const double vectors = static_cast<double>(cut.task_blocks * cut.vectors);
    const double task = kTask + vectors * (products + results) +
                        pixels * static_cast<double>(CeilDiv(a.group_channels, kAmxColumns)) * kPackPixels;
    const double rounds = static_cast<double>(CeilDiv(cut.tasks, machine.threads));
    return machine.threads > 1 && cut.tasks > 1 ? rounds * task + kWake : rounds * task;
  };
  // Pixels of a chunk, and its sums, are to stay in L2.
  const int64_t width = std::max<int64_t>(1, a.conv_size[1]);
  const int64_t row_bytes =
      4 * width * height * (a.stride[0] * a.stride[1] * p.chunk_channels + (chunks > 1 ? out_channels : p.block));
  const int64_t most = std::clamp<int64_t>(machine.l2_bytes * 6 / 10 / std::max<int64_t>(1, row_bytes), 1, rows);
  return SearchTasks(p, {rows, blocks, a.stacks * a.groups, CeilDiv(rows, most)}, machine.threads, cycles);
}

}  // namespace jsc
