// Room: dense layers on sparse rows, kernels that read only the kernel rows of non-zero inputs. rows.cu: several rows,
//   any GPU. row.*: one row, on Hopper, also as the end of a fused chain.
// May change: tiles and the stream, while the order of sums is fixed. Details: docs/design/kernels/matvec.md.
// Tests: tests/api/test_dense.py, tests/fusion/test_fusion_rows.py.
#ifndef JSC_CUDA_SPARSE_MATVEC_ROW_H_
#define JSC_CUDA_SPARSE_MATVEC_ROW_H_

#include "cuda/ffi/kernels.h"

namespace jsc {

// Whether DenseRow takes a call on this device: one row for each kernel, whose rows, and x, start 16 bytes each.
bool IsDenseRow(const DeviceCall& call, const DeviceInfo& device);

Error DenseRow(const DeviceCall& call, const DeviceInfo& device, cudaStream_t stream);

// What a chain knows of the row that a dense layer of its end reads.
struct ChainRow {
  int64_t averaged;   // pixels of a map, [averaged, C], whose average the row is; 1 for a row that is there
  bool behind_dense;  // another dense layer wrote it
};

// The same as a kernel of a chain, for one row.
Error DenseRowInChain(const DeviceCall& call, const ChainRow& row, const DeviceInfo& device, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_SPARSE_MATVEC_ROW_H_
