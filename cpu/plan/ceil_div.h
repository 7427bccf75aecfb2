// Apart from plan.h, which the files of instruction sets include: an inline function of those could be the copy that
// the linker keeps for everybody (core/isa.h).
#ifndef JSC_CPU_PLAN_CEIL_DIV_H_
#define JSC_CPU_PLAN_CEIL_DIV_H_

#include <cstdint>

namespace jsc {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jsc

#endif  // JSC_CPU_PLAN_CEIL_DIV_H_
