// Where the kernels that go through the pixels of x, not through the windows, keep their sums.
#ifndef JSC_CPU_LOOPS_SUMS_LAYOUT_H_
#define JSC_CPU_LOOPS_SUMS_LAYOUT_H_

#include "cpu/loops/tile.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Where sums lie: rows of `columns` places, the results of the tile among them. Around the results is room for what
// pixels at the edge add outside: it is never read. What falls out of a row on the right shares its places with what
// falls out of the next one on the left.
struct SumsLayout {
  int64_t rows, columns;
  int64_t before;   // places before the first row
  int64_t places;   // all
  int64_t first_x;  // place within its row that tile.in_cols.begin adds to through the last kernel column; may be < 0
};

// Results along an axis that elements `in` of x add to, those outside of the map as well.
inline Range Reached(const ConvArgs& a, int axis, Range in) {
  const int64_t reach = (a.kernel_size[axis] - 1) * a.dilation[axis], stride = a.stride[axis];
  const auto floor = [stride](int64_t value) { return (value < 0 ? value - stride + 1 : value) / stride; };
  return {floor(in.begin + a.pad_low[axis] - reach + stride - 1), floor(in.end - 1 + a.pad_low[axis]) + 1};
}

// Rows of sums that one image needs, and the first of them that is a result.
struct ImageRows {
  int64_t rows;
  int64_t first_result;
  int64_t first_y;  // row that in_rows.begin adds to through the last kernel row
};

inline ImageRows RowsOfImage(const ConvArgs& a, const TileImage& image) {
  const Range reached = Reached(a, 0, image.in_rows);
  const int64_t low = Min(image.conv_rows.begin, reached.begin), high = Max(image.conv_rows.end, reached.end);
  return {high - low, image.conv_rows.begin - low, reached.begin - low};
}

// Sets tile.sum_cols and, where images is not null, first_sum of each.
inline SumsLayout LayOutSums(const ConvTask& task, Tile& tile, TileImage* images) {
  const ConvArgs& a = task.call->args;
  const Range reached = Reached(a, 1, tile.in_cols);
  SumsLayout layout{};
  layout.first_x = reached.begin - tile.conv_cols.begin;
  layout.before = Max(0, -layout.first_x);
  const int64_t after = Max(0, reached.end - tile.conv_cols.end);
  layout.columns = tile.conv_cols.size() + Max(layout.before, after);
  tile.sum_cols = layout.columns;
  for (int64_t i = 0; i < tile.images; ++i) {
    TileImage image = images != nullptr ? images[i] : ImageOfTile(task, i);
    const ImageRows rows = RowsOfImage(a, image);
    if (images != nullptr) images[i].first_sum = layout.rows + rows.first_result;
    layout.rows += rows.rows;
  }
  layout.places = layout.before + layout.rows * layout.columns + after;
  return layout;
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_SUMS_LAYOUT_H_
