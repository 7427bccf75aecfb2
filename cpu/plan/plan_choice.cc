// Which loop runs a convolution.
#include <atomic>
#include <string>

#include "cpu/ffi/host.h"
#include "cpu/plan/ceil_div.h"
#include "cpu/plan/plan.h"
#include "cpu/plan/plan_cache.h"

namespace jsc {
namespace {

ConvPlan PlanOf(ConvLoop loop, const ConvCall& call, const Machine& machine, int64_t accumulator_bytes, double density,
                bool pairs) {
  switch (loop) {
    case ConvLoop::kScatter:
      return MakeScatterPlan(call.args, machine, accumulator_bytes, density);
    case ConvLoop::kPixels:
      return MakePixelPlan(call.args, machine, accumulator_bytes, density, call.packed != nullptr, pairs);
    case ConvLoop::kDirect:
      return MakeDirectPlan(call, machine, accumulator_bytes);
    case ConvLoop::kDots:
      return MakeDotPlan(call, machine, accumulator_bytes);
    case ConvLoop::kPhases:
      return MakePhasePlan(call.args, machine, accumulator_bytes, density, pairs);
    case ConvLoop::kWinograd:
      return MakeWinogradPlan(call.args, machine);
    case ConvLoop::kAmx:
    case ConvLoop::kEmulatedAmx:
      return MakeAmxPlan(call, machine, loop);
    default:
      return MakePlan(call.args, machine, accumulator_bytes, density);
  }
}

bool CanRun(ConvLoop loop, const ConvCall& call, const Machine& machine, int64_t accumulator_bytes, bool pairs) {
  switch (loop) {
    case ConvLoop::kScatter:
      return call.kernel != nullptr && CanScatter(call.args);
    case ConvLoop::kPixels:
      return CanRunPixels(call.args, machine);
    case ConvLoop::kDirect:
    case ConvLoop::kEmulatedAmx:
      return call.may_be_dense;
    case ConvLoop::kAmx:
      return call.may_be_dense && machine.amx;
    case ConvLoop::kDots:
      return CanRunDots(call, machine);
    case ConvLoop::kPhases:
      return call.kernel != nullptr &&
             CanRunPhases(call.args, machine, accumulator_bytes, call.packed != nullptr, pairs);
    case ConvLoop::kWinograd:
      return CanRunWinograd(call, machine);
    default:
      return call.kernel != nullptr;
  }
}

// A loop, of elements or of pairs of them.
struct Candidate {
  const char* name;
  ConvLoop loop;
  bool pairs;
};

constexpr Candidate kCandidates[] = {
    {"windows", ConvLoop::kWindows, false},       {"scatter", ConvLoop::kScatter, false},
    {"pixels", ConvLoop::kPixels, false},         {"direct", ConvLoop::kDirect, false},
    {"phases", ConvLoop::kPhases, false},         {"dots", ConvLoop::kDots, false},
    {"winograd", ConvLoop::kWinograd, false},     {"pixels of pairs", ConvLoop::kPixels, true},
    {"direct of pairs", ConvLoop::kDirect, true}, {"phases of pairs", ConvLoop::kPhases, true},
    {"amx of pairs", ConvLoop::kAmx, true},       {"emulated amx of pairs", ConvLoop::kEmulatedAmx, true}};

bool IsDense(ConvLoop loop) {
  return loop == ConvLoop::kDirect || loop == ConvLoop::kAmx || loop == ConvLoop::kEmulatedAmx;
}

// A loop that takes the call, whatever others do. Calls with a packed kernel alone are of dense blocks, 1x1 or 3x3.
const Candidate& LoopOfAny(const ConvCall& call) {
  constexpr const Candidate &windows = kCandidates[0], &pixels = kCandidates[2], &pixels_of_pairs = kCandidates[7];
  static_assert(windows.loop == ConvLoop::kWindows && pixels.loop == ConvLoop::kPixels);
  static_assert(pixels_of_pairs.loop == ConvLoop::kPixels && pixels_of_pairs.pairs);
  if (call.kernel != nullptr) return windows;
  return call.dtype == DataType::BF16 ? pixels_of_pairs : pixels;
}

std::atomic<const Candidate*>& Forced() {
  static std::atomic<const Candidate*> forced{nullptr};
  return forced;
}

// The calls that candidates make.
struct Calls {
  ConvCall single, pairs;
  bool has_pairs;
  double density, density_of_pairs;

  bool CanRunOn(const Candidate& candidate, const Machine& machine, int64_t accumulator_bytes) const {
    if (candidate.pairs && (!has_pairs || (pairs.lone_channel && !IsDense(candidate.loop)))) return false;
    if (!candidate.pairs && single.kernel == nullptr && single.packed == nullptr) return false;
    return CanRun(candidate.loop, candidate.pairs ? pairs : single, machine, accumulator_bytes, candidate.pairs);
  }

  ConvPlan PlanFor(const Candidate& candidate, const Machine& machine, int64_t accumulator_bytes) const {
    ConvPlan plan = PlanOf(candidate.loop, candidate.pairs ? pairs : single, machine, accumulator_bytes,
                           candidate.pairs ? density_of_pairs : density, candidate.pairs);
    plan.pairs = candidate.pairs;
    return plan;
  }
};

}  // namespace

bool SetLoop(const std::string& name) {
  const Candidate* found = nullptr;
  for (const Candidate& candidate : kCandidates) {
    if (name == candidate.name) found = &candidate;
  }
  if (found == nullptr && name != "auto") return false;
  if (Forced().exchange(found) != found) ClearPlans();
  return true;
}

const char* LoopName(const ConvPlan& plan) {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.loop == plan.loop && candidate.pairs == plan.pairs) return candidate.name;
  }
  return "";
}

bool CanRunPairs(const ConvCall& call, const Machine& machine) {
  const bool odd = call.args.group_channels % 2 != 0;
  return machine.pairs && call.dtype == DataType::BF16 && call.may_be_dense && call.args.group_channels > 0 &&
         (!odd || (call.args.groups == 1 && call.kernel != nullptr));
}

ConvCall AsPairs(const ConvCall& call) {
  ConvCall pairs = call;
  pairs.lone_channel = call.args.group_channels % 2 != 0;
  pairs.args.channels = CeilDiv(call.args.channels, 2);
  pairs.args.group_channels = CeilDiv(call.args.group_channels, 2);
  return pairs;
}

ConvCall WithoutPairs(const ConvCall& call) {
  ConvCall single = call;
  if (call.dtype == DataType::BF16) single.packed = nullptr;
  return single;
}

ConvPlan ChoosePlan(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes, double density) {
  // Loops add in different orders, so they are compared for a fixed number of threads: results do not depend on it.
  Machine typical = machine;
  typical.threads = 2;
  // A pair is zero where both of it are; zeros of neighbouring channels are as good as independent.
  const Calls calls = {WithoutPairs(call), AsPairs(call), CanRunPairs(call, machine), density,
                       1 - (1 - density) * (1 - density)};
  const Candidate* const forced = Forced();
  if (forced != nullptr) {
    const bool can_run = calls.CanRunOn(*forced, machine, accumulator_bytes);
    return calls.PlanFor(can_run ? *forced : LoopOfAny(call), machine, accumulator_bytes);
  }
  Candidate best = LoopOfAny(call);
  ConvPlan plan = calls.PlanFor(best, typical, accumulator_bytes);
  for (const Candidate& other : kCandidates) {
    if (other.loop == ConvLoop::kEmulatedAmx) continue;  // for tests
    if (!calls.CanRunOn(other, machine, accumulator_bytes)) continue;
    const ConvPlan its = calls.PlanFor(other, typical, accumulator_bytes);
    if (its.cycles < plan.cycles) {
      plan = its;
      best = other;
    }
  }
  return machine.threads == typical.threads ? plan : calls.PlanFor(best, machine, accumulator_bytes);
}

}  // namespace jsc
