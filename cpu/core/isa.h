// Room: one table of kernels per instruction set, vectors, threads and limits of the machine. isa_<name>.cc each
//   compile the same kernel headers with other compiler flags into a namespace of their own. The table is chosen at run
//   time.
// Those files use nothing from the standard library that emits code. An inline function compiled with AVX-512 flags
//   could otherwise be the copy that the linker keeps for everybody.
// Why not Google Highway: the loops are multiply-adds on vectors, which GCC's and Clang's vector extensions write for
//   any width, aarch64 included. Few lines need intrinsics (compression, float16, bfloat16).
// May change: instruction sets and vectors, while results do not depend on threads. Tests:
//   tests/primitive/test_instruction_sets.py, tests/sanitize/, tests/emulated/.
#ifndef JSC_CPU_CORE_ISA_H_
#define JSC_CPU_CORE_ISA_H_

#include <cstdint>

#include "cpu/core/dtypes.h"
#include "cpu/loops/coo_task.h"
#include "cpu/plan/plan.h"
#include "cpu/training/channels_task.h"
#include "cpu/training/max_pool_task.h"
#include "native/call.h"

namespace jsc {

// One thread's part of a dense product: output columns [col_begin, col_end) of one stack's rows of x.
struct DenseTask {
  const ConvCall* call;
  int64_t stack;
  int64_t col_begin, col_end;
};

// A kernel's gradient: sizes as of the convolution, without a pool, and its buffers.
struct KernelGradientCall {
  ConvArgs args;
  const void* x;          // [N, H, W, C]
  const void* cotangent;  // [N, Ho, Wo, K], same dtype
  int64_t chunks;         // of the rows of all images, one below the other; each has a sum of its own
  void* out;              // [chunks, kh, kw, C / groups, K], float64 for float64 and else float32
};

// One thread's part of it: input channels [channel_begin, channel_end) and output channels [out_begin, out_end) of one
// group, and one chunk of the rows.
struct KernelGradientTask {
  const KernelGradientCall* call;
  int64_t chunk;
  int64_t group;
  int64_t channel_begin, channel_end;
  int64_t out_begin, out_end;
};

constexpr int64_t kCountRun = 16;
constexpr int64_t kChains = 10;
constexpr int64_t kLimitEntries = 32, kLimitTaps = 9;

// Scratch bytes that a task needs, and the task itself, as in Isa.
struct PairLoops {
  int64_t (*pixel_bytes)(const ConvTask& task);
  void (*pixels)(const ConvTask& task, char* scratch);
  int64_t (*phase_bytes)(const ConvTask& task);
  void (*phases)(const ConvTask& task, char* scratch);
  int64_t (*direct_bytes)(const ConvTask& task);
  void (*direct)(const ConvTask& task, char* scratch);
  int64_t (*amx_bytes)(const ConvTask& task) = nullptr;
  void (*amx)(const ConvTask& task, char* scratch) = nullptr;           // on processors that have AMX, ...
  void (*emulated_amx)(const ConvTask& task, char* scratch) = nullptr;  // ... and on others
};

struct Isa {
  const char* name;
  int64_t vector_bytes;
  bool many_registers;  // 32 for vectors, not 16
  // Scratch bytes that a task needs, and the task itself; `scratch` is aligned to 64 bytes.
  int64_t (*conv_bytes[kDtypes])(const ConvTask& task);
  void (*conv[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*scatter_bytes[kDtypes])(const ConvTask& task);
  void (*scatter[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*pixel_bytes[kDtypes])(const ConvTask& task);
  void (*pixels[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*phase_bytes[kDtypes])(const ConvTask& task);
  void (*phases[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*depthwise_bytes[kDtypes])(const ConvTask& task);
  void (*depthwise[kDtypes])(const ConvTask& task, char* scratch);
  void (*direct_depthwise[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*direct_bytes[kDtypes])(const ConvTask& task);
  void (*direct[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*dot_bytes[kDtypes])(const ConvTask& task);
  void (*dots[kDtypes])(const ConvTask& task, char* scratch);
  int64_t (*winograd_bytes)(const ConvTask& task);  // of float32
  void (*winograd)(const ConvTask& task, char* scratch);
  PairLoops pairs;  // of bfloat16, for processors that have AVX512-BF16, too; null in sets without AVX-512
  void (*scaled_pairs)(const ChannelsTask& task);  // likewise; loops/scaled_pairs.h
  int64_t (*dense_bytes[kDtypes])(const DenseTask& task);
  void (*dense[kDtypes])(const DenseTask& task, char* scratch);
  int64_t (*coo_bytes[kDtypes])(const CooRow& row);
  void (*coo[kDtypes])(const CooRow& row, char* scratch);
  int64_t (*kernel_gradient_bytes[kDtypes])(const KernelGradientTask& task);
  void (*kernel_gradient[kDtypes])(const KernelGradientTask& task, char* scratch);
  int64_t (*max_pool_gradient_bytes[kDtypes])(const MaxPoolTask& task);
  void (*max_pool_gradient[kDtypes])(const MaxPoolTask& task, char* scratch);
  int64_t (*max_pool_tangent_bytes[kDtypes])(const MaxPoolTask& task);
  void (*max_pool_tangent[kDtypes])(const MaxPoolTask& task, char* scratch);
  void (*channel_sums[kDtypes])(const ChannelsTask& task);
  void (*channel_sums_gradient[kDtypes])(const ChannelsTask& task);
  void (*channel_affine[kDtypes])(const ChannelsTask& task);
  void (*channel_affine_gradient[kDtypes])(const ChannelsTask& task);
  void (*channel_masked_gradient[kDtypes])(const ChannelsTask& task);
  // Non-zeros among `runs` runs of kCountRun elements of x; the runs begin `step` elements apart.
  int64_t (*count[kDtypes])(const void* x, int64_t runs, int64_t step);
  // For core/machine_limits.cc: kChains multiply-adds of independent vectors, `rounds` times; kLimitEntries *
  // kLimitTaps of them with each a vector of `rows`, `rounds` times; and reading `bytes`, whole lines.
  void (*multiply_adds)(int64_t rounds);
  void (*loaded_multiply_adds)(const char* rows, int64_t rounds);
  void (*read)(const char* begin, int64_t bytes);
};

extern const Isa kPortable;
#ifdef JSC_X86
extern const Isa kAvx2;
extern const Isa kAvx512;
#endif

}  // namespace jsc

#endif  // JSC_CPU_CORE_ISA_H_
