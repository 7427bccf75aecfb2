// What a core can do at most, to hold kernels against: multiply-adds in registers, those with a weight from L1 each,
// and reading memory.
#ifndef JSC_CPU_CORE_LIMITS_KERNEL_H_
#define JSC_CPU_CORE_LIMITS_KERNEL_H_

#include "cpu/core/isa.h"
#include "cpu/core/simd.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Keeps a value that nobody uses: in a register, where the compiler knows of a class for it.
template <typename V>
[[gnu::always_inline]] inline void Keep(V& value) {
#if defined(__SSE2__)
  asm volatile("" : "+v"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#else
  asm volatile("" : "+m"(value));
#endif
}

inline void MultiplyAdds(int64_t rounds) {
  const Vector<float> factor = Vector<float>{} + 0.999f;
  Vector<float> sums[kChains] = {};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = sums[i] * factor + factor;
      Keep(sums[i]);
    }
  }
}

// As the loop of loops/pixel_rows.h has them: an entry is a bit and a value, then kLimitTaps rows of weights. rows: for
// each entry kLimitTaps vectors.
inline void LoadedMultiplyAdds(const char* rows, int64_t rounds) {
  float values[kLimitEntries];
  for (float& value : values) value = 0.5f;
  Vector<float> sums[kLimitTaps] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    uint64_t bits = (uint64_t{1} << kLimitEntries) - 1;
    asm volatile("" : "+r"(bits) : : "memory");
    for (; bits != 0; bits &= bits - 1) {
      const int64_t channel = __builtin_ctzll(bits);
      const float value = values[channel];
      const char* row = rows + channel * kLimitTaps * kVectorBytes;
      asm("" : "+r"(row));
#pragma GCC unroll 16
      for (int tap = 0; tap < kLimitTaps; ++tap) sums[tap] += value * LoadAs<Vector<float>>(row + tap * kVectorBytes);
    }
  }
  for (Vector<float>& sum : sums) Keep(sum);
}

inline void ReadLines(const char* begin, int64_t bytes) {
  Vector<float> sum = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < 64; k += kVectorBytes) sum += LoadAs<Vector<float>>(begin + i + k);
  }
  Keep(sum);
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

#endif  // JSC_CPU_CORE_LIMITS_KERNEL_H_
