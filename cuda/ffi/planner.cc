// The planners for Python: what a kernel can take and what it would have, for any GPU that is described. Compiled for
// the host alone, so it needs no GPU and no CUDA; the extension that launches kernels asks the same planners.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cuda/chain/plans.h"
#include "cuda/core/model.h"
#include "cuda/dense_conv/plan/choice.h"
#include "cuda/ffi/planner.h"
#include "cuda/sparse/ecr/plan.h"
#include "cuda/training/kernel_gradient_plan.h"

namespace nb = nanobind;

namespace jsc {
namespace {

template <typename T>
T Field(const nb::dict& device, const char* name) {
  if (!device.contains(name)) throw nb::value_error((std::string("device has no ") + name).c_str());
  return nb::cast<T>(device[name]);
}

constexpr const char* kFamilies[] = {"model", "few_channels", "splitk_channels", "grouped",
                                     "wgmma", "mma",          "per_output",      "ecr"};

nb::object Named(const Candidate& candidate) {
  const std::vector<int64_t> tile(std::begin(candidate.tile), std::end(candidate.tile));
  return nb::make_tuple(kFamilies[static_cast<int>(candidate.family)], nb::tuple(nb::cast(tile)));
}

constexpr size_t kWorkspace = size_t{1} << 31;  // what a device without clusters gets is chosen when it runs

nb::tuple Direct(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
                 bool in_chain, const nb::dict& device) {
  const ConvArgs args = ArgsOfLayer(layer, pool, precise);
  const DeviceModel model(device);
  const DenseConvChoice choice = ChooseKernel(args, element_bytes, kWorkspace, in_chain, {}, ReadDevice(device));
  const nb::object named = Named(CandidateOf(choice));
  return nb::make_tuple(named[0], named[1], choice.us, PoolsInKernel(choice, args));
}

Candidate CandidateOf(const EcrPlan& p) {
  if (p.warps == 0) return {Family::kPerOutput, {}};
  return {Family::kEcr, {p.lanes, p.splits, p.tile_images, p.tile_out[0], p.tile_out[1], p.row_parts, p.max_rows}};
}

nb::tuple Sparse(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
                 const nb::dict& device) {
  const ConvArgs args = ArgsOfLayer(layer, pool, precise);
  const DeviceModel model(device);
  const DeviceInfo info = ReadDevice(device);
  const EcrPlan p = ChooseEcrPlan(args, element_bytes, kWorkspace, info);
  const nb::object named = Named(CandidateOf(p));
  return nb::make_tuple(named[0], named[1], EcrMicroseconds(p, args, element_bytes, info), true);
}

// The `most` best of each family by its model, best first.
nb::list Candidates(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes,
                    bool precise, int most, const nb::dict& device) {
  const ConvArgs args = ArgsOfLayer(layer, pool, precise);
  const DeviceModel model(device);
  const DeviceInfo info = ReadDevice(device);
  std::vector<Rated> rated = DenseCandidates(args, element_bytes, kWorkspace, info);
  VisitEcrPlans(args, element_bytes, kWorkspace, info, [&](const EcrPlan& p) {
    rated.push_back({CandidateOf(p), EcrMicroseconds(p, args, element_bytes, info)});
  });
  std::stable_sort(rated.begin(), rated.end(), [](const Rated& a, const Rated& b) { return a.us < b.us; });
  std::map<Family, std::set<std::vector<int>>> known;
  nb::list found;
  for (const Rated& each : rated) {
    auto& tiles = known[each.candidate.family];
    const std::vector<int> tile(std::begin(each.candidate.tile), std::end(each.candidate.tile));
    if (static_cast<int>(tiles.size()) >= most || !tiles.insert(tile).second) continue;
    const nb::object named = Named(each.candidate);
    found.append(nb::make_tuple(named[0], named[1], each.us));
  }
  return found;
}

Candidate ReadCandidate(const std::vector<int>& numbers) {
  if (numbers.size() != kTileNumbers + 1) throw nb::value_error("a candidate must have 8 numbers");
  Candidate candidate;
  candidate.family = static_cast<Family>(numbers[0]);
  std::copy(numbers.begin() + 1, numbers.end(), candidate.tile);
  return candidate;
}

// What the models expect of candidates that fit, in their order.
std::vector<double> Expected(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes,
                             bool precise, const std::vector<std::vector<int>>& candidates, const nb::dict& device) {
  const ConvArgs args = ArgsOfLayer(layer, pool, precise);
  const DeviceModel model(device);
  const DeviceInfo info = ReadDevice(device);
  std::vector<double> found;
  for (const std::vector<int>& numbers : candidates) {
    const Candidate candidate = ReadCandidate(numbers);
    if (candidate.family == Family::kEcr) {
      const EcrPlan p = EcrPlanOf(candidate, args, element_bytes, kWorkspace, info);
      found.push_back(p.warps == 0 ? 0 : EcrMicroseconds(p, args, element_bytes, info));
    } else {
      found.push_back(MicrosecondsOf(candidate, args, element_bytes, kWorkspace, info));
    }
  }
  return found;
}

// The group and kind of model.json whose constants a candidate's model takes.
nb::tuple ModelGroup(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes,
                     bool precise, const std::vector<int>& candidate, const nb::dict& device) {
  const ModelName name = ModelNameOf(ReadCandidate(candidate), ArgsOfLayer(layer, pool, precise), element_bytes,
                                     kWorkspace, ReadDevice(device));
  return nb::make_tuple(name.group, name.kind);
}

nb::list OfKernelGradients(const std::vector<int64_t>& layer, size_t most, const nb::dict& device) {
  const ConvArgs args = ArgsOfLayer(layer, {}, /*precise=*/true);
  nb::list found;
  for (const KernelGradientPlan& p : KernelGradientPlans(args, ReadDevice(device))) {
    if (found.size() == most) break;
    found.append(nb::make_tuple(nb::make_tuple(p.tiles, p.shares_channels ? 1 : 0, p.columns, p.splits), p.microseconds,
                                KernelGradientBytes(args, p)));
  }
  return found;
}

nb::list OfChain(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int element_bytes, bool precise,
                 const nb::dict& device) {
  const DeviceModel model(device);
  nb::list found;
  for (const WgmmaPlan& plan : ChainPlans(layer, pool, element_bytes, precise, ReadDevice(device))) {
    const bool by_model = plan.splits <= kModelSplits;
    found.append(
        nb::make_tuple(plan.out_channels, plan.pixels, plan.patch ? 1 : 0, plan.splits, plan.cycles, by_model));
  }
  return found;
}

}  // namespace

DeviceModel::DeviceModel(const nb::dict& device) : constants_(Read(device)), scope_(constants_.data()) {}

std::vector<double> DeviceModel::Read(const nb::dict& device) {
  auto constants = Field<std::vector<double>>(device, "model");
  if (constants.empty()) constants.assign(std::begin(model::kShipped), std::end(model::kShipped));
  if (constants.size() != model::kCount) {
    throw nb::value_error(("model must have " + std::to_string(model::kCount) + " constants").c_str());
  }
  return constants;
}

DeviceInfo ReadDevice(const nb::dict& device) {
  DeviceInfo info{};
  info.multiprocessors = Field<int>(device, "multiprocessors");
  info.shared_memory = Field<int>(device, "shared_memory");
  info.shared_memory_sm = Field<int>(device, "shared_memory_sm");
  info.tensor_maps = Field<bool>(device, "tensor_maps");
  info.fast_tf32 = Field<bool>(device, "fast_tf32");
  info.wgmma = Field<bool>(device, "warpgroups");
  info.clock_hz = Field<double>(device, "clock_hz");
  info.memory_bytes_per_second = Field<double>(device, "memory_bytes_per_second");
  const auto clusters = Field<std::vector<int>>(device, "clusters");
  if (clusters.size() != kMaxSplits + 1) throw nb::value_error("clusters must have 17 entries");
  for (int size = 0; size <= kMaxSplits; ++size) info.clusters[size] = clusters[size];
  if (info.clock_hz <= 0 || info.memory_bytes_per_second <= 0) throw nb::value_error("rates must be positive");
  if (info.multiprocessors < 1) throw nb::value_error("multiprocessors must be at least 1");
  return info;
}

}  // namespace jsc

NB_MODULE(_planner, m) {
  using namespace nb::literals;
  jsc::DefineCoo(m);
  jsc::DefineLimits(m);
  m.def("direct", &jsc::Direct, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "in_chain"_a, "device"_a,
        "(family, tile, microseconds, whether it takes the pool) that the models choose for a dense convolution.");
  m.def("sparse", &jsc::Sparse, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "device"_a,
        "(family, tile, microseconds, True) that the model chooses for ECR or PECR.");
  m.def(
      "candidates", &jsc::Candidates, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "most"_a, "device"_a,
      "(family, tile, microseconds) of what kernels can take, at most so many of a family, by what its model expects.");
  m.def("expected", &jsc::Expected, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "candidates"_a, "device"_a,
        "Microseconds that the models expect of these candidates, as the attribute `candidate` has them.");
  m.def("model_group", &jsc::ModelGroup, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "candidate"_a, "device"_a,
        "(group, kind) of model.json that a candidate's model takes, empty where the candidate does not fit.");
  m.def(
      "chain_tiles", &jsc::OfChain, "layer"_a, "pool"_a, "element_bytes"_a, "precise"_a, "device"_a,
      "(output channels, pixels, patch, splits, cycles, whether the model may choose it) of every tile that a layer of "
      "a chain may have.");
  m.def("kernel_gradients", &jsc::OfKernelGradients, "layer"_a, "most"_a, "device"_a,
        "(tile, microseconds, bytes of workspace) of plans of a kernel's gradient at HIGHEST, the fastest first.");
  m.def(
      "chain_takes_pool",
      [](const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, const std::vector<int64_t>& tile,
         int element_bytes, bool precise, const nb::dict& device) {
        const jsc::DeviceModel model(device);
        return jsc::ChainTakesPool(layer, pool, tile, element_bytes, precise, jsc::ReadDevice(device));
      },
      "layer"_a, "pool"_a, "tile"_a, "element_bytes"_a, "precise"_a, "device"_a,
      "Whether the kernel of a layer of a chain takes the pool behind it.");
  m.def(
      "chain_pairs",
      [](int64_t pixels, int64_t in_channels, int64_t channels, int64_t out_channels, int element_bytes, bool precise,
         const nb::dict& device) {
        return jsc::ChainPairs(pixels, in_channels, channels, out_channels, element_bytes, precise,
                               jsc::ReadDevice(device));
      },
      "pixels"_a, "in_channels"_a, "channels"_a, "out_channels"_a, "element_bytes"_a, "precise"_a, "device"_a,
      "Whether one kernel runs two 1x1 convolutions of a chain.");
}
