// A dense block from XLA's FFI to a checked call, for its handler.
#ifndef JSC_CUDA_DENSENET_DECODE_H_
#define JSC_CUDA_DENSENET_DECODE_H_

#include "cuda/densenet/block.h"
#include "native/decode.h"

namespace jsc {

// attributes: precision, int64, and offsets, int64 [parameters], where one operand [size] holds all of them: the
// elements in front of each, whole multiples of 128 bytes.
ffi::ErrorOr<DenseBlockCall> MakeDenseBlockCall(ffi::AnyBuffer x, ffi::RemainingArgs operands, ffi::AnyBuffer out,
                                                ffi::RemainingRets rest, ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_DECODE_H_
