#include "cuda/dense_conv/plan/choice.h"

#include <limits>

#include "cuda/core/model.h"

namespace jsc {

namespace {

// The plan of a candidate, or none where it does not fit.
DenseConvChoice ChoiceOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                         bool in_chain, const DeviceInfo& info) {
  DenseConvChoice choice{};
  switch (candidate.family) {
    case Family::kFewChannels:
      choice.few_channels = FewChannelsPlanOf(candidate, a, element_bytes, info);
      choice.us = FewChannelsMicroseconds(choice.few_channels, a, element_bytes, info);
      break;
    case Family::kSplitKChannels:
      if (in_chain) break;
      choice.splitk_channels = SplitKChannelsPlanOf(candidate, FlattenedArgs(a), element_bytes, info);
      choice.us = SplitKChannelsMicroseconds(choice.splitk_channels, a, element_bytes, info);
      break;
    case Family::kGrouped:
      if (!info.wgmma) break;
      choice.grouped = GroupedPlanOf(candidate, a, element_bytes, info);
      choice.us = GroupedMicroseconds(choice.grouped, a, element_bytes, in_chain, info);
      break;
    case Family::kWgmma:
      if (!info.wgmma) break;
      choice.wgmma = WgmmaPlanOf(candidate, a, element_bytes, in_chain, info);
      choice.us = WgmmaMicroseconds(choice.wgmma, a, element_bytes, in_chain, info);
      break;
    case Family::kMma:
      if (a.pool != Pool::kNone) break;
      choice.mma = MmaPlanOf(candidate, a, element_bytes, workspace_bytes, info);
      choice.us = MmaMicroseconds(choice.mma, a, element_bytes, in_chain, info);
      break;
    default:
      break;
  }
  return choice;
}

Candidate CandidateOf(const FewChannelsPlan& p) {
  return {Family::kFewChannels, {p.out_channels, p.tile_out[0], p.tile_out[1]}};
}

Candidate CandidateOf(const MmaPlan& p) { return {Family::kMma, {static_cast<int>(p.tile), p.splits}}; }

Candidate CandidateOf(const WgmmaPlan& p) { return {Family::kWgmma, {p.out_channels, p.pixels, p.patch, p.splits}}; }

Candidate CandidateOf(const GroupedPlan& p) {
  return {Family::kGrouped, {p.tile_images, p.tile_high, p.tile_wide, p.groups, p.out_channel_splits}};
}

Candidate CandidateOf(const SplitKChannelsPlan& p) {
  return {Family::kSplitKChannels, {p.out_channels, p.columns, p.warps, p.tile_high, p.tile_wide, p.splits}};
}

}  // namespace

DenseConvChoice ChooseKernel(const ConvArgs& a, int element_bytes, size_t workspace_bytes, bool in_chain,
                             const Candidate& candidate, const DeviceInfo& info) {
  if (candidate.family != Family::kByModel && !in_chain) {
    return ChoiceOf(candidate, a, element_bytes, workspace_bytes, in_chain, info);
  }
  DenseConvChoice choice{};
  choice.us = std::numeric_limits<double>::infinity();
  const auto is_faster = [&choice](double us) {
    if (us >= choice.us) return false;
    choice.us = us;
    return true;
  };
  if (a.pool == Pool::kNone) {
    VisitMmaPlans(a, element_bytes, workspace_bytes, !in_chain, info, [&](const MmaPlan& plan) {
      if (is_faster(MmaMicroseconds(plan, a, element_bytes, in_chain, info))) choice.mma = plan;
    });
  }
  const FewChannelsPlan few_channels = ChooseFewChannelsPlan(a, element_bytes, info);
  const bool has_few_channels = few_channels.out_channels > 0;
  if (has_few_channels && (is_faster(FewChannelsMicroseconds(few_channels, a, element_bytes, info)) || in_chain)) {
    choice.few_channels = few_channels;
  }
  if (!info.wgmma || (in_chain && has_few_channels)) return choice;
  const WgmmaPlan told = WgmmaPlanOf(candidate, a, element_bytes, in_chain, info);
  if (told.out_channels > 0) {
    choice.wgmma = told, choice.few_channels = {};
    return choice;
  }
  const WgmmaPlan wgmma = ChooseWgmmaPlan(a, element_bytes, in_chain, info);
  if (wgmma.out_channels > 0 && is_faster(WgmmaMicroseconds(wgmma, a, element_bytes, in_chain, info))) {
    choice.wgmma = wgmma, choice.few_channels = {};
  }
  const GroupedPlan grouped = ChooseGroupedPlan(a, element_bytes, info);
  // In a chain, too, the models of kernels alone say more of one image in float32, for groups as wide as those that
  // were timed (docs/design/kernels/chain.md).
  const bool as_alone = in_chain && a.images == 1 && element_bytes == 4 &&
                        static_cast<double>(a.out_channels / a.groups) >= model::gpu_chains::kChannelsOfAGroupAlone &&
                        choice.wgmma.out_channels == 0 && choice.mma.tile != MmaTile::kNone;
  if (as_alone) choice.us = MmaMicroseconds(choice.mma, a, element_bytes, false, info);
  if (grouped.tiles > 0 && is_faster(GroupedMicroseconds(grouped, a, element_bytes, in_chain && !as_alone, info))) {
    choice.grouped = grouped;
  }
  if (in_chain) return choice;
  const SplitKChannelsPlan splitk = ChooseSplitKChannelsPlan(FlattenedArgs(a), element_bytes, info);
  if (splitk.out_channels > 0 && is_faster(SplitKChannelsMicroseconds(splitk, a, element_bytes, info))) {
    choice.splitk_channels = splitk, choice.few_channels = {};
  }
  return choice;
}

std::vector<Rated> DenseCandidates(const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                                   const DeviceInfo& info) {
  std::vector<Rated> found;
  const auto add = [&](const Candidate& candidate) {
    found.push_back({candidate, MicrosecondsOf(candidate, a, element_bytes, workspace_bytes, info)});
  };
  VisitFewChannelsPlans(a, element_bytes, info, [&](const FewChannelsPlan& p) { add(CandidateOf(p)); });
  if (a.pool == Pool::kNone) {
    VisitMmaPlans(a, element_bytes, workspace_bytes, true, info, [&](const MmaPlan& p) { add(CandidateOf(p)); });
  }
  if (!info.wgmma) return found;
  for (const WgmmaPlan& p : WgmmaPlans(a, element_bytes, false, info)) add(CandidateOf(p));
  VisitGroupedPlans(a, element_bytes, info, [&](const GroupedPlan& p) { add(CandidateOf(p)); });
  VisitSplitKChannelsPlans(FlattenedArgs(a), element_bytes, info,
                           [&](const SplitKChannelsPlan& p) { add(CandidateOf(p)); });
  return found;
}

Candidate CandidateOf(const DenseConvChoice& choice) {
  if (choice.few_channels.out_channels > 0) return CandidateOf(choice.few_channels);
  if (choice.splitk_channels.out_channels > 0) return CandidateOf(choice.splitk_channels);
  if (choice.grouped.tiles > 0) return CandidateOf(choice.grouped);
  if (choice.wgmma.out_channels > 0) return CandidateOf(choice.wgmma);
  return choice.mma.tile == MmaTile::kNone ? Candidate{Family::kPerOutput, {}} : CandidateOf(choice.mma);
}

double MicrosecondsOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                      const DeviceInfo& info) {
  const DenseConvChoice choice = ChoiceOf(candidate, a, element_bytes, workspace_bytes, false, info);
  return choice.has_plan() ? choice.us : 0;
}

ModelName ModelNameOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                      const DeviceInfo& info) {
  constexpr const char* kKinds[] = {"16bit", "tf32", "highest", "ffma"};
  if (candidate.family == Family::kEcr) return {"ecr", "all"};
  const DenseConvChoice choice = ChoiceOf(candidate, a, element_bytes, workspace_bytes, false, info);
  if (!choice.has_plan()) return {};
  const char* kind = kKinds[KindOf(a, element_bytes)];
  switch (candidate.family) {
    case Family::kFewChannels:
      return {"few_channels", kind};
    case Family::kSplitKChannels:
      return {"splitk_channels", kind};
    case Family::kGrouped:
      return {"grouped", kind};
    case Family::kWgmma:
      return {"wgmma", kind};
    default:
      return {IsSmallMap(choice.mma.tile) ? "small_map" : "mma", kKinds[MmaKind(choice.mma, element_bytes)]};
  }
}

bool PoolsInKernel(const DenseConvChoice& choice, const ConvArgs& a) {
  if (a.pool == Pool::kNone) return false;
  // At HIGHEST what tiles compute twice costs more than a pool behind many images: most products are one image's 7x7
  // stem.
  constexpr double kMostPooledTf32x3 = model::gpu_choice::kProductsPooledStem;
  const double products = 1.0 * a.images * a.conv_size[0] * a.conv_size[1] * a.out_channels * a.kernel_size[0] *
                          a.kernel_size[1] * a.channels;
  const bool image =
      choice.few_channels.out_channels > 0 && (!choice.few_channels.tf32x3 || products <= kMostPooledTf32x3);
  return image || choice.wgmma.out_channels > 0;
}

}  // namespace jsc
