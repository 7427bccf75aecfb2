// Passes over a map [pixels, channels] (channels_task.h):
//   ChannelSums            sums of x - center and of its squares over pixels
//   ChannelSumsGradient    cotangent + (x - center) * scale + shift
//   ChannelAffine          relu((x - center) * scale + shift + residual)
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

// Two values of each pixel, summed over pixels [begin, end): `value(element, far, channel, width, first, second)` gives
// a vector of both, which begins at `element` of x, `far` of a map that has more channels, and `channel` of the rows.
template <typename A, typename Value>
[[gnu::always_inline]] inline void SumOverPixels(const ChannelsTask& task, const Value& value) {
  constexpr int64_t kChannelsAtOnce = 512;
  const int64_t channels = task.call->channels, wide = task.call->wide, padded = PaddedChannels(channels);
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
        const int64_t first = pixel * channels + part, far = pixel * wide + part;
        for (int64_t v = 0; v < count; v += kLanes<A>) {
          const int64_t width = Min(kLanes<A>, count - v);
          Vector<A> ones = {}, others = {};
          if (several && width == kLanes<A>) {
#pragma GCC unroll 4
            for (int i = 0; i < kPixelsAtOnce; ++i) {
              Vector<A> one, other;
              value(first + i * channels + v, far + i * wide + v, part + v, kLanes<A>, one, other);
              ones += one;
              others += other;
            }
          } else {
            for (int i = 0; i < (several ? kPixelsAtOnce : 1); ++i) {
              Vector<A> one, other;
              value(first + i * channels + v, far + i * wide + v, part + v, width, one, other);
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

// out = value(element, channel, width) for each vector of channels of the task's pixels; `element` is where it begins
// in a map of x's shape, and out may have more channels.
template <typename T, typename Value>
[[gnu::always_inline]] inline void WritePixels(const ChannelsTask& task, const Value& value) {
  using A = Accumulator<T>;
  const int64_t channels = task.call->channels, whole = channels / kLanes<A> * kLanes<A>;
  T* out = static_cast<T*>(task.call->out);
  for (int64_t pixel = task.begin; pixel < task.end; ++pixel) {
    const int64_t first = pixel * channels, far = pixel * task.call->wide;
    for (int64_t v = 0; v < whole; v += kLanes<A>) Store(out + far + v, value(first + v, v, kLanes<A>));
    if (whole < channels) {
      StoreFirst(out + far + whole, value(first + whole, whole, channels - whole), channels - whole);
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

template <bool kResidual, typename T>
void RunChannelAffineOf(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const ChannelsView<T> view(task);
  Vector<A> least = {};
  if (!task.call->relu) least -= static_cast<A>(__builtin_inf());
  WritePixels<T>(task, [&](int64_t element, int64_t channel, int64_t width) {
    const Vector<A> centered = LoadFirstOf<A>(view.x + element, width) - Load(view.center + channel);
    Vector<A> y = Affine(centered, view.scale + channel, view.shift + channel);
    if (kResidual) y = Rounded<T>(y) + LoadFirstOf<A>(view.residual + element, width);
    return y <= least ? least : y;  // NaN stays NaN
  });
}

template <typename T>
void RunChannelAffine(const ChannelsTask& task) {
  const IeeeScope ieee;
  if (task.call->residual == nullptr) return RunChannelAffineOf<false, T>(task);
  RunChannelAffineOf<true, T>(task);
}

enum class Mask { kNone, kOfX, kOfResult };  // where the ReLU let through

template <Mask kMask, bool kAdded, typename T>
void RunChannelAffineGradientOf(const ChannelsTask& task) {
  using A = Accumulator<T>;
  const ChannelsView<T> view(task);
  SumOverPixels<A>(
      task, [&](int64_t element, int64_t far, int64_t channel, int64_t width, Vector<A>& one, Vector<A>& other) {
        const Vector<A> none = {}, centered = LoadFirstOf<A>(view.x + element, width) - Load(view.center + channel);
        one = LoadFirstOf<A>(view.cotangent + far, width);
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
