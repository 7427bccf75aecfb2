// The operation as the native kernels see it, shared by cpu/ and cuda/.
//
//   out = pool(activation(conv(x, kernel) + bias + residual))
//
// ConvArgs holds static sizes only; it is plain data, so a CUDA kernel can take it by value. MakeConvCall decodes the
// attributes of the custom call, checks every buffer against them and says in one sentence what does not fit: a
// handler that got its ConvCall from here can trust each size.
#ifndef JSC_CPU_CONV_ARGS_H_
#define JSC_CPU_CONV_ARGS_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jsc {

namespace ffi = xla::ffi;

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
  int64_t features;        // K
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

// When a kernel runs. CUDA only: which of two does, by a density that only the device knows (on a CPU XLA branches),
// and how it stands to the kernel in front of it on the stream.
struct Gate {
  const int32_t* nonzeros = nullptr;  // [parts, 2] (non-zeros, elements) of parts of x; null: the kernel runs
  int parts = 0;
  float threshold = 0.f;        // of the density, non-zeros / elements
  bool above = false;           // runs where the density is above the threshold, else where it is at most that
  bool overlaps = false;        // launched to start before the kernel in front of it is done
  bool in_chain = false;        // waits for the kernel in front before it reads x, and then lets the next one start
  const void* ahead = nullptr;  // in a chain: filters that the next kernel reads, to be brought to the L2 cache
  uint32_t ahead_bytes = 0;     // in whole 16 bytes
  bool x_is_older = false;      // in a chain: the kernel in front does not write x, so it may be read at once
};

// The tile that a convolution by warpgroup products is to have (cuda/warpgroup_plan.h), where it has such a plan. CUDA
// only.
struct TileChoice {
  int filters = 0;  // 0: the model chooses
  int pixels = 0;
  bool patch = false;
  int splits = 0;
};

// What a kernel takes of a GPU.
struct Footprint {
  int64_t blocks = 0;                              // 0: there is no kernel
  int64_t shared = 0, registers = 0, threads = 0;  // of a block
};

// Small parts (cuda/small_parts.cuh) in a chain of float32 at HIGHEST; each null where there are none.
struct SmallParts {
  const void* x = nullptr;  // [N, H, W, C]; kernels that want them make them where they are not in memory
  void* out = nullptr;      // [N, Ho, Wo, K], to be written
  bool* written = nullptr;  // where the launch says whether its kernel writes them, which not all do
};

constexpr int kCountRows = 64;  // rows of counts that a CUDA kernel writes; PARTS in jax_sparse_conv/_src/primitive/sampling.py

// One call: sizes, buffers and their one element type.
struct ConvCall {
  ConvArgs args;
  ffi::DataType dtype;  // of every buffer
  bool may_be_dense;    // a kernel that skips nothing may run where it is expected to be faster
  const void* x;        // [N, H, W, C]
  const void* kernel;   // [S, kh, kw, C / groups, K]
  // The kernel as pixel_kernel.h reads it, or absent: [S, groups, blocks, C / groups, kh * kw, PackedBlock], the output
  // channels that fill the last block zero.
  const void* packed = nullptr;
  const void* bias = nullptr;      // [S, K] or absent
  const void* residual = nullptr;  // [N, Ho, Wo, K] or absent
  void* out;                       // [N, Ho, Wo, K]
  int32_t* counts = nullptr;       // [kCountRows, 2] (non-zeros, elements) of parts of out, to be written; or null
  Gate gate;
  Footprint* in_front = nullptr;  // in a chain: of the kernel in front, and after the launch of this call's
  SmallParts small;
  TileChoice tile;
};

// Output channels of one block of a packed kernel.
int64_t PackedBlock(const ConvArgs& args);

// `optional` holds bias, residual and packed kernel, each only where its attribute says so. Attributes (all int64,
// numpy arrays or scalars on the Python side): stride[2], padding[4] as low, high of H, then of W, dilation[2], groups,
// has_bias, has_residual, has_packed, may_be_dense, activation, pool, window[2], window_stride[2], window_padding[4],
// precision.
ffi::ErrorOr<ConvCall> MakeConvCall(ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::RemainingArgs optional,
                                    ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CPU_CONV_ARGS_H_
