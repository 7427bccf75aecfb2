// A device that is current for a while.
#ifndef JSC_CUDA_CORE_DEVICE_SCOPE_H_
#define JSC_CUDA_CORE_DEVICE_SCOPE_H_

#include <cuda_runtime_api.h>

namespace jsc {

// Makes a device current until the end of the scope, where the one before is again.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t status_;
};

}  // namespace jsc

#endif  // JSC_CUDA_CORE_DEVICE_SCOPE_H_
