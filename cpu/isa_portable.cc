#define JSC_ISA portable
#include "kernels.h"

namespace jsc {
const Isa kPortable = JSC_ISA_TABLE("portable");
}  // namespace jsc
