// A dense block of DenseNet-BC (Huang et al. 2017, section 3) as one call: every layer reads the block's map where it
// lies and writes its channels behind those of the layers before it. What the layers are to each other: see
// jax_sparse_conv/_src/fusion/dense_blocks.py. Details: docs/design/kernels/dense_block.md.
#ifndef JSC_CPU_FFI_DENSE_BLOCK_H_
#define JSC_CPU_FFI_DENSE_BLOCK_H_

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jsc {

struct BlockOnCpu {
  int64_t images, size[2], channels;  // of x
  int64_t layers, middle, growth;     // M and G
  int64_t out_channels;               // K; 0 without a transition

  int64_t all() const { return channels + layers * growth; }  // of the map
};

// Why a block of float32 or, in pairs, bfloat16 cannot be one call, or nothing.
std::string WhyNotOnCpu(const BlockOnCpu& block, bool pairs);

// Buffers, all float32 or all bfloat16:
//   x [N, H, W, C0]
//   parameters, one array: of each layer scale [C], shift [C], kernel1, bias1 [M] and kernel2, of a transition scale,
//     shift and kernel; kernels as packed ones lie (native/call.h). In bfloat16 scale and shift are two rows each, [2,
//     C], to be added, and offsets are even
//   out: the map [N, H, W, C0 + layers * G] or, with a transition, [N, H / 2, W / 2, K]
//   memory: the M channels of a layer [N, H, W, M], in bfloat16 what a layer reads, in the map's shape, and, with a
//     transition, the map
// Attributes: layers, middle (M), growth (G), out_channels (K; 0 without a transition), and offsets[], the elements in
// front of each parameter.
xla::ffi::Error DenseBlock(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer parameters,
                           xla::ffi::Result<xla::ffi::AnyBuffer> out, xla::ffi::RemainingRets memory,
                           xla::ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CPU_FFI_DENSE_BLOCK_H_
