#include "cpu/core/machine_limits.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "cpu/ffi/host.h"

namespace jsc {
namespace {

constexpr int kRepeats = 7;

// Seconds until each of `threads` threads has run body(thread), the best of some.
template <typename Body>
double BestSeconds(int64_t threads, const Body& body) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const Clock::time_point start = Clock::now();
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back([&body, i] { body(i); });
    body(0);
    for (std::thread& other : others) other.join();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

}  // namespace

Limits MeasureLimits() {
  constexpr int64_t kRounds = 2000000, kCacheBytes = 16 << 20, kMemoryBytes = 256 << 20;
  const Isa& isa = CurrentIsa();
  Limits limits{};
  limits.threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const double threads = static_cast<double>(limits.threads);
  const double lanes = static_cast<double>(isa.vector_bytes) / sizeof(float);
  limits.flops = threads * 2 * lanes * kChains * kRounds /
                 BestSeconds(limits.threads, [&](int64_t) { isa.multiply_adds(kRounds); });
  constexpr int64_t kPasses = kRounds / (kLimitEntries * kLimitTaps) * kChains,
                    kRowBytes = kLimitEntries * kLimitTaps * 64;
  alignas(64) static const char rows[kRowBytes] = {};
  limits.loaded_flops = threads * 2 * lanes * kLimitEntries * kLimitTaps * kPasses /
                        BestSeconds(limits.threads, [&](int64_t) { isa.loaded_multiply_adds(rows, kPasses); });
  const std::vector<char> memory(limits.threads * kMemoryBytes, 1);
  const auto rate = [&](int64_t bytes) {
    return threads * static_cast<double>(bytes) /
           BestSeconds(limits.threads, [&](int64_t thread) { isa.read(memory.data() + thread * kMemoryBytes, bytes); });
  };
  limits.cache_bytes = rate(kCacheBytes);
  limits.memory_bytes = rate(kMemoryBytes);
  return limits;
}

}  // namespace jsc
