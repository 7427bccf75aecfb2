// How the windows of a task are numbered for tiles of AMX (loops/amx_kernel.h), and the products of a tile.
#ifndef JSC_CPU_PLAN_AMX_CUT_H_
#define JSC_CPU_PLAN_AMX_CUT_H_

#include <cstdint>

#include "cpu/plan/plan.h"

namespace jsc {

constexpr int64_t kAmxRows = 16;  // windows of a tile at most, and pairs of a product

// Pairs that are multiplied at once: the largest divisor of a run of products that a tile has room for.
inline int64_t PairsOfProduct(int64_t run) {
  int64_t pairs = run < kAmxRows ? run : kAmxRows;
  while (pairs > 1 && run % pairs != 0) --pairs;
  return pairs;
}

struct AmxCut {
  inline AmxCut(const ConvCall& call, const ConvPlan& plan, int64_t width);

  // Of windows that are numbered together, in `rows` of `width`: those of a row of tiles, tiles, and rows of sums.
  int64_t WindowsOf(int64_t rows, int64_t width) const { return by_rows ? width : (rows - 1) * columns + width; }
  int64_t TilesOf(int64_t rows, int64_t width) const {
    const int64_t of_row = (WindowsOf(rows, width) + tile_windows - 1) / tile_windows;
    return rows <= 0 || width <= 0 ? 0 : by_rows ? rows * of_row : of_row;
  }
  int64_t PlaceRowsOf(int64_t rows, int64_t width) const {
    return by_rows ? rows : (TilesOf(rows, width) * tile_windows + columns - 1) / columns;
  }

  bool is_point;         // 1x1 without padding
  bool by_rows;          // each row of windows has tiles of its own
  int64_t tile_windows;  // at most kAmxRows
  int64_t columns;       // of a row of sums
};

// width: of the convolution's results that are needed.
AmxCut::AmxCut(const ConvCall& call, const ConvPlan& plan, int64_t width) {
  const auto ceil_div = [](int64_t one, int64_t other) { return (one + other - 1) / other; };
  const ConvArgs& a = call.args;
  width = width > 0 ? width : 1;
  is_point = !call.lone_channel;
  for (int i = 0; i < 2; ++i) {
    is_point &= a.kernel_size[i] == 1 && a.pad_low[i] == 0 && (a.conv_size[i] - 1) * a.stride[i] < a.size[i];
  }
  const bool moves_by_one = a.stride[0] == 1 && a.stride[1] == 1;
  const int64_t span = (width - 1) * a.stride[1] + (a.kernel_size[1] - 1) * a.dilation[1] + 1;
  const int64_t of_row = ceil_div(width, kAmxRows);  // tiles of a row alone
  by_rows = !is_point && (!moves_by_one || of_row * kAmxRows <= span);
  if (by_rows) {
    tile_windows = ceil_div(width, of_row);
    columns = of_row * tile_windows;
    return;
  }
  columns = is_point ? width : span;
  const int64_t all = (plan.tile_rows > 1 ? plan.tile_rows - 1 : 0) * columns + width;
  tile_windows = is_point || all >= 4 * kAmxRows ? kAmxRows : ceil_div(all, ceil_div(all, kAmxRows));
}

}  // namespace jsc

#endif  // JSC_CPU_PLAN_AMX_CUT_H_
