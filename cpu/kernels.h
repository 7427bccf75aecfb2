// Everything that is compiled once per instruction set. An isa_<name>.cc defines JSC_ISA and includes this file once;
// no include guard on the parts, which live in jsc::JSC_ISA.
#include "isa.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jsc {
namespace JSC_ISA {
namespace {

#include "conv_kernel.h"
#include "dense_kernel.h"
#include "epilogue.h"
#include "simd.h"
#include "tile.h"
#include "window_lists.h"

template <typename T>
int64_t CountNonZeros(const void* x, int64_t samples, int64_t step) {
  int64_t count = 0;
  for (int64_t i = 0; i < samples; ++i) count += !IsZero(Widen(static_cast<const T*>(x)[i * step]));
  return count;
}

}  // namespace
}  // namespace JSC_ISA
}  // namespace jsc

// The table of one instruction set, in the order of DtypeIndex.
#define JSC_PER_DTYPE(function) \
  {&JSC_ISA::function<float>, &JSC_ISA::function<BFloat16>, &JSC_ISA::function<Float16>, &JSC_ISA::function<double>}
#define JSC_ISA_TABLE(name)   \
  {name,                      \
   JSC_ISA::kVectorBytes,     \
   JSC_PER_DTYPE(ConvBytes),  \
   JSC_PER_DTYPE(RunConv),    \
   JSC_PER_DTYPE(DenseBytes), \
   JSC_PER_DTYPE(RunDense),   \
   JSC_PER_DTYPE(CountNonZeros)}
