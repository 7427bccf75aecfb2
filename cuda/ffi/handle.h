// What handlers of the custom calls of CUDA share: how operands and attributes become a checked call on its device.
#ifndef JSC_CUDA_FFI_HANDLE_H_
#define JSC_CUDA_FFI_HANDLE_H_

#include <cuda_runtime_api.h>

#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cuda/core/device_scope.h"
#include "cuda/ffi/kernels.h"
#include "native/decode.h"

namespace jsc {

inline ffi::Error Invalid(const std::string& sentence) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, sentence);
}

// Runs `launch` with a device current that could be read.
template <typename Launch>
ffi::Error OnDevice(int device, Launch launch) {
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("cudaSetDevice: ") + cudaGetErrorString(scope.status()));
  }
  if (const char* error = GetDeviceInfo(device).error) {
    return ffi::Error(ffi::ErrorCode::kInternal, "device " + std::to_string(device) + ": " + error);
  }
  return launch();
}

// Where `counted` holds a result for counts, has the call write it.
inline ffi::Error TakeCounts(ffi::RemainingRets counted, DeviceCall* call) {
  if (counted.size() == 0) return ffi::Error::Success();
  auto counts = counted.get<ffi::AnyBuffer>(0);
  if (!counts.has_value()) return counts.error();
  const auto size = (*counts)->dimensions();
  if (counted.size() > 1 || (*counts)->element_type() != ffi::DataType::S32 || size.size() != 2 ||
      size[0] != kCountRows || size[1] != 2) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "the only result after the workspace is counts, int32 [" + std::to_string(kCountRows) + ", 2]");
  }
  call->counts = static_cast<int32_t*>((*counts)->untyped_data());
  return ffi::Error::Success();
}

// The attribute `candidate`, int64 [1 + kTileNumbers], which may be left out: a family and the numbers of its tile.
inline ffi::Error ReadCandidate(ffi::Dictionary attributes, DeviceCall* call) {
  const auto given = attributes.get<ffi::Span<const int64_t>>("candidate");
  if (!given.has_value()) return ffi::Error::Success();
  constexpr int64_t kMost = 1 << 16;
  bool fits = given->size() == 1 + kTileNumbers;
  for (size_t i = 0; fits && i < given->size(); ++i) fits = (*given)[i] >= 0 && (*given)[i] <= kMost;
  if (!fits || (*given)[0] > static_cast<int64_t>(Family::kEcr)) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "attribute candidate must be " +
                                                            std::to_string(1 + kTileNumbers) +
                                                            " int64, a family from 0 to 7 and numbers from 0 to 65536");
  }
  call->candidate.family = static_cast<Family>((*given)[0]);
  for (int i = 0; i < kTileNumbers; ++i) call->candidate.tile[i] = static_cast<int>((*given)[1 + i]);
  return ffi::Error::Success();
}

// What every convolution takes and returns, so that one lowering serves all.
inline auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()  // x [N, H, W, C]
      .Arg<ffi::AnyBuffer>()  // kernel [S, kh, kw, C / groups, K]; image n takes kernel n / (N / S)
      .RemainingArgs()        // bias [S, K] if has_bias, then residual [N, Ho, Wo, K] if has_residual
      .Ret<ffi::AnyBuffer>()  // out [N, Ho, Wo, K]
      .Ret<ffi::AnyBuffer>()  // workspace uint8 [bytes], of workspace_bytes(); its contents mean nothing
      .RemainingRets()        // counts int32 [kCountRows, 2] (non-zeros, elements) of parts of out, or nothing
      .Attrs();               // int64: stride[2], padding[4] (low, high of H, then W), dilation[2], groups, has_bias,
                              // has_residual, activation (0 none, 1 ReLU), pool (0 none, 1 max, 2 average), window[2],
                              // window_stride[2], window_padding[4], precision
}

// The same where the density of x decides: jsc_adaptive, whose `threshold` is a float32, and jsc_coo_by_density.
inline auto BindingWithNonzeros() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()           // x
      .Arg<ffi::AnyBuffer>()           // kernel
      .Arg<ffi::BufferR2<ffi::S32>>()  // nonzeros [parts, 2] (non-zeros, elements) of parts of x
      .RemainingArgs()                 // bias, residual
      .Ret<ffi::AnyBuffer>()           // out
      .Ret<ffi::AnyBuffer>()           // workspace
      .RemainingRets()                 // counts
      .Attrs();
}

template <typename Launch>
ffi::Error Handle(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                  ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                  ffi::RemainingRets counted, ffi::Dictionary attributes, Launch launch) try {
  ffi::ErrorOr<ConvCall> decoded = MakeConvCall(x, kernel, optional, out, attributes);
  if (decoded.has_error()) return decoded.error();
  DeviceCall call(*decoded);
  if (ffi::Error error = TakeCounts(counted, &call); error.failure()) return error;
  if (ffi::Error error = ReadCandidate(attributes, &call); error.failure()) return error;
  if (call.dtype == DataType::F64) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "dtype float64 is not implemented on CUDA; float32, bfloat16 and float16 are");
  }
  if (out->element_count() == 0 && call.counts == nullptr) return ffi::Error::Success();
  return OnDevice(device, [&] {
    if (out->element_count() > 0) {
      return launch(call, Workspace{workspace->untyped_data(), workspace->size_bytes()});
    }
    const cudaError_t status = cudaMemsetAsync(call.counts, 0, kCountRows * 2 * sizeof(int32_t), stream);
    if (status == cudaSuccess) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("cudaMemsetAsync: ") + cudaGetErrorString(status));
  });
} catch (const std::exception& error) {
  return ffi::Error(ffi::ErrorCode::kInternal, error.what());
}

// Runs `launch` on the call that `make` decodes and checks, with the call's device current.
template <typename Make, typename Launch>
ffi::Error CheckAndLaunch(int device, Make make, Launch launch) try {
  const auto call = make();
  if (call.has_error()) return call.error();
  return OnDevice(device, [&] { return launch(*call); });
} catch (const std::exception& error) {
  return ffi::Error(ffi::ErrorCode::kInternal, error.what());
}

// Counts of x, which decide what runs.
inline ffi::Error CheckNonzeros(ffi::BufferR2<ffi::S32> nonzeros) {
  const int64_t parts = nonzeros.dimensions()[0];
  if (parts >= 1 && parts <= std::numeric_limits<int32_t>::max() / 2 && nonzeros.dimensions()[1] == 2) {
    return ffi::Error::Success();
  }
  return Invalid("nonzeros must be int32 [parts, 2]");
}

// Custom calls by name, to be registered.
using Handlers = std::vector<std::pair<const char*, XLA_FFI_Handler*>>;

Handlers CooHandlers();  // ffi/coo_handlers.cc

}  // namespace jsc

#endif  // JSC_CUDA_FFI_HANDLE_H_
