// The binding of planners (planner.cc) in parts: what all of them read, and what is defined in another file.
#ifndef JSC_CUDA_FFI_PLANNER_H_
#define JSC_CUDA_FFI_PLANNER_H_

#include <nanobind/nanobind.h>

#include "cuda/core/device_info.h"

namespace jsc {

// A GPU as Python describes it (devices.py): multiprocessors, shared_memory (bytes that a block may have),
// shared_memory_sm, tensor_maps, fast_tf32, warpgroups, clock_hz, memory_bytes_per_second, clusters [17] (of n blocks
// that run at once). ValueError where that makes no sense.
DeviceInfo ReadDevice(const nanobind::dict& device);

void DefineCoo(nanobind::module_& m);     // planner_coo.cc
void DefineLimits(nanobind::module_& m);  // planner_limits.cc

}  // namespace jsc

#endif  // JSC_CUDA_FFI_PLANNER_H_
