#include "cpu/core/caches.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace jsc {
namespace {

#if defined(__linux__)
std::string LineOf(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Processors that have the same data cache of a level as the first one; 1 where nothing says so.
int64_t Sharers(int level) {
  for (int index = 0;; ++index) {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    const std::string type = LineOf(cache + "/type");
    if (type.empty()) return 1;
    if (type == "Instruction" || LineOf(cache + "/level") != std::to_string(level)) continue;
    return ProcessorsInList(LineOf(cache + "/shared_cpu_list"));
  }
}
#endif

}  // namespace

int64_t CacheBytesOfThread(int level) {
  const int64_t otherwise = level == 1 ? 32 << 10 : 512 << 10;  // where the system does not tell
#if defined(__linux__) && defined(_SC_LEVEL1_DCACHE_SIZE)
  const int64_t bytes = sysconf(level == 1 ? _SC_LEVEL1_DCACHE_SIZE : _SC_LEVEL2_CACHE_SIZE);
  return (bytes > 0 ? bytes : otherwise) / Sharers(level);
#else
  return otherwise;
#endif
}

int64_t ProcessorsInList(const std::string& list) {
  int64_t count = 0;
  for (const char* at = list.c_str(); *at >= '0' && *at <= '9';) {
    char* end = nullptr;
    const int64_t first = std::strtoll(at, &end, 10);
    const int64_t last = *end == '-' ? std::strtoll(end + 1, &end, 10) : first;
    count += std::max<int64_t>(0, last - first + 1);
    at = *end == ',' ? end + 1 : end;
  }
  return std::max<int64_t>(1, count);
}

}  // namespace jsc
