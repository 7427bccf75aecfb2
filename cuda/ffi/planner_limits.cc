// The part of the planners' binding that says why a kernel does not take a layer, in words.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "cuda/chain/limits.h"
#include "cuda/chain/pair_plan.h"
#include "cuda/densenet/limits.h"
#include "cuda/ffi/planner.h"
#include "cuda/sparse/matvec/row_limits.h"

namespace nb = nanobind;

namespace jsc {

void DefineLimits(nb::module_& m) {
  using namespace nb::literals;
  m.attr("dense_block_shared_bytes") = kBlockSharedBytes;
  m.def(
      "why_no_dense_block",
      [](int64_t images, int64_t height, int64_t width, int64_t channels,
         std::vector<std::pair<int64_t, int64_t>> layers, int64_t out_channels, bool pools) {
        return WhyNotDenseBlock({images, height, width, channels, std::move(layers), out_channels, pools});
      },
      "images"_a, "height"_a, "width"_a, "channels"_a, "layers"_a, "out_channels"_a, "pools"_a,
      "Why a dense block of layers (M, G), and a transition where there is one, cannot be one call, or nothing.");
  m.def(
      "why_not_in_chain",
      [](const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
         const nb::dict& device) {
        const DeviceModel model(device);
        return WhyNotInChain(layer, pool, element_bytes, precise, ReadDevice(device));
      },
      "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "device"_a,
      "Why no kernel of a chain takes a convolution, or none would be a good one, or nothing.");
  m.def(
      "may_be_pair",
      [](int64_t pixels, int64_t in_channels, int64_t channels, int64_t out_channels) {
        return MayBePair({pixels, in_channels, channels, out_channels});
      },
      "pixels"_a, "in_channels"_a, "channels"_a, "out_channels"_a,
      "Whether some GPU may run two 1x1 convolutions of a chain by one kernel.");
  m.def(
      "why_no_dense_in_chain",
      [](int64_t rows, int64_t kernels, int64_t channels, int64_t out_channels, bool has_residual, int element_bytes,
         int64_t shared_memory) {
        return WhyNotInChain({rows, kernels, channels, out_channels, has_residual}, element_bytes, shared_memory);
      },
      "rows"_a, "kernels"_a, "channels"_a, "out_channels"_a, "has_residual"_a, "element_bytes"_a, "shared_memory"_a,
      "Why no kernel of a chain takes a dense layer, or nothing; shared_memory: of a block, 0 where it is not known.");
  m.def(
      "average_rounds",
      [](int64_t pixels, int64_t channels, int64_t out_channels, int element_bytes, const nb::dict& device) {
        return AverageRounds(pixels, channels, out_channels, element_bytes, ReadDevice(device));
      },
      "pixels"_a, "channels"_a, "out_channels"_a, "element_bytes"_a, "device"_a,
      "Rounds that a block of a dense layer in a chain takes over the average of the map that it reads.");
}

}  // namespace jsc
