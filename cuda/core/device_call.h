// A call as CUDA kernels have it: what both platforms share, and what a launch on a GPU adds.
#ifndef JSC_CUDA_CORE_DEVICE_CALL_H_
#define JSC_CUDA_CORE_DEVICE_CALL_H_

#include <cstdint>

#include "native/call.h"

namespace jsc {

// When a kernel runs: which of two does, by a density that only the device knows, and how it stands to the kernel in
// front of it on the stream.
struct Gate {
  const int32_t* nonzeros = nullptr;  // [rows, 2] (non-zeros, elements) of parts of x; null: the kernel runs
  int rows = 0;
  float threshold = 0.f;        // of the density, non-zeros / elements
  bool above = false;           // runs where the density is above the threshold, else where it is at most that
  bool overlaps = false;        // launched to start before the kernel in front of it is done
  bool in_chain = false;        // waits for the kernel in front before it reads x, and then lets the next one start
  const void* ahead = nullptr;  // in a chain: weights that the next kernel reads, to be brought to the L2 cache
  uint32_t ahead_bytes = 0;     // in whole 16 bytes
  bool x_is_older = false;      // in a chain: the kernel in front does not write x, so it may be read at once
};

// Kernel families of convolutions, as the attribute `candidate` numbers them
// (jax_sparse_conv/_src/dispatch/planner.py).
enum class Family : int { kByModel, kFewChannels, kSplitKChannels, kGrouped, kWgmma, kMma, kPerOutput, kEcr };

constexpr int kTileNumbers = 7;  // of a candidate, at most

// The kernel that a call is told to have, with the numbers that cut it into tiles; by default the models choose. What
// the numbers are is beside each planner's Visit function.
struct Candidate {
  Family family = Family::kByModel;
  int tile[kTileNumbers] = {};
};

// What a kernel takes of a GPU.
struct Footprint {
  int64_t blocks = 0;                              // 0: there is no kernel
  int64_t shared = 0, registers = 0, threads = 0;  // of a block
};

// Low parts (core/low_parts.cuh) in a chain of float32 at HIGHEST; each null where there are none.
struct LowParts {
  const void* x = nullptr;  // [N, H, W, C]; kernels that want them make them where they are not in memory
  void* out = nullptr;      // [N, Ho, Wo, K], to be written
  bool* written = nullptr;  // where the launch says whether its kernel writes them, which not all do
};

// Rows of counts that a CUDA kernel writes; also in jax_sparse_conv/_src/primitive/sampling.py.
constexpr int kCountRows = 64;

struct DeviceCall : ConvCall {
  DeviceCall() = default;
  explicit DeviceCall(const ConvCall& call) : ConvCall(call) {}

  int32_t* counts = nullptr;  // [kCountRows, 2] (non-zeros, elements) of parts of out, to be written; or null
  Gate gate;
  Footprint* in_front = nullptr;  // in a chain: of the kernel in front, and after the launch of this call's
  LowParts low;
  Candidate candidate;
};

}  // namespace jsc

#endif  // JSC_CUDA_CORE_DEVICE_CALL_H_
