#include "cuda/core/model.h"

namespace jsc {
namespace {

thread_local const double* current = model::kShipped;

}  // namespace

const double* CurrentModel() { return current; }

ModelScope::ModelScope(const double* constants) : before_(current) {
  current = constants != nullptr ? constants : model::kShipped;
}

ModelScope::~ModelScope() { current = before_; }

double OperandBytes(const ConvArgs& a, int element_bytes) {
  const double x = static_cast<double>(a.images * a.size[0] * a.size[1] * a.channels);
  const double kernel =
      static_cast<double>(a.stacks * a.kernel_size[0] * a.kernel_size[1] * a.group_channels * a.out_channels);
  const double results = static_cast<double>(a.images * a.conv_size[0] * a.conv_size[1] * a.out_channels);
  return (x + kernel + (a.has_residual ? 2 : 1) * results) * element_bytes;
}

}  // namespace jsc
