// Runs independent tasks on XLA's own thread pool.
//
// The caller may itself be a thread of that pool, so it never waits for a task that has not started. It takes work from
// the same counter as its helpers. Once that is used up, it waits only for helpers that are still inside a task. A
// helper that starts later finds the work closed and touches nothing but the shared counters.
//
// Tasks come in ranges, one for each thread, and the rest of another's once its own is done. Neighbouring tasks share
// lists and follow each other in the kernel. A thread takes half of what is left of its range at once. So tasks can be
// done together and few are left to wait for at the end. What a late helper leaves is taken task by task.
//
// Helpers take some 3 to 10 microseconds to wake up. Who knows that there will be work invites them first and finds out
// meanwhile what the work is. A helper that is there before it spins, and so it does between the rounds of one team.
#ifndef JSC_CPU_CORE_PARALLEL_H_
#define JSC_CPU_CORE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/core/spread.h"
#include "xla/ffi/api/ffi.h"

namespace jsc {

// Tasks [begin, end).
struct Taken {
  int64_t begin, end;
};

// Which neighbouring tasks may be taken at once: up to `most`, and none on both sides of a multiple of `period`.
struct Together {
  int64_t most, period;
};

// Tasks [begin, end) of one thread: it takes them from the front; others, when theirs are done, from the back.
class alignas(64) TaskRange {
 public:
  static constexpr int64_t kMost = int64_t{1} << 32;  // tasks

  void Set(int64_t begin, int64_t end) { ends_ = static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end); }

  // Up to half of the tasks, those at the front; empty where there are none left.
  Taken TakeFirst(Together together) {
    uint64_t ends = ends_;
    while (Size(ends) > 0) {
      const int64_t begin = static_cast<int64_t>(ends >> 32);
      const int64_t half = (Size(ends) + 1) / 2, room = together.period - begin % together.period;
      const int64_t count = std::min(std::min(half, room), together.most);
      if (ends_.compare_exchange_weak(ends, ends + (static_cast<uint64_t>(count) << 32))) return {begin, begin + count};
    }
    return {0, 0};
  }

  // The one at the back.
  Taken TakeLast() {
    uint64_t ends = ends_;
    while (Size(ends) > 0) {
      const int64_t last = static_cast<int64_t>((ends & 0xffffffffu) - 1);
      if (ends_.compare_exchange_weak(ends, ends - 1)) return {last, last + 1};
    }
    return {0, 0};
  }

  int64_t size() const { return Size(ends_); }

 private:
  static int64_t Size(uint64_t ends) {
    return static_cast<int64_t>(ends & 0xffffffffu) - static_cast<int64_t>(ends >> 32);
  }

  std::atomic<uint64_t> ends_{0};
};

class Team {
 public:
  explicit Team(xla::ffi::ThreadPool& pool) : pool_(pool), shared_(std::make_shared<Shared>()) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() { Close(); }

  // That the pool has.
  int64_t threads() const { return std::max<int64_t>(1, pool_.num_threads()); }

  // Has `helpers` threads come; what they are to do follows soon, or nothing does.
  void Invite(int64_t helpers) {
    if (invited_ == 0 && helpers > 0) shared_->cores.Take();
    for (; invited_ < helpers; ++invited_) {
      // A pool may run it here and now, as Eigen's does where its queue is full or a place in it is being taken. Then
      // this thread would wait for itself.
      pool_.Schedule([shared = shared_, caller = std::this_thread::get_id()] {
        if (std::this_thread::get_id() == caller) return;
        ++shared->running;
        shared->cores.Take();
        shared->Help();
        --shared->running;
      });
    }
  }

  // Calls body(taken, previous) until each index in [0, count) was taken once, on at most `threads` threads and those
  // that were invited; `previous` is the last index that the same thread ran just before, with nothing else in between,
  // or -1. The body must not throw. Threads take one index after another or, where `together.most` is above 0, each
  // goes through a part of its own first, several at a time.
  template <typename Body>
  void Run(int64_t threads, int64_t count, Together together, const Body& body) {
    shared_->count = count;
    shared_->body = &body;
    shared_->together = together;
    shared_->next = shared_->arrived = 0;
    shared_->ranges.clear();
    if (together.most > 0 && count < TaskRange::kMost) {
      shared_->Divide(std::min(std::max(threads, invited_ + 1), count));
    }
    shared_->work = [](Shared& shared, const void* work) {
      const int64_t self = shared.arrived++;
      int64_t previous = -1;
      for (Taken taken = shared.Take(self); taken.begin < taken.end; taken = shared.Take(self)) {
        (*static_cast<const Body*>(work))(taken, previous);
        previous = taken.end - 1;
      }
    };
    ++shared_->round;
    shared_->state = kOpen;
    Invite(std::min(threads, count) - 1);
    shared_->work(*shared_, &body);
    shared_->state = kPreparing;
    WaitWhile([&] { return shared_->inside != 0; });
  }

 private:
  enum State { kPreparing, kOpen, kClosed };

  struct Shared {
    // What a helper does: its part of each round that it is there for.
    void Help() {
      for (int64_t done = 0;;) {
        WaitWhile([&] { return state == kPreparing || (state == kOpen && round == done); });
        ++inside;
        const State now = state;
        if (now == kOpen) {
          done = round;
          work(*this, body);
        }
        --inside;
        if (now == kClosed) return;
      }
    }

    // Between `parts` threads.
    void Divide(int64_t parts) {
      ranges = std::vector<TaskRange>(parts);
      for (int64_t i = 0; i < parts; ++i) ranges[i].Set(i * count / parts, (i + 1) * count / parts);
    }

    // What the thread that came as number `self` does next; empty where nothing is left.
    Taken Take(int64_t self) {
      if (ranges.empty()) {
        const int64_t index = next++;
        return {index, std::min(index + 1, count)};
      }
      if (self < static_cast<int64_t>(ranges.size())) {
        const Taken own = ranges[self].TakeFirst(together);
        if (own.begin < own.end) return own;
      }
      for (;;) {
        const auto most =
            std::max_element(ranges.begin(), ranges.end(),
                             [](const TaskRange& one, const TaskRange& other) { return one.size() < other.size(); });
        if (most->size() == 0) return {0, 0};
        const Taken taken = most->TakeLast();
        if (taken.begin < taken.end) return taken;
      }
    }

    std::atomic<int64_t> next{0};
    std::atomic<int64_t> arrived{0};
    std::atomic<int64_t> running{0};  // helpers that are there
    std::atomic<int64_t> inside{0};   // those that may be at work
    std::atomic<int64_t> round{0};
    Cores cores;
    std::atomic<State> state{kPreparing};
    // Written before the state is kOpen, read after. The body is alive until no helper is counted as inside.
    int64_t count = 0;
    std::vector<TaskRange> ranges;  // none: indices are taken in turn
    Together together{0, 1};
    const void* body = nullptr;
    void (*work)(Shared&, const void* body) = nullptr;
  };

  // Spins for some 2 milliseconds before it yields: whom it waits for is on another core and about to be done, while
  // whoever else is runnable here, and be it a pool's thread that looks for work, would keep the core for a time slice.
  template <typename Condition>
  static void WaitWhile(const Condition& condition) {
    constexpr int kSpins = 50000;
    for (int i = 0; condition(); ++i) {
      if (i >= kSpins) {
        std::this_thread::yield();
        continue;
      }
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  }

  void Close() {
    shared_->state = kClosed;
    WaitWhile([&] { return shared_->running != 0; });
  }

  xla::ffi::ThreadPool& pool_;
  std::shared_ptr<Shared> shared_;
  int64_t invited_ = 0;
};

// Team::Run without an invitation.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t threads, int64_t count, const Body& body) {
  Team(pool).Run(threads, count, {0, 1}, [&body](Taken taken, int64_t previous) { body(taken.begin, previous); });
}

}  // namespace jsc

#endif  // JSC_CPU_CORE_PARALLEL_H_
