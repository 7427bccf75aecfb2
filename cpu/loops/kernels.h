// Room: the CPU's loops, everything that is compiled once per instruction set. An isa_<name>.cc defines JSC_ISA, the
// namespace of its kernels, and includes this file. Loops: windows, scatter, pixels, phases, dense_conv, dot, amx,
// winograd, depthwise, matvec, coo, scaled_pairs, and those of cpu/training: kernel_gradient, point_gradient, max_pool,
// channels. May change: a loop's tiling, while the order of its sums depends on neither tiles nor threads. Details:
// docs/design/kernels/cpu.md. Tests: tests/primitive/test_kernels.py, tests/primitive/test_packing.py.
#ifndef JSC_CPU_LOOPS_KERNELS_H_
#define JSC_CPU_LOOPS_KERNELS_H_

#include "cpu/core/isa.h"
#include "cpu/core/limits_kernel.h"
#include "cpu/loops/coo_kernel.h"
#include "cpu/loops/dense/amx_kernel.h"
#include "cpu/loops/dense/dense_conv_kernel.h"
#include "cpu/loops/dense/dot_kernel.h"
#include "cpu/loops/dense/winograd_kernel.h"
#include "cpu/loops/depthwise_kernel.h"
#include "cpu/loops/matvec_kernel.h"
#include "cpu/loops/phase_kernel.h"
#include "cpu/loops/pixel_kernel.h"
#include "cpu/loops/scaled_pairs.h"
#include "cpu/loops/scatter_kernel.h"
#include "cpu/loops/window_kernel.h"
#include "cpu/training/channels_kernel.h"
#include "cpu/training/kernel_gradient.h"
#include "cpu/training/max_pool_kernel.h"

namespace jsc {
namespace JSC_ISA {
namespace {

template <typename T>
int64_t CountNonZeros(const void* x, int64_t runs, int64_t step) {
  int64_t count = 0;
  const T* begin = static_cast<const T*>(x);
  for (int64_t run = 0; run < runs; ++run, begin += step) {
    constexpr int64_t kRunsAhead = 16;  // each is a cache miss
    if (run + kRunsAhead < runs) __builtin_prefetch(begin + kRunsAhead * step);
    count += __builtin_popcountll(NonZeroBits(begin, kCountRun));
  }
  return count;
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

// The table of one instruction set, in the order of DtypeIndex.
#define JSC_PER_DTYPE(function) \
  {&JSC_ISA::function<float>, &JSC_ISA::function<BFloat16>, &JSC_ISA::function<Float16>, &JSC_ISA::function<double>}
#if defined(__AVX512F__)
#define JSC_PAIR_LOOPS                        \
  {&JSC_ISA::PixelBytes<BFloat16Pair>,        \
   &JSC_ISA::RunPixels<BFloat16Pair>,         \
   &JSC_ISA::PhaseBytes<BFloat16Pair>,        \
   &JSC_ISA::RunPhases<BFloat16Pair>,         \
   &JSC_ISA::DirectBytes<BFloat16Pair>,       \
   &JSC_ISA::RunDirect<BFloat16Pair>,         \
   &JSC_ISA::AmxBytes,                        \
   &JSC_ISA::RunAmx<JSC_ISA::AmxTiles>,       \
   &JSC_ISA::RunAmx<JSC_ISA::EmulatedTiles>}, \
      &JSC_ISA::RunScaledPairs
#else
#define JSC_PAIR_LOOPS {}, nullptr
#endif
#define JSC_ISA_TABLE(name)                 \
  {name,                                    \
   JSC_ISA::kVectorBytes,                   \
   JSC_ISA::kManyRegisters,                 \
   JSC_PER_DTYPE(ConvBytes),                \
   JSC_PER_DTYPE(RunConv),                  \
   JSC_PER_DTYPE(ScatterBytes),             \
   JSC_PER_DTYPE(RunScatter),               \
   JSC_PER_DTYPE(PixelBytes),               \
   JSC_PER_DTYPE(RunPixels),                \
   JSC_PER_DTYPE(PhaseBytes),               \
   JSC_PER_DTYPE(RunPhases),                \
   JSC_PER_DTYPE(DepthwiseBytes),           \
   JSC_PER_DTYPE(RunDepthwise),             \
   JSC_PER_DTYPE(RunDirectDepthwise),       \
   JSC_PER_DTYPE(DirectBytes),              \
   JSC_PER_DTYPE(RunDirect),                \
   JSC_PER_DTYPE(DotBytes),                 \
   JSC_PER_DTYPE(RunDots),                  \
   JSC_ISA::WinogradBytes,                  \
   JSC_ISA::RunWinograd,                    \
   JSC_PAIR_LOOPS,                          \
   JSC_PER_DTYPE(DenseBytes),               \
   JSC_PER_DTYPE(RunDense),                 \
   JSC_PER_DTYPE(CooBytes),                 \
   JSC_PER_DTYPE(RunCoo),                   \
   JSC_PER_DTYPE(KernelGradientBytes),      \
   JSC_PER_DTYPE(RunKernelGradient),        \
   JSC_PER_DTYPE(PoolGradientBytes),        \
   JSC_PER_DTYPE(RunPoolGradient),          \
   JSC_PER_DTYPE(PoolTangentBytes),         \
   JSC_PER_DTYPE(RunPoolTangent),           \
   JSC_PER_DTYPE(RunChannelSums),           \
   JSC_PER_DTYPE(RunChannelSumsGradient),   \
   JSC_PER_DTYPE(RunChannelAffine),         \
   JSC_PER_DTYPE(RunChannelAffineGradient), \
   JSC_PER_DTYPE(RunChannelMaskedGradient), \
   JSC_PER_DTYPE(CountNonZeros),            \
   JSC_ISA::MultiplyAdds,                   \
   JSC_ISA::LoadedMultiplyAdds,             \
   JSC_ISA::ReadLines}

#endif  // JSC_CPU_LOOPS_KERNELS_H_
