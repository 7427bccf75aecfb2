// A kernel turned round, for the gradient of x (primitive/gradient_of_x.py): taps from the last one on, input and
// output channels in each other's place. Details: docs/design/kernels/cpu.md.
#ifndef JSC_CPU_FFI_TURNED_KERNEL_H_
#define JSC_CPU_FFI_TURNED_KERNEL_H_

#include <cstdint>

#include "cpu/core/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jsc {

// Channels are those of a group. Along the kernel's rows and columns are taken the taps first, first + step, ...
//   out[s][i][j][k][g * channels + c] = kernel[s][first + i * step][first + j * step][c][g * out_channels + k]
struct TurnedKernelCall {
  int64_t stacks;
  int64_t size[2];
  int64_t first[2], step[2], count[2];
  int64_t groups, channels, out_channels;
  int64_t element_bytes;  // 2, 4 or 8
  const void* kernel;     // [stacks, size, channels, groups * out_channels]
  void* out;              // [stacks, count, out_channels, groups * channels]
};

void RunTurnedKernelCall(Team& team, const TurnedKernelCall& call);

// kernel [S, kh, kw, C / groups, K] -> [S, rows, columns, K / groups, C], of one dtype. Attributes: first[2], step[2]
// and groups, int64. `after` is any array, which is not read: XLA turns no kernel before it is there.
xla::ffi::Error TurnedKernel(xla::ffi::ThreadPool pool, xla::ffi::AnyBuffer kernel, xla::ffi::AnyBuffer after,
                             xla::ffi::Result<xla::ffi::AnyBuffer> out, xla::ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CPU_FFI_TURNED_KERNEL_H_
