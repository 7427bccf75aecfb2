// Passes over a map [pixels, channels] (channels_task.h):
//   ChannelSums            sums of x - center and of its squares over pixels
//   ChannelSumsGradient    cotangent + (x - center) * scale + shift
//   ChannelAffine          relu((x - center) * scale + shift + residual), or sums of 2x2 of these
//   ChannelAffineGradient  scale * g + added, and sums of g and g * (x - center), with g the cotangent where the ReLU
//                          let through
//   ChannelMaskedGradient  g, and its sums
// What the ReLU let through is computed again from x, or read from y where there is a residual. Sums of up to
// kPixelsOfSum pixels are in the dtype of sums, and sums of these in float64.
#ifndef JSC_CPU_TRAINING_CHANNELS_KERNEL_H_
#define JSC_CPU_TRAINING_CHANNELS_KERNEL_H_

#include "cpu/core/isa.h"
#include "cpu/core/simd.h"
#include "cpu/loops/epilogue.h"
#include "cpu/training/channels_task.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kPixelsOfSum = 64;
constexpr int kPixelsAtOnce = 4;  // whose values are added before they go to the sums

template <typename T, typename A = Accumulator<T>>
struct ChannelsView {
  explicit ChannelsView(const ChannelsTask& task)
      : channels(task.call->channels),
        x(static_cast<const T*>(task.call->x)),
        residual(static_cast<const T*>(task.call->residual)),
        y(static_cast<const T*>(task.call->y)),
        cotangent(static_cast<const T*>(task.call->cotangent)),
        added(static_cast<const T*>(task.call->added)),
        out(static_cast<T*>(task.call->out)),
        masked(static_cast<T*>(task.call->masked)),
        center(static_cast<const A*>(task.rows->center)),
        scale(static_cast<const A*>(task.rows->scale)),
        shift(static_cast<const A*>(task.rows->shift)) {}

  int64_t channels;
  const T *x, *residual, *y, *cotangent, *added;
  T *out, *masked;
  const A *center, *scale, *shift;
};

// As it is read from a map of T.
template <typename T, typename A = Accumulator<T>>
inline Vector<A> Rounded(Vector<A> value) {
  if constexpr (sizeof(T) == sizeof(A)) return value;
  T all[kLanes<A>];
  Store(all, value);
  return Load(all);
}

// A vector of channels in front of residual and ReLU. Forward and backward have the same bits.
template <typename A>
[[gnu::always_inline]] inline Vector<A> Affine(Vector<A> centered, const A* scale, const A* shift) {
  return centered * Load(scale) + Load(shift);
}

// Where the result that a pixel of x belongs to begins.
inline int64_t ResultOf(const ChannelsCall& call, int64_t pixel) {
  if (call.columns == 0) return pixel * call.pixel_stride;
  const int64_t row = pixel / call.columns, column = pixel % call.columns;
  return (row / 2 * (call.columns / 2) + column / 2) * call.pixel_stride;
}

// Two values of each pixel, summed over pixels [begin, end): `value(element, of_result, channel, width, first, second)`
// gives a vector of both, which begins at `element` of x, `of_result` of the result, and `channel` of the rows.
template <typename A, typename Value>
[[gnu::always_inline]] inline void SumOverPixels(const ChannelsTask& task, const Value& value) {
  constexpr int64_t kChannelsAtOnce = 512;
  const int64_t channels = task.call->channels, padded = PaddedChannels(channels);
  alignas(64) A sums[2 * kChannelsAtOnce];
  for (int64_t i = 0; i < 2 * padded; ++i) task.sums[i] = 0;
  for (int64_t block = task.begin; block < task.end; block += kPixelsOfSum) {
    const int64_t end = Min(block + kPixelsOfSum, task.end);
    for (int64_t part = 0; part < channels; part += kChannelsAtOnce) {
      const int64_t count = Min(kChannelsAtOnce, channels - part);
      __builtin_memset(sums, 0, PaddedChannels(count) * sizeof(A));
      __builtin_memset(sums + kChannelsAtOnce, 0, PaddedChannels(count) * sizeof(A));
      for (int64_t pixel = block; pixel < end;) {
        const bool several = pixel + kPixelsAtOnce <= end;
        const int64_t first = pixel * channels + part;
        int64_t of_result[kPixelsAtOnce] = {};
        for (int i = 0; i < (several ? kPixelsAtOnce : 1); ++i) of_result[i] = ResultOf(*task.call, pixel + i) + part;
        for (int64_t v = 0; v < count; v += kLanes<A>) {
          const int64_t width = Min(kLanes<A>, count - v);
          Vector<A> ones = {}, others = {};
          if (several && width == kLanes<A>) {
#pragma GCC unroll 4
            for (int i = 0; i < kPixelsAtOnce; ++i) {
              Vector<A> one, other;
              value(first + i * channels + v, of_result[i] + v, part + v, kLanes<A>, one, other);
              ones += one;
              others += other;
            }
          } else {
            for (int i = 0; i < (several ? kPixelsAtOnce : 1); ++i) {
              Vector<A> one, other;
              value(first + i * channels + v, of_result[i] + v, part + v, width, one, other);
              ones += one;
              others += other;
            }
          }
          AddTo(sums + v, ones);
          AddTo(sums + kChannelsAtOnce + v, others);
        }
        pixel += several ? kPixelsAtOnce : 1;
      }
      for (int64_t c = 0; c < count; ++c) {
        task.sums[part + c] += static_cast<double>(sums[c]);
        task.sums[padded + part + c] += static_cast<double>(sums[kChannelsAtOnce + c]);
      }
    }
  }
}

template <typename T>
void RunChannelSums(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ChannelsView<T> view(task);
  SumOverPixels<A>(task,
                   [&](int64_t element, int64_t, int64_t channel, int64_t width, Vector<A>& one, Vector<A>& other) {
                     one = LoadFirstOf<A>(view.x + element, width) - Load(view.center + channel);
                     other = one * one;
                   });
}

// out = value(element, channel, width) for each vector of channels of results [begin, end); `element` is where it
// begins in x: of 2x2 pixels in the first one.
template <typename T, typename Value>
[[gnu::always_inline]] inline void WritePixels(const ChannelsTask& task, const Value& value) {
  using A = Accumulator<T>;
  const ChannelsCall& call = *task.call;
  const int64_t channels = call.channels, whole = channels / kLanes<A> * kLanes<A>, half = call.columns / 2;
  T* out = static_cast<T*>(call.out);
  for (int64_t pixel = task.begin; pixel < task.end; ++pixel) {
    const int64_t of_x = half == 0 ? pixel : 2 * (pixel / half * call.columns + pixel % half);
    const int64_t first = of_x * call.x_stride, of_result = pixel * call.pixel_stride;
    for (int64_t v = 0; v < whole; v += kLanes<A>) Store(out + of_result + v, value(first + v, v, kLanes<A>));
    if (whole < channels) {
      StoreFirst(out + of_result + whole, value(first + whole, whole, channels - whole), channels - whole);
    }
  }
}

template <typename T>
void RunChannelSumsGradient(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const ChannelsView<T> view(task);
  WritePixels<T>(task, [&](int64_t element, int64_t channel, int64_t width) {
    const Vector<A> centered = LoadFirstOf<A>(view.x + element, width) - Load(view.center + channel);
    return LoadFirstOf<A>(view.cotangent + element, width) +
           Affine(centered, view.scale + channel, view.shift + channel);
  });
}

template <bool kResidual, bool kSums, typename T>
void RunChannelAffineOf(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const ChannelsView<T> view(task);
  Vector<A> least = {};
  if (!task.call->relu) least -= static_cast<A>(__builtin_inf());
  const auto one = [&](int64_t element, int64_t channel, int64_t width) {
    const Vector<A> centered = LoadFirstOf<A>(view.x + element, width) - Load(view.center + channel);
    Vector<A> y = Affine(centered, view.scale + channel, view.shift + channel);
    if (kResidual) y = Rounded<T>(y) + LoadFirstOf<A>(view.residual + element, width);
    return y <= least ? least : y;  // NaN stays NaN
  };
  if (!kSums) return WritePixels<T>(task, one);
  const int64_t right = task.call->x_stride, below = task.call->columns * right;
  WritePixels<T>(task, [&](int64_t element, int64_t channel, int64_t width) {
    return one(element, channel, width) + one(element + right, channel, width) +
           (one(element + below, channel, width) + one(element + below + right, channel, width));
  });
}

template <typename T>
void RunChannelAffine(const ChannelsTask& task) {
  const IeeeScope ieee;
  if (task.call->columns > 0) return RunChannelAffineOf<false, true, T>(task);
  if (task.call->residual == nullptr) return RunChannelAffineOf<false, false, T>(task);
  RunChannelAffineOf<true, false, T>(task);
}

enum class Mask { kNone, kOfX, kOfResult };  // where the ReLU let through

template <Mask kMask, bool kAdded, typename T>
void RunChannelAffineGradientOf(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const ChannelsView<T> view(task);
  SumOverPixels<A>(
      task, [&](int64_t element, int64_t of_result, int64_t channel, int64_t width, Vector<A>& one, Vector<A>& other) {
        const Vector<A> none = {}, centered = LoadFirstOf<A>(view.x + element, width) - Load(view.center + channel);
        one = LoadFirstOf<A>(view.cotangent + of_result, width);
        if (kMask == Mask::kOfX) {
          one = Rounded<T>(Affine(centered, view.scale + channel, view.shift + channel)) > none ? one : none;
        } else if (kMask == Mask::kOfResult) {
          one = LoadFirstOf<A>(view.y + element, width) > none ? one : none;
          StoreFirst(view.masked + element, one, width);
        }
        other = one * centered;
        Vector<A> of_x = one * Load(view.scale + channel);
        if (kAdded) of_x += LoadFirstOf<A>(view.added + element, width);
        StoreFirst(view.out + element, of_x, width);
      });
}

template <Mask kMask, typename T>
void RunChannelAffineGradientOf(const ChannelsTask& task) {
  if (task.call->added == nullptr) return RunChannelAffineGradientOf<kMask, false, T>(task);
  RunChannelAffineGradientOf<kMask, true, T>(task);
}

template <typename T>
void RunChannelAffineGradient(const ChannelsTask& task) {
  const IeeeScope ieee;
  if (!task.call->relu) return RunChannelAffineGradientOf<Mask::kNone, T>(task);
  if (task.call->y == nullptr) return RunChannelAffineGradientOf<Mask::kOfX, T>(task);
  RunChannelAffineGradientOf<Mask::kOfResult, false, T>(task);
}

// Sums of the cotangent alone; where there is a ReLU, with its zeros, and written.
template <typename T>
void RunChannelMaskedGradient(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const T* y = static_cast<const T*>(task.call->y);
  const T* cotangent = static_cast<const T*>(task.call->cotangent);
  T* masked = static_cast<T*>(task.call->masked);
  if (y == nullptr) {
    SumOverPixels<A>(task, [&](int64_t element, int64_t, int64_t, int64_t width, Vector<A>& one, Vector<A>& other) {
      one = LoadFirstOf<A>(cotangent + element, width);
      other = Vector<A>{};
    });
    return;
  }
  SumOverPixels<A>(task, [&](int64_t element, int64_t, int64_t, int64_t width, Vector<A>& one, Vector<A>& other) {
    const Vector<A> none = {}, given = LoadFirstOf<A>(cotangent + element, width);
    one = LoadFirstOf<A>(y + element, width) > none ? given : none;
    other = none;
    StoreFirst(masked + element, one, width);
  });
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_TRAINING_CHANNELS_KERNEL_H_
