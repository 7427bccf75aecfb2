// Keeps the threads of one call on cores of their own.
//
// Linux wakes a thread on the core of whoever wakes it, or on its last one. Where all cores were busy a moment ago it
// does not look for a free one. Two threads then share a core for many calls while another is idle, and a call that two
// threads could do in 80 microseconds takes 200. A thread that finds its core taken moves once. The cores that it may
// run on afterwards are those it might before.
#ifndef JSC_CPU_CORE_SPREAD_H_
#define JSC_CPU_CORE_SPREAD_H_

#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <cstdint>

namespace jsc {

class Cores {
 public:
  // Marks the core that the calling thread is on; where it was marked before, the thread moves to another one first.
  void Take() {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (!Mark(core)) return;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    cpu_set_t rest = allowed;
    for (int i = 0; i < kCores; ++i) {
      if (IsMarked(i)) CPU_CLR(i, &rest);
    }
    if (CPU_COUNT(&rest) == 0 || sched_setaffinity(0, sizeof(rest), &rest) != 0) return;
    Mark(sched_getcpu());
    sched_setaffinity(0, sizeof(allowed), &allowed);
#endif
  }

 private:
  static constexpr int kCores = 1024, kWord = 64;

#if defined(__linux__)
  // Whether it was marked already.
  bool Mark(int core) {
    if (core < 0 || core >= kCores) return false;
    const uint64_t bit = uint64_t{1} << core % kWord;
    return (taken_[core / kWord].fetch_or(bit) & bit) != 0;
  }

  bool IsMarked(int core) const { return (taken_[core / kWord] >> core % kWord & 1) != 0; }
#endif

  std::atomic<uint64_t> taken_[kCores / kWord] = {};
};

}  // namespace jsc

#endif  // JSC_CPU_CORE_SPREAD_H_
