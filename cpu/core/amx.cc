#include "cpu/core/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jsc {

#if defined(__x86_64__) && defined(__linux__)
namespace {

bool AskForTiles() {
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;  // of leaf 7, in EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kBFloat16) != 0 && (edx & kTiles) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool HasAmx() {
  static const bool has = AskForTiles();
  return has;
}
#else
bool HasAmx() { return false; }
#endif

}  // namespace jsc
