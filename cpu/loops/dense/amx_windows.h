// How the windows of a task of amx_kernel.h are numbered, its buffers, and its pixels.
//
// A tile of pixels has a row for each of 16 windows, and rows are evenly spaced. So windows that move by a pixel are
//   numbered through the rows of the patch, its padding included. Those that begin in the padding are computed and not
//   used. With strides each row of windows has tiles of its own. 1x1 windows need no padding: they are read in x, or
//   one behind the other.
#ifndef JSC_CPU_LOOPS_DENSE_AMX_WINDOWS_H_
#define JSC_CPU_LOOPS_DENSE_AMX_WINDOWS_H_

#include "cpu/core/amx_tiles.h"
#include "cpu/loops/dense/dense_conv_kernel.h"

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
struct AmxWindows {
  explicit AmxWindows(const ConvTask& of)
      : task(of),
        tile(MakeTile(of, nullptr)),
        patch(PatchOf(of, tile)),
        cut(MakeAmxCut(*of.call, *of.plan, tile.conv_cols.size())) {
    const ConvArgs& a = task.call->args;
    merged = cut.is_point && a.pool == Pool::kNone;
    in_place = ReadsInPlace<BFloat16Pair>(task) && tile.conv_cols.size() == a.size[1];
    for (int i = 0; i < 2; ++i) in_place &= a.stride[i] == 1 && a.conv_size[i] == a.size[i];
    for (int64_t i = 0; i < (merged ? 1 : tile.images); ++i) {
      const int64_t rows = RowsOf(i);
      tiles += TilesOf(cut, rows, tile.conv_cols.size());
      place_rows += SumRowsOf(cut, rows, tile.conv_cols.size());
    }
    // A 1x1 kernel's rows are far apart, in few sets of L1: read more than twice, they had better be packed.
    const bool may_read = task.call->packed != nullptr && PackedBlock(a, true) % task.plan->block == 0;
    reads_packed =
        may_read && a.group_channels % kAmxRows == 0 && (a.kernel_size[0] == 3 || tiles <= 2 * kTilesTogether);
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

inline AmxBuffers TakeAmxBuffers(const AmxWindows& of, char* scratch) {
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
  const int64_t slack = kAmxRows * a.stride[1];  // pixels that the last tile reads for windows that are not used
  const int64_t pixels = of.in_place       ? kAmxRows
                         : of.cut.is_point ? of.tile.windows + slack
                                           : of.patch.rows * of.patch.columns + slack;
  buffers.pixels = arena.Take<BFloat16Pair>(pixels * p.chunk_channels);
  const int64_t kept = is_chunked ? blocks : a.pool != Pool::kNone ? 1 : 0;
  buffers.sums = arena.Take<float>(kept * buffers.places * p.block);
  buffers.finished = arena.Take<float>(kTilesTogether * kAmxRows * p.block);
  buffers.bytes = arena.used();
  return buffers;
}

// Fills images, tiles and taps.
inline void LocateTiles(const AmxWindows& of, AmxBuffers& buffers) {
  const ConvTask& task = of.task;
  const ConvArgs& a = task.call->args;
  MakeTile(task, buffers.images);
  const int64_t columns = of.tile.conv_cols.size();
  WindowTile* tile = buffers.tiles;
  int64_t patch_row = 0, place_row = 0, windows = 0;
  for (int64_t i = 0; i < (of.merged ? 1 : of.tile.images); ++i) {
    TileImage& image = buffers.images[i];
    const int64_t rows = of.RowsOf(i), first = (image.image * a.conv_size[0] + image.conv_rows.begin) * a.conv_size[1];
    image.first_sum = place_row;
    const int64_t in_x = of.in_place ? (image.image * a.size[0] + image.conv_rows.begin) * a.size[1] : windows;
    const int64_t all = WindowsOf(of.cut, rows, columns);  // of a row of tiles
    for (int64_t row = 0; row < (of.cut.by_rows ? rows : 1); ++row) {
      for (int64_t window = 0; window < all; window += of.cut.tile_windows, ++tile) {
        const int64_t y = row + window / of.cut.columns, x = window % of.cut.columns;
        tile->pixel =
            of.cut.is_point ? in_x + window : (patch_row + row * a.stride[0]) * of.patch.columns + window * a.stride[1];
        tile->place = (place_row + row) * of.cut.columns + window;
        tile->out = first + y * a.conv_size[1] + x;
        tile->x = x;
        tile->count = Min(of.cut.tile_windows, all - window);
      }
    }
    patch_row += PatchRows(a, image);
    place_row += SumRowsOf(of.cut, rows, columns);
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
[[gnu::noinline]] inline void PackPoints(const AmxWindows& of, const Chunk& chunk, BFloat16Pair* pixels) {
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

// The pixels of the last tile, which ends behind x.
inline void CopyLastTile(const AmxWindows& of, const Chunk& chunk, AmxBuffers& buffers) {
  const ConvArgs& a = of.task.call->args;
  if (of.tiles == 0) return;
  const int64_t first = buffers.tiles[of.tiles - 1].pixel;
  const int64_t count = Min(of.cut.tile_windows, a.images * a.size[0] * a.size[1] - first);
  const auto* x = static_cast<const BFloat16Pair*>(of.task.call->x) + of.task.group * a.group_channels;
  for (int64_t i = 0; i < count; ++i) {
    WidenRun(x + (first + i) * a.channels + chunk.channel_begin, chunk.channels, buffers.pixels + i * chunk.channels);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif

#endif  // JSC_CPU_LOOPS_DENSE_AMX_WINDOWS_H_
