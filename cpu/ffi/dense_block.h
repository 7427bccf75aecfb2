// A dense block of DenseNet-BC (Huang et al. 2017, section 3) as one call: every layer reads the block's map where it
// lies and writes its channels behind those of the layers before it. What the layers are to each other: see
// jax_sparse_conv/_src/fusion/dense_blocks.py. Details: docs/design/kernels/dense_block.md.
#ifndef JSC_CPU_FFI_DENSE_BLOCK_H_
#define JSC_CPU_FFI_DENSE_BLOCK_H_

#include "xla/ffi/api/ffi.h"

namespace jsc {

// x [N, H, W, C0] and all parameters in one array, both float32. The parameters of each layer: scale [C], shift [C],
// kernel1 [1, C, 1, B1], bias1 [M] and kernel2 [blocks, M, 9, B2], and of a transition: scale, shift and kernel;
// kernels as packed ones lie (native/call.h). Results: the map [N, H, W, C0 + layers * G] or the transition's [N, H /
// 2, W / 2, K], memory for the M channels of a layer [N, H, W, M] and, with a transition, for the map. Attributes:
// layers, middle (M), growth (G), features (K; 0: no transition), and offsets[], the elements in front of each
// parameter.
xla::ffi::Error DenseBlock(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer parameters,
                           xla::ffi::Result<xla::ffi::AnyBuffer> out, xla::ffi::RemainingRets memory,
                           xla::ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CPU_FFI_DENSE_BLOCK_H_
