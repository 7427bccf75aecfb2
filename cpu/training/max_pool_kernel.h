// Derivatives of a max pool. Each window has one pixel that they go through: its last NaN or, without one, its first
// maximum. Padding is never that pixel.
//   gradient: each pixel of x has the sum of the cotangents of the windows that chose it
//   tangent: each window has the tangent of the pixel that it chose
// Both choose anew from x, a vector of channels at a time. What is chosen stays in registers, so memory is read and
// written once. A pixel's sum is in the order of its windows, whatever the tasks: neighbours that share windows choose
// in both.
#ifndef JSC_CPU_TRAINING_MAX_POOL_KERNEL_H_
#define JSC_CPU_TRAINING_MAX_POOL_KERNEL_H_

#include "cpu/core/isa.h"
#include "cpu/core/simd.h"
#include "cpu/loops/epilogue.h"
#include "cpu/loops/tile.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Of each lane, a number as wide as the lane: what comparing two vectors makes.
template <typename A>
using Lanes = decltype(Vector<A>{} > Vector<A>{});

// A NaN is taken, and kept but for another one.
template <typename A>
inline Lanes<A> IsTaken(Vector<A> best, Vector<A> value) {
  return (value > best) | (value != value);
}

// The last `count` elements of a vector, and zeros in front of them.
template <typename A>
inline Vector<A> LastOf(Vector<A> value, int64_t count) {
  const Vector<A> none = {};
  Lanes<A> lane = {};
  for (int64_t i = 0; i < kLanes<A>; ++i) lane[i] = i;
  lane += static_cast<decltype(lane[0] + 0)>(count - kLanes<A>);
  return lane >= 0 ? value : none;
}

// One vector of channels of one window: pixels [rows, columns], `across` elements apart from row to row and `along`
// from column to column.
struct WindowPixels {
  int64_t rows, columns, across, along;
};

// Which pixel of the window is chosen, counted in their order.
template <int kRows, int kColumns, typename T, typename A = Accumulator<T>>
[[gnu::always_inline]] inline Lanes<A> Chosen(const WindowPixels& window, const T* x, int64_t width) {
  const int64_t rows = kRows > 0 ? kRows : window.rows, columns = kColumns > 0 ? kColumns : window.columns;
  Vector<A> best = LoadFirstOf<A>(x, width);
  Lanes<A> chosen = {}, pixel = {};
#pragma GCC unroll 3
  for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 3
    for (int64_t column = 0; column < columns; ++column, pixel += 1) {
      const Vector<A> value = LoadFirstOf<A>(x + row * window.across + column * window.along, width);
      const Lanes<A> taken = IsTaken<A>(best, value);
      best = taken ? value : best;
      chosen = taken ? pixel : chosen;
    }
  }
  return chosen;
}

// Adds a window's cotangent to the sum of its pixel, of those in one row of the window: pixels `first` and those behind
// it.
template <int kColumns, typename A>
[[gnu::always_inline]] inline void AddToChosen(const WindowPixels& window, Lanes<A> chosen, int64_t first,
                                               Vector<A> cotangent, A* sums, int64_t width) {
  const int64_t columns = kColumns > 0 ? kColumns : window.columns;
  const Vector<A> none = {};
  Lanes<A> pixel = {};
  pixel += static_cast<decltype(pixel[0] + 0)>(first);
#pragma GCC unroll 3
  for (int64_t column = 0; column < columns; ++column, pixel += 1) {
    A* sum = sums + column * window.along;
    StoreFirst<A, A>(sum, LoadFirstOf<A>(sum, width) + (chosen == pixel ? cotangent : none), width);
  }
}

// The gradient's rows of one task. Sums of float32 and float64 are where the result is; of 16 bits they are float32, of
// as many rows as a window has.
template <typename T>
class MaxPoolGradient {
 public:
  using A = Accumulator<T>;
  static constexpr bool kInPlace = sizeof(T) == sizeof(A);

  static int64_t Bytes(const MaxPoolTask& task) {
    const ConvArgs& a = task.call->args;
    return kInPlace ? 0 : Min(a.window[0], a.size[0]) * a.size[1] * a.channels * static_cast<int64_t>(sizeof(A));
  }

  MaxPoolGradient(const MaxPoolTask& task, char* scratch)
      : task_(task),
        args_(task.call->args),
        x_(static_cast<const T*>(task.call->x) + task.image * args_.size[0] * Row()),
        out_(static_cast<T*>(task.call->out) + task.image * args_.size[0] * Row()),
        sums_(reinterpret_cast<A*>(scratch)),
        opened_(task.row_begin),
        closed_(task.row_begin) {}

  void Run() {
    const int64_t stride = args_.window_stride[0], rows = args_.window[0], pad = args_.window_pad_low[0];
    const int64_t before = task_.row_begin + pad - rows;  // windows that begin there end in front of the task
    const int64_t first = before < 0 ? 0 : before / stride + 1;
    const int64_t end = Min(CeilDiv(Max(task_.row_end + pad, 0), stride), args_.out_size[0]);
    for (int64_t y = first; y < end; ++y) {
      const int64_t top = y * stride - pad;
      const Range inside = {Clamp(top, 0, args_.size[0]), Clamp(top + rows, 0, args_.size[0])};
      const Range written = {Clamp(top, task_.row_begin, task_.row_end),
                             Clamp(top + rows, task_.row_begin, task_.row_end)};
      if (opened_ < written.begin) {  // between windows
        Close(opened_);
        ZeroTo(written.begin);
      }
      for (; opened_ < written.end; ++opened_) Zero(Sums(opened_));
      RunWindows(y, inside, written);
      Close(Clamp(top + stride, closed_, opened_));
    }
    Close(opened_);
    ZeroTo(task_.row_end);
  }

 private:
  int64_t Row() const { return args_.size[1] * args_.channels; }
  int64_t channels() const { return task_.channel_end - task_.channel_begin; }

  A* Sums(int64_t row) const {
    if constexpr (kInPlace) return out_ + row * Row();
    return sums_ + row % Min(args_.window[0], args_.size[0]) * Row();
  }

  template <typename E>
  void Zero(E* row) const {
    if (channels() == args_.channels) {
      __builtin_memset(row, 0, Row() * sizeof(E));
      return;
    }
    row += task_.channel_begin;
    for (int64_t x = 0; x < args_.size[1]; ++x, row += args_.channels) __builtin_memset(row, 0, channels() * sizeof(E));
  }

  // Rows without windows, of the result.
  void ZeroTo(int64_t end) {
    for (; opened_ < end; ++opened_) Zero(out_ + opened_ * Row());
    closed_ = opened_;
  }

  // The sums of rows in front of `end` are complete.
  void Close(int64_t end) {
    if constexpr (kInPlace) {
      closed_ = end;
      return;
    }
    for (; closed_ < end; ++closed_) {
      const A* sums = Sums(closed_) + task_.channel_begin;
      T* out = out_ + closed_ * Row() + task_.channel_begin;
      for (int64_t x = 0; x < args_.size[1]; ++x, sums += args_.channels, out += args_.channels) {
        for (int64_t v = 0; v < channels(); v += kLanes<A>) {
          const int64_t width = Min(kLanes<A>, channels());
          v = Min(v, channels() - width);  // the last vector may lie over the one before it
          StoreFirst(out + v, LoadFirstOf<A>(sums + v, width), width);
        }
      }
    }
  }

  // Row y of the windows: `inside` are its rows in the map, `written` those of the task.
  void RunWindows(int64_t y, Range inside, Range written) {
    if (inside.size() <= 0 || written.size() <= 0) return;
    const int64_t channels = args_.channels;
    const T* given = static_cast<const T*>(task_.call->linear) +
                     (task_.image * args_.out_size[0] + y) * args_.out_size[1] * channels;
    const bool whole = inside.size() == written.size() && inside.size() <= kLines;
    for (int64_t row = 0; whole && row < inside.size(); ++row) lines_[row] = Sums(inside.begin + row);
    for (int64_t x = 0; x < args_.out_size[1]; ++x, given += channels) {
      const int64_t left = x * args_.window_stride[1] - args_.window_pad_low[1];
      const Range columns = {Clamp(left, 0, args_.size[1]), Clamp(left + args_.window[1], 0, args_.size[1])};
      if (columns.size() <= 0) continue;
      const WindowPixels window = {inside.size(), columns.size(), Row(), channels};
      const int64_t at = columns.begin * channels;
      if (whole && window.rows == 3 && window.columns == 3) {
        RunWindow<3, 3>(window, inside, inside, at, given);
      } else if (whole && window.rows == 2 && window.columns == 2) {
        RunWindow<2, 2>(window, inside, inside, at, given);
      } else {
        RunWindow<0, 0>(window, inside, written, at, given);
      }
    }
  }

  template <int kRows, int kColumns>
  void RunWindow(const WindowPixels& window, Range inside, Range written, int64_t at, const T* given) const {
    const T* x = x_ + inside.begin * Row() + at;
    int64_t v = task_.channel_begin;
    for (; v + kLanes<A> <= task_.channel_end; v += kLanes<A>) {
      AddWindow<kRows, kColumns>(window, inside, written, x + v, at + v, Load(given + v), kLanes<A>);
    }
    const int64_t left = task_.channel_end - v;
    if (left == 0) return;
    if (channels() < kLanes<A>) {
      AddWindow<0, 0>(window, inside, written, x + v, at + v, LoadFirstOf<A>(given + v, left), left);
      return;
    }
    v = task_.channel_end - kLanes<A>;  // the last vector, of which zeros are added where channels are done
    AddWindow<kRows, kColumns>(window, inside, written, x + v, at + v, LastOf<A>(Load(given + v), left), kLanes<A>);
  }

  template <int kRows, int kColumns>
  [[gnu::always_inline]] void AddWindow(const WindowPixels& window, Range inside, Range written, const T* x, int64_t at,
                                        Vector<A> cotangent, int64_t width) const {
    const Lanes<A> chosen = Chosen<kRows, kColumns>(window, x, width);
    if constexpr (kRows > 0) {
#pragma GCC unroll 3
      for (int row = 0; row < kRows; ++row) {
        AddToChosen<kColumns, A>(window, chosen, row * kColumns, cotangent, lines_[row] + at, width);
      }
      return;
    }
    for (int64_t row = written.begin; row < written.end; ++row) {
      AddToChosen<kColumns, A>(window, chosen, (row - inside.begin) * window.columns, cotangent, Sums(row) + at, width);
    }
  }

  static constexpr int kLines = 3;

  const MaxPoolTask& task_;
  const ConvArgs& args_;
  const T* x_;  // of the image
  T* out_;      // of the image
  A* sums_;
  A* lines_[kLines];         // rows of sums that a window of so many rows adds to
  int64_t opened_, closed_;  // rows whose sums have begun, and rows that are in the result
};

template <typename T>
int64_t PoolGradientBytes(const MaxPoolTask& task) {
  return MaxPoolGradient<T>::Bytes(task);
}

template <typename T>
void RunPoolGradient(const MaxPoolTask& task, char* scratch) {
  const IeeeScope ieee;
  MaxPoolGradient<T>(task, scratch).Run();
}

// The tangent of the pixel that a window chooses.
template <int kRows, int kColumns, typename T, typename A = Accumulator<T>>
[[gnu::always_inline]] inline Vector<A> ChosenTangent(const WindowPixels& window, const T* x, const T* tangent,
                                                      int64_t width) {
  const int64_t rows = kRows > 0 ? kRows : window.rows, columns = kColumns > 0 ? kColumns : window.columns;
  Vector<A> best = LoadFirstOf<A>(x, width), found = LoadFirstOf<A>(tangent, width);
#pragma GCC unroll 3
  for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 3
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t at = row * window.across + column * window.along;
      const Vector<A> value = LoadFirstOf<A>(x + at, width), its_tangent = LoadFirstOf<A>(tangent + at, width);
      const Lanes<A> taken = IsTaken<A>(best, value);
      best = taken ? value : best;
      found = taken ? its_tangent : found;
    }
  }
  return found;
}

template <typename T>
int64_t PoolTangentBytes(const MaxPoolTask&) {
  return 0;
}

template <typename T>
void RunPoolTangent(const MaxPoolTask& task, char*) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ConvArgs& a = task.call->args;
  const int64_t image = task.image * a.size[0] * a.size[1];
  const T* x = static_cast<const T*>(task.call->x) + image * a.channels;
  const T* tangent = static_cast<const T*>(task.call->linear) + image * a.channels;
  const int64_t channels = task.channel_end - task.channel_begin;
  T* out = static_cast<T*>(task.call->out) + (task.image * a.out_size[0] + task.row_begin) * a.out_size[1] * a.channels;
  for (int64_t y = task.row_begin; y < task.row_end; ++y) {
    const int64_t top = y * a.window_stride[0] - a.window_pad_low[0];
    const Range rows = {Clamp(top, 0, a.size[0]), Clamp(top + a.window[0], 0, a.size[0])};
    for (int64_t column = 0; column < a.out_size[1]; ++column, out += a.channels) {
      const int64_t left = column * a.window_stride[1] - a.window_pad_low[1];
      const Range columns = {Clamp(left, 0, a.size[1]), Clamp(left + a.window[1], 0, a.size[1])};
      const WindowPixels window = {rows.size(), columns.size(), a.size[1] * a.channels, a.channels};
      const int64_t first = (rows.begin * a.size[1] + columns.begin) * a.channels;
      for (int64_t v = task.channel_begin; v < task.channel_end; v += kLanes<A>) {
        const int64_t width = Min(kLanes<A>, channels);
        v = Min(v, task.channel_end - width);  // the last vector may lie over the one before it
        const int64_t at = first + v;
        Vector<A> found = {};
        if (width == kLanes<A> && window.rows == 3 && window.columns == 3) {
          found = ChosenTangent<3, 3>(window, x + at, tangent + at, kLanes<A>);
        } else if (width == kLanes<A> && window.rows == 2 && window.columns == 2) {
          found = ChosenTangent<2, 2>(window, x + at, tangent + at, kLanes<A>);
        } else if (window.rows > 0 && window.columns > 0) {
          found = ChosenTangent<0, 0>(window, x + at, tangent + at, width);
        }
        StoreFirst(out + v, found, width);
      }
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_TRAINING_MAX_POOL_KERNEL_H_
