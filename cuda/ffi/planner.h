// The binding of planners (planner.cc) in parts: what all of them read, and what is defined in another file.
#ifndef JSC_CUDA_FFI_PLANNER_H_
#define JSC_CUDA_FFI_PLANNER_H_

#include <nanobind/nanobind.h>

#include <vector>

#include "cuda/core/device_info.h"
#include "cuda/core/model.h"

namespace jsc {

// A GPU as Python describes it (devices.py): multiprocessors, shared_memory (bytes that a block may have),
// shared_memory_sm, tensor_maps, fast_tf32, warpgroups, clock_hz, memory_bytes_per_second, clusters [17] (of n blocks
// that run at once). ValueError where that makes no sense.
DeviceInfo ReadDevice(const nanobind::dict& device);

// Constants of the models for as long as this lives: those of the device's `model`, or the shipped ones.
class DeviceModel {
 public:
  explicit DeviceModel(const nanobind::dict& device);

 private:
  static std::vector<double> Read(const nanobind::dict& device);

  std::vector<double> constants_;
  ModelScope scope_;
};

void DefineCoo(nanobind::module_& m);     // planner_coo.cc
void DefineLimits(nanobind::module_& m);  // planner_limits.cc

}  // namespace jsc

#endif  // JSC_CUDA_FFI_PLANNER_H_
