// How the windows of a task are numbered for tiles of AMX (loops/dense/amx_kernel.h), and the products of a tile.
// Defined in amx_plan.cc: code of one instruction set has no inline functions in common with other code (core/isa.h).
#ifndef JSC_CPU_PLAN_AMX_CUT_H_
#define JSC_CPU_PLAN_AMX_CUT_H_

#include <cstdint>

#include "cpu/plan/plan.h"

namespace jsc {

constexpr int64_t kAmxRows = 16;     // windows of a tile at most, and pairs of a product
constexpr int64_t kAmxColumns = 16;  // output channels of a tile

// Pairs that are multiplied at once: the largest divisor of a run of products that a tile has room for.
int64_t PairsOfProduct(int64_t run);

struct AmxCut {
  bool is_point;         // 1x1 without padding
  bool by_rows;          // each row of windows has tiles of its own
  int64_t tile_windows;  // at most kAmxRows
  int64_t columns;       // of a row of sums
};

// width: of the convolution's results that are needed.
AmxCut MakeAmxCut(const ConvCall& call, const ConvPlan& plan, int64_t width);

// Of windows that are numbered together, in `rows` of `width`: those of a row of tiles, tiles, and rows of sums.
int64_t WindowsOf(const AmxCut& cut, int64_t rows, int64_t width);
int64_t TilesOf(const AmxCut& cut, int64_t rows, int64_t width);
int64_t SumRowsOf(const AmxCut& cut, int64_t rows, int64_t width);

}  // namespace jsc

#endif  // JSC_CPU_PLAN_AMX_CUT_H_
