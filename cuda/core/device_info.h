// What planners and launches have to know of a GPU, and the arithmetic that they share.
#ifndef JSC_CUDA_CORE_DEVICE_INFO_H_
#define JSC_CUDA_CORE_DEVICE_INFO_H_

#include <cstdint>

namespace jsc {

constexpr int kWarp = 32;
constexpr int kMaxSplits = 16;  // blocks that split the reduction of a tile: the largest cluster

struct DeviceInfo {
  const char* error;  // why the device could not be read, or null
  int multiprocessors;
  int shared_memory;  // bytes a block may ask for
  int shared_memory_sm;
  bool tensor_maps;                // the driver can describe tensors to TMA
  bool fast_tf32;                  // tensor cores multiply TF32 at more than three times the rate of FFMA
  bool wgmma;                      // Hopper's wgmma products, which this build has code for
  double clock_hz;                 // of the SMs
  double memory_bytes_per_second;  // of device memory
  int clusters[kMaxSplits + 1];    // of n blocks, each with an SM to itself, that run at once; 0: no clusters
};

// The device of ordinal `device`, read once per device.
const DeviceInfo& GetDeviceInfo(int device);

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The least multiple of b that is not below a.
inline int64_t Whole(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

// Division by a number that the host knows: a multiplication and a shift. For numerators in [0, 2^31).
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
};

// How partial sums of blocks that share outputs but not input channels come together; always in a fixed order.
enum class Reduction : int { kNone = 0, kCluster = 1, kWorkspace = 2 };

}  // namespace jsc

#endif  // JSC_CUDA_CORE_DEVICE_INFO_H_
