// Room: the custom calls on the CPU: from a checked call to finished results, by plan, tasks, memory and threads. May
// change: how memory and threads are found, while no loop is chosen here (cpu/plan). Details:
// docs/design/kernels/cpu.md. Tests: tests/primitive/test_kernels.py.
#ifndef JSC_CPU_FFI_HOST_H_
#define JSC_CPU_FFI_HOST_H_

#include <string>
#include <vector>

#include "cpu/core/isa.h"
#include "cpu/core/parallel.h"
#include "native/coo_lists.h"
#include "native/decode.h"

namespace jsc {

// The instruction set in use: the best that the processor has, unless one was set.
const Isa& CurrentIsa();

// Whether loops of pairs of bfloat16 (core/isa.h) can run in it on this processor.
bool MultipliesPairs();

// Whether AMX multiplies tiles of them.
bool MultipliesTiles();

// Names of the instruction sets of this build that the processor has, best first.
std::vector<std::string> AvailableIsas();

// Uses the named instruction set from now on; false where it is not available.
bool SetIsa(const std::string& name);

// A loop of plan/plan_choice.cc, such as "windows", for every convolution that has it from now on, "auto" for the
// cheapest one; false for other names.
bool SetLoop(const std::string& name);

// Convolution, bias, residual, ReLU and pool, in one pass over x. By a team: as one of several rounds.
ffi::Error RunConvCall(ffi::ThreadPool& pool, const ConvCall& call);
ffi::Error RunConvCall(Team& team, const ConvCall& call);

// Convolution, bias, residual and ReLU over COO* lists, of x or those that are given; only what a row of kCooVariants
// covers.
ffi::Error RunCooCall(ffi::ThreadPool& pool, const ConvCall& call, const CooLists* lists);

// The same, dense and without a pool.
ffi::Error RunDirectCall(ffi::ThreadPool& pool, const ConvCall& call);

// The same for maps of one pixel and a 1x1 kernel: a dense layer that reads only the kernel rows it needs.
ffi::Error RunDenseCall(ffi::ThreadPool& pool, const ConvCall& call);

// The gradient of a kernel, of one kernel for all images.
ffi::Error RunKernelGradientCall(ffi::ThreadPool& pool, DataType dtype, const KernelGradientCall& call);

// The gradient of a max pool, and its tangent.
ffi::Error RunMaxPoolGradientCall(ffi::ThreadPool& pool, DataType dtype, const MaxPoolCall& call);
ffi::Error RunMaxPoolTangentCall(ffi::ThreadPool& pool, DataType dtype, const MaxPoolCall& call);

}  // namespace jsc

#endif  // JSC_CPU_FFI_HOST_H_
