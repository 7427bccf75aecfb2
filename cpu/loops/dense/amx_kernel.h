// One task of the dense convolution of bfloat16 by AMX: nothing is skipped, as in dense_conv_kernel.h.
//
// What: sums[window][channel] += x * kernel for every tap and pair of channels, 16 windows x 16 output channels x up to
//   16 pairs at once, chunk by chunk. Then bias, residual and ReLU on each tile while it is in L1, or the pool.
// Layout: windows and their pixels as in amx_windows.h. A packed 3x3 kernel is read as it lies. Others are packed
//   as for loops/window_kernel.h, in blocks of two tiles.
// Why this tiling: two tiles of windows times two of output channels are four sums for four loads. So loads from L1
//   take half of the time of products. A chunk's weights of a block stay in L1 while all windows pass. Each step asks
//   for some of the next weights.
// Pairs of a product: the largest divisor of a run of products that a tile has room for, so that no row needs padding.
// Order of each sum: by pairs, then chunks, whatever tiles and threads there are.
// Bound by: products on wide layers; packing weights where there are few windows; writing results where there are few
//   input channels.
#ifndef JSC_CPU_LOOPS_DENSE_AMX_KERNEL_H_
#define JSC_CPU_LOOPS_DENSE_AMX_KERNEL_H_

#include "cpu/loops/dense/amx_windows.h"

#if defined(__AVX512F__)

namespace jsc {
namespace JSC_ISA {
namespace {

// Rows of the next weights, some of which each step asks for.
struct NextRows {
  const char* row = nullptr;
  int64_t bytes = 0;  // from one row to the next
  int64_t rows = 0;   // still to fetch
  int64_t each = 0;   // in a step

  [[gnu::always_inline]] void Fetch() {
    for (int64_t i = Min(each, rows); i > 0; --i, --rows, row += bytes) {
      __builtin_prefetch(row, 0, 2);
      __builtin_prefetch(row + 64, 0, 2);
    }
  }
};

// A chunk's products of one block.
struct AmxWork {
  const BFloat16Pair* weights;  // of the first product
  int64_t runs, steps, pairs;   // products of a run: steps * pairs
  int64_t block;                // of sums
  int64_t row, run, step;       // from the weights of a product, a run and a step to the next ones
  bool first;                   // of the chunks: sums are new
  NextRows* next;
};

// Where a tile of windows is read: its first pixel, bytes from one row to the next, and elements from pixel to pixel.
struct TileRowsAt {
  const BFloat16Pair* pixels;
  int64_t stride, pitch;
};

template <class Tiles, int kRows, int kColumns>
[[gnu::noinline]] void MultiplyTiles(Tiles& tiles, const AmxWork& work, const int64_t* taps, const TileRowsAt* at,
                                     const float* const* old, float* const* target) {
  const int64_t sum_bytes = work.block * static_cast<int64_t>(sizeof(float));
  const auto columns_of = [](auto* row) { return row + kAmxColumns; };
  if (work.first) {
    tiles.template Zero<0>();
    if constexpr (kColumns == 2) tiles.template Zero<1>();
    if constexpr (kRows == 2) tiles.template Zero<2>();
    if constexpr (kRows == 2 && kColumns == 2) tiles.template Zero<3>();
  } else {
    tiles.template Load<0>(old[0], sum_bytes);
    if constexpr (kColumns == 2) tiles.template Load<1>(columns_of(old[0]), sum_bytes);
    if constexpr (kRows == 2) tiles.template Load<2>(old[1], sum_bytes);
    if constexpr (kRows == 2 && kColumns == 2) tiles.template Load<3>(columns_of(old[1]), sum_bytes);
  }
  const int64_t row_bytes = work.row * static_cast<int64_t>(sizeof(BFloat16Pair));
  const BFloat16Pair* run_weights = work.weights;
  NextRows next = *work.next;
  for (int64_t run = 0; run < work.runs; ++run, run_weights += work.run) {
    const BFloat16Pair* weights = run_weights;
    const BFloat16Pair* one = at[0].pixels + taps[run] * at[0].pitch;
    const BFloat16Pair* other = kRows == 2 ? at[1].pixels + taps[run] * at[1].pitch : nullptr;
    for (int64_t step = 0; step < work.steps; ++step) {
      next.Fetch();
      tiles.template Load<6>(weights, row_bytes);
      tiles.template Load<4>(one, at[0].stride);
      tiles.template MultiplyAdd<0, 4, 6>();
      if constexpr (kColumns == 2) {
        tiles.template Load<7>(columns_of(weights), row_bytes);
        tiles.template MultiplyAdd<1, 4, 7>();
      }
      if constexpr (kRows == 2) {
        tiles.template Load<5>(other, at[1].stride);
        tiles.template MultiplyAdd<2, 5, 6>();
        if constexpr (kColumns == 2) tiles.template MultiplyAdd<3, 5, 7>();
        other += work.pairs;
      }
      one += work.pairs;
      weights += work.step;
    }
  }
  *work.next = next;
  tiles.template Store<0>(target[0], sum_bytes);
  if constexpr (kColumns == 2) tiles.template Store<1>(columns_of(target[0]), sum_bytes);
  if constexpr (kRows == 2) tiles.template Store<2>(target[1], sum_bytes);
  if constexpr (kRows == 2 && kColumns == 2) tiles.template Store<3>(columns_of(target[1]), sum_bytes);
}

// Bias, residual and ReLU on a tile's sums [windows, block] of the channels of `range`.
[[gnu::noinline]] inline void WriteTile(const AmxWindows& of, const WindowTile& tile, ChannelRange range,
                                        const float* sums) {
  const ConvTask& task = of.task;
  const ConvArgs& a = task.call->args;
  const int64_t columns = of.tile.conv_cols.size(), block = task.plan->block;
  auto* const out = static_cast<BFloat16*>(task.call->out) + range.channel;
  const bool whole = range.width == 2 * kLanes<float>;
  const BFloat16* residual =
      a.has_residual ? static_cast<const BFloat16*>(task.call->residual) + range.channel : nullptr;
  Vector<float> bias[2] = {}, least = {};
  if (a.activation != Activation::kRelu) least -= __builtin_inff();
  if (whole && a.has_bias) {
    const BFloat16* from = static_cast<const BFloat16*>(task.call->bias) + task.stack * a.out_channels + range.channel;
    for (int v = 0; v < 2; ++v) bias[v] = Load(from + v * kLanes<float>);
  }
  int64_t x = tile.x, result = tile.out;
  for (int64_t window = 0; window < tile.count; ++window, ++x, ++result, sums += block) {
    if (x == of.cut.columns) {
      x = 0;
      result += columns - of.cut.columns;
    }
    if (x >= columns) continue;
    if (whole) {
      Vector<float> value[2] = {Load(sums) + bias[0], Load(sums + kLanes<float>) + bias[1]};
      if (residual != nullptr) {
        for (int v = 0; v < 2; ++v) value[v] += Load(residual + result * a.out_channels + v * kLanes<float>);
      }
      for (int v = 0; v < 2; ++v) value[v] = _mm512_max_ps(least, value[v]);  // NaN stays NaN
      StoreAs(out + result * task.call->out_stride, RoundedPairs(value[0], value[1]));
      continue;
    }
    for (int64_t v = 0; v < range.width; v += kLanes<float>) {
      const ChannelRange part = {range.channel + v, Min(kLanes<float>, range.width - v)};
      StoreFirst(out + result * task.call->out_stride + v, Activate<BFloat16>(task, Load(sums + v), part, result),
                 part.width);
    }
  }
}

// A chunk of one block: all tiles of windows, two at a time. sums: [places, block], or null.
template <class Tiles, int kColumns>
void MultiplyAmxBlock(Tiles& tiles, const AmxWindows& of, const AmxBuffers& buffers, const AmxWork& work,
                      const TileRowsAt& pixels, ChannelRange range, float* sums, bool finish) {
  const ConvArgs& a = of.task.call->args;
  const int64_t all_pixels = a.images * a.size[0] * a.size[1];
  for (int64_t first = 0; first < of.tiles; first += kTilesTogether) {
    const int64_t count = Min(kTilesTogether, of.tiles - first);
    TileRowsAt at[kTilesTogether];
    float *target[kTilesTogether], *old[kTilesTogether];
    for (int64_t i = 0; i < count; ++i) {
      const WindowTile& tile = buffers.tiles[first + i];
      at[i] = pixels;
      if (of.in_place && tile.pixel + of.cut.tile_windows > all_pixels) {  // copied: it ends behind x
        at[i] = {buffers.pixels, work.steps * work.pairs * static_cast<int64_t>(sizeof(BFloat16Pair)), 0};
      } else {
        at[i].pixels += tile.pixel * pixels.pitch;
      }
      old[i] = sums + tile.place * work.block;
      target[i] = finish ? buffers.finished + i * kAmxRows * work.block : old[i];
    }
    const auto run = count == 2 ? &MultiplyTiles<Tiles, 2, kColumns> : &MultiplyTiles<Tiles, 1, kColumns>;
    run(tiles, work, buffers.taps, at, old, target);
    for (int64_t i = 0; finish && i < count; ++i) WriteTile(of, buffers.tiles[first + i], range, target[i]);
  }
}

// Rows of the packed kernel that are read after those of this chunk and block.
inline NextRows NextRowsOf(const AmxWindows& of, const Chunk& chunk, int64_t block, const AmxWork& work) {
  const ConvTask& task = of.task;
  const ConvArgs& a = task.call->args;
  const int64_t whole = PackedBlock(a, true);
  if (task.call->packed == nullptr || whole % task.plan->block != 0 || of.tiles == 0) return {};
  const ChunkOfBlock next = ChunkAfter(task, chunk, block);
  if (next.chunk.channels <= 0) return {};
  const int64_t rows = next.chunk.channels * a.kernel_size[0] * a.kernel_size[1];
  const int64_t steps = CeilDiv(of.tiles, kTilesTogether) * work.runs * work.steps;
  const Weights<BFloat16Pair> weights = WeightsOf<BFloat16Pair>(task, next.chunk, next.block);
  return {reinterpret_cast<const char*>(weights.first[0]), whole * static_cast<int64_t>(sizeof(BFloat16Pair)), rows,
          CeilDiv(rows, steps)};
}

inline int64_t AmxBytes(const ConvTask& task) { return TakeAmxBuffers(AmxWindows(task), nullptr).bytes; }

template <class Tiles>
void RunAmx(const ConvTask& task, char* scratch) {
  using T = BFloat16Pair;
  const IeeeScope ieee;
  const AmxWindows of(task);
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  AmxBuffers buffers = TakeAmxBuffers(of, scratch);
  LocateTiles(of, buffers);
  Tile tile = of.tile;
  tile.sum_cols = of.cut.columns;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1], run = of.run, out_channels = a.out_channels / a.groups;
  const bool is_pooled = a.pool != Pool::kNone, is_chunked = p.chunk_channels < a.group_channels;
  Tiles tiles;
  for (int64_t channel = 0; channel < a.group_channels; channel += p.chunk_channels) {
    const Chunk chunk = {channel, Min(p.chunk_channels, a.group_channels - channel), 0, a.kernel_size[0]};
    const bool is_last = channel + chunk.channels == a.group_channels;
    const int64_t pairs = PairsOfProduct(run * chunk.channels);
    tiles.Shape(of.cut.tile_windows, pairs);
    TileRowsAt pixels = {buffers.pixels, 0, chunk.channels};
    if (of.in_place) {
      pixels = {static_cast<const T*>(task.call->x) + task.group * a.group_channels + channel, 0, a.channels};
      CopyLastTile(of, chunk, buffers);
    } else if (of.cut.is_point) {
      PackPoints(of, chunk, buffers.pixels);
    } else {
      PackPixels<T>(task, of.tile, chunk, buffers.images, buffers.pixels);
    }
    pixels.stride = pixels.pitch * (of.cut.is_point ? 1 : a.stride[1]) * static_cast<int64_t>(sizeof(T));
    NextRows next;
    AmxWork work = {buffers.packed, taps / run, run * chunk.channels / pairs,   pairs,
                    p.block,        p.block,    run * chunk.channels * p.block, pairs * p.block,
                    channel == 0,   &next};
    for (int64_t block = task.block_begin; block < task.block_end; ++block) {
      if (of.reads_packed) {
        const Weights<T> weights = WeightsOf<T>(task, chunk, block);
        work.weights = weights.first[0];
        work.row = weights.channel_stride;
        work.run = weights.tap_stride;
        work.step = pairs * weights.channel_stride;
      } else {
        PackBlock<T>(task, chunk, block, buffers.packed);
      }
      next = NextRowsOf(of, chunk, block, work);
      float* sums = buffers.sums + (is_chunked ? (block - task.block_begin) * buffers.places * p.block : 0);
      const ChannelRange range = {task.group * out_channels + block * p.block,
                                  Min(p.block, out_channels - block * p.block)};
      const auto multiply = range.width > kAmxColumns ? &MultiplyAmxBlock<Tiles, 2> : &MultiplyAmxBlock<Tiles, 1>;
      multiply(tiles, of, buffers, work, pixels, range, sums, is_last && !is_pooled);
      if (is_last && is_pooled) WriteBlock<BFloat16>(task, tile, buffers.images, block, sums);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif

#endif  // JSC_CPU_LOOPS_DENSE_AMX_KERNEL_H_
