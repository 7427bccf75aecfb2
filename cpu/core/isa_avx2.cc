#define JSC_ISA avx2
#include "cpu/loops/kernels.h"

namespace jsc {
const Isa kAvx2 = JSC_ISA_TABLE("avx2");
}  // namespace jsc
