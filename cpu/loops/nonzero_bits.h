// Which of up to 64 elements are not zero, as bits of one word. The test is on the elements' bits, so subnormals and
// NaN stay whatever the floating-point modes are.
#ifndef JSC_CPU_LOOPS_NONZERO_BITS_H_
#define JSC_CPU_LOOPS_NONZERO_BITS_H_

#include "cpu/core/simd.h"

namespace jsc {
namespace JSC_ISA {
namespace {

constexpr int64_t kWordBits = 64;
constexpr bool kFindsBitsFast = kVectorBytes == 64;  // in a few operations

#if defined(__AVX512F__)
template <typename T>
constexpr int kMagnitude = 0x7fffffff;  // all bits of an element but signs
template <>
constexpr int kMagnitude<BFloat16Pair> = 0x7fff7fff;

template <typename T>
inline __mmask16 NonZeroBits16(const T* source, int64_t count, __m512& value) {
  value = count >= 16 ? BitCast<__m512>(Load(source)) : LoadFirst(source, count);
  return _mm512_test_epi32_mask(_mm512_castps_si512(value), _mm512_set1_epi32(kMagnitude<T>));
}

// Bit i for source[i], i < count <= kWordBits.
template <typename T>
inline uint64_t NonZeroBits(const T* source, int64_t count) {
  uint64_t bits = 0;
  __m512 value;
  if (count == kWordBits) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kWordBits; i += 16) {
      bits |= static_cast<uint64_t>(NonZeroBits16(source + i, 16, value)) << i;
    }
    return bits;
  }
  for (int64_t i = 0; i < count; i += 16) {
    bits |= static_cast<uint64_t>(NonZeroBits16(source + i, count - i, value)) << i;
  }
  return bits;
}
inline uint64_t NonZeroBits(const double* source, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi64(0x7fffffffffffffff);
  uint64_t bits = 0;
  for (int64_t i = 0; i < count; i += 8) {
    const auto lanes = static_cast<__mmask8>(count - i >= 8 ? 0xff : (1u << (count - i)) - 1);
    const __m512i value = _mm512_maskz_loadu_epi64(lanes, source + i);
    bits |= static_cast<uint64_t>(_mm512_test_epi64_mask(value, magnitude)) << i;
  }
  return bits;
}

// The same, and the non-zeros themselves side by side to values, up to kListSlack more behind them.
template <typename T>
inline uint64_t CompressNonZeros(const T* source, int64_t count, float* values) {
  uint64_t bits = 0;
  __m512 value;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 nonzero = NonZeroBits16(source + i, count - i, value);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(nonzero, value));
    values += __builtin_popcount(nonzero);
    bits |= static_cast<uint64_t>(nonzero) << i;
  }
  return bits;
}
inline uint64_t CompressNonZeros(const BFloat16Pair* source, int64_t count, BFloat16Pair* values) {
  return CompressNonZeros(source, count, reinterpret_cast<float*>(values));
}
#else
template <typename T>
inline uint64_t NonZeroBitsScalar(const T* source, int64_t count) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= static_cast<uint64_t>(!IsZero(Widen(source[i]))) << i;
  return bits;
}

template <typename T>
inline uint64_t NonZeroBits(const T* source, int64_t count) {
  return NonZeroBitsScalar(source, count);
}

#if defined(__AVX2__)
inline uint64_t NonZeroBits(const float* source, int64_t count) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  uint64_t bits = 0;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i value = _mm256_and_si256(LoadAs<__m256i>(source + i), magnitude);
    const __m256i nonzero = _mm256_cmpgt_epi32(value, _mm256_setzero_si256());
    bits |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(nonzero))) << i;
  }
  return i < count ? bits | NonZeroBitsScalar(source + i, count - i) << i : bits;
}
#endif
#endif

// Where nothing compresses vectors.
template <typename T, typename A>
inline uint64_t CompressNonZeros(const T* source, int64_t count, A* values) {
  const uint64_t bits = NonZeroBits(source, count);
  for (uint64_t rest = bits; rest != 0; rest &= rest - 1) *values++ = Widen(source[__builtin_ctzll(rest)]);
  return bits;
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_LOOPS_NONZERO_BITS_H_
