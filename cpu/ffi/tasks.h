// Tasks of one call on the CPU: what its dtype is called in the tables of kernels, the memory that each thread keeps,
// and a run of all tasks.
#ifndef JSC_CPU_FFI_TASKS_H_
#define JSC_CPU_FFI_TASKS_H_

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "cpu/core/isa.h"
#include "cpu/core/parallel.h"
#include "native/decode.h"

namespace jsc {

// -1 for an element type without kernels: the only dtype dispatch of the CPU side.
int IndexOf(DataType dtype);

ffi::Error UnsupportedDtype();

// Memory that is kept between calls and grown when more is needed.
class KeptMemory {
 public:
  // `kept` is false where the memory is not as it was left; null when there is none.
  char* Take(int64_t bytes, bool& kept);

 private:
  std::unique_ptr<char, decltype(&std::free)> data_{nullptr, &std::free};
  int64_t size_ = 0;
};

// That of a thread's tasks.
char* Scratch(int64_t bytes, bool& kept);

// Fraction of non-zeros, from up to 128 runs of 16 elements spread over them, a quarter of few: runs, because each
// place costs a cache miss. Of none 1.
double SampledDensity(const Isa& isa, int dtype, const void* elements, int64_t count);

// Runs make(taken, previous) until all of [0, count) are done: each task, or those that are taken together, says how
// much memory it needs, then runs in it. `previous` is the task that the same thread ran just before, if the memory is
// still as it left it, else -1.
template <typename MakeTask, typename Task>
ffi::Error RunTasks(Team& team, int64_t threads, int64_t count, const MakeTask& make, int64_t (*bytes)(const Task&),
                    void (*run)(const Task&, char*), Together together = {0, 1}) {
  std::atomic<int64_t> missing{0};
  team.Run(threads, count, together, [&](Taken taken, int64_t previous) {
    Task task = make(taken, previous);
    const int64_t needed = bytes(task);
    bool kept = true;
    char* scratch = Scratch(needed, kept);
    if (!kept) task = make(taken, -1);
    if (scratch == nullptr && needed > 0) {
      missing = needed;
    } else {
      run(task, scratch);
    }
  });
  if (missing == 0) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "a convolution task needs " + std::to_string(missing.load()) + " bytes of scratch memory");
}

}  // namespace jsc

#endif  // JSC_CPU_FFI_TASKS_H_
