// The custom calls of the CPU by name, without Python: the module (ffi.cc) hands them to JAX, a program of tests
// (tests/emulated) calls them as XLA does.
#ifndef JSC_CPU_FFI_HANDLERS_H_
#define JSC_CPU_FFI_HANDLERS_H_

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jsc {

struct Target {
  const char* name;  // of the custom call
  XLA_FFI_Handler* handler;
};

std::vector<Target> Targets();

}  // namespace jsc

#endif  // JSC_CPU_FFI_HANDLERS_H_
