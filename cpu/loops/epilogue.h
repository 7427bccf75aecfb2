// What follows the sums of a block: bias, residual and ReLU where they lie, then the pool, then one write of the
// result.
#ifndef JSC_CPU_LOOPS_EPILOGUE_H_
#define JSC_CPU_LOOPS_EPILOGUE_H_

#include <type_traits>

#include "cpu/core/simd.h"
#include "cpu/loops/tile.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// max(value, 0) as jnp.maximum has it: NaN stays NaN.
template <typename A>
inline Vector<A> Relu(Vector<A> value) {
  const Vector<A> zero = {};
  return value <= zero ? zero : value;
}

// target[0, width) = the first `width` elements of the vector.
template <typename T, typename A = Accumulator<T>>
inline void StoreFirst(T* target, Vector<A> value, int64_t width) {
  if (width >= kLanes<A>) return Store(target, value);
  T all[kLanes<A>];
  Store(all, value);
  __builtin_memcpy(target, all, width * sizeof(T));
}

template <typename A, typename T>
inline Vector<A> LoadFirstOf(const T* source, int64_t width) {
  if (width >= kLanes<A>) return Load(source);
  if constexpr (std::is_same_v<T, A>) return LoadFirst(source, width);
  T all[kLanes<A>] = {};
  __builtin_memcpy(all, source, width * sizeof(T));
  return Load(all);
}

// `width` channels of K from `channel` on: a block, or the part of it in one vector.
struct ChannelRange {
  int64_t channel, width;
};

// Bias, residual and ReLU on one vector of sums; `pixel` is the result's position among N * Ho * Wo.
template <typename T, typename A = Accumulator<T>>
inline Vector<A> Activate(const ConvTask& task, Vector<A> sum, ChannelRange range, int64_t pixel) {
  const ConvArgs& a = task.call->args;
  if (a.has_bias) {
    const T* bias = static_cast<const T*>(task.call->bias);  // [S, K]
    sum += LoadFirstOf<A>(bias + task.stack * a.out_channels + range.channel, range.width);
  }
  if (a.has_residual) {
    const T* residual = static_cast<const T*>(task.call->residual);  // [N, Ho, Wo, K]
    sum += LoadFirstOf<A>(residual + pixel * a.out_channels + range.channel, range.width);
  }
  return a.activation == Activation::kRelu ? Relu<A>(sum) : sum;
}

// The pooled value of rows x columns activated sums; sums: [rows, sum_cols, stride] at one vector of channels.
template <typename A>
[[gnu::always_inline]] inline Vector<A> PoolWindow(const ConvArgs& a, const A* sums, int64_t rows, int64_t columns,
                                                   int64_t row_stride, int64_t stride) {
  if (a.pool == Pool::kMax) {
    Vector<A> result = Vector<A>{} - static_cast<A>(__builtin_inf());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        const Vector<A> value = Load(sums + row * row_stride + column * stride);
        result = ((value > result) | (value != value)) ? value : result;  // a NaN is taken, and kept
      }
    }
    return result;
  }
  Vector<A> result = {};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) result += Load(sums + row * row_stride + column * stride);
  }
  return result / static_cast<A>(a.window[0] * a.window[1]);
}

// One vector of channels of a row of results, without residual and pool, from sums [columns, stride] to out [columns,
// output channels]. The bias is read once, and nothing branches.
template <typename T, typename A>
inline void WriteRow(const ConvTask& task, int64_t columns, ChannelRange range, const A* sum, T* out) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block;
  Vector<A> bias = {}, least = {};
  if (a.has_bias) bias = Load(static_cast<const T*>(task.call->bias) + task.stack * a.out_channels + range.channel);
  if (a.activation != Activation::kRelu) least -= static_cast<A>(__builtin_inf());
  for (int64_t x = 0; x < columns; ++x, sum += stride, out += task.call->out_stride) {
    const Vector<A> value = Load(sum) + bias;
    Store(out, value <= least ? least : value);
  }
}

// A row of results with a residual, pixel by pixel: residual and out are K apart from pixel to pixel, too far for the
// hardware to see it coming, so the lines of the pixels to come are asked for here.
template <typename T, typename A>
void AddResidualRow(const ConvTask& task, int64_t columns, int64_t first, ChannelRange block, const A* sum, T* out) {
  constexpr int64_t kAhead = 6, kLine = 64 / sizeof(T);
  const ConvArgs& a = task.call->args;
  const T* residual = static_cast<const T*>(task.call->residual);
  const int64_t pixels = a.images * a.conv_size[0] * a.conv_size[1], out_stride = task.call->out_stride;
  for (int64_t x = 0; x < columns; ++x, sum += task.plan->block) {
    const int64_t ahead = Min(first + x + kAhead, pixels - 1);
    for (int64_t c = block.channel; c < block.channel + block.width; c += kLine) {
      __builtin_prefetch(residual + ahead * a.out_channels + c);
      __builtin_prefetch(out + ahead * out_stride + c, 1);
    }
    for (int64_t v = 0; v < block.width; v += kLanes<A>) {
      const ChannelRange range = {block.channel + v, Min(kLanes<A>, block.width - v)};
      StoreFirst(out + (first + x) * out_stride + range.channel, Activate<T>(task, Load(sum + v), range, first + x),
                 range.width);
    }
  }
}

// Bias, residual and ReLU on a block's sums [rows, sum_cols, stride] in row y of one image, in place where a pool
// follows, else to out.
template <typename T, typename A>
void ActivateRow(const ConvTask& task, const Tile& tile, const TileImage& image, int64_t y, ChannelRange block,
                 A* sums) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block, columns = tile.conv_cols.size();
  T* out = static_cast<T*>(task.call->out);  // [N, Ho, Wo, K]
  A* row = sums + (image.first_sum + y - image.conv_rows.begin) * tile.sum_cols * stride;
  const int64_t first = (image.image * a.conv_size[0] + y) * a.conv_size[1] + tile.conv_cols.begin;
  if (a.has_residual && a.pool == Pool::kNone) {
    return AddResidualRow(task, columns, first, block, row, out);
  }
  for (int64_t v = 0; v < block.width; v += kLanes<A>) {
    const ChannelRange range = {block.channel + v, Min(kLanes<A>, block.width - v)};
    if (range.width == kLanes<A> && a.pool == Pool::kNone) {
      WriteRow(task, columns, range, row + v, out + first * task.call->out_stride + range.channel);
      continue;
    }
    A* sum = row + v;
    for (int64_t x = 0; x < columns; ++x, sum += stride) {
      const Vector<A> value = Activate<T>(task, Load(sum), range, first + x);
      if (a.pool == Pool::kNone) {
        StoreFirst(out + (first + x) * task.call->out_stride + range.channel, value, range.width);
      } else {
        Store(sum, value);
      }
    }
  }
}

// The larger of each pair of elements; a NaN is taken, and kept.
template <typename A>
inline Vector<A> Larger(Vector<A> one, Vector<A> other) {
  return ((other > one) | (other != other)) ? other : one;
}

// Windows of a max pool side by side, all within the map: `columns` of them, of `rows` rows, from sums before bias and
// ReLU. The rows of sums are row_stride apart, the windows `step`.
struct MaxPoolRow {
  int64_t columns, rows, row_stride, step;
};

// A block of whole vectors of them, of kColumns columns each; to out [columns, output channels]. Window by window, as
// sums of one vector alone lie in few sets of L1. Nothing branches.
template <int kColumns, typename T, typename A>
void WriteMaxPoolRow(const ConvTask& task, const MaxPoolRow& row, ChannelRange block, const A* sum, T* out) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block;
  const T* bias = nullptr;
  if (a.has_bias) bias = static_cast<const T*>(task.call->bias) + task.stack * a.out_channels + block.channel;
  Vector<A> least = {};
  if (a.activation != Activation::kRelu) least -= static_cast<A>(__builtin_inf());
  for (int64_t x = 0; x < row.columns; ++x, sum += row.step, out += task.call->out_stride) {
    for (int64_t v = 0; v < block.width; v += kLanes<A>) {
      Vector<A> largest[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) largest[c] = Load(sum + v + c * stride);
      for (int64_t r = 1; r < row.rows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          largest[c] = Larger<A>(largest[c], Load(sum + v + r * row.row_stride + c * stride));
        }
      }
#pragma GCC unroll 4
      for (int c = 1; c < kColumns; ++c) largest[0] = Larger<A>(largest[0], largest[c]);
      const Vector<A> value = bias != nullptr ? largest[0] + Load(bias + v) : largest[0];
      Store(out + v, value <= least ? least : value);
    }
  }
}

// The windows among `columns` of a pool that lie within the `size` columns of the map.
inline Range WholeWindows(const ConvArgs& a, Range columns, int64_t size) {
  const int64_t first = CeilDiv(a.window_pad_low[1], a.window_stride[1]);
  const int64_t last = size - a.window[1] + a.window_pad_low[1];  // where the last of them begins, times the stride
  const int64_t begin = Clamp(first, columns.begin, columns.end);
  return {begin, last < 0 ? begin : Clamp(last / a.window_stride[1] + 1, begin, columns.end)};
}

// The pooled results of a block in row y of one image, from its sums: those before bias and ReLU where `late`, which
// then follow here.
template <typename T, typename A>
void PoolRow(const ConvTask& task, const Tile& tile, const TileImage& image, int64_t y, ChannelRange block, bool late,
             const A* sums) {
  const ConvArgs& a = task.call->args;
  const int64_t stride = task.plan->block, row_stride = tile.sum_cols * stride;
  const int64_t top = y * a.window_stride[0] - a.window_pad_low[0];
  const Range rows = {Max(top, 0), Max(Max(top, 0), Min(top + a.window[0], a.conv_size[0]))};
  T* out = static_cast<T*>(task.call->out);  // [N, out_size, K]
  const A* line = sums + (image.first_sum + rows.begin - image.conv_rows.begin) * row_stride;
  Range whole = {tile.out_cols.begin, tile.out_cols.begin};
  if (late && block.width % kLanes<A> == 0 && rows.size() > 0 && (a.window[1] == 2 || a.window[1] == 3)) {
    whole = WholeWindows(a, tile.out_cols, a.conv_size[1]);
    const int64_t left = whole.begin * a.window_stride[1] - a.window_pad_low[1] - tile.conv_cols.begin;
    T* row = out + ((image.image * a.out_size[0] + y) * a.out_size[1] + whole.begin) * task.call->out_stride;
    const MaxPoolRow windows = {whole.size(), rows.size(), row_stride, a.window_stride[1] * stride};
    const auto write = a.window[1] == 2 ? &WriteMaxPoolRow<2, T, A> : &WriteMaxPoolRow<3, T, A>;
    write(task, windows, block, line + left * stride, row + block.channel);
  }
  for (int64_t x = tile.out_cols.begin; x < tile.out_cols.end; ++x) {
    if (x == whole.begin) x = whole.end;
    if (x >= tile.out_cols.end) break;
    const int64_t left = x * a.window_stride[1] - a.window_pad_low[1];
    const Range columns = {Max(left, 0), Max(Max(left, 0), Min(left + a.window[1], a.conv_size[1]))};
    const A* first = line + (columns.begin - tile.conv_cols.begin) * stride;
    T* target = out + ((image.image * a.out_size[0] + y) * a.out_size[1] + x) * task.call->out_stride + block.channel;
    const bool two_by_two = rows.size() == 2 && columns.size() == 2;
    const bool activate = late && rows.size() > 0 && columns.size() > 0;  // the padding is not
    for (int64_t v = 0; v < block.width; v += kLanes<A>) {
      const ChannelRange range = {block.channel + v, Min(kLanes<A>, block.width - v)};
      const Vector<A> value = two_by_two ? PoolWindow(a, first + v, 2, 2, row_stride, stride)
                                         : PoolWindow(a, first + v, rows.size(), columns.size(), row_stride, stride);
      StoreFirst(target + v, activate ? Activate<T>(task, value, range, 0) : value, range.width);
    }
  }
}

// Whether bias and ReLU may follow the pool: a maximum is the same before and after them, and there are fewer of it.
// But an infinite bias may meet a sum that is infinite the other way, which makes a NaN of what is no maximum.
template <typename T>
inline bool MayActivateLate(const ConvTask& task, ChannelRange block) {
  const ConvArgs& a = task.call->args;
  if (a.pool != Pool::kMax) return false;
  for (int64_t k = 0; a.has_bias && k < block.width; ++k) {
    const auto bias = Widen(static_cast<const T*>(task.call->bias)[task.stack * a.out_channels + block.channel + k]);
    if (!(bias - bias == 0)) return false;
  }
  return true;
}

// Writes the results of one block of one image row by row, as its sums become complete. sums: [rows, sum_cols, stride]
template <typename T, typename A>
class BlockWriter {
 public:
  BlockWriter(const ConvTask& task, const Tile& tile, const TileImage& image, int64_t block, A* sums)
      : task_(task),
        tile_(tile),
        image_(image),
        sums_(sums),
        done_(image.conv_rows.begin),
        pooled_(image.out_rows.begin) {
    const int64_t stride = task.plan->block, out_channels = task.call->args.out_channels / task.call->args.groups;
    range_ = {task.group * out_channels + block * stride, Min(stride, out_channels - block * stride)};
    late_ = MayActivateLate<T>(task, range_);
  }

  // The sums of all rows in front of `end` are complete.
  void WriteTo(int64_t end) {
    const ConvArgs& a = task_.call->args;
    for (; done_ < Min(end, image_.conv_rows.end); ++done_) {
      if (!late_) ActivateRow<T>(task_, tile_, image_, done_, range_, sums_);
    }
    if (a.pool == Pool::kNone) return;
    for (; pooled_ < image_.out_rows.end && LastOfWindow(a) < done_; ++pooled_) {
      PoolRow<T>(task_, tile_, image_, pooled_, range_, late_, sums_);
    }
  }

 private:
  // The last row that the next pooled one needs: windows may hang over the end, or lie in the padding.
  int64_t LastOfWindow(const ConvArgs& a) const {
    const int64_t end = pooled_ * a.window_stride[0] - a.window_pad_low[0] + a.window[0];
    return Min(end, image_.conv_rows.end) - 1;
  }

  const ConvTask& task_;
  const Tile& tile_;
  const TileImage& image_;
  A* sums_;
  ChannelRange range_;
  bool late_;              // bias and ReLU follow the pool
  int64_t done_, pooled_;  // rows
};

// Writes one block of a task's results.
template <typename T, typename A>
void WriteBlock(const ConvTask& task, const Tile& tile, const TileImage* images, int64_t block, A* sums) {
  for (int64_t i = 0; i < tile.images; ++i) {
    BlockWriter<T, A>(task, tile, images[i], block, sums).WriteTo(images[i].conv_rows.end);
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_EPILOGUE_H_
