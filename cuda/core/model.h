// The constants of the planners' models. They are fitted, by `python -m jax_sparse_conv tune --fit`, and are in
// jax_sparse_conv/_src/dispatch/model.json; the build makes model_constants.h of it.
#ifndef JSC_CUDA_CORE_MODEL_H_
#define JSC_CUDA_CORE_MODEL_H_

#include <cmath>

#include "cuda/core/device_info.h"
#include "model_constants.h"
#include "native/call.h"

namespace jsc {

// Kinds of products, in the order in which groups have them. Float32 of any precision is kTf32 but for kHighest; kFfma
// is kHighest without tensor cores.
enum ProductKind { k16Bit, kTf32, kHighest, kFfma };

inline ProductKind KindOf(const ConvArgs& a, int element_bytes) {
  return element_bytes == 2 ? k16Bit : a.precision == Precision::kHighest ? kHighest : kTf32;
}

// The constants in use on this thread, model::kCount of them: the shipped ones, or those of a ModelScope.
const double* CurrentModel();

class ModelScope {
 public:
  explicit ModelScope(const double* constants);  // which outlive it; null for the shipped ones
  ~ModelScope();
  ModelScope(const ModelScope&) = delete;
  ModelScope& operator=(const ModelScope&) = delete;

 private:
  const double* before_;
};

// A kind's constants of a group as a struct of doubles that names them, in the order of model.json.
template <typename T, const model::ModelGroup& group>
const T& ModelOf(int kind) {
  static_assert(sizeof(T) == group.size * sizeof(double), "the struct and model.json differ");
  return *reinterpret_cast<const T*>(CurrentModel() + group.first + kind * group.size);
}

// From a family's cycles to microseconds, which can be compared with another family's: what any call takes, a share of
// the cycles, and one of the time that memory needs for all operands.
struct Microseconds {
  double floor, scale, memory;
  double Of(double cycles, double bytes, const DeviceInfo& device) const {
    const double work = scale * cycles / device.clock_hz * 1e6,
                 moved = memory * bytes / device.memory_bytes_per_second * 1e6;
    return floor + std::cbrt(work * work * work + moved * moved * moved);  // little more than the longer one
  }
};

// Of x, the kernel, the result and the residual, each once.
double OperandBytes(const ConvArgs& a, int element_bytes);

}  // namespace jsc

#endif  // JSC_CUDA_CORE_MODEL_H_
