// One task of the dense convolution of bfloat16 by AMX: nothing is skipped, as in loops/dense_conv_kernel.h.
//
// What: sums[window][channel] += x * kernel for every tap and pair of channels, 16 windows x 16 output channels x up to
//   16 pairs at once, chunk by chunk. Then bias, residual and ReLU on each tile while it is in L1, or the pool.
// Layout: a tile of pixels has a row for each of 16 windows, and rows are evenly spaced. So windows are numbered
// through
//   the rows of the patch, its padding included, where the window moves by a pixel: those that begin in the padding are
//   computed and not used. With strides each row of windows has tiles of its own. 1x1 windows need no padding: they are
//   read in x, or one behind the other. A packed 3x3 kernel is read as it lies, others are packed as for
//   loops/window_kernel.h, in blocks of two tiles.
// Why this tiling: two tiles of windows times two of output channels are four sums for four loads, so that loads from
// L1
//   take half of the time of products. A chunk's weights of a block stay in L1 while all windows pass. Each step asks
//   for some of the next weights.
// Pairs of a product: the largest divisor of a run of products that a tile has room for, so that no row needs padding.
// Order of each sum: by pairs, then chunks, whatever tiles and threads there are.
// Bound by: products on wide layers; packing weights where there are few windows; writing results where there are few
//   input channels.
#ifndef JSC_CPU_LOOPS_AMX_KERNEL_H_
#define JSC_CPU_LOOPS_AMX_KERNEL_H_

#include "cpu/loops/amx_tiles.h"
#include "cpu/loops/dense_conv_kernel.h"
#include "cpu/plan/amx_cut.h"

#if defined(__AVX512F__)

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kTilesTogether = 2;  // of windows, and of output channels at most

// Windows whose sums are one tile.
struct WindowTile {
  int64_t pixel;  // where the first begins, among those of the patch or of x
  int64_t place;  // its sums
  int64_t out;    // its result, among all pixels of out
  int64_t x;      // its column
  int64_t count;  // those behind the last window of a row, or of all rows, are not used
};

struct AmxBuffers {
  TileImage* images;     // [tile images]
  WindowTile* tiles;     // [tiles]
  int64_t* taps;         // [kh * kw] how far each run of products is from the window's first pixel
  BFloat16Pair* packed;  // [chunk rows + 1, block]
  BFloat16Pair* pixels;  // those of the patch, or of its windows; of the last tile alone where they are read in x
  float* sums;           // [task blocks or 1, places, block], where they are needed
  float* finished;       // [2 tiles, rows, block]
  int64_t places, bytes;
};

// How the windows of a task are numbered.
struct AmxTask {
  explicit AmxTask(const ConvTask& of)
      : task(of),
        tile(MakeTile(of, nullptr)),
        patch(PatchOf(of, tile)),
        cut(*of.call, *of.plan, tile.conv_cols.size()) {
    const ConvArgs& a = task.call->args;
    merged = cut.is_point && a.pool == Pool::kNone;
    in_place = ReadsInPlace<BFloat16Pair>(task) && tile.conv_cols.size() == a.size[1];
    for (int i = 0; i < 2; ++i) in_place &= a.stride[i] == 1 && a.conv_size[i] == a.size[i];
    for (int64_t i = 0; i < (merged ? 1 : tile.images); ++i) {
      const int64_t rows = RowsOf(i);
      tiles += cut.TilesOf(rows, tile.conv_cols.size());
      place_rows += cut.PlaceRowsOf(rows, tile.conv_cols.size());
    }
    // A 1x1 kernel's rows are far apart, in few sets of L1: read more than twice, they had better be packed.
    const bool may_read = task.call->packed != nullptr && PackedBlock(a, true) % task.plan->block == 0;
    reads_packed =
        may_read && a.group_channels % kTileRows == 0 && (a.kernel_size[0] == 3 || tiles <= 2 * kTilesTogether);
    run = reads_packed ? 1 : RunTaps(a);
  }

  // Of windows that are numbered together: all, or those of an image.
  int64_t RowsOf(int64_t i) const { return merged ? tile.conv_rows : ImageOfTile(task, i).conv_rows.size(); }

  const ConvTask& task;
  Tile tile;
  Patch patch;
  AmxCut cut;
  bool merged, in_place, reads_packed;
  int64_t run;  // taps whose products are one run
  int64_t tiles = 0, place_rows = 0;
};

inline AmxBuffers TakeAmxBuffers(const AmxTask& of, char* scratch) {
  const ConvTask& task = of.task;
  const ConvPlan& p = *task.plan;
  const ConvArgs& a = task.call->args;
  const int64_t taps = a.kernel_size[0] * a.kernel_size[1], blocks = task.block_end - task.block_begin;
  const bool is_chunked = p.chunk_channels < a.group_channels;
  Arena arena(scratch);
  AmxBuffers buffers{};
  buffers.places = of.place_rows * of.cut.columns;
  buffers.images = arena.Take<TileImage>(of.tile.images);
  buffers.tiles = arena.Take<WindowTile>(of.tiles);
  buffers.taps = arena.Take<int64_t>(taps);
  buffers.packed = arena.Take<BFloat16Pair>((taps * p.chunk_channels + 1) * p.block);
  const int64_t slack = kTileRows * a.stride[1];  // pixels that the last tile reads for windows that are not used
  const int64_t pixels = of.in_place       ? kTileRows
                         : of.cut.is_point ? of.tile.windows + slack
                                           : of.patch.rows * of.patch.columns + slack;
  buffers.pixels = arena.Take<BFloat16Pair>(pixels * p.chunk_channels);
  const int64_t kept = is_chunked ? blocks : a.pool != Pool::kNone ? 1 : 0;
  buffers.sums = arena.Take<float>(kept * buffers.places * p.block);
  buffers.finished = arena.Take<float>(kTilesTogether * kTileRows * p.block);
  buffers.bytes = arena.used();
  return buffers;
}

// Fills images, tiles and taps.
inline void LocateTiles(const AmxTask& of, AmxBuffers& buffers) {
  const ConvTask& task = of.task;
  const ConvArgs& a = task.call->args;
  MakeTile(task, buffers.images);
  const int64_t columns = of.tile.conv_cols.size(), step = of.cut.is_point ? 1 : a.stride[1];
  WindowTile* tile = buffers.tiles;
  int64_t patch_row = 0, place_row = 0, windows = 0;
  for (int64_t i = 0; i < (of.merged ? 1 : of.tile.images); ++i) {
    TileImage& image = buffers.images[i];
    const int64_t rows = of.RowsOf(i), first = (image.image * a.conv_size[0] + image.conv_rows.begin) * a.conv_size[1];
    image.first_sum = place_row;
    const int64_t in_x = of.in_place ? (image.image * a.size[0] + image.conv_rows.begin) * a.size[1] : windows;
    const int64_t all = of.cut.WindowsOf(rows, columns);  // of a row of tiles
    for (int64_t row = 0; row < (of.cut.by_rows ? rows : 1); ++row) {
      for (int64_t window = 0; window < all; window += of.cut.tile_windows, ++tile) {
        const int64_t y = row + window / of.cut.columns, x = window % of.cut.columns;
        tile->pixel =
            of.cut.is_point ? in_x + window : (patch_row + row * a.stride[0]) * of.patch.columns + window * step;
        tile->place = (place_row + row) * of.cut.columns + window;
        tile->out = first + y * a.conv_size[1] + x;
        tile->x = x;
        tile->count = Min(of.cut.tile_windows, all - window);
      }
    }
    patch_row += PatchRows(a, image);
    place_row += of.cut.PlaceRowsOf(rows, columns);
    windows += rows * columns;
  }
  const int64_t run = of.run, runs = a.kernel_size[1] / run;
  for (int64_t ky = 0; ky < a.kernel_size[0]; ++ky) {
    for (int64_t kx = 0; kx < runs; ++kx) {
      buffers.taps[ky * runs + kx] = ky * a.dilation[0] * of.patch.columns + kx * a.dilation[1];
    }
  }
}

// A chunk's channels of 1x1 windows, one behind the other.
[[gnu::noinline]] inline void PackPoints(const AmxTask& of, const Chunk& chunk, BFloat16Pair* pixels) {
  const ConvArgs& a = of.task.call->args;
  const auto* x = static_cast<const BFloat16Pair*>(of.task.call->x) + of.task.group * a.group_channels;
  for (int64_t i = 0; i < of.tile.images; ++i) {
    const TileImage image = ImageOfTile(of.task, i);
    for (int64_t y = image.conv_rows.begin; y < image.conv_rows.end; ++y) {
      const int64_t row = (image.image * a.size[0] + y * a.stride[0]) * a.size[1];
      for (int64_t column = of.tile.conv_cols.begin; column < of.tile.conv_cols.end; ++column) {
        const BFloat16Pair* pixel = x + (row + column * a.stride[1]) * a.channels + chunk.channel_begin;
        WidenRun(pixel, chunk.channels, pixels);
        pixels += chunk.channels;
      }
    }
  }
}

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
  const auto columns_of = [](auto* row) { return row + kTileColumns; };
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

// Two vectors as 32 bfloat16, rounded to the nearest; subnormals become 0.
inline void StoreBoth(BFloat16* target, Vector<float> low, Vector<float> high) {
  Word32 both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low), "v"(high));
  StoreAs(target, both);
}

// Bias, residual and ReLU on a tile's sums [windows, block] of the channels of `range`.
[[gnu::noinline]] inline void WriteTile(const AmxTask& of, const WindowTile& tile, ChannelRange range,
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
      StoreBoth(out + result * task.call->out_stride, value[0], value[1]);
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
void MultiplyAmxBlock(Tiles& tiles, const AmxTask& of, const AmxBuffers& buffers, const AmxWork& work,
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
      target[i] = finish ? buffers.finished + i * kTileRows * work.block : old[i];
    }
    const auto run = count == 2 ? &MultiplyTiles<Tiles, 2, kColumns> : &MultiplyTiles<Tiles, 1, kColumns>;
    run(tiles, work, buffers.taps, at, old, target);
    for (int64_t i = 0; finish && i < count; ++i) WriteTile(of, buffers.tiles[first + i], range, target[i]);
  }
}

// The pixels of the last tile, which ends behind x.
inline void CopyLastTile(const AmxTask& of, const Chunk& chunk, AmxBuffers& buffers) {
  const ConvArgs& a = of.task.call->args;
  if (of.tiles == 0) return;
  const int64_t first = buffers.tiles[of.tiles - 1].pixel;
  const int64_t count = Min(of.cut.tile_windows, a.images * a.size[0] * a.size[1] - first);
  const auto* x = static_cast<const BFloat16Pair*>(of.task.call->x) + of.task.group * a.group_channels;
  for (int64_t i = 0; i < count; ++i) {
    WidenRun(x + (first + i) * a.channels + chunk.channel_begin, chunk.channels, buffers.pixels + i * chunk.channels);
  }
}

// Rows of the packed kernel that follow those of this chunk and block.
inline NextRows NextRowsOf(const AmxTask& of, Chunk chunk, int64_t block, const AmxWork& work) {
  const ConvTask& task = of.task;
  const ConvArgs& a = task.call->args;
  const int64_t whole = PackedBlock(a, true);
  if (task.call->packed == nullptr || whole % task.plan->block != 0 || of.tiles == 0) return {};
  if (++block == task.block_end) {
    block = task.block_begin;
    chunk.channel_begin += chunk.channels;
    chunk.channels = Min(chunk.channels, a.group_channels - chunk.channel_begin);
    if (chunk.channels <= 0) return {};
  }
  const int64_t rows = chunk.channels * a.kernel_size[0] * a.kernel_size[1];
  const int64_t steps = CeilDiv(of.tiles, kTilesTogether) * work.runs * work.steps;
  const Weights<BFloat16Pair> weights = WeightsOf<BFloat16Pair>(task, chunk, block);
  return {reinterpret_cast<const char*>(weights.first[0]), whole * static_cast<int64_t>(sizeof(BFloat16Pair)), rows,
          CeilDiv(rows, steps)};
}

inline int64_t AmxBytes(const ConvTask& task) { return TakeAmxBuffers(AmxTask(task), nullptr).bytes; }

template <class Tiles>
void RunAmx(const ConvTask& task, char* scratch) {
  using T = BFloat16Pair;
  const IeeeScope ieee;
  const AmxTask of(task);
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
      PackPixels<T>(task, of.tile, chunk, of.patch, buffers.images, buffers.pixels);
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
      const auto multiply = range.width > kTileColumns ? &MultiplyAmxBlock<Tiles, 2> : &MultiplyAmxBlock<Tiles, 1>;
      multiply(tiles, of, buffers, work, pixels, range, sums, is_last && !is_pooled);
      if (is_last && is_pooled) WriteBlock<BFloat16>(task, tile, buffers.images, block, sums);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif

#endif  // JSC_CPU_LOOPS_AMX_KERNEL_H_
