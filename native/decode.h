// From XLA's FFI to checked calls (native/call.h), for handlers.
#ifndef JSC_NATIVE_DECODE_H_
#define JSC_NATIVE_DECODE_H_

#include "native/call.h"
#include "xla/ffi/api/ffi.h"

namespace jsc {

namespace ffi = xla::ffi;

inline Error::operator ffi::Error() const { return {static_cast<ffi::ErrorCode>(code_), message_}; }

inline DataType TypeOf(ffi::AnyBuffer buffer) { return static_cast<DataType>(buffer.element_type()); }

// The sizes of a kernel's gradient [chunks, kh, kw, C / groups, K] from x [N, H, W, C] and cotangent [N, Ho, Wo, K].
// attributes: stride[2], padding[4], dilation[2] and groups, as of a call.
ffi::ErrorOr<ConvArgs> MakeKernelGradientArgs(ffi::AnyBuffer x, ffi::AnyBuffer cotangent, ffi::AnyBuffer kernel,
                                              ffi::Dictionary attributes);
// Whether the CPU's kernel has room for them (cpu/training/kernel_gradient.h).
ffi::Error CheckKernelGradientOnCpu(const ConvArgs& args);

// The sizes of a derivative of a max pool: of x [N, H, W, C], of the pool's result [N, Ho, Wo, C] and, as `size`,
// `out_size` and `window`, of the pool. attributes: window[2], window_stride[2], window_padding[4].
ffi::ErrorOr<ConvArgs> MakeMaxPoolArgs(ffi::AnyBuffer x, ffi::AnyBuffer pooled, ffi::Dictionary attributes);

// `optional` holds bias, residual and packed kernel, each only where its attribute says so. Attributes are int64, numpy
// arrays or scalars on the Python side: stride[2], padding[4] as low, high of H, then of W, dilation[2], groups,
// has_bias, has_residual, has_packed, may_be_dense, activation, pool, window[2], window_stride[2], window_padding[4],
// precision.
ffi::ErrorOr<ConvCall> MakeConvCall(ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::RemainingArgs optional,
                                    ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_NATIVE_DECODE_H_
