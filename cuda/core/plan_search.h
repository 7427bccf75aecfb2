// What every planner does with the plans that fit.
#ifndef JSC_CUDA_CORE_PLAN_SEARCH_H_
#define JSC_CUDA_CORE_PLAN_SEARCH_H_

#include <limits>

namespace jsc {

// The plan of the fewest cycles, the first of equals, among those that `visit_all` hands to its argument; an empty one
// of infinitely many where there are none.
template <typename Plan, typename VisitAll>
Plan Cheapest(const VisitAll& visit_all) {
  Plan best{};
  best.cycles = std::numeric_limits<double>::infinity();
  visit_all([&best](const Plan& plan) {
    if (plan.cycles < best.cycles) best = plan;
  });
  return best;
}

}  // namespace jsc

#endif  // JSC_CUDA_CORE_PLAN_SEARCH_H_
