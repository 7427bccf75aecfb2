// Room: fused chains, many layers in one custom call. This header has the call as data: values (operands, results and
// places in the workspace) and the layers that make one from another. All is checked before anything trusts it. May
// change: how layers are launched; attributes change together with jax_sparse_conv/_src/fusion/chains.py. Details:
// docs/design/kernels/chain.md. Tests: tests/fusion/test_chains.py, tests/fusion/test_network_chains.py.
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
  ffi::DataType dtype;  // of every value, kernel and bias
  bool precise;         // float32 as float32 rather than as TF32
  std::vector<ChainStep> steps;
};

constexpr int kValueFields = 7, kStepFields = 18, kTileFields = 4, kPackedFields = 7, kPackedAlignment = 64;

// The tile of these kTileFields: of none where they are zeros, or nothing where there is no such tile.
std::optional<Candidate> ReadTile(const int64_t* fields);

// A dense layer has one image: x is [1, H, W, C] and out [1, 1, 1, K]. window is H and W where x is averaged over its
// pixels first, and 1 and 1 where it is taken as H W C inputs. All other numbers are those of a 1x1 convolution.
//
// Attributes, int64. precision. values [n, kValueFields]: where it is (0 operand, 1 result, 2 workspace, 3 nowhere);
// which operand or result, or at which byte; N, H, W, C; at which byte of the workspace there is room for its low
// parts, or -1, as of all but float32 at HIGHEST. layers [n, kStepFields]: kind; value of x; operand of the kernel [1,
// kh, kw, C / groups, K] or -1; operand of the bias [1, K] or -1; value of the residual or -1; value of out; then rows
// and columns of window, stride, padding (low, high of H, then of W) and dilation; 1 for a ReLU; groups. tiles [n,
// kTileFields], which may be left out: output channels and pixels of each layer's tile, 1 where it is a patch, and
// splits. Zeros stand for what the model chooses, which also runs where the tile does not fit the layer on the device.
// packed [n, kPackedFields], which may be left out: the last operand is one array [size] that holds n operands,
// numbered on from the others; of each the element at which it starts, a multiple of kPackedAlignment, its axes and
// their sizes. The last result is the workspace, uint8. A value is nowhere if a convolution hands it to the pool that
// is the next layer, inside its kernel. Such a call was lowered for a device whose kernel takes the pool
// (chain/plans.h), and is an error on others. With a place the map is written where the kernel does not take the pool.
ffi::ErrorOr<ChainCall> MakeChainCall(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                      ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_CALL_H_
