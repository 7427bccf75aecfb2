// The element types of the CPU kernels and the one place that chooses between them.
#ifndef JSC_CPU_CORE_DTYPES_H_
#define JSC_CPU_CORE_DTYPES_H_

#include <cstdint>
#include <type_traits>

namespace jsc {

// Storage only; core/simd.h converts to and from float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Two neighbouring channels of a bfloat16 map, or their two weights of an output channel, the lower one in the low
// half. Loops that multiply both at once (core/simd.h, MultiplyAdd) read a map as one of half the channels.
struct BFloat16Pair {
  uint32_t bits;
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

// What loops multiply: elements widened to the type of sums, or pairs as they lie.
template <typename T>
using Factor = std::conditional_t<std::is_same_v<T, BFloat16Pair>, T, Accumulator<T>>;

// What kernels, biases, residuals and results are stored as.
template <typename T>
using Stored = std::conditional_t<std::is_same_v<T, BFloat16Pair>, BFloat16, T>;

// Channels of x in one element.
template <typename T>
constexpr int64_t kChannelsOf = static_cast<int64_t>(sizeof(T) / sizeof(Stored<T>));

// Index of an element type in a table of kernels; see Isa.
enum DtypeIndex : int { kFloat32, kBFloat16, kFloat16, kFloat64, kDtypes };

}  // namespace jsc

#endif  // JSC_CPU_CORE_DTYPES_H_
