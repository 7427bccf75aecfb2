// Dense layers of one row of x (dense_row.cuh), which Dense of kernels.h takes where it can.
#ifndef JSC_CUDA_DENSE_ROW_H_
#define JSC_CUDA_DENSE_ROW_H_

#include "kernels.h"

namespace jsc {

// Whether DenseRow takes a call on this device: one row for each kernel, whose rows, and x, start 16 bytes each.
bool IsDenseRow(const ConvCall& call, const DeviceInfo& device);

ffi::Error DenseRow(const ConvCall& call, const DeviceInfo& device, cudaStream_t stream);

// What a chain knows of the row that a dense layer of its end reads.
struct ChainRow {
  int64_t averaged;   // pixels of a map, [averaged, C], whose average the row is; 1 for a row that is there
  bool behind_dense;  // another dense layer wrote it
};

// The same as a kernel of a chain, for one row.
ffi::Error DenseRowInChain(const ConvCall& call, const ChainRow& row, const DeviceInfo& device, cudaStream_t stream);

}  // namespace jsc

#endif  // JSC_CUDA_DENSE_ROW_H_
