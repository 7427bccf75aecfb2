// Batch norms of dense blocks in training (Huang et al. 2017): a scale and a shift of each channel of maps that lie
// side by side, and their gradients. Details: docs/design/kernels/cpu.md.
#ifndef JSC_CPU_FFI_JOINED_CHANNELS_H_
#define JSC_CPU_FFI_JOINED_CHANNELS_H_

#include "xla/ffi/api/ffi.h"

namespace jsc {

// The affine call of maps that lie side by side, [..., C1], [..., C2], ...: y [..., C1 + C2 + ...] without a map of
// all.
xla::ffi::Error ChannelJoined(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer center, xla::ffi::AnyBuffer scale,
                              xla::ffi::AnyBuffer shift, xla::ffi::RemainingArgs maps,
                              xla::ffi::Result<xla::ffi::AnyBuffer> y, int64_t relu, int64_t sums);

// Its gradients, of each map one. The cotangents of the maps from elsewhere may follow the maps; they are added, and a
// gradient may lie where its cotangent does.
xla::ffi::Error ChannelJoinedGradient(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer center, xla::ffi::AnyBuffer scale,
                                      xla::ffi::AnyBuffer shift, xla::ffi::AnyBuffer cotangent,
                                      xla::ffi::RemainingArgs maps, xla::ffi::Result<xla::ffi::AnyBuffer> of_scale,
                                      xla::ffi::Result<xla::ffi::AnyBuffer> of_shift, xla::ffi::RemainingRets gradients,
                                      int64_t relu, int64_t sums);

}  // namespace jsc

#endif  // JSC_CPU_FFI_JOINED_CHANNELS_H_
