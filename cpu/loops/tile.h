// The rectangle of one task: which convolution results its outputs need, and which pixels of x those need.
#ifndef JSC_CPU_LOOPS_TILE_H_
#define JSC_CPU_LOOPS_TILE_H_

#include "cpu/plan/plan.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Memory of a task, handed out in pieces; with a null base it only counts.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <typename T>
  T* Take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t Clamp(int64_t value, int64_t low, int64_t high) { return Max(low, Min(value, high)); }
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Elements of an axis of `size` that windows [first, last) of `span` elements touch; empty ranges stay in bounds.
inline Range Touched(Range windows, int64_t stride, int64_t pad_low, int64_t span, int64_t size) {
  const int64_t begin = Clamp(windows.begin * stride - pad_low, 0, size);
  const int64_t end = Clamp((windows.end - 1) * stride - pad_low + span, begin, size);
  return windows.size() <= 0 ? Range{begin, begin} : Range{begin, end};
}

// The part of a tile that lies in one image.
struct TileImage {
  int64_t image;      // in the whole batch
  Range out_rows;     // results
  Range conv_rows;    // convolution results they need
  Range in_rows;      // rows of x those need
  int64_t first_sum;  // row of the sums that conv_rows.begin has
  int64_t first_in;   // tile row of in_rows.begin
};

struct Tile {
  Range out_cols, conv_cols, in_cols;
  int64_t images;
  int64_t conv_rows, in_rows;  // summed over the images
  int64_t windows;             // conv_rows * conv_cols
  int64_t sum_cols;            // places in a row of the sums, at least conv_cols
};

inline TileImage ImageOfTile(const ConvTask& task, int64_t index) {
  const ConvArgs& a = task.call->args;
  const int64_t image = task.row_begin / a.out_size[0] + index;
  TileImage t{};
  t.image = task.stack * (a.images / a.stacks) + image;
  t.out_rows = {Max(task.row_begin - image * a.out_size[0], 0),
                Min(task.row_end - image * a.out_size[0], a.out_size[0])};
  t.conv_rows = Touched(t.out_rows, a.window_stride[0], a.window_pad_low[0], a.window[0], a.conv_size[0]);
  t.in_rows = Touched(t.conv_rows, a.stride[0], a.pad_low[0], (a.kernel_size[0] - 1) * a.dilation[0] + 1, a.size[0]);
  return t;
}

// Fills images[] (when not null) and returns the sums.
inline Tile MakeTile(const ConvTask& task, TileImage* images) {
  const ConvArgs& a = task.call->args;
  Tile tile{};
  tile.out_cols = {task.col_begin, task.col_end};
  tile.conv_cols = Touched(tile.out_cols, a.window_stride[1], a.window_pad_low[1], a.window[1], a.conv_size[1]);
  tile.in_cols =
      Touched(tile.conv_cols, a.stride[1], a.pad_low[1], (a.kernel_size[1] - 1) * a.dilation[1] + 1, a.size[1]);
  tile.images = CeilDiv(task.row_end, a.out_size[0]) - task.row_begin / a.out_size[0];
  for (int64_t i = 0; i < tile.images; ++i) {
    TileImage t = ImageOfTile(task, i);
    t.first_sum = tile.conv_rows;
    t.first_in = tile.in_rows;
    tile.conv_rows += t.conv_rows.size();
    tile.in_rows += t.in_rows.size();
    if (images != nullptr) images[i] = t;
  }
  tile.windows = tile.conv_rows * tile.conv_cols.size();
  tile.sum_cols = tile.conv_cols.size();
  return tile;
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_TILE_H_
