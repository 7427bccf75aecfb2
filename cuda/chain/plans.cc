#include "cuda/chain/plans.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/chain/call.h"
#include "cuda/chain/pair_plan.h"
#include "cuda/dense_conv/plan/choice.h"

namespace jsc {
namespace {

void CheckElementBytes(int element_bytes) {
  if (element_bytes != 2 && element_bytes != 4) throw std::invalid_argument("element_bytes must be 2 or 4");
}

}  // namespace

std::vector<WgmmaPlan> ChainPlans(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool,
                                  int element_bytes, bool precise, const DeviceInfo& device) {
  CheckElementBytes(element_bytes);
  ConvArgs a = ArgsOfLayer(layer, pool, precise);
  if (!device.wgmma || ChooseFewChannelsPlan(a, element_bytes, device).out_channels > 0) return {};
  std::vector<WgmmaPlan> plans = WgmmaPlans(a, element_bytes, true, device);
  if (plans.empty() && a.pool != Pool::kNone) {
    a.pool = Pool::kNone;
    for (int i = 0; i < 2; ++i) a.out_size[i] = a.conv_size[i];
    plans = WgmmaPlans(a, element_bytes, true, device);
  }
  const auto rank = [](const WgmmaPlan& plan) { return std::pair(plan.splits > kModelSplits, plan.cycles); };
  std::stable_sort(plans.begin(), plans.end(),
                   [&](const WgmmaPlan& one, const WgmmaPlan& other) { return rank(one) < rank(other); });
  return plans;
}

bool ChainTakesPool(const std::vector<int64_t>& layer, const std::vector<int64_t>& pool,
                    const std::vector<int64_t>& tile, int element_bytes, bool precise, const DeviceInfo& device) {
  CheckElementBytes(element_bytes);
  if (pool.empty() || tile.size() != kTileFields) throw std::invalid_argument("pool must have 8 entries and tile 4");
  const ConvArgs args = ArgsOfLayer(layer, pool, precise);
  const std::optional<Candidate> choice = ReadTile(tile.data());
  if (!choice) return false;  // the call itself is refused, with the reason
  return PoolsInKernel(ChooseKernel(args, element_bytes, 0, true, *choice, device), args);
}

bool ChainPairs(int64_t pixels, int64_t in_channels, int64_t channels, int64_t out_channels, int element_bytes,
                bool precise, const DeviceInfo& device) {
  CheckElementBytes(element_bytes);
  if (std::min({pixels, in_channels, channels, out_channels}) < 1 ||
      std::max({pixels, in_channels, channels, out_channels}) > kMaxElements) {
    throw std::invalid_argument("sizes must be from 1 to 2^31 - 1");
  }
  const PairShape shape{pixels, in_channels, channels, out_channels};
  return ChoosePairPlan(shape, element_bytes, precise && element_bytes == 4, device).blocks > 0;
}

}  // namespace jsc
