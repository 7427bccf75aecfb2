// The element types of the CPU kernels and the one place that chooses between them.
#ifndef JSC_CPU_CORE_DTYPES_H_
#define JSC_CPU_CORE_DTYPES_H_

#include <cstdint>

namespace jsc {

// Storage only; core/simd.h converts to and from float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// What sums are taken in: float for the 16-bit types.
template <typename T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::Type;

// Index of an element type in a table of kernels; see Isa.
enum DtypeIndex : int { kFloat32, kBFloat16, kFloat16, kFloat64, kDtypes };

}  // namespace jsc

#endif  // JSC_CPU_CORE_DTYPES_H_
