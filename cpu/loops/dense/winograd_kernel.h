// One task of a dense 3x3 convolution by Winograd's algorithm F(2x2, 3x3) (Lavin and Gray, CVPR 2016, section 4.1):
// four results of one pair of channels take 16 multiplications, not 36. Nothing is skipped.
//
// What: for each square of 2x2 results the 4x4 pixels of x that it meets are transformed, and the kernel is. At each of
//   the 16 points the squares' channels are multiplied with the kernel's, as a product of matrices. The sums are
//   transformed back. Transforms of x and of the sums only add, that of the kernel halves. Then the epilogue.
// Layout: pixels are [point, square, channel], the kernel of one block and chunk [point, channel, block], the sums of a
//   block [point, square, block]. So each point is a 1x1 convolution, which is MultiplyDirect of dense_conv_kernel.h.
// Squares begin at even rows and columns of a map, whatever the tile is. So results do not depend on how many threads
//   there are. A square over the edge of a tile is computed and written in part.
// Accuracy: a sum has a ninth of the terms at each point, so it loses fewer digits, and the transforms lose some.
// Large values: all results of a square share the rounding of its pixels. So a tile whose largest element is beyond
//   kMostOverRms times the root of its mean square is left to dense_conv_kernel.h. Infinite weights, and sums that
//   overflow, make a result that is not finite: then the rest of the task is left to it, too.
// Bound by: multiply-adds where there are many squares, transforms of the kernel where there are few.
#ifndef JSC_CPU_LOOPS_DENSE_WINOGRAD_KERNEL_H_
#define JSC_CPU_LOOPS_DENSE_WINOGRAD_KERNEL_H_

#include "cpu/loops/dense/dense_conv_kernel.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kSquare = 2, kTaps = 3, kPatch = kSquare + kTaps - 1, kPoints = kPatch * kPatch;

// Squares of results of one image of a tile, from the even row and column at or in front of its first ones on.
struct Squares {
  int64_t first_y, first_x, rows, columns;
};

inline Squares SquaresOf(const Tile& tile, const TileImage& image) {
  const int64_t y = image.conv_rows.begin / kSquare * kSquare, x = tile.conv_cols.begin / kSquare * kSquare;
  return {y, x, CeilDiv(Max(0, image.conv_rows.end - y), kSquare), CeilDiv(Max(0, tile.conv_cols.end - x), kSquare)};
}

inline int64_t SquareCount(const ConvTask& task, const Tile& tile) {
  int64_t count = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    const Squares squares = SquaresOf(tile, ImageOfTile(task, i));
    count += squares.rows * squares.columns;
  }
  return count;
}

struct WinogradBuffers {
  TileImage* images;  // [tile images]
  int64_t squares;    // of all images
  float* pixels;      // [kPoints, squares, channels], a point pixel_pitch after the one before
  float* kernel;      // [kPoints, chunk channels, block], kernel_pitch
  float* products;    // [kPoints, squares + kMostWindows, block], product_pitch
  float* sums;        // [windows + 1, block]
  int64_t pixel_pitch, kernel_pitch, product_pitch;
  DirectBuffers<float> rows;  // squares as windows, one behind the other
  int64_t bytes;
};

// Elements from one point to the next: points side by side in one set of the caches would displace each other.
inline int64_t PointPitch(int64_t elements) {
  constexpr int64_t kLine = 64 / sizeof(float);
  return CeilDiv(elements, kLine) * kLine + kLine;
}

inline WinogradBuffers TakeWinogradBuffers(const ConvTask& task, const Tile& tile, char* scratch) {
  const ConvPlan& p = *task.plan;
  Arena arena(scratch);
  WinogradBuffers buffers{};
  buffers.images = arena.Take<TileImage>(tile.images);
  buffers.squares = SquareCount(task, tile);
  buffers.pixel_pitch = PointPitch(buffers.squares * task.call->args.group_channels);
  buffers.kernel_pitch = PointPitch(p.chunk_channels * p.block);
  buffers.product_pitch = PointPitch((buffers.squares + kMostWindows) * p.block);
  buffers.pixels = arena.Take<float>(kPoints * buffers.pixel_pitch);
  buffers.kernel = arena.Take<float>(kPoints * buffers.kernel_pitch);
  buffers.products = arena.Take<float>(kPoints * buffers.product_pitch);
  buffers.sums = arena.Take<float>((tile.windows + 1) * p.block);
  buffers.rows.windows = arena.Take<int64_t>(buffers.squares + kMostWindows);
  buffers.rows.taps = arena.Take<int64_t>(1);
  buffers.bytes = arena.used();
  return buffers;
}

constexpr float kMostOverRms = 256;  // whose rounding is some 1e-5 of it, in results beside the element

// Whether an element of a tile's x is larger than that, or not finite.
[[gnu::noinline]] inline bool HasOutlier(const ConvTask& task, const Tile& tile, const TileImage* images) {
  const ConvArgs& a = task.call->args;
  double squares = 0;
  float most = 0;
  int64_t rows = 0;
  for (int64_t i = 0; i < tile.images; ++i) {
    for (int64_t y = images[i].in_rows.begin; y < images[i].in_rows.end; ++y, ++rows) {
      const float* x = static_cast<const float*>(task.call->x) +
                       ((images[i].image * a.size[0] + y) * a.size[1] + tile.in_cols.begin) * a.channels +
                       task.group * a.group_channels;
      Vector<float> sum = {}, largest = {};
      for (int64_t column = 0; column < tile.in_cols.size(); ++column, x += a.channels) {
        for (int64_t c = 0; c < a.group_channels; c += kLanes<float>) {
          const Vector<float> value = LoadFirstOf<float>(x + c, a.group_channels - c), square = value * value;
          sum += square;
          largest = square > largest ? square : largest;
        }
      }
      for (int64_t lane = 0; lane < kLanes<float>; ++lane) {
        squares += static_cast<double>(sum[lane]);
        most = largest[lane] > most ? largest[lane] : most;
      }
    }
  }
  const double count = static_cast<double>(rows * tile.in_cols.size() * a.group_channels);
  const bool within = static_cast<double>(most) * count <= kMostOverRms * kMostOverRms * squares;
  return !within || squares - squares != 0;
}

// B' d B of a patch of x, d: [row][column], in place.
inline void TransformPatch(Vector<float> (&d)[kPatch][kPatch]) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kPatch; ++i) {
    const Vector<float> first = d[i][0] - d[i][2], second = d[i][1] + d[i][2], third = d[i][2] - d[i][1],
                        fourth = d[i][1] - d[i][3];
    d[i][0] = first, d[i][1] = second, d[i][2] = third, d[i][3] = fourth;
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kPatch; ++j) {
    const Vector<float> first = d[0][j] - d[2][j], second = d[1][j] + d[2][j], third = d[2][j] - d[1][j],
                        fourth = d[1][j] - d[3][j];
    d[0][j] = first, d[1][j] = second, d[2][j] = third, d[3][j] = fourth;
  }
}

// The patch of one square: pixels from row y and column x of an image on, those outside it zeros, all channels.
// source: the image, at the group's first channel; target: the square's channels at the first point.
inline void TransformPixels(const ConvArgs& a, const float* source, int64_t y, int64_t x, int64_t pitch,
                            float* target) {
  const float* rows[kPatch][kPatch];  // null outside
  for (int64_t i = 0; i < kPatch; ++i) {
    for (int64_t j = 0; j < kPatch; ++j) {
      const bool inside = y + i >= 0 && y + i < a.size[0] && x + j >= 0 && x + j < a.size[1];
      rows[i][j] = inside ? source + ((y + i) * a.size[1] + x + j) * a.channels : nullptr;
    }
  }
  for (int64_t c = 0; c < a.group_channels; c += kLanes<float>) {
    const int64_t width = Min(kLanes<float>, a.group_channels - c);
    Vector<float> d[kPatch][kPatch];
#pragma GCC unroll 4
    for (int64_t i = 0; i < kPatch; ++i) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kPatch; ++j) {
        d[i][j] = rows[i][j] == nullptr ? Vector<float>{} : LoadFirstOf<float>(rows[i][j] + c, width);
      }
    }
    TransformPatch(d);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kPatch; ++i) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kPatch; ++j) StoreFirst(target + (i * kPatch + j) * pitch + c, d[i][j], width);
    }
  }
}

// Those of all squares of a tile.
[[gnu::noinline]] inline void TransformTile(const ConvTask& task, const Tile& tile, const WinogradBuffers& buffers) {
  const ConvArgs& a = task.call->args;
  float* target = buffers.pixels;
  for (int64_t i = 0; i < tile.images; ++i) {
    const TileImage& image = buffers.images[i];
    const float* source = static_cast<const float*>(task.call->x) + image.image * a.size[0] * a.size[1] * a.channels +
                          task.group * a.group_channels;
    const Squares squares = SquaresOf(tile, image);
    for (int64_t row = 0; row < squares.rows; ++row) {
      for (int64_t column = 0; column < squares.columns; ++column, target += a.group_channels) {
        TransformPixels(a, source, squares.first_y + row * kSquare - a.pad_low[0],
                        squares.first_x + column * kSquare - a.pad_low[1], buffers.pixel_pitch, target);
      }
    }
  }
}

// G g of three values.
struct Transformed {
  Vector<float> at[kPatch];
};
inline Transformed TransformRow(Vector<float> first, Vector<float> second, Vector<float> third) {
  const Vector<float> ends = (first + third) * 0.5f, middle = second * 0.5f;
  return {{first, ends + middle, ends - middle, third}};
}

// G g G' of `channels` channels. target: [kPoints, channels, block], the points `pitch` apart.
[[gnu::noinline]] inline void TransformKernel(const Weights<float>& weights, int64_t channels, int64_t block,
                                              int64_t pitch, float* target) {
  for (int64_t c = 0; c < channels; ++c, target += block) {
    for (int64_t v = 0; v < weights.vectors; ++v) {
      const float* const first = weights.first[v] + c * weights.channel_stride;
      Transformed columns[kTaps];
#pragma GCC unroll 3
      for (int64_t j = 0; j < kTaps; ++j) {
        Vector<float> tap[kTaps];
#pragma GCC unroll 3
        for (int64_t i = 0; i < kTaps; ++i) {
          tap[i] = LoadFirstOf<float>(first + (i * kTaps + j) * weights.tap_stride, weights.width - v * kLanes<float>);
        }
        columns[j] = TransformRow(tap[0], tap[1], tap[2]);
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < kPatch; ++i) {
        const Transformed row = TransformRow(columns[0].at[i], columns[1].at[i], columns[2].at[i]);
#pragma GCC unroll 4
        for (int64_t j = 0; j < kPatch; ++j) {
          Store(target + (i * kPatch + j) * pitch + v * kLanes<float>, row.at[j]);
        }
      }
    }
  }
}

// A' m A of all squares of a block: results that lie in the tile, to its sums. Whether all are finite.
[[gnu::noinline]] inline bool TransformProducts(const Tile& tile, const WinogradBuffers& buffers, int64_t vectors,
                                                int64_t block) {
  Vector<float> not_finite = {};
  const float* products = buffers.products;
  for (int64_t i = 0; i < tile.images; ++i) {
    const TileImage& image = buffers.images[i];
    const Squares squares = SquaresOf(tile, image);
    for (int64_t square = 0; square < squares.rows * squares.columns; ++square, products += block) {
      const int64_t y = squares.first_y + square / squares.columns * kSquare - image.conv_rows.begin;
      const int64_t x = squares.first_x + square % squares.columns * kSquare - tile.conv_cols.begin;
      float* const sums = buffers.sums + ((image.first_sum + y) * tile.sum_cols + x) * block;
      for (int64_t v = 0; v < vectors * kLanes<float>; v += kLanes<float>) {
        Vector<float> m[2][kPatch];  // rows that are added up already
#pragma GCC unroll 4
        for (int64_t j = 0; j < kPatch; ++j) {
          const auto at = [&](int64_t row) { return Load(products + (row * kPatch + j) * buffers.product_pitch + v); };
          const Vector<float> sum = at(1) + at(2), difference = at(1) - at(2);
          m[0][j] = at(0) + sum;
          m[1][j] = difference - at(3);
        }
#pragma GCC unroll 2
        for (int64_t row = 0; row < kSquare; ++row) {
          const Vector<float> result[kSquare] = {m[row][0] + (m[row][1] + m[row][2]),
                                                 (m[row][1] - m[row][2]) - m[row][3]};
          for (int64_t column = 0; column < kSquare; ++column) {
            not_finite += result[column] - result[column];
            const bool inside = y + row >= 0 && y + row < image.conv_rows.size() && x + column >= 0 &&
                                x + column < tile.conv_cols.size();
            if (inside) Store(sums + (row * tile.sum_cols + column) * block + v, result[column]);
          }
        }
      }
    }
  }
  for (int64_t lane = 0; lane < kLanes<float>; ++lane) {
    if (!(not_finite[lane] == 0)) return false;
  }
  return true;
}

// What the products at one point ask for of the weights that are `next`: its share of one of their lines' columns.
inline NextLines ShareOf(const NextLines& next, int64_t point, int64_t channels) {
  if (next.times == 0) return {};
  const int64_t each = kPoints / next.times, column = Min(point / each, next.times - 1);
  const int64_t rows = CeilDiv(kTaps * kTaps * channels, each);
  return {next.first + column * next.step + (point - column * each) * rows * next.line, next.line, channels * next.line,
          CeilDiv(rows, channels)};
}

inline int64_t WinogradBytes(const ConvTask& task) {
  const Tile tile = MakeTile(task, nullptr);
  return Max(TakeWinogradBuffers(task, tile, nullptr).bytes, DirectBytes<float>(task));
}

inline void RunWinograd(const ConvTask& task, char* scratch) {
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  const ConvPlan& p = *task.plan;
  const Tile tile = MakeTile(task, nullptr);
  WinogradBuffers buffers = TakeWinogradBuffers(task, tile, scratch);
  MakeTile(task, buffers.images);
  if (HasOutlier(task, tile, buffers.images)) return RunDirect<float>(task, scratch);
  for (int64_t i = 0; i < buffers.squares + kMostWindows; ++i) buffers.rows.windows[i] = i < buffers.squares ? i : 0;
  buffers.rows.taps[0] = 0;
  TransformTile(task, tile, buffers);
  for (int64_t block = task.block_begin; block < task.block_end; ++block) {
    int64_t vectors = 0;
    for (int64_t channel = 0; channel < a.group_channels; channel += p.chunk_channels) {
      const Chunk chunk = {channel, Min(p.chunk_channels, a.group_channels - channel), 0, a.kernel_size[0]};
      const Weights<float> weights = WeightsOf<float>(task, chunk, block);
      vectors = weights.vectors;
      TransformKernel(weights, chunk.channels, p.block, buffers.kernel_pitch, buffers.kernel);
      const NextLines next = NextLinesOf<float>(task, chunk, block);
      for (int64_t point = 0; point < kPoints; ++point) {
        const DirectWork<float> work = {buffers.pixels + point * buffers.pixel_pitch + channel,
                                        buffers.kernel + point * buffers.kernel_pitch,
                                        buffers.squares,
                                        1,
                                        chunk.channels,
                                        a.group_channels,
                                        p.block,
                                        channel == 0,
                                        false,
                                        ShareOf(next, point, chunk.channels)};
        MultiplyDirectBlock(vectors, buffers.rows, work, buffers.products + point * buffers.product_pitch);
      }
    }
    if (!TransformProducts(tile, buffers, vectors, p.block)) {
      ConvTask rest = task;
      rest.block_begin = block;
      return RunDirect<float>(rest, scratch);
    }
    WriteBlock<float>(task, tile, buffers.images, block, buffers.sums);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_DENSE_WINOGRAD_KERNEL_H_
