// What batch norms in training are made of (Ioffe and Szegedy 2015, algorithm 1): sums of each channel, and a scale and
// a shift of each with the residual and the ReLU behind them. Each call is one pass over the map. Sums do not depend on
// threads. Details: docs/design/kernels/cpu.md.
#ifndef JSC_CPU_FFI_CHANNELS_H_
#define JSC_CPU_FFI_CHANNELS_H_

#include "xla/ffi/api/ffi.h"

namespace jsc {

// Maps (x, residual, y and their cotangents) are [..., C] of one dtype; everything else is [C], float64 for float64 and
// else float32.

// Over all axes but the last: sums of x, of x * x, and of (x - mean)^2.
xla::ffi::Error ChannelSums(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x,
                            xla::ffi::Result<xla::ffi::AnyBuffer> sums, xla::ffi::Result<xla::ffi::AnyBuffer> squares,
                            xla::ffi::Result<xla::ffi::AnyBuffer> spread);

// cotangent + of_sums + 2 * of_squares * x + 2 * of_spread * (x - mean)
xla::ffi::Error ChannelSumsGradient(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer mean,
                                    xla::ffi::AnyBuffer cotangent, xla::ffi::AnyBuffer of_sums,
                                    xla::ffi::AnyBuffer of_squares, xla::ffi::AnyBuffer of_spread,
                                    xla::ffi::Result<xla::ffi::AnyBuffer> x_gradient);

// y = relu((x - center) * scale + shift + residual), without a ReLU where `relu` is 0.
xla::ffi::Error ChannelAffine(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer center,
                              xla::ffi::AnyBuffer scale, xla::ffi::AnyBuffer shift, xla::ffi::RemainingArgs residual,
                              xla::ffi::Result<xla::ffi::AnyBuffer> y, int64_t relu);

// Its gradients; that of center is -scale * of_shift. With y, the residual's is one of them: then there is a ReLU.
// Without a ReLU the residual's is the cotangent.
xla::ffi::Error ChannelAffineGradient(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer center,
                                      xla::ffi::AnyBuffer scale, xla::ffi::AnyBuffer shift,
                                      xla::ffi::AnyBuffer cotangent, xla::ffi::RemainingArgs y,
                                      xla::ffi::Result<xla::ffi::AnyBuffer> x_gradient,
                                      xla::ffi::Result<xla::ffi::AnyBuffer> of_scale,
                                      xla::ffi::Result<xla::ffi::AnyBuffer> of_shift,
                                      xla::ffi::RemainingRets residual_gradient, int64_t relu);

// Of a bias: sums of the cotangent over all axes but the last. With y, the result of a ReLU, those of the cotangent
// with the ReLU's zeros, which is the second result.
xla::ffi::Error ChannelMaskedGradient(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer cotangent,
                                      xla::ffi::RemainingArgs y, xla::ffi::Result<xla::ffi::AnyBuffer> sums,
                                      xla::ffi::RemainingRets masked);

}  // namespace jsc

#endif  // JSC_CPU_FFI_CHANNELS_H_
