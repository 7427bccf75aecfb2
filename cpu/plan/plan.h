// Room: how one convolution is cut into tasks, tiles, chunks and blocks. Host decisions only: no kernel code here.
//
//   task   one stack, one group, a rectangle of `tile_rows` x `tile_cols` results and `task_blocks` blocks of output
//          channels. Tasks are independent, so threads take them in any order and the result does not change.
//   block  `block` output channels = `vectors` registers: one packed slice of the kernel
//   chunk  `chunk_taps` kernel rows x kw x `chunk_channels` input channels. The packed slice [chunk rows, block] stays
//          in L1 while every window of the tile runs over its list.
//
// Cycles that a step is expected to take are fitted, and in dispatch/model.json, of which the build makes
// model_constants.h. kWake of "cpu threads" is the time until another thread has taken its first task. What is a
// literal here is no such number: shares of caches and the room for lists say what fits, most taps and products keep
// sums exact, and a registers' count is the instruction set's.
//
// May change: what is expected to be fastest, with tests/golden.
#ifndef JSC_CPU_PLAN_PLAN_H_
#define JSC_CPU_PLAN_PLAN_H_

#include <cstdint>

#include "native/call.h"

namespace jsc {

struct Machine {
  int64_t l1_bytes;      // data cache of one core
  int64_t l2_bytes;      // of one core
  int64_t vector_bytes;  // of the instruction set in use
  int64_t threads;
  bool many_registers;  // of the instruction set: 32 for vectors, not 16
  bool pairs = false;   // it multiplies pairs of bfloat16, ...
  bool amx = false;     // ... and tiles of them
};

// Which kernel of loops/ runs: window_kernel.h, window by window, scatter_kernel.h, channel by channel, pixel_kernel.h,
// pixel by pixel, or phase_kernel.h, pixel by pixel with strides of 2. Those of loops/dense/ skip nothing.
enum class ConvLoop : int64_t { kWindows, kScatter, kPixels, kDirect, kPhases, kDots, kWinograd, kAmx, kEmulatedAmx };

struct ConvPlan {
  ConvLoop loop;
  bool pairs;              // the call is AsPairs, of half the channels
  int64_t vectors;         // registers per window and block
  int64_t windows;         // windows that run together, so that vectors * windows accumulators hide the FMA latency
  int64_t block;           // output channels per block
  int64_t chunk_channels;  // input channels per chunk
  int64_t chunk_taps;      // kernel rows (ky) per chunk; all of them unless the kernel is very large
  int64_t tile_rows;       // result rows per tile, counted through the images of a stack
  int64_t tile_cols;       // result columns per tile
  int64_t task_blocks;     // blocks per task

  int64_t row_tiles, col_tiles, block_tiles;  // how many of each
  int64_t tasks;                              // stacks * groups * row_tiles * col_tiles * block_tiles

  int64_t strip_rows;    // of kScatter: rows of x whose sums stay in L1
  int64_t sweep_blocks;  // of kPixels: most blocks that go through each chunk one after another, those of several tasks
  bool copied;           // of kPixels: lists have the values of the non-zeros, which are else read from x
  double cycles;         // expected, until the last thread is done
};

struct ConvTask {
  const ConvCall* call;
  const ConvPlan* plan;
  int64_t stack, group;
  int64_t row_begin, row_end;      // result rows: image within the stack * out_size[0] + y
  int64_t col_begin, col_end;      // result columns
  int64_t block_begin, block_end;  // blocks of the group's output channels
  bool lists_ready;  // of kScatter and kPixels: the scratch memory holds the lists of this tile, from another task
};

// `density` is the (sampled) fraction of non-zeros of x, `accumulator_bytes` 4 or 8.
ConvPlan MakePlan(const ConvArgs& args, const Machine& machine, int64_t accumulator_bytes, double density);

// The same for the dense convolution (plan/dense_conv_plan.cc).
ConvPlan MakeDirectPlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes);

// Dense, for few output channels of one group. Only where CanRunDots.
bool CanRunDots(const ConvCall& call, const Machine& machine);
ConvPlan MakeDotPlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes);

// For maps so sparse that packing the kernel would cost more than the sums. Only where CanScatter.
bool CanScatter(const ConvArgs& args);
ConvPlan MakeScatterPlan(const ConvArgs& args, const Machine& machine, int64_t accumulator_bytes, double density);

// Stride 1, 1x1, 3x3 or, with many registers, 5x5. Only where CanRunPixels. `packed`: the call's kernel is packed.
bool CanRunPixels(const ConvArgs& args, const Machine& machine);
ConvPlan MakePixelPlan(const ConvArgs& args, const Machine& machine, int64_t accumulator_bytes, double density,
                       bool packed, bool pairs);

// 3x3 with strides of 2, float32 with AVX-512 and a packed kernel. Only where CanRunPhases.
bool CanRunPhases(const ConvArgs& args, const Machine& machine, int64_t accumulator_bytes, bool packed, bool pairs);
ConvPlan MakePhasePlan(const ConvArgs& args, const Machine& machine, int64_t accumulator_bytes, double density,
                       bool pairs);

// 3x3, float32, that may be dense. Only where CanRunWinograd.
bool CanRunWinograd(const ConvCall& call, const Machine& machine);
ConvPlan MakeWinogradPlan(const ConvArgs& args, const Machine& machine);

// Dense, of pairs (below), by kAmx or kEmulatedAmx.
ConvPlan MakeAmxPlan(const ConvCall& call, const Machine& machine, ConvLoop loop);

// A bfloat16 call that may be dense, as one of half the channels: each is a pair of them (core/dtypes.h). Only where
// CanRunPairs, and of an odd number of channels by the direct loop. A product of a pair is one of a zero and a
// non-zero, too, so that 0 * inf is NaN.
bool CanRunPairs(const ConvCall& call, const Machine& machine);
ConvCall AsPairs(const ConvCall& call);

// The same call for loops that widen each element: without a packed kernel of pairs.
ConvCall WithoutPairs(const ConvCall& call);

// The cheapest of the loops that can run the call, unless SetLoop set one (plan/plan_choice.cc).
ConvPlan ChoosePlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes, double density);

// As SetLoop (ffi/host.h) takes it: "windows", or "pixels of pairs".
const char* LoopName(const ConvPlan& plan);

ConvTask TaskAt(const ConvCall& call, const ConvPlan& plan, int64_t index);

}  // namespace jsc

#endif  // JSC_CPU_PLAN_PLAN_H_
