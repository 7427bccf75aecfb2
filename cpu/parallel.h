// Runs independent tasks on XLA's own thread pool.
//
// The caller may itself be a thread of that pool, so it never waits for a task that has not started: it takes work from
// the same counter as its helpers and, once that is used up, waits only for helpers that are still inside a task. A
// helper that starts later finds the work closed and touches nothing but the shared counter.
#ifndef JSC_CPU_PARALLEL_H_
#define JSC_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jsc {

// Calls body(index, previous) once for each index in [0, count), on at most `threads` threads; `previous` is the index
// that the same thread ran just before, with nothing else in between, or -1. The body must not throw.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t threads, int64_t count, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> running{0};
    std::atomic<bool> closed{false};
  };
  const auto work = [count, &body](Shared& shared) {
    int64_t previous = -1;
    for (int64_t i = shared.next++; i < count; i = shared.next++) {
      body(i, previous);
      previous = i;
    }
  };
  const int64_t helpers = std::min(threads, count) - 1;
  auto shared = std::make_shared<Shared>();
  for (int64_t i = 0; i < helpers; ++i) {
    // `work` is copied; the body it points to is alive while the work is not closed or a helper is counted as running.
    pool.Schedule([shared, work] {
      ++shared->running;
      if (!shared->closed) work(*shared);
      --shared->running;
    });
  }
  work(*shared);
  shared->closed = true;
  while (shared->running != 0) std::this_thread::yield();
}

}  // namespace jsc

#endif  // JSC_CPU_PARALLEL_H_
