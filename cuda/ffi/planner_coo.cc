// The part of the planners' binding that is of COO* (sparse/coo/plan.h).
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "cuda/ffi/planner.h"
#include "cuda/sparse/coo/plan.h"

namespace nb = nanobind;

namespace jsc {
namespace {

const CooVariant& VariantAt(int index) {
  if (index < 0 || index >= kCooVariantCount) throw std::out_of_range("there is no such variant");
  return kCooVariants[index];
}

std::vector<std::vector<int>> Rows() {
  std::vector<std::vector<int>> rows;
  for (const CooVariant& v : kCooVariants) {
    rows.push_back({v.kernel, v.stride, v.height, v.width, v.out_channels, v.max_warps(), v.min_blocks()});
  }
  return rows;
}

// window: rows and columns of a kernel, strides and dilation.
std::vector<int> Covering(const std::vector<int64_t>& window) {
  if (window.size() != 6) throw std::invalid_argument("window must have 6 entries");
  ConvArgs a{};
  for (int i = 0; i < 2; ++i) {
    a.kernel_size[i] = window[i];
    a.stride[i] = window[2 + i];
    a.dilation[i] = window[4 + i];
  }
  std::vector<int> found;
  for (int index = 0; index < kCooVariantCount; ++index) {
    if (CooCovers(kCooVariants[index], a)) found.push_back(index);
  }
  return found;
}

// sizes: images, rows and columns of results, C and K of a group, groups.
nb::list Plans(int variant, const std::vector<int64_t>& sizes, int element_bytes, const nb::dict& device) {
  const CooVariant& shape = VariantAt(variant);
  if (sizes.size() != 6) throw std::invalid_argument("sizes must have 6 entries");
  for (const int64_t size : sizes) {
    if (size < 1) throw std::invalid_argument("sizes must be at least 1");
  }
  ConvArgs a{};
  a.images = sizes[0];
  a.stacks = 1;
  a.groups = sizes[5];
  a.group_channels = sizes[3];
  a.channels = sizes[3] * sizes[5];
  a.out_channels = sizes[4] * sizes[5];
  for (int i = 0; i < 2; ++i) {
    a.conv_size[i] = a.out_size[i] = sizes[1 + i];
    a.kernel_size[i] = shape.kernel;
    a.stride[i] = shape.stride;
    a.dilation[i] = 1;
  }
  nb::list found;
  VisitCooPlans(variant, a, element_bytes, ReadDevice(device), [&](const CooPlan& plan) {
    found.append(nb::make_tuple(plan.out_channel_warps, plan.slices, plan.splits));
  });
  return found;
}

}  // namespace

void DefineCoo(nb::module_& m) {
  using namespace nb::literals;
  m.attr("coo_chunk") = kCooChunk;
  m.attr("most_coo_variants") = kMostCooVariants;
  m.def("coo_variants", &Rows,
        "The rows of coo_variants.h: kernel, stride, height, width, output channels, max_warps, min_blocks.");
  m.def("coo_covering", &Covering, "window"_a,
        "Which rows compute convolutions of a kernel's size, strides, dilation.");
  m.def("coo_plans", &Plans, "variant"_a, "sizes"_a, "element_bytes"_a, "device"_a,
        "(out_channel_warps, slices, splits) of what a row's kernel can be launched with for results of these sizes.");
  m.def(
      "coo_shared_bytes",
      [](int variant, int warps, int element_bytes) {
        return CooSharedBytes(VariantAt(variant), warps, element_bytes);
      },
      "variant"_a, "warps"_a, "element_bytes"_a, "Bytes of shared memory of a block of a row's kernel.");
}

}  // namespace jsc
