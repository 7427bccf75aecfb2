#define JSC_ISA avx512
#include "cpu/loops/kernels.h"

namespace jsc {
const Isa kAvx512 = JSC_ISA_TABLE("avx512");
}  // namespace jsc
