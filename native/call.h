// Room: the call as data, shared by cpu/ and cuda/. What CUDA alone needs of a call is in cuda/core/device_call.h.
//   out = pool(activation(conv(x, kernel) + bias + residual))
// ConvArgs holds static sizes only. It is plain data, so a CUDA kernel can take it by value. MakeConvCall decodes the
// custom call's attributes and checks every buffer against them. So a handler can trust each size of its ConvCall. May
// change: with the attributes that jax_sparse_conv/_src/primitive/lowering.py writes. Tests: tests/cuda/test_native.py.
#ifndef JSC_NATIVE_CALL_H_
#define JSC_NATIVE_CALL_H_

#include <cstdint>

#include "native/types.h"

namespace jsc {

enum class Activation : int64_t { kNone = 0, kRelu = 1 };
enum class Pool : int64_t { kNone = 0, kMax = 1, kAverage = 2 };
enum class Precision : int64_t { kDefault = 0, kHigh = 1, kHighest = 2 };  // jax.lax.Precision

struct ConvArgs {
  int64_t images;          // N
  int64_t size[2];         // H, W of x
  int64_t channels;        // C
  int64_t stacks;          // S kernels; image n is convolved with kernel n / (N / S)
  int64_t kernel_size[2];  // kh, kw
  int64_t group_channels;  // C / groups
  int64_t out_channels;    // K
  int64_t groups;          // output channel k reads input channels [g * C/groups, ...), g = k / (K / groups)
  int64_t stride[2];
  int64_t pad_low[2];  // zeros in front of row 0 and column 0; may be negative (crops)
  int64_t dilation[2];
  int64_t conv_size[2];  // height and width of the convolution's result, before pooling
  Activation activation;
  Pool pool;
  int64_t window[2];  // of the pool; 1, 1 without one
  int64_t window_stride[2];
  int64_t window_pad_low[2];  // max pooling pads with -inf; average pooling with zeros that count in the mean
  int64_t out_size[2];        // height and width of out; conv_size without a pool
  bool has_bias;              // bias [S, K]
  bool has_residual;          // residual [N, conv_size, K], only without a pool
  Precision precision;        // of float32 products, where a kernel has a choice
};

// What x is read through, if there is a scale: relu(scale * x + shift) and, of windows of `window` pixels a side that
// do not overlap, the average. x is [N, *size, C] then. For dense blocks of float32 on a CPU, which have a packed
// kernel.
struct Scaled {
  const void* scale = nullptr;  // [C / groups]
  const void* shift = nullptr;  // [C / groups]
  int64_t window = 1;
  int64_t size[2] = {};
};

// One call: sizes, buffers and their one element type.
struct ConvCall {
  ConvArgs args;
  DataType dtype;      // of every buffer
  bool may_be_dense;   // a kernel that skips nothing may run where it is expected to be faster
  const void* x;       // [N, H, W, C]
  const void* kernel;  // [S, kh, kw, C / groups, K]
  // The kernel as cpu/loops/pixel_kernel.h reads it, or absent: [S, groups, blocks, C / groups, kh * kw, PackedBlock],
  // the output channels that fill the last block zero. In bfloat16 [.., C / groups / 2, kh * kw, PackedBlock, 2].
  const void* packed = nullptr;
  bool lone_channel = false;  // of a call of pairs of channels (cpu/core/dtypes.h): the last one has but one
  Scaled scaled;
  const void* bias = nullptr;      // [S, K] or absent
  const void* residual = nullptr;  // [N, Ho, Wo, K] or absent
  void* out;                       // [N, Ho, Wo, K]
  int64_t out_stride;              // elements from one pixel of out to the next: K, more within a wider map
};

// Output channels of one block of a packed kernel, of pairs of channels or not.
int64_t PackedBlock(const ConvArgs& args, bool pairs);

}  // namespace jsc

#endif  // JSC_NATIVE_CALL_H_
