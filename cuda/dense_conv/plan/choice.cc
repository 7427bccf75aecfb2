#include "cuda/dense_conv/plan/choice.h"

namespace jsc {

namespace {

// The plan of a candidate, or none where it does not fit.
DirectChoice ChoiceOf(const Candidate& candidate, const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                      bool in_chain, const DeviceInfo& info) {
  DirectChoice choice{};
  switch (candidate.family) {
    case Family::kFewChannels:
      choice.image = ImagePlanOf(candidate, a, element_bytes, info);
      break;
    case Family::kSplitKChannels:
      if (!in_chain) choice.slice = SlicePlanOf(candidate, FlattenedArgs(a), element_bytes, info);
      break;
    case Family::kGrouped:
      if (info.warpgroups) choice.group = GroupPlanOf(candidate, a, element_bytes, info);
      break;
    case Family::kWgmma:
      if (info.warpgroups) choice.warpgroup = WarpgroupPlanOf(candidate, a, element_bytes, in_chain, info);
      break;
    case Family::kMma:
      if (a.pool == Pool::kNone) choice.direct = DirectPlanOf(candidate, a, element_bytes, workspace_bytes, info);
      break;
    default:
      break;
  }
  return choice;
}

}  // namespace

DirectChoice ChooseKernel(const ConvArgs& a, int element_bytes, size_t workspace_bytes, bool in_chain,
                          const Candidate& candidate, const DeviceInfo& info) {
  if (candidate.family != Family::kByModel && !in_chain) {
    return ChoiceOf(candidate, a, element_bytes, workspace_bytes, in_chain, info);
  }
  DirectChoice choice{};
  choice.image = ChooseImagePlan(a, element_bytes, info);
  if (choice.image.filters > 0) return choice;
  if (a.pool == Pool::kNone) choice.direct = ChooseDirectPlan(a, element_bytes, workspace_bytes, !in_chain, info);
  if (!info.warpgroups) return choice;
  choice.warpgroup = WarpgroupPlanOf(candidate, a, element_bytes, in_chain, info);
  if (choice.warpgroup.filters > 0) return choice;
  choice.warpgroup = ChooseWarpgroupPlan(a, element_bytes, in_chain, info);
  // The other model knows no bound by memory: of calls where it expects up to a tenth less or more, warpgroups took as
  // long on an H200 (at most 5 % more) or up to a quarter less. At HIGHEST small layers take 0.85 of what it expects,
  // those of 20 us and more all of it. In a chain they fetch their first data earlier. Of the tiles that are small in
  // all ways, with which 2 to 5 us are compared, choices by these lose 0.9 % on average (12 % at most, but for one
  // layer of 5x5 in 16 bits). Of kernels alone in TF32 and 16 bits that was with a model of warpgroups that expected
  // 1.25 and 1.13 times as long of small layers as today's, by which these shares are set anew.
  constexpr double kSmall = 30000;  // cycles of warpgroups: 20 us
  const bool parts = element_bytes == 4 && a.precision == Precision::kHighest, halves = element_bytes == 2;
  const double of_parts = choice.warpgroup.cycles < kSmall ? 1.2 : 1;
  const double of_large = in_chain ? 0.6 : parts ? of_parts : halves ? 0.97 : 1;
  const double of_deep = in_chain ? (parts ? 0.95 : halves ? 0.85 : 0.75) : parts ? 0.95 : halves ? 0.96 : 0.94;
  if (IsDeep(choice.direct.tile)) {
    const DirectPlan large = ChooseDirectPlan(a, element_bytes, workspace_bytes, false, info);
    if (large.cycles / of_large < choice.direct.cycles / of_deep) choice.direct = large;
  }
  const double margin = IsDeep(choice.direct.tile) ? of_deep : of_large;
  const bool is_faster = choice.direct.cycles < margin * choice.warpgroup.cycles;
  if (choice.direct.tile != DirectTile::kNone && is_faster) choice.warpgroup = {};
  double other = choice.warpgroup.filters > 0 ? choice.warpgroup.cycles : choice.direct.cycles / margin;
  choice.group = ChooseGroupPlan(a, element_bytes, info);
  // By 90 times of RegNets' layers at batch 1 (h100_zoo_groups_before.json), as shares of what the other model expects.
  const double of_groups = parts ? 1.05 : halves ? 0.87 : IsDeep(choice.direct.tile) ? 1 : 0.9;
  const bool by_products = choice.warpgroup.filters == 0;
  if (choice.group.cycles > (by_products ? choice.direct.cycles / of_groups : other)) choice.group = {};
  if (choice.group.tiles > 0) other = choice.group.cycles;
  if (in_chain) return choice;
  choice.slice = ChooseSlicePlan(FlattenedArgs(a), element_bytes, info);
  // By 280 calls on an H200 in each precision, hardly any of which has groups.
  const double of_slices = by_products ? (parts ? 1.01 : 1.06) : (parts ? 0.95 : 0.92);
  if (choice.slice.cycles > of_slices * other) choice.slice = {};
  return choice;
}

std::vector<Rated> DenseCandidates(const ConvArgs& a, int element_bytes, size_t workspace_bytes,
                                   const DeviceInfo& info) {
  std::vector<Rated> found;
  VisitImagePlans(a, element_bytes, info, [&](const ImagePlan& p) {
    found.push_back({{Family::kFewChannels, {p.filters, p.tile_out[0], p.tile_out[1]}}, p.cycles});
  });
  if (a.pool == Pool::kNone) {
    VisitDirectPlans(a, element_bytes, workspace_bytes, true, info, [&](const DirectPlan& p) {
      found.push_back({{Family::kMma, {static_cast<int>(p.tile), p.splits}}, p.cycles});
    });
  }
  if (!info.warpgroups) return found;
  for (const WarpgroupPlan& p : WarpgroupPlans(a, element_bytes, false, info)) {
    found.push_back({{Family::kWgmma, {p.filters, p.pixels, p.patch, p.splits}}, p.cycles});
  }
  VisitGroupPlans(a, element_bytes, info, [&](const GroupPlan& p) {
    const Candidate tile{Family::kGrouped, {p.tile_images, p.tile_high, p.tile_wide, p.groups, p.feature_parts}};
    found.push_back({tile, p.cycles});
  });
  VisitSlicePlans(FlattenedArgs(a), element_bytes, info, [&](const SlicePlan& p) {
    const Candidate tile{Family::kSplitKChannels, {p.filters, p.columns, p.warps, p.tile_high, p.tile_wide, p.splits}};
    found.push_back({tile, p.cycles});
  });
  return found;
}

bool PoolsInKernel(const DirectChoice& choice, const ConvArgs& a) {
  if (a.pool == Pool::kNone) return false;
  constexpr double kMostPooledParts = 1.25e8;  // products of a call: one image's 7x7 stem
  // At HIGHEST what tiles compute twice costs more than a pool behind many images.
  const double products =
      1.0 * a.images * a.conv_size[0] * a.conv_size[1] * a.features * a.kernel_size[0] * a.kernel_size[1] * a.channels;
  const bool image = choice.image.filters > 0 && (!choice.image.parts || products <= kMostPooledParts);
  return image || choice.warpgroup.filters > 0;
}

}  // namespace jsc
