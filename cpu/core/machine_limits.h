// Measures what the cores of this machine can do together, with the instruction set in use.
#ifndef JSC_CPU_CORE_MACHINE_LIMITS_H_
#define JSC_CPU_CORE_MACHINE_LIMITS_H_

#include <cstdint>

namespace jsc {

struct Limits {
  int64_t threads;
  double flops;         // float32 operations a second, of multiply-adds in registers
  double loaded_flops;  // of multiply-adds that each read a vector of weights from L1, as the pixel loop has them
  double cache_bytes;   // bytes a second, read again and again from 16 MiB for each thread
  double memory_bytes;  // and from 256 MiB
};

// Takes some 0.3 s; threads of its own, one for each core that the process may use.
Limits MeasureLimits();

}  // namespace jsc

#endif  // JSC_CPU_CORE_MACHINE_LIMITS_H_
