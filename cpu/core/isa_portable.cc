#define JSC_ISA portable
#include "cpu/loops/kernels.h"

namespace jsc {
const Isa kPortable = JSC_ISA_TABLE("portable");
}  // namespace jsc
