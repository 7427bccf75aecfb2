// Which loop runs a convolution.
#include <atomic>
#include <string>
#include <utility>

#include "cpu/ffi/host.h"
#include "cpu/plan/plan.h"
#include "cpu/plan/plan_cache.h"

namespace jsc {
namespace {

std::atomic<int>& ForcedLoop() {
  static std::atomic<int> forced{-1};
  return forced;
}

ConvPlan PlanOf(ConvLoop loop, const ConvCall& call, const Machine& machine, int64_t accumulator_bytes,
                double density) {
  switch (loop) {
    case ConvLoop::kScatter:
      return MakeScatterPlan(call.args, machine, accumulator_bytes, density);
    case ConvLoop::kPixels:
      return MakePixelPlan(call.args, machine, accumulator_bytes, density, call.packed != nullptr);
    case ConvLoop::kDirect:
      return MakeDirectPlan(call.args, machine, accumulator_bytes, call.packed != nullptr);
    case ConvLoop::kPhases:
      return MakePhasePlan(call.args, machine, accumulator_bytes, density);
    default:
      return MakePlan(call.args, machine, accumulator_bytes, density);
  }
}

}  // namespace

bool SetLoop(const std::string& name) {
  const std::pair<const char*, int> loops[] = {{"auto", -1},
                                               {"windows", static_cast<int>(ConvLoop::kWindows)},
                                               {"scatter", static_cast<int>(ConvLoop::kScatter)},
                                               {"pixels", static_cast<int>(ConvLoop::kPixels)},
                                               {"phases", static_cast<int>(ConvLoop::kPhases)}};
  for (const auto& [known, loop] : loops) {
    if (name != known) continue;
    ForcedLoop() = loop;
    ClearPlans();
    return true;
  }
  return false;
}

ConvPlan ChoosePlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes, double density) {
  // Loops add in different orders, so they are compared for a fixed number of threads: results do not depend on it.
  Machine typical = machine;
  typical.threads = 2;
  if (call.kernel == nullptr) return PlanOf(ConvLoop::kPixels, call, machine, accumulator_bytes, density);
  const bool can_run[] = {true, CanScatter(call.args), CanRunPixels(call.args, machine), call.may_be_dense,
                          CanRunPhases(call.args, machine, accumulator_bytes, call.packed != nullptr)};
  const int forced = ForcedLoop();
  ConvLoop loop = ConvLoop::kWindows;
  if (forced >= 0) {
    if (can_run[forced]) loop = static_cast<ConvLoop>(forced);
    return PlanOf(loop, call, machine, accumulator_bytes, density);
  }
  ConvPlan best = PlanOf(loop, call, typical, accumulator_bytes, density);
  for (const ConvLoop other : {ConvLoop::kScatter, ConvLoop::kPixels, ConvLoop::kDirect, ConvLoop::kPhases}) {
    if (!can_run[static_cast<int>(other)]) continue;
    const ConvPlan plan = PlanOf(other, call, typical, accumulator_bytes, density);
    if (plan.cycles < best.cycles) best = plan;
  }
  return machine.threads == typical.threads ? best : PlanOf(best.loop, call, machine, accumulator_bytes, density);
}

}  // namespace jsc
