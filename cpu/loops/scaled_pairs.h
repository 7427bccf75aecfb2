// relu(x * scale + shift) of a map of bfloat16, in bfloat16: what a layer of a dense block reads (ffi/dense_block.cc).
//
// As RunChannelAffine of training/channels_kernel.h, without a center, a residual and sums. Subnormals are zeros here,
// as they are to the products of pairs. For processors with AVX512-BF16.
//
// Bound by: two vectors of channels take some 12 operations, a third of what rounding by integers takes.
#ifndef JSC_CPU_LOOPS_SCALED_PAIRS_H_
#define JSC_CPU_LOOPS_SCALED_PAIRS_H_

#include "cpu/core/isa.h"
#include "cpu/core/simd.h"
#include "cpu/training/channels_task.h"

#if defined(__AVX512F__)
namespace jsc {
namespace JSC_ISA {
namespace {

// NaN stays NaN.
inline __m512 ScaledLanes(__m256i x, const float* scale, const float* shift) {
  const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  const __m512 y = _mm512_fmadd_ps(wide, _mm512_loadu_ps(scale), _mm512_loadu_ps(shift));
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_NLE_UQ), y);
}

// scale and shift are readable for PaddedChannels().
inline void RunScaledPairs(const ChannelsTask& task) {
  const IeeeScope ieee;
  const ChannelsCall& call = *task.call;
  const auto *scale = static_cast<const float*>(task.rows->scale), *shift = static_cast<const float*>(task.rows->shift);
  const int64_t whole = call.channels / 32 * 32, left = call.channels - whole;
  const auto first = static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
  const auto second = static_cast<__mmask16>(left > 16 ? (1 << (left - 16)) - 1 : 0);
  for (int64_t pixel = task.begin; pixel < task.end; ++pixel) {
    const auto* x = static_cast<const BFloat16*>(call.x) + pixel * call.x_stride;
    auto* out = static_cast<BFloat16*>(call.out) + pixel * call.pixel_stride;
    for (int64_t c = 0; c < whole; c += 32) {
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + c));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + c + 16));
      const __m512 lanes = ScaledLanes(low, scale + c, shift + c);
      _mm512_storeu_si512(out + c, RoundedPairs(lanes, ScaledLanes(high, scale + c + 16, shift + c + 16)));
    }
    if (left == 0) continue;
    const __m256i low = _mm256_maskz_loadu_epi16(first, x + whole);
    const __m512 lanes = ScaledLanes(low, scale + whole, shift + whole);
    __m512 others = _mm512_setzero_ps();
    if (second != 0) {
      const __m256i high = _mm256_maskz_loadu_epi16(second, x + whole + 16);
      others = ScaledLanes(high, scale + whole + 16, shift + whole + 16);
    }
    _mm512_mask_storeu_epi16(out + whole, static_cast<__mmask32>(second) << 16 | first, RoundedPairs(lanes, others));
  }
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc
#endif

#endif  // JSC_CPU_LOOPS_SCALED_PAIRS_H_
