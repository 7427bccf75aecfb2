#include "cuda/core/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

namespace jsc {
namespace {

constexpr int kMostAxes = 5;

// A function of the driver, found without linking to its library; null where there is none.
template <typename Function>
Function FindDriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

auto TiledEncoder() {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encode;
}

auto WindowEncoder() {
  static const auto encode = FindDriverFunction<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  return encode;
}

// Numbers of the axes, as the driver takes them.
template <typename Number>
struct Axes {
  Number of[kMostAxes] = {};

  Axes() = default;
  explicit Axes(AxisList list) {
    int i = 0;
    for (const int64_t n : list) of[i++] = static_cast<Number>(n);
  }
};

// Bytes of all axes but the innermost.
Axes<cuuint64_t> DenseStrides(AxisList size, int64_t element_bytes) {
  Axes<cuuint64_t> stride;
  int64_t bytes = element_bytes;
  int i = 0;
  for (const int64_t n : size) stride.of[i++] = static_cast<cuuint64_t>(bytes *= n);
  return stride;
}

bool EncodeTiled(const void* data, const MapFormat& format, AxisList size, const Axes<cuuint64_t>& stride, AxisList box,
                 CUtensorMap* map) {
  const Axes<cuuint64_t> sizes(size);
  const Axes<cuuint32_t> boxes(box), steps({1, 1, 1, 1, 1});
  return TiledEncoder() &&
         TiledEncoder()(map, format.type, static_cast<cuuint32_t>(size.size()), const_cast<void*>(data), sizes.of,
                        stride.of, boxes.of, steps.of, CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, format.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool HasTensorMaps() { return TiledEncoder() != nullptr; }

CUtensorMapDataType TensorMapType(DataType dtype, bool precise) {
  if (dtype == DataType::F32) {
    return precise ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  }
  return dtype == DataType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

int64_t MapFormat::element_bytes() const {
  return type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? 2 : 4;
}

bool EncodeTiledMap(const void* data, const MapFormat& format, AxisList size, AxisList stride, AxisList box,
                    CUtensorMap* map) {
  return EncodeTiled(data, format, size, Axes<cuuint64_t>(stride), box, map);
}

bool EncodeDenseMap(const void* data, const MapFormat& format, AxisList size, AxisList box, CUtensorMap* map) {
  return EncodeTiled(data, format, size, DenseStrides(size, format.element_bytes()), box, map);
}

bool EncodeWindowMap(const void* data, const MapFormat& format, AxisList size, const int (&lower)[2],
                     const int (&upper)[2], AxisList box, AxisList step, CUtensorMap* map) {
  const Axes<cuuint64_t> sizes(size), strides = DenseStrides(size, format.element_bytes());
  const Axes<cuuint32_t> boxes(box), steps(step);
  return WindowEncoder() &&
         WindowEncoder()(map, format.type, static_cast<cuuint32_t>(size.size()), const_cast<void*>(data), sizes.of,
                         strides.of, lower, upper, boxes.of[0], boxes.of[1], steps.of, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         format.swizzle, format.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool EncodeKernelPieces(const void* kernel, CUtensorMapDataType type, int64_t out_channels, int64_t depth, int64_t taps,
                        CUtensorMap* map) {
  const MapFormat format{type};
  const int64_t side = 128 / format.element_bytes();
  return EncodeDenseMap(kernel, format, {out_channels, depth, taps}, {side, side, 1}, map);
}

Error MapsRefused(const char* kernel) {
  return Error(ErrorCode::kInternal, std::string(kernel) + ": cuTensorMapEncodeTiled refuses its maps");
}

}  // namespace jsc
