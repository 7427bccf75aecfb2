// How much of a cache a thread has. Two processors on one core, as hyperthreads are, have the core's caches in parts.
// A plan that takes all of L1 for each thread then waits for L2 at every multiply-add: the pixel loop took up to 2.2
// times as long. Which processors the process may use does not matter, so that results do not depend on it.
#ifndef JSC_CPU_CORE_CACHES_H_
#define JSC_CPU_CORE_CACHES_H_

#include <cstdint>
#include <string>

namespace jsc {

// A thread's part of the data cache of level 1 or 2, of the machine's first processor.
int64_t CacheBytesOfThread(int level);

// How many processors a list of Linux names, "0-3,8"; 1 where it is none.
int64_t ProcessorsInList(const std::string& list);

}  // namespace jsc

#endif  // JSC_CPU_CORE_CACHES_H_
