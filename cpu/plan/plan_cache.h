// Plans of the convolutions that were run before: searching one takes 1 to 9 microseconds, which is a tenth of a small
// layer, and a program runs the same layers again and again.
#ifndef JSC_CPU_PLAN_PLAN_CACHE_H_
#define JSC_CPU_PLAN_PLAN_CACHE_H_

#include "cpu/plan/plan.h"

namespace jsc {

// All that a plan depends on but for the density.
class PlanKey {
 public:
  PlanKey(const ConvCall& call, const Machine& machine, int64_t accumulator_bytes);
  bool operator<(const PlanKey& other) const;

 private:
  static constexpr int kFields = 40;
  int64_t fields_[kFields] = {};
  int used_ = 0;
};

// Threads that the last call of this kind had work for; 1 when there was none.
int64_t ExpectedThreads(const PlanKey& key);

// ChoosePlan for the nearest of some 64 densities.
ConvPlan CachedPlan(const PlanKey& key, const ConvCall& call, const Machine& machine, int64_t accumulator_bytes,
                    double density);

// Forgets all plans.
void ClearPlans();

}  // namespace jsc

#endif  // JSC_CPU_PLAN_PLAN_CACHE_H_
