// Vectors of one instruction set: conversion of the storage types, and appending the non-zeros of a run of elements to
// a list. In jsc::<isa>. Written with GCC/Clang vector extensions, with intrinsics only for compression and float16.
#ifndef JSC_CPU_CORE_SIMD_H_
#define JSC_CPU_CORE_SIMD_H_

#include <cstdint>

#include "cpu/core/dtypes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jsc {
namespace JSC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32 of them
#else
constexpr bool kManyRegisters = false;
#endif

template <typename A>
struct VectorOf {
  typedef A Type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<BFloat16Pair> {
  typedef uint32_t Type __attribute__((vector_size(kVectorBytes)));
};
template <typename A>
using Vector = typename VectorOf<A>::Type;

template <typename A>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(A));

typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Word32 __attribute__((vector_size(kVectorBytes)));

template <typename V>
inline V LoadAs(const void* source) {
  V value;
  __builtin_memcpy(&value, source, sizeof(V));
  return value;
}

template <typename V>
inline void StoreAs(void* target, V value) {
  __builtin_memcpy(target, &value, sizeof(V));
}

template <typename To, typename From>
inline To BitCast(From value) {
  static_assert(sizeof(To) == sizeof(From), "");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

// --- scalars ---

inline float Widen(float value) { return value; }
inline double Widen(double value) { return value; }
inline BFloat16Pair Widen(BFloat16Pair value) { return value; }
inline float Widen(BFloat16 value) { return BitCast<float>(static_cast<uint32_t>(value.bits) << 16); }

inline float Widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return BitCast<float>(sign | 0x7f800000u | (rest << 13));  // infinity, NaN
  if (rest >= 0x0400u) return BitCast<float>(sign | ((rest << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(rest) * BitCast<float>(0x33800000u);  // * 2^-24
  return BitCast<float>(sign | BitCast<uint32_t>(subnormal));
}

inline void Narrow(float value, float* target) { *target = value; }
inline void Narrow(double value, double* target) { *target = value; }

inline void Narrow(float value, BFloat16* target) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  target->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void Narrow(float value, Float16* target) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x477ff000u) {  // rounds to 2^16 or beyond
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {
    half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  } else {  // subnormal: adding 0.5 aligns the mantissa and rounds to nearest even
    half = BitCast<uint32_t>(BitCast<float>(rest) + 0.5f) - 0x3f000000u;
  }
  target->bits = static_cast<uint16_t>(sign | half);
}

// --- vectors ---

inline Vector<float> Load(const float* source) { return LoadAs<Vector<float>>(source); }
inline Vector<double> Load(const double* source) { return LoadAs<Vector<double>>(source); }

// The vector, or zeros where `load` is not set: nothing is read then.
inline Vector<float> LoadIf(bool load, const float* source) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(load ? 0xffff : 0), source);
#else
  return load ? Load(source) : Vector<float>{};
#endif
}

// The value in a register: a compiler may else load it again for each use.
template <typename V>
[[gnu::always_inline]] inline V KeepLoaded(V value) {
#if defined(__SSE2__)
  asm("" : "+x"(value));
#endif
  return value;
}

// The first `count` elements of a vector, fewer than all, and zeros. What is behind them is not read.
#if defined(__AVX512F__)
inline Vector<float> LoadFirst(const float* source, int64_t count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), source);
}
inline Vector<double> LoadFirst(const double* source, int64_t count) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), source);
}
#elif defined(__AVX2__)
inline Vector<float> LoadFirst(const float* source, int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(source, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane));
}
inline Vector<double> LoadFirst(const double* source, int64_t count) {
  return _mm256_maskload_pd(source, _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3)));
}
#else
template <typename A>
inline Vector<A> LoadFirst(const A* source, int64_t count) {
  Vector<A> value = {};
  for (int64_t i = 0; i < count; ++i) value[i] = source[i];
  return value;
}
#endif

inline Vector<BFloat16Pair> Load(const BFloat16Pair* source) { return LoadAs<Vector<BFloat16Pair>>(source); }

inline Vector<float> Load(const BFloat16* source) {
  return BitCast<Vector<float>>(__builtin_convertvector(LoadAs<Half16>(source), Word32) << 16);
}

inline Vector<float> Load(const Float16* source) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(LoadAs<__m256i>(source));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(LoadAs<__m128i>(source));
#elif defined(__aarch64__)
  return BitCast<Vector<float>>(vcvt_f32_f16(LoadAs<float16x4_t>(source)));
#else
  Vector<float> value;
  for (int64_t i = 0; i < kLanes<float>; ++i) value[i] = Widen(source[i]);
  return value;
#endif
}

inline Vector<BFloat16Pair> LoadIf(bool load, const BFloat16Pair* source) {
  return BitCast<Vector<BFloat16Pair>>(LoadIf(load, reinterpret_cast<const float*>(source)));
}

// The elements of two rows, side by side.
inline Vector<BFloat16Pair> LoadPairs(const BFloat16* low, const BFloat16* high) {
  return __builtin_convertvector(LoadAs<Half16>(low), Word32) | __builtin_convertvector(LoadAs<Half16>(high), Word32)
                                                                    << 16;
}

inline BFloat16Pair PairOf(BFloat16 low, BFloat16 high) {
  return {static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16};
}

inline void Store(BFloat16Pair* target, Vector<BFloat16Pair> value) { StoreAs(target, value); }
inline void Store(float* target, Vector<float> value) { StoreAs(target, value); }
inline void Store(double* target, Vector<double> value) { StoreAs(target, value); }

// sum += value * weight.
template <typename A>
[[gnu::always_inline]] inline void MultiplyAdd(Vector<A>& sum, A value, Vector<A> weight) {
  sum += value * weight;
}

// The same with a weight that is read once.
template <typename A>
[[gnu::always_inline]] inline void MultiplyAddAt(Vector<A>& sum, A value, const A* weight) {
  sum += value * Load(weight);
}

#if defined(__AVX512F__)
// Both products of each pair, one after another, to a sum in float32; subnormals count as 0. As text, because only
// processors with AVX512-BF16 may run it, and no other code here may need that.
[[gnu::always_inline]] inline void MultiplyAdd(Vector<float>& sum, BFloat16Pair value, Vector<BFloat16Pair> weight) {
  const Vector<BFloat16Pair> values = value.bits + Vector<BFloat16Pair>{};
  Vector<float> added = sum;  // a register of its own: an array's element would go to memory
  asm("vdpbf16ps %2, %1, %0" : "+v"(added) : "v"(values), "v"(weight));
  sum = added;
}

[[gnu::always_inline]] inline void MultiplyAddAt(Vector<float>& sum, BFloat16Pair value, const BFloat16Pair* weight) {
  typedef uint32_t Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  const Vector<BFloat16Pair> values = value.bits + Vector<BFloat16Pair>{};
  Vector<float> added = sum;
  asm("vdpbf16ps %2, %1, %0" : "+v"(added) : "v"(values), "m"(*reinterpret_cast<const Unaligned*>(weight)));
  sum = added;
}

// 32 bfloat16, rounded to the nearest; subnormals become 0. As text, too.
[[gnu::always_inline]] inline __m512i RoundedPairs(__m512 low, __m512 high) {
  __m512i both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
  return both;
}
#endif

// target += value. Kernels add up some hundred products from 0 on, then such sums, because one chain of thousands of
// float32 additions loses digits (docs/design/kernels/cpu.md).
template <typename A>
inline void AddTo(A* target, Vector<A> value) {
  Store(target, Load(target) + value);
}

// The sum of the lanes, halves upon halves.
template <typename A>
inline A SumOf(Vector<A> value) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) return _mm512_reduce_add_ps(value);
  if constexpr (std::is_same_v<A, double>) return _mm512_reduce_add_pd(value);
#endif
  A lanes[kLanes<A>];
  StoreAs(lanes, value);
#pragma GCC unroll 4
  for (int64_t half = kLanes<A> / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline void Store(BFloat16* target, Vector<float> value) {
  const Word32 bits = BitCast<Word32>(value);
  const Word32 nan = BitCast<Word32>((bits & 0x7fffffffu) > 0x7f800000u);
  const Word32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  StoreAs(target, __builtin_convertvector((nan & ((bits >> 16) | 0x40u)) | (~nan & rounded), Half16));
}

inline void Store(Float16* target, Vector<float> value) {
#if defined(__AVX512F__)
  StoreAs(target, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  StoreAs(target, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  StoreAs(target, vcvt_f16_f32(BitCast<float32x4_t>(value)));
#else
  for (int64_t i = 0; i < kLanes<float>; ++i) Narrow(value[i], target + i);
#endif
}

inline bool IsZero(float value) { return (BitCast<uint32_t>(value) << 1) == 0; }
inline bool IsZero(double value) { return (BitCast<uint64_t>(value) << 1) == 0; }

// Elements that the appends below may write past the end of a list.
constexpr int64_t kListSlack = 16;

// Appends the non-zeros among source[0, count) to values and the offset of each, first, first + step, ..., to offsets;
// returns how many. The test is on the bits, so subnormals and NaN stay whatever the floating-point modes are.
template <typename T, typename A>
inline int64_t AppendScalar(const T* source, int64_t count, uint32_t first, uint32_t step, A* values,
                            uint32_t* offsets) {
  int64_t used = 0;
  for (int64_t i = 0; i < count; ++i) {
    const A value = Widen(source[i]);
    values[used] = value;
    offsets[used] = first + static_cast<uint32_t>(i) * step;
    used += !IsZero(value);
  }
  return used;
}

template <typename T>
inline int64_t Append(const T* source, int64_t count, uint32_t first, uint32_t step, double* values,
                      uint32_t* offsets) {
  return AppendScalar(source, count, first, step, values, offsets);
}

#if defined(__AVX512F__)
inline __m512 LoadFirst(const BFloat16Pair* source, int64_t count) {
  return LoadFirst(reinterpret_cast<const float*>(source), count);
}

template <typename T>
inline __m512 LoadFirst(const T* source, int64_t count) {
  T padded[16] = {};
  __builtin_memcpy(padded, source, count * sizeof(T));
  return Load(padded);
}

template <typename T>
inline int64_t Append(const T* source, int64_t count, uint32_t first, uint32_t step, float* values, uint32_t* offsets) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i step16 = _mm512_set1_epi32(static_cast<int>(16 * step));
  __m512i offset = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                                    _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(step))));
  int64_t used = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 value = count - i >= 16 ? Load(source + i) : LoadFirst(source + i, count - i);
    const __mmask16 nonzero = _mm512_test_epi32_mask(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff));
    _mm512_storeu_ps(values + used, _mm512_maskz_compress_ps(nonzero, value));
    _mm512_storeu_si512(offsets + used, _mm512_maskz_compress_epi32(nonzero, offset));
    used += __builtin_popcount(nonzero);
    offset = _mm512_add_epi32(offset, step16);
  }
  return used;
}
#else
template <typename T>
inline int64_t Append(const T* source, int64_t count, uint32_t first, uint32_t step, float* values, uint32_t* offsets) {
  return AppendScalar(source, count, first, step, values, offsets);
}
#endif

// Clears flush-to-zero and denormals-are-zero for the life of the object: subnormal inputs count as IEEE says.
class IeeeScope {
 public:
#if defined(__SSE2__)
  IeeeScope() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~IeeeScope() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    Set(saved_ & ~(uint64_t{1} << 24));
  }
  ~IeeeScope() { Set(saved_); }

 private:
  // Loads and stores stay on their side of it, so the arithmetic between them does.
  static void Set(uint64_t modes) { asm volatile("msr fpcr, %0" : : "r"(modes) : "memory"); }

  uint64_t saved_;
#else
  IeeeScope() {}
#endif
};

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_CORE_SIMD_H_
