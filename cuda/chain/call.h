// Room: fused chains, many layers in one custom call. This header has the call as data: values (operands, results and
// places in the workspace) and the layers that make one from another. All is checked before anything trusts it. What
// can be a layer is in limits.h. May change: how layers are launched; attributes change together with
// jax_sparse_conv/_src/fusion/chains.py. Details: docs/design/kernels/chain.md. Tests: tests/fusion/test_chains.py,
// tests/fusion/test_chain_rules.py, tests/fusion/test_network_chains.py.
#ifndef JSC_CUDA_CHAIN_CALL_H_
#define JSC_CUDA_CHAIN_CALL_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/core/device_call.h"

namespace jsc {

enum class ChainKind : int { kConv = 0, kMaxPool = 1, kDense = 2 };

struct ChainValue {
  void* data;       // [N, H, W, C]; null: nowhere
  int64_t size[4];  // N, H, W, C
  void* low;        // room for its low parts (core/low_parts.cuh), or null
};

struct ChainStep {
  ChainKind kind;
  ChainValue x, out;     // [N, H, W, C] and [N, Ho, Wo, K]
  const void* kernel;    // [kh, kw, C / groups, K] of a convolution, [C, K] of a dense layer
  const void* bias;      // [K] or null
  const void* residual;  // [N, Ho, Wo, K] or null
  int64_t window[2], stride[2], pad_low[2], pad_high[2], dilation[2];
  bool relu;
  int64_t groups;
  Candidate tile;  // of a convolution
};

struct ChainCall {
  DataType dtype;  // of every value, kernel and bias
  bool precise;    // float32 as float32 rather than as TF32
  std::vector<ChainStep> steps;
};

constexpr int kValueFields = 7, kStepFields = 18, kTileFields = 4, kPackedFields = 7, kPackedAlignment = 64;

// The tile of these kTileFields: of none where they are zeros, or nothing where there is no such tile.
std::optional<Candidate> ReadTile(const int64_t* fields);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_CALL_H_
