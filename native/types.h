// What calls need of XLA's FFI, without its C++ header: nvcc reads a header once a GPU generation and twice more, and
// that one takes it over two seconds a file. native/decode.h, for handlers, has the FFI itself.
#ifndef JSC_NATIVE_TYPES_H_
#define JSC_NATIVE_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace xla::ffi {
class Error;
}

namespace jsc {

// Element types by the FFI's own numbers, of which buffers of other types have one that is not here.
enum class DataType : uint8_t {
  U8 = XLA_FFI_DataType_U8,
  F16 = XLA_FFI_DataType_F16,
  BF16 = XLA_FFI_DataType_BF16,
  F32 = XLA_FFI_DataType_F32,
  F64 = XLA_FFI_DataType_F64,
};

// Bytes of an element of a floating-point type.
constexpr size_t ByteWidth(DataType dtype) {
  return dtype == DataType::F64 ? 8 : dtype == DataType::F32 ? 4 : dtype == DataType::U8 ? 1 : 2;
}

enum class ErrorCode : uint8_t {
  kOk = XLA_FFI_Error_Code_OK,
  kInvalidArgument = XLA_FFI_Error_Code_INVALID_ARGUMENT,
  kFailedPrecondition = XLA_FFI_Error_Code_FAILED_PRECONDITION,
  kUnimplemented = XLA_FFI_Error_Code_UNIMPLEMENTED,
  kInternal = XLA_FFI_Error_Code_INTERNAL,
};

// The outcome of a call: success, or what went wrong. native/decode.h makes it the FFI's own.
class Error {
 public:
  Error() = default;
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Error Success() { return Error(); }

  bool success() const { return code_ == ErrorCode::kOk; }
  bool failure() const { return !success(); }
  const std::string& message() const { return message_; }

  operator xla::ffi::Error() const;

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

}  // namespace jsc

#endif  // JSC_NATIVE_TYPES_H_
