// Batch norm in training, with the residual and the ReLU behind it: four passes over maps [pixels, channels].
//   BatchNormSums          sums of x and x * x over pixels
//   BatchNormResult        y = relu((x - mean) * scale + shift + residual)
//   BatchNormGradientSums  sums of g and g * (x - mean), with g the cotangent where the ReLU let through
//   BatchNormGradient      scale * g + slope * (x - mean) + offset
// What the ReLU let through is computed again from x, or read from y where there is a residual. Sums of up to
// kPixelsOfSum pixels are in the dtype of sums, and sums of these in float64.
#ifndef JSC_CPU_TRAINING_BATCH_NORM_KERNEL_H_
#define JSC_CPU_TRAINING_BATCH_NORM_KERNEL_H_

#include "cpu/core/isa.h"
#include "cpu/core/simd.h"
#include "cpu/loops/epilogue.h"
#include "cpu/training/batch_norm_task.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kPixelsOfSum = 256;
constexpr int kPixelsAtOnce = 4;  // whose values are added before they go to the sums

template <typename T, typename A = Accumulator<T>>
struct BatchNormView {
  explicit BatchNormView(const BatchNormTask& task)
      : channels(task.call->channels),
        x(static_cast<const T*>(task.call->x)),
        residual(static_cast<const T*>(task.call->residual)),
        y(static_cast<const T*>(task.call->y)),
        cotangent(static_cast<const T*>(task.call->cotangent)),
        out(static_cast<T*>(task.call->out)),
        masked(static_cast<T*>(task.call->masked)) {
    if (task.rows == nullptr) return;
    mean = static_cast<const A*>(task.rows->mean);
    scale = static_cast<const A*>(task.rows->scale);
    shift = static_cast<const A*>(task.rows->shift);
    slope = static_cast<const A*>(task.rows->slope);
    offset = static_cast<const A*>(task.rows->offset);
  }

  int64_t channels;
  const T *x, *residual, *y, *cotangent;
  T *out, *masked;
  const A *mean = nullptr, *scale = nullptr, *shift = nullptr, *slope = nullptr, *offset = nullptr;
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
[[gnu::always_inline]] inline Vector<A> Normalized(Vector<A> centered, const A* scale, const A* shift) {
  return centered * Load(scale) + Load(shift);
}

// Two values of each pixel, summed over pixels [begin, end): `value(element, channel, width, first, second)` gives a
// vector of both, `element` and `channel` being where it begins in the map and in the rows.
template <typename A, typename Value>
[[gnu::always_inline]] inline void SumOverPixels(const BatchNormTask& task, const Value& value) {
  constexpr int64_t kChannelsAtOnce = 512;
  const int64_t channels = task.call->channels, padded = PaddedChannels(channels);
  alignas(64) A sums[2 * kChannelsAtOnce];
  for (int64_t i = 0; i < 2 * padded; ++i) task.sums[i] = 0;
  for (int64_t block = task.begin; block < task.end; block += kPixelsOfSum) {
    const int64_t end = Min(block + kPixelsOfSum, task.end);
    for (int64_t part = 0; part < channels; part += kChannelsAtOnce) {
      const int64_t count = Min(kChannelsAtOnce, channels - part);
      __builtin_memset(sums, 0, sizeof(sums));
      for (int64_t pixel = block; pixel < end;) {
        const bool several = pixel + kPixelsAtOnce <= end;
        const int64_t first = pixel * channels + part;
        for (int64_t v = 0; v < count; v += kLanes<A>) {
          const int64_t width = Min(kLanes<A>, count - v);
          Vector<A> ones = {}, others = {};
          if (several && width == kLanes<A>) {
#pragma GCC unroll 4
            for (int i = 0; i < kPixelsAtOnce; ++i) {
              Vector<A> one, other;
              value(first + i * channels + v, part + v, kLanes<A>, one, other);
              ones += one;
              others += other;
            }
          } else {
            for (int i = 0; i < (several ? kPixelsAtOnce : 1); ++i) {
              Vector<A> one, other;
              value(first + i * channels + v, part + v, width, one, other);
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
void RunBatchNormSums(const BatchNormTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const T* x = static_cast<const T*>(task.call->x);
  SumOverPixels<A>(task, [&](int64_t element, int64_t, int64_t width, Vector<A>& one, Vector<A>& other) {
    one = LoadFirstOf<A>(x + element, width);
    other = one * one;
  });
}

template <typename T>
void RunBatchNormResult(const BatchNormTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const BatchNormView<T> view(task);
  const bool relu = task.call->relu;
  for (int64_t pixel = task.begin; pixel < task.end; ++pixel) {
    const int64_t first = pixel * view.channels;
    for (int64_t v = 0; v < view.channels; v += kLanes<A>) {
      const int64_t width = Min(kLanes<A>, view.channels - v);
      const Vector<A> centered = LoadFirstOf<A>(view.x + first + v, width) - Load(view.mean + v);
      Vector<A> y = Normalized(centered, view.scale + v, view.shift + v);
      if (view.residual != nullptr) y = Rounded<T>(y) + LoadFirstOf<A>(view.residual + first + v, width);
      StoreFirst(view.out + first + v, relu ? Relu<A>(y) : y, width);
    }
  }
}

// The cotangent behind the ReLU, at one vector of channels of one pixel.
template <bool kFromResult, typename T, typename A = Accumulator<T>>
[[gnu::always_inline]] inline Vector<A> Masked(const BatchNormView<T>& view, Vector<A> centered, int64_t element,
                                               int64_t channel, int64_t width) {
  const Vector<A> none = {}, cotangent = LoadFirstOf<A>(view.cotangent + element, width);
  const Vector<A> y = kFromResult ? LoadFirstOf<A>(view.y + element, width)
                                  : Rounded<T>(Normalized(centered, view.scale + channel, view.shift + channel));
  return y > none ? cotangent : none;
}

template <typename T>
void RunBatchNormGradientSums(const BatchNormTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  const BatchNormView<T> view(task);
  const auto centered = [&](int64_t element, int64_t channel, int64_t width) {
    return LoadFirstOf<A>(view.x + element, width) - Load(view.mean + channel);
  };
  if (!task.call->relu) {
    SumOverPixels<A>(task, [&](int64_t element, int64_t channel, int64_t width, Vector<A>& one, Vector<A>& other) {
      one = LoadFirstOf<A>(view.cotangent + element, width);
      other = one * centered(element, channel, width);
    });
  } else if (view.y == nullptr) {
    SumOverPixels<A>(task, [&](int64_t element, int64_t channel, int64_t width, Vector<A>& one, Vector<A>& other) {
      const Vector<A> x = centered(element, channel, width);
      one = Masked<false>(view, x, element, channel, width);
      other = one * x;
    });
  } else {
    SumOverPixels<A>(task, [&](int64_t element, int64_t channel, int64_t width, Vector<A>& one, Vector<A>& other) {
      const Vector<A> x = centered(element, channel, width);
      one = Masked<true>(view, x, element, channel, width);
      StoreFirst(view.masked + element, one, width);
      other = one * x;
    });
  }
}

template <typename T>
void RunBatchNormGradient(const BatchNormTask& task) {
  using A = Accumulator<T>;
  const IeeeScope ieee;
  BatchNormView<T> view(task);
  const bool is_masked = !task.call->relu || view.masked != nullptr;
  if (view.masked != nullptr) view.cotangent = view.masked;
  for (int64_t pixel = task.begin; pixel < task.end; ++pixel) {
    const int64_t first = pixel * view.channels;
    for (int64_t v = 0; v < view.channels; v += kLanes<A>) {
      const int64_t width = Min(kLanes<A>, view.channels - v), element = first + v;
      const Vector<A> centered = LoadFirstOf<A>(view.x + element, width) - Load(view.mean + v);
      const Vector<A> g = is_masked ? LoadFirstOf<A>(view.cotangent + element, width)
                                    : Masked<false>(view, centered, element, v, width);
      StoreFirst(view.out + element, Load(view.scale + v) * g + Load(view.slope + v) * centered + Load(view.offset + v),
                 width);
    }
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_TRAINING_BATCH_NORM_KERNEL_H_
