#include <algorithm>
#include <cmath>

#include "cpu/plan/plan_search.h"
#include "model_constants.h"

namespace jsc {
namespace {

// Cycles of one core, in the unit of plan/window_plan.cc: only their ratios matter. They are "cpu pixels" of
// dispatch/model.json:
//   kPixel         reading one pixel of x, ...
//   kCompare       ... each vector of it, ...
//   kCompress      ... and where its non-zeros are copied
//   kVisit         one pixel in a chunk, for one block, ...
//   kMiss          ... the branch miss at the end of its list, where that is one of too many, ...
//   kLearnt        ... of these, which the next blocks' sweeps find in the branch predictor, ...
//   kSum           ... loading and storing one vector of sums, ...
//   kAdd           ... and one multiply-add with a weight from L1
//   kLine          64 bytes of a packed kernel from the outer cache, while sums are added, ...
//   kBeside        ... which then take so much longer
//   kPack          64 bytes of a kernel as it lies, while nothing else is done
//   kPlace         zeroing one vector of sums and writing its result, ...
//   kPlaceFar      ... where other threads write the results between, too many for the sets of L2
//   kTask          of a task, whatever it does
//   kUneven        of a task of rows: how much their zeros differ
//   kUnevenBlocks  of one of blocks: how much its time does
//   kBlocksMany    for which a copy of the non-zeros pays: how many, ...
//   kBlocksManyUnpacked  ... of a kernel that is packed here, but of 1x1: each block goes through all of x
using namespace model::cpu_pixels;
using model::cpu_threads::kWake;

// What does not depend on the cut into tasks.
struct Layer {
  int64_t blocks, parts, chunks;
  int64_t rows;            // of results of one stack, through its images
  double places_per_row;   // sums
  double in_rows_per_row;  // rows of x per row of results, without what tiles share
  double shared_rows;      // rows of x that neighbouring tiles share
  double lines;            // of 64 bytes in the slices of one block
  double vectors;          // in the rows of one channel of a block
  double lanes;
  double entries;     // non-zeros per row of x
  double within;      // of taps that meet a result, not the padding
  double rows_bytes;  // of a row of results
  double l2_bytes;
  bool packed, copied;
};

// Of an axis's taps, those that meet a result, if the padding keeps the size.
double Within(int64_t size, int64_t kernel_size) {
  const double all = static_cast<double>(size * kernel_size);
  return std::max(1.0, all - static_cast<double>(kernel_size / 2 * 2)) / std::max(1.0, all);
}

Layer LayerOf(const ConvArgs& a, const ConvPlan& p, const Machine& machine, int64_t accumulator_bytes, double density,
              bool packed) {
  Layer l{};
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  l.lanes = static_cast<double>(machine.vector_bytes / accumulator_bytes);
  l.blocks = CeilDiv(std::max<int64_t>(1, a.out_channels / a.groups), p.block);
  l.parts = a.stacks * a.groups;
  l.chunks = CeilDiv(a.group_channels, p.chunk_channels);
  l.rows = std::max<int64_t>(1, a.images / a.stacks * a.out_size[0]);
  l.places_per_row = static_cast<double>(a.conv_size[1] + (a.kernel_size[1] - 1) * a.dilation[1]);
  l.in_rows_per_row = static_cast<double>(a.size[0]) / static_cast<double>(std::max<int64_t>(1, a.out_size[0]));
  l.shared_rows = static_cast<double>((a.kernel_size[0] - 1) * a.dilation[0] +
                                      std::max<int64_t>(0, a.window[0] - a.window_stride[0]));
  l.lines = static_cast<double>(a.group_channels * taps * p.block * accumulator_bytes) / 64;
  l.vectors = static_cast<double>(taps * p.block) / l.lanes;
  l.entries = density * static_cast<double>(a.size[1] * a.group_channels);
  l.within = Within(a.size[0], a.kernel_size[0]) * Within(a.size[1], a.kernel_size[1]);
  l.rows_bytes = static_cast<double>(a.out_size[1] * a.out_channels * accumulator_bytes);
  l.l2_bytes = static_cast<double>(machine.l2_bytes);
  l.packed = packed;
  l.copied = p.copied;
  return l;
}

double ListCycles(const ConvArgs& a, const Layer& l, double in_rows) {
  const double vectors = static_cast<double>(a.group_channels) / l.lanes;
  return in_rows * static_cast<double>(a.size[1]) * (kPixel + (l.copied ? kCompress : kCompare) * vectors);
}

// rows: of x; halo: of them, those that neighbouring tiles have as well; parted: other threads have blocks of the tile.
double BlockCycles(const ConvArgs& a, const Layer& l, const ConvPlan& p, double rows, double halo, bool parted) {
  const double visits = (rows + halo / static_cast<double>(a.kernel_size[0])) * static_cast<double>(a.size[1]);
  const double miss = kMiss * std::max(0.0, 1 - kLearnt / ((rows + halo) * static_cast<double>(a.size[1])));
  const double column = l.vectors / static_cast<double>(a.kernel_size[1]);
  const double add = visits * static_cast<double>(l.chunks) * (kVisit + miss + kSum * column) +
                     rows * kAdd * l.within * l.entries * l.vectors;
  const double bytes = static_cast<double>(p.tile_rows) * l.rows_bytes;
  const bool far = parted && bytes > l.l2_bytes / 4;
  const double places = rows * l.places_per_row * static_cast<double>(p.block) / l.lanes * (far ? kPlaceFar : kPlace);
  return places + (l.packed ? std::max(add + kBeside * l.lines, kLine * l.lines) : add + kPack * l.lines);
}

// Time until the last thread is done. Each has neighbouring tasks, of which it takes half of what is left at once where
// blocks go through each chunk one after another; threads that work on the same tile each list its non-zeros.
double Cycles(const ConvArgs& a, const Layer& l, const ConvPlan& p, int64_t threads) {
  const double rows = static_cast<double>(p.tile_rows) * l.in_rows_per_row, halo = p.row_tiles > 1 ? l.shared_rows : 0;
  const int64_t rounds = CeilDiv(p.tasks, threads), tiles = l.parts * p.row_tiles;
  const double lists = static_cast<double>(CeilDiv(rounds, p.block_tiles));
  const double each = static_cast<double>(rounds) / lists, taken = lists * (l.packed ? 1 + std::log2(each) : each);
  const double task = static_cast<double>(p.task_blocks) * BlockCycles(a, l, p, rows, halo, rounds < p.block_tiles);
  const double cycles = lists * ListCycles(a, l, rows + halo) + static_cast<double>(rounds) * task + taken * kTask;
  const double uneven = tiles > 1 ? kUneven : kUnevenBlocks;
  return threads > 1 && p.tasks > 1 ? cycles + kWake + uneven * task : cycles;
}

// Most rows of results in a tile whose sums and lists stay in L2.
int64_t FittingRows(const ConvArgs& a, const Layer& l, const ConvPlan& p, const Machine& machine,
                    int64_t accumulator_bytes) {
  const double sums = l.places_per_row * static_cast<double>(p.block * accumulator_bytes);
  const double all = static_cast<double>(a.size[1] * l.chunks * p.chunk_channels);
  const double values = l.in_rows_per_row * static_cast<double>(accumulator_bytes);  // times those of a row
  const double touched = values * (l.copied ? l.entries : all) + sums, room = l.copied ? values * all : 0;
  const double fit = std::min(0.5 * static_cast<double>(machine.l2_bytes) / touched, 64e6 / std::max(1.0, room));
  return std::clamp<int64_t>(static_cast<int64_t>(fit), 1, l.rows);
}

}  // namespace

bool CanRunPixels(const ConvArgs& a, const Machine& machine) {
  const int64_t size = a.kernel_size[0];
  if (!CanScatter(a) || a.kernel_size[1] != size) return false;
  if (size == 1) return true;
  return a.dilation[1] == 1 && (size == 3 || (size == 5 && machine.many_registers));  // 25 sums
}

ConvPlan MakePixelPlan(const ConvArgs& a, const Machine& machine, int64_t accumulator_bytes, double density,
                       bool packed, bool pairs) {
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1];
  ConvPlan p{};
  p.loop = ConvLoop::kPixels;
  p.block = PackedBlock(a, pairs);
  if (!packed && taps == 9 && a.out_channels / a.groups > 16) p.block = 32;  // 128 bytes, as the outer cache gives them
  const int64_t row_bytes = taps * p.block * accumulator_bytes;
  constexpr int64_t kWordBits = 64;  // one for each channel
  const int64_t fit = std::clamp<int64_t>(machine.l1_bytes * 3 / 4 / row_bytes, 1, kWordBits);
  p.chunk_channels = std::clamp<int64_t>(fit >= 16 ? fit / 16 * 16 : fit, 1, std::max<int64_t>(1, a.group_channels));
  p.tile_cols = std::max<int64_t>(1, a.out_size[1]);
  p.col_tiles = 1;
  const double many = packed || taps == 1 ? kBlocksMany : kBlocksManyUnpacked;
  // Of packed windows each block of 16 counts: one of pairs, which has 32, as two.
  const int64_t each = packed && taps > 1 ? PackedBlock(a, false) : p.block;
  p.copied = CeilDiv(a.out_channels / a.groups, each) >= static_cast<int64_t>(many);
  const Layer l = LayerOf(a, p, machine, accumulator_bytes, density, packed);
  const int64_t fewest = CeilDiv(l.rows, FittingRows(a, l, p, machine, accumulator_bytes));
  p = SearchTasks(p, {l.rows, l.blocks, l.parts, fewest}, machine.threads,
                  [&](const ConvPlan& cut) { return Cycles(a, l, cut, machine.threads); });
  p.sweep_blocks = 1;
  if (!packed || taps == 1) return p;
  const double sums = static_cast<double>(p.tile_rows + a.kernel_size[0]) * l.places_per_row *
                      static_cast<double>(p.block * accumulator_bytes);
  p.sweep_blocks = std::clamp<int64_t>(static_cast<int64_t>(l.l2_bytes / 2 / sums), 1, 16);
  return p;
}

}  // namespace jsc
