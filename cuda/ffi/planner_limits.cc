// The part of the planners' binding that says why a kernel does not take a layer, in words.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "cuda/densenet/limits.h"
#include "cuda/ffi/planner.h"

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
}

}  // namespace jsc
