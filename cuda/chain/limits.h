// What can be a layer of a chain, host code without CUDA: asked by jax_sparse_conv/_src/fusion/chain_rules.py, which
// adds where a chain pays.
#ifndef JSC_CUDA_CHAIN_LIMITS_H_
#define JSC_CUDA_CHAIN_LIMITS_H_

#include <string>
#include <vector>

#include "cuda/core/device_info.h"
#include "native/layer.h"

namespace jsc {

// Why no kernel of a chain takes a convolution, or none would be a good one, or nothing. layer and pool as ArgsOfLayer
// takes them.
std::string WhyNotInChain(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes,
                          bool precise, const DeviceInfo& device);

// A dense layer of x [rows, C] and kernels [S, C, K].
struct ChainDense {
  int64_t rows, kernels, channels, out_channels;
  bool has_residual;
};

// The same of a dense layer. shared_memory: bytes that a block may have; 0: not known yet.
std::string WhyNotInChain(const ChainDense& dense, int element_bytes, int64_t shared_memory);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_LIMITS_H_
