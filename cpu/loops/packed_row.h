// One row of a packed kernel, for the loops that pack in each call.
#ifndef JSC_CPU_LOOPS_PACKED_ROW_H_
#define JSC_CPU_LOOPS_PACKED_ROW_H_

#include "cpu/core/simd.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// `width` weights as loops read them, and zeros up to `stride`; of pairs those of `row` and of the row `apart` from it,
// or zeros where that is 0.
template <typename T>
[[gnu::always_inline]] inline void PackRow(const Stored<T>* row, int64_t apart, int64_t width, int64_t stride,
                                           Factor<T>* target) {
  using F = Factor<T>;
  constexpr bool kIsPair = kChannelsOf<T> == 2;
  const int64_t whole = width / kLanes<F> * kLanes<F>;
  for (int64_t k = 0; k < whole; k += kLanes<F>) {
    if constexpr (kIsPair) {
      const Vector<BFloat16Pair> pairs = LoadPairs(row + k, row + apart + k);
      Store(target + k, apart == 0 ? pairs & 0xffffu : pairs);
    } else {
      Store(target + k, Load(row + k));
    }
  }
  for (int64_t k = whole; k < width; ++k) {
    if constexpr (kIsPair) {
      target[k] = PairOf(row[k], apart == 0 ? BFloat16{} : row[apart + k]);
    } else {
      target[k] = Widen(row[k]);
    }
  }
  for (int64_t k = width; k < stride; ++k) target[k] = F{};
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_PACKED_ROW_H_
