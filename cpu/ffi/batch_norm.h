// Batch norm in training (Ioffe and Szegedy 2015, algorithm 1) with the residual and the ReLU behind it, and its
// gradient: two passes over the map each, whose sums do not depend on threads. Details: docs/design/kernels/cpu.md.
#ifndef JSC_CPU_FFI_BATCH_NORM_H_
#define JSC_CPU_FFI_BATCH_NORM_H_

#include "xla/ffi/api/ffi.h"

namespace jsc {

// x, residual and y [..., C] of one dtype; scale, bias, mean and variance [C], float64 for float64 and else float32.
//   y = relu((x - mean) / sqrt(variance + epsilon) * scale + bias + residual)
// Attributes: epsilon (float64) and relu (int64, 0 or 1).
xla::ffi::Error BatchNorm(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer scale,
                          xla::ffi::AnyBuffer bias, xla::ffi::RemainingArgs residual,
                          xla::ffi::Result<xla::ffi::AnyBuffer> y, xla::ffi::Result<xla::ffi::AnyBuffer> mean,
                          xla::ffi::Result<xla::ffi::AnyBuffer> variance, xla::ffi::Dictionary attributes);

// From cotangents, which are as what they belong to. With y, the residual's gradient is a result: then there is a ReLU.
// A residual without a ReLU is none of this call's concern.
xla::ffi::Error BatchNormGradient(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer scale,
                                  xla::ffi::AnyBuffer bias, xla::ffi::AnyBuffer mean, xla::ffi::AnyBuffer variance,
                                  xla::ffi::AnyBuffer cotangent, xla::ffi::AnyBuffer of_mean,
                                  xla::ffi::AnyBuffer of_variance, xla::ffi::RemainingArgs y,
                                  xla::ffi::Result<xla::ffi::AnyBuffer> x_gradient,
                                  xla::ffi::Result<xla::ffi::AnyBuffer> scale_gradient,
                                  xla::ffi::Result<xla::ffi::AnyBuffer> bias_gradient,
                                  xla::ffi::RemainingRets residual_gradient, xla::ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CPU_FFI_BATCH_NORM_H_
