#include "cpu/ffi/tasks.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jsc {

int IndexOf(DataType dtype) {
  switch (dtype) {
    case DataType::F32:
      return kFloat32;
    case DataType::BF16:
      return kBFloat16;
    case DataType::F16:
      return kFloat16;
    case DataType::F64:
      return kFloat64;
    default:
      return -1;
  }
}

ffi::Error UnsupportedDtype() {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "x must be float32, bfloat16, float16 or float64");
}

char* KeptMemory::Take(int64_t bytes, bool& kept) {
  kept = size_ >= bytes;
  if (!kept) {
    data_.reset();
    size_ = 0;
    constexpr int64_t kPage = int64_t{2} << 20;  // huge pages, where the system has them: fewer address look-ups
    const int64_t page = bytes >= kPage / 2 ? kPage : 4096;
    const int64_t rounded = (bytes + page - 1) / page * page;
    data_.reset(static_cast<char*>(std::aligned_alloc(page, rounded)));
    if (data_ != nullptr) size_ = rounded;
#if defined(__linux__)
    if (data_ != nullptr && page == kPage) madvise(data_.get(), rounded, MADV_HUGEPAGE);
#endif
  }
  return data_.get();
}

char* Scratch(int64_t bytes, bool& kept) {
  static thread_local KeptMemory memory;
  return memory.Take(bytes, kept);
}

double SampledDensity(const Isa& isa, int dtype, const void* elements, int64_t count) {
  constexpr int64_t kRuns = 128, kShare = 4;
  const int64_t step = std::max(kShare * kCountRun, count / kRuns) | 1;  // odd: all channels have their turn
  const int64_t runs = count < kCountRun ? 0 : (count - kCountRun) / step + 1;
  if (runs == 0) return 1;
  return static_cast<double>(isa.count[dtype](elements, runs, step)) / static_cast<double>(runs * kCountRun);
}

}  // namespace jsc
