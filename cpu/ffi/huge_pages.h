// Huge pages for large results. XLA takes new memory from the system in each execution, and the first write to each
// page costs time: docs/design/kernels/cpu.md, "Memory".
#ifndef JSC_CPU_FFI_HUGE_PAGES_H_
#define JSC_CPU_FFI_HUGE_PAGES_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jsc {

// Asks for huge pages where a result lies, which nobody may have written to yet, and around it, as XLA's results lie
// side by side. It is advice: a system without huge pages (/sys/kernel/mm/transparent_hugepage/enabled) goes on as
// ever.
inline void AdviseHugePages(xla::ffi::AnyBuffer result) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(result.untyped_data());
  const uintptr_t first = begin / kPage * kPage, end = (begin + result.size_bytes() + kPage - 1) / kPage * kPage;
  if (result.size_bytes() >= kPage / 4) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)result;
#endif
}

}  // namespace jsc

#endif  // JSC_CPU_FFI_HUGE_PAGES_H_
