// Whether this processor multiplies tiles of bfloat16, and the system lets it.
#ifndef JSC_CPU_CORE_AMX_H_
#define JSC_CPU_CORE_AMX_H_

namespace jsc {

// AMX with bfloat16. Linux is asked for the tiles' state once, for all threads.
bool HasAmx();

}  // namespace jsc

#endif  // JSC_CPU_CORE_AMX_H_
