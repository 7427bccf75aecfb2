// What a core can do at most, to hold kernels against: multiply-adds in registers, those with a weight from L1 each,
// and reading memory.
#ifndef JSC_CPU_LIMITS_KERNEL_H_
#define JSC_CPU_LIMITS_KERNEL_H_

#include "isa.h"
#include "simd.h"

namespace jsc {
namespace JSC_ISA {
namespace {

// Keeps a value that nobody uses: in a register, where the compiler knows of a class for it.
template <typename V>
[[gnu::always_inline]] inline void Keep(V& value) {
#if defined(__SSE2__)
  asm volatile("" : "+v"(value));
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

// As the loop of pixel_rows.h has them: an entry's value and offset are read, then kLimitTaps rows of weights. rows:
// for each entry kLimitTaps vectors.
inline void LoadedMultiplyAdds(const char* rows, int64_t rounds) {
  float values[kLimitEntries];
  uint32_t offsets[kLimitEntries];
  for (int i = 0; i < kLimitEntries; ++i) {
    values[i] = 0.5f;
    offsets[i] = static_cast<uint32_t>(i * kLimitTaps * kVectorBytes);
  }
  Vector<float> sums[kLimitTaps] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : : : "memory");
    for (int i = 0; i < kLimitEntries; ++i) {
      const float value = values[i];
      const char* row = rows + offsets[i];
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

#endif  // JSC_CPU_LIMITS_KERNEL_H_
