// The cut into tasks that all row-tiled loops search in the same way: tiles of rows and of blocks, by expected cycles.
#ifndef JSC_CPU_PLAN_PLAN_SEARCH_H_
#define JSC_CPU_PLAN_PLAN_SEARCH_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/plan/ceil_div.h"
#include "cpu/plan/plan.h"

namespace jsc {

// What there is to cut: `rows` of results and `blocks` of output channels in each of `parts` (stacks and groups).
struct TaskSpace {
  int64_t rows, blocks, parts;
  int64_t fewest;  // tiles of rows, so that one fits the caches
};

// `plan` with the cut of the least `cycles(plan)`. One tile of columns, `plan.block` and the like as they come.
template <typename Cycles>
ConvPlan SearchTasks(ConvPlan plan, const TaskSpace& space, int64_t threads, const Cycles& cycles) {
  ConvPlan best{};
  best.cycles = std::numeric_limits<double>::infinity();
  for (int64_t tiles = space.fewest; tiles <= std::min(space.rows, space.fewest + 2 * threads); ++tiles) {
    plan.tile_rows = CeilDiv(space.rows, tiles);
    plan.row_tiles = CeilDiv(space.rows, plan.tile_rows);
    for (plan.block_tiles = 1; plan.block_tiles <= std::min<int64_t>(space.blocks, 64); ++plan.block_tiles) {
      plan.task_blocks = CeilDiv(space.blocks, plan.block_tiles);
      plan.tasks = space.parts * plan.row_tiles * plan.block_tiles;
      plan.cycles = cycles(plan);
      if (plan.cycles < best.cycles && CeilDiv(space.blocks, plan.task_blocks) == plan.block_tiles) best = plan;
    }
  }
  return best;
}

}  // namespace jsc

#endif  // JSC_CPU_PLAN_PLAN_SEARCH_H_
