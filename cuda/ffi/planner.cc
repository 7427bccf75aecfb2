// The planners for Python: what a kernel can take and what it would have, for any GPU that is described. Compiled for
// the host alone, so it needs no GPU and no CUDA; the extension that launches kernels asks the same planners.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/chain/plans.h"
#include "cuda/dense_conv/plan/choice.h"
#include "cuda/sparse/ecr/plan.h"

namespace nb = nanobind;

namespace jsc {
namespace {

template <typename T>
T Field(const nb::dict& device, const char* name) {
  if (!device.contains(name)) throw nb::value_error((std::string("device has no ") + name).c_str());
  return nb::cast<T>(device[name]);
}

// multiprocessors, shared_memory (bytes that a block may have), shared_memory_sm, tensor_maps, fast_tf32, warpgroups,
// clusters [17] (of n blocks that run at once).
DeviceInfo ReadDevice(const nb::dict& device) {
  DeviceInfo info{};
  info.multiprocessors = Field<int>(device, "multiprocessors");
  info.shared_memory = Field<int>(device, "shared_memory");
  info.shared_memory_sm = Field<int>(device, "shared_memory_sm");
  info.tensor_maps = Field<bool>(device, "tensor_maps");
  info.fast_tf32 = Field<bool>(device, "fast_tf32");
  info.warpgroups = Field<bool>(device, "warpgroups");
  const auto clusters = Field<std::vector<int>>(device, "clusters");
  if (clusters.size() != kMaxSplits + 1) throw nb::value_error("clusters must have 17 entries");
  for (int size = 0; size <= kMaxSplits; ++size) info.clusters[size] = clusters[size];
  if (info.multiprocessors < 1) throw nb::value_error("multiprocessors must be at least 1");
  return info;
}

// A plan as Python has it: the engine's name, what cuts it, and the cycles that its model expects.
nb::tuple Described(const char* engine, std::vector<int64_t> tile, double cycles) {
  return nb::make_tuple(engine, nb::tuple(nb::cast(tile)), cycles);
}

nb::tuple Describe(const DirectChoice& choice) {
  if (const ImagePlan& p = choice.image; p.filters > 0) {
    return Described("image", {p.filters, p.tile_out[0], p.tile_out[1], p.warps, p.blocks}, p.cycles);
  }
  if (const SlicePlan& p = choice.slice; p.filters > 0) {
    return Described("slice", {p.filters, p.columns, p.warps, p.tile_high, p.tile_wide, p.splits}, p.cycles);
  }
  if (const GroupPlan& p = choice.group; p.tiles > 0) {
    return Described("group", {p.tile_images, p.tile_high, p.tile_wide, p.groups, p.feature_parts}, p.cycles);
  }
  if (const WarpgroupPlan& p = choice.warpgroup; p.filters > 0) {
    const int meeting = !p.by_mail ? 0 : p.mail_at == 0 ? 1 : 2;
    return Described("warpgroup", {p.filters, p.pixels, p.patch, p.splits, p.teams, p.roomy, meeting, p.turns.blocks},
                     p.cycles);
  }
  const DirectPlan& p = choice.direct;
  if (p.tile == DirectTile::kNone) return Described("per_output", {}, 0);
  return Described("warp", {static_cast<int>(p.tile), static_cast<int>(p.engine), p.splits}, p.cycles);
}

nb::tuple Direct(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
                 bool in_chain, const nb::dict& device) {
  const ConvArgs args = ArgsOfLayer(layer, pool, precise);
  constexpr size_t kWorkspace = size_t{1} << 31;
  const DirectChoice choice = ChooseKernel(args, element_bytes, kWorkspace, in_chain, {}, ReadDevice(device));
  nb::tuple found = Describe(choice);
  return nb::make_tuple(found[0], found[1], found[2], PoolsInKernel(choice, args));
}

nb::tuple Sparse(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
                 const nb::dict& device) {
  const EcrPlan p =
      ChooseEcrPlan(ArgsOfLayer(layer, pool, precise), element_bytes, size_t{1} << 31, ReadDevice(device));
  return Described("lists", {p.lanes, p.splits, p.tile_images, p.tile_out[0], p.tile_out[1], p.row_parts, p.max_rows},
                   p.cycles);
}

nb::list OfChain(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
                 const nb::dict& device) {
  nb::list found;
  for (const WarpgroupPlan& plan : ChainPlans(layer, pool, element_bytes, precise, ReadDevice(device))) {
    found.append(nb::make_tuple(plan.filters, plan.pixels, plan.patch ? 1 : 0, plan.splits, plan.cycles));
  }
  return found;
}

}  // namespace
}  // namespace jsc

NB_MODULE(_planner, m) {
  using namespace nb::literals;
  m.def("direct", &jsc::Direct, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "in_chain"_a, "device"_a,
        "(engine, tile, cycles, whether it takes the pool) of the direct convolution of a layer.");
  m.def("sparse", &jsc::Sparse, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "device"_a,
        "(engine, tile, cycles) of ECR or PECR of a layer.");
  m.def("chain_tiles", &jsc::OfChain, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "device"_a,
        "(filters, pixels, patch, splits, cycles) of every tile that a layer of a chain may have.");
  m.def(
      "chain_takes_pool",
      [](const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, const std::vector<int64_t>& tile,
         int element_bytes, bool precise, const nb::dict& device) {
        return jsc::ChainTakesPool(layer, pool, tile, element_bytes, precise, jsc::ReadDevice(device));
      },
      "layer"_a, "pool"_a, "tile"_a, "element_bytes"_a, "precise"_a, "device"_a,
      "Whether the kernel of a layer of a chain takes the pool behind it.");
  m.def(
      "chain_pairs",
      [](int64_t pixels, int64_t in_channels, int64_t channels, int64_t features, int element_bytes, bool precise,
         const nb::dict& device) {
        return jsc::ChainPairs(pixels, in_channels, channels, features, element_bytes, precise,
                               jsc::ReadDevice(device));
      },
      "pixels"_a, "in_channels"_a, "channels"_a, "features"_a, "element_bytes"_a, "precise"_a, "device"_a,
      "Whether one kernel runs two 1x1 convolutions of a chain.");
}
