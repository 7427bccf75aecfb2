#include "cpu/plan/plan_cache.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

namespace jsc {
namespace {

constexpr double kDensities = 64;
constexpr size_t kMostCalls = 4096;  // of different shapes: beyond that all are forgotten

struct Known {
  std::map<int, ConvPlan> plans;  // by density
  int64_t threads = 1;            // of the last call
};

struct Plans {
  std::mutex mutex;
  std::map<PlanKey, Known> known;
};

Plans& AllPlans() {
  static Plans* const plans = new Plans;  // alive until the last thread is gone
  return *plans;
}

}  // namespace

PlanKey::PlanKey(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes) {
  const ConvArgs& a = call.args;
  for (int64_t field : {machine.l1_bytes,
                        machine.l2_bytes,
                        machine.vector_bytes,
                        machine.threads,
                        accumulator_bytes,
                        static_cast<int64_t>(call.dtype),  // whose packed kernel is read, or is not
                        static_cast<int64_t>(machine.pairs),
                        static_cast<int64_t>(machine.amx),
                        static_cast<int64_t>(call.packed != nullptr),
                        static_cast<int64_t>(call.kernel != nullptr),
                        static_cast<int64_t>(call.may_be_dense),
                        static_cast<int64_t>(call.scaled.scale != nullptr),
                        a.images,
                        a.size[0],
                        a.size[1],
                        a.channels,
                        a.stacks,
                        a.kernel_size[0],
                        a.kernel_size[1],
                        a.group_channels,
                        a.out_channels,
                        a.groups,
                        a.stride[0],
                        a.stride[1],
                        a.pad_low[0],
                        a.pad_low[1],
                        a.dilation[0],
                        a.dilation[1],
                        a.conv_size[0],
                        a.conv_size[1],
                        static_cast<int64_t>(a.pool),
                        a.window[0],
                        a.window[1],
                        a.window_stride[0],
                        a.window_stride[1],
                        a.window_pad_low[0],
                        a.window_pad_low[1],
                        a.out_size[0],
                        a.out_size[1]}) {
    fields_[used_++] = field;
  }
}

bool PlanKey::operator<(const PlanKey& other) const {
  return std::lexicographical_compare(fields_, fields_ + used_, other.fields_, other.fields_ + other.used_);
}

int64_t ExpectedThreads(const PlanKey& key) {
  Plans& plans = AllPlans();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  const auto found = plans.known.find(key);
  return found == plans.known.end() ? 1 : found->second.threads;
}

ConvPlan CachedPlan(const PlanKey& key, const ConvCall& call, const Machine& machine, int64_t accumulator_bytes,
                    double density) {
  // Finer steps where maps are sparse: a plan depends on the ratio of densities.
  const int step = static_cast<int>(std::lround(std::sqrt(density) * kDensities));
  Plans& plans = AllPlans();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  if (plans.known.size() >= kMostCalls && plans.known.find(key) == plans.known.end()) plans.known.clear();
  Known& known = plans.known[key];
  auto found = known.plans.find(step);
  if (found == known.plans.end()) {
    const double root = step / kDensities;
    found = known.plans.emplace(step, ChoosePlan(call, machine, accumulator_bytes, root * root)).first;
  }
  known.threads = std::min(machine.threads, found->second.tasks);
  return found->second;
}

void ClearPlans() {
  Plans& plans = AllPlans();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  plans.known.clear();
}

}  // namespace jsc
