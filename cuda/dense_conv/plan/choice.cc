#include "cuda/dense_conv/plan/choice.h"

namespace jsc {

namespace {

// The plan of a candidate, or none where it does not fit.
DenseConvChoice ChoiceOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                         bool in_chain, const DeviceInfo& info) {
  DenseConvChoice choice{};
  switch (candidate.family) {
    case Family::kFewChannels:
      choice.few_channels = FewChannelsPlanOf(candidate, a, element_bytes, info);
      break;
    case Family::kSplitKChannels:
      if (!in_chain) choice.splitk_channels = SplitKChannelsPlanOf(candidate, FlattenedArgs(a), element_bytes, info);
      break;
    case Family::kGrouped:
      if (info.wgmma) choice.grouped = GroupedPlanOf(candidate, a, element_bytes, info);
      break;
    case Family::kWgmma:
      if (info.wgmma) choice.wgmma = WgmmaPlanOf(candidate, a, element_bytes, in_chain, info);
      break;
    case Family::kMma:
      if (a.pool == Pool::kNone) choice.mma = MmaPlanOf(candidate, a, element_bytes, workspace_bytes, info);
      break;
    default:
      break;
  }
  return choice;
}

}  // namespace

DenseConvChoice ChooseKernel(const ConvArgs& a, int element_bytes, size_t workspace_bytes, bool in_chain,
                             const Candidate& candidate, const DeviceInfo& info) {
  if (candidate.family != Family::kByModel && !in_chain) {
    return ChoiceOf(candidate, a, element_bytes, workspace_bytes, in_chain, info);
  }
  DenseConvChoice choice{};
  choice.few_channels = ChooseFewChannelsPlan(a, element_bytes, info);
  if (choice.few_channels.out_channels > 0) return choice;
  if (a.pool == Pool::kNone) choice.mma = ChooseMmaPlan(a, element_bytes, workspace_bytes, !in_chain, info);
  if (!info.wgmma) return choice;
  choice.wgmma = WgmmaPlanOf(candidate, a, element_bytes, in_chain, info);
  if (choice.wgmma.out_channels > 0) return choice;
  choice.wgmma = ChooseWgmmaPlan(a, element_bytes, in_chain, info);
  // The model of mma knows no bound by memory. Where it expects up to a tenth less or more than that of wgmma, wgmma
  // took as long on an H200 (at most 5 % more) or up to a quarter less. At HIGHEST small layers take 0.85 of what it
  // expects, those of 20 us and more all of it. In a chain wgmma fetches its first data earlier. Choices between these
  // and small_map lose 0.9 % on average and 12 % at most.
  constexpr double kSmall = 30000;  // cycles of wgmma: 20 us
  const bool tf32x3 = element_bytes == 4 && a.precision == Precision::kHighest, halves = element_bytes == 2;
  const double of_tf32x3 = choice.wgmma.cycles < kSmall ? 1.2 : 1;
  const double of_large = in_chain ? 0.6 : tf32x3 ? of_tf32x3 : halves ? 0.97 : 1;
  const double of_small_map = in_chain ? (tf32x3 ? 0.95 : halves ? 0.85 : 0.75) : tf32x3 ? 0.95 : halves ? 0.96 : 0.94;
  if (IsSmallMap(choice.mma.tile)) {
    const MmaPlan large = ChooseMmaPlan(a, element_bytes, workspace_bytes, false, info);
    if (large.cycles / of_large < choice.mma.cycles / of_small_map) choice.mma = large;
  }
  const double margin = IsSmallMap(choice.mma.tile) ? of_small_map : of_large;
  const bool is_faster = choice.mma.cycles < margin * choice.wgmma.cycles;
  if (choice.mma.tile != MmaTile::kNone && is_faster) choice.wgmma = {};
  double other = choice.wgmma.out_channels > 0 ? choice.wgmma.cycles : choice.mma.cycles / margin;
  choice.grouped = ChooseGroupedPlan(a, element_bytes, info);
  // From RegNets' layers at batch 1, as shares of what the other model expects.
  const double of_grouped = tf32x3 ? 1.05 : halves ? 0.87 : IsSmallMap(choice.mma.tile) ? 1 : 0.9;
  const bool by_products = choice.wgmma.out_channels == 0;
  if (choice.grouped.cycles > (by_products ? choice.mma.cycles / of_grouped : other)) choice.grouped = {};
  if (choice.grouped.tiles > 0) other = choice.grouped.cycles;
  if (in_chain) return choice;
  choice.splitk_channels = ChooseSplitKChannelsPlan(FlattenedArgs(a), element_bytes, info);
  // From calls on an H200 in each precision, hardly any of which has groups.
  const double of_splitk_channels = by_products ? (tf32x3 ? 1.01 : 1.06) : (tf32x3 ? 0.95 : 0.92);
  if (choice.splitk_channels.cycles > of_splitk_channels * other) choice.splitk_channels = {};
  return choice;
}

std::vector<Rated> DenseCandidates(const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                                   const DeviceInfo& info) {
  std::vector<Rated> found;
  VisitFewChannelsPlans(a, element_bytes, info, [&](const FewChannelsPlan& p) {
    found.push_back({{Family::kFewChannels, {p.out_channels, p.tile_out[0], p.tile_out[1]}}, p.cycles});
  });
  if (a.pool == Pool::kNone) {
    VisitMmaPlans(a, element_bytes, workspace_bytes, true, info, [&](const MmaPlan& p) {
      found.push_back({{Family::kMma, {static_cast<int>(p.tile), p.splits}}, p.cycles});
    });
  }
  if (!info.wgmma) return found;
  for (const WgmmaPlan& p : WgmmaPlans(a, element_bytes, false, info)) {
    found.push_back({{Family::kWgmma, {p.out_channels, p.pixels, p.patch, p.splits}}, p.cycles});
  }
  VisitGroupedPlans(a, element_bytes, info, [&](const GroupedPlan& p) {
    const Candidate tile{Family::kGrouped, {p.tile_images, p.tile_high, p.tile_wide, p.groups, p.out_channel_splits}};
    found.push_back({tile, p.cycles});
  });
  VisitSplitKChannelsPlans(FlattenedArgs(a), element_bytes, info, [&](const SplitKChannelsPlan& p) {
    const Candidate tile{Family::kSplitKChannels,
                         {p.out_channels, p.columns, p.warps, p.tile_high, p.tile_wide, p.splits}};
    found.push_back({tile, p.cycles});
  });
  return found;
}

bool PoolsInKernel(const DenseConvChoice& choice, const ConvArgs& a) {
  if (a.pool == Pool::kNone) return false;
  constexpr double kMostPooledTf32x3 = 1.25e8;  // products of a call: one image's 7x7 stem
  // At HIGHEST what tiles compute twice costs more than a pool behind many images.
  const double products = 1.0 * a.images * a.conv_size[0] * a.conv_size[1] * a.out_channels * a.kernel_size[0] *
                          a.kernel_size[1] * a.channels;
  const bool image =
      choice.few_channels.out_channels > 0 && (!choice.few_channels.tf32x3 || products <= kMostPooledTf32x3);
  return image || choice.wgmma.out_channels > 0;
}

}  // namespace jsc
