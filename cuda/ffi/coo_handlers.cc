// The custom calls of COO*: convolutions of a map and of a CooStar, and the format's conversions.
#include "cuda/ffi/handle.h"
#include "native/decode_coo.h"

namespace jsc {
namespace {

// The attributes `coo`, 4 int64 a variant (see sparse/coo/plan.h), and `densities`, float32, one less than variants.
ffi::ErrorOr<CooChoice> ReadChoice(ffi::Dictionary attributes) {
  const auto coo = attributes.get<ffi::Span<const int64_t>>("coo");
  const auto densities = attributes.get<ffi::Span<const float>>("densities");
  const size_t several = densities.has_value() ? densities->size() : 0;
  if (!coo.has_value() || coo->size() != 4 * (several + 1) || several >= kMostCooVariants) {
    return ffi::Unexpected(Invalid("attribute coo must be an array of 4 int64 for each of 1 to " +
                                   std::to_string(kMostCooVariants) +
                                   " variants, and densities have a float32 between each two"));
  }
  CooChoice choice;
  choice.count = static_cast<int>(several) + 1;
  for (int i = 0; i < choice.count; ++i) {
    const int64_t* numbers = coo->begin() + 4 * i;
    choice.plans[i].variant = static_cast<int>(numbers[0]);
    choice.plans[i].out_channel_warps = static_cast<int>(numbers[1]);
    choice.plans[i].slices = static_cast<int>(numbers[2]);
    choice.plans[i].splits = static_cast<int>(numbers[3]);
    if (i > 0) choice.densities[i - 1] = (*densities)[i - 1];
  }
  return choice;
}

// The same with the counts that choose one of several.
ffi::ErrorOr<CooChoice> ReadChoice(ffi::Dictionary attributes, ffi::BufferR2<ffi::S32> nonzeros) {
  if (ffi::Error error = CheckNonzeros(nonzeros); error.failure()) return ffi::Unexpected(error);
  ffi::ErrorOr<CooChoice> choice = ReadChoice(attributes);
  if (choice.has_error()) return choice;
  choice->nonzeros = nonzeros.typed_data();
  choice->rows = static_cast<int>(nonzeros.dimensions()[0]);
  const auto dense_above = attributes.get<float>("dense_above");  // which may be left out
  choice->has_dense = dense_above.has_value();
  if (choice->has_dense) choice->dense_above = *dense_above;
  return choice;
}

ffi::Error RunCoo(const DeviceCall& call, const ffi::ErrorOr<CooChoice>& choice, Workspace workspace, int device,
                  cudaStream_t stream) {
  if (call.counts != nullptr) return Invalid("jsc_coo does not count; jsc_ecr, jsc_pecr and jsc_direct do");
  if (choice.has_error()) return choice.error();
  return Coo(call, *choice, workspace, device, stream);
}

ffi::Error CooHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                      ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> workspace, ffi::RemainingRets counted, ffi::Dictionary attributes) {
  return Handle(stream, device, x, kernel, optional, out, workspace, counted, attributes,
                [&](const DeviceCall& call, Workspace scratch) -> ffi::Error {
                  const ffi::ErrorOr<CooChoice> choice = ReadChoice(attributes);
                  if (!choice.has_error() && choice->count > 1) return Invalid("jsc_coo has one variant");
                  return RunCoo(call, choice, scratch, device, stream);
                });
}

ffi::Error CooByDensityHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                               ffi::BufferR2<ffi::S32> nonzeros, ffi::RemainingArgs optional,
                               ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                               ffi::RemainingRets counted, ffi::Dictionary attributes) {
  return Handle(stream, device, x, kernel, optional, out, workspace, counted, attributes,
                [&](const DeviceCall& call, Workspace scratch) {
                  return RunCoo(call, ReadChoice(attributes, nonzeros), scratch, device, stream);
                });
}

ffi::Error CooOfListsHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer values, ffi::AnyBuffer positions,
                             ffi::AnyBuffer counts, ffi::AnyBuffer kernel, ffi::BufferR2<ffi::S32> nonzeros,
                             ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary attributes) {
  return CheckAndLaunch(
      device, [&] { return MakeCooListsCall(values, positions, counts, kernel, optional, out, attributes); },
      [&](const CooListsCall& given) -> ffi::Error {
        const DeviceCall call(given.call);
        const ffi::ErrorOr<CooChoice> choice = ReadChoice(attributes, nonzeros);
        if (choice.has_error()) return choice.error();
        if (choice->has_dense) return Invalid("jsc_coo_lists has no dense map for dense_above");
        if (out->element_count() == 0) return ffi::Error::Success();
        return CooOfLists(call, *choice, given.lists, Workspace{workspace->untyped_data(), workspace->size_bytes()},
                          device, stream);
      });
}

ffi::Error CooFromDenseHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x,
                               ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> positions,
                               ffi::Result<ffi::AnyBuffer> counts, ffi::Span<const int64_t> tile) {
  return CheckAndLaunch(
      device, [&] { return MakeCooStarArgs(x, *values, *positions, *counts, tile); },
      [&](const CooStarArgs& args) {
        return CooFromDense(args, x.untyped_data(), values->untyped_data(), positions->untyped_data(),
                            counts->untyped_data(), stream);
      });
}

ffi::Error CooToDenseHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer values, ffi::AnyBuffer positions,
                             ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> x, ffi::Span<const int64_t> tile) {
  return CheckAndLaunch(
      device, [&] { return MakeCooStarArgs(*x, values, positions, counts, tile); },
      [&](const CooStarArgs& args) {
        return CooToDense(args, values.untyped_data(), positions.untyped_data(), counts.untyped_data(),
                          x->untyped_data(), stream);
      });
}

// Neither counts. Attributes are those of the other convolutions and coo[4], of several variants coo[4 * variants],
// densities[variants - 1] and, where it is dense beyond, dense_above.
XLA_FFI_DEFINE_HANDLER(kCoo, CooHandler, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCooByDensity, CooByDensityHandler, BindingWithNonzeros(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCooOfLists, CooOfListsHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()           // values
                           .Arg<ffi::AnyBuffer>()           // positions
                           .Arg<ffi::AnyBuffer>()           // counts
                           .Arg<ffi::AnyBuffer>()           // kernel
                           .Arg<ffi::BufferR2<ffi::S32>>()  // nonzeros
                           .RemainingArgs()                 // bias, residual
                           .Ret<ffi::AnyBuffer>()           // out
                           .Ret<ffi::AnyBuffer>()           // workspace
                           .Attrs(),                        // the same, and tile[3], map[3] (H, W, C)
                       {ffi::Traits::kCmdBufferCompatible});

// CooStar; the shapes of the buffers are in native/coo_star_args.h.
XLA_FFI_DEFINE_HANDLER(kCooFromDense, CooFromDenseHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // positions
                           .Ret<ffi::AnyBuffer>()  // counts
                           .Attr<ffi::Span<const int64_t>>("tile"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCooToDense, CooToDenseHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()  // values
                           .Arg<ffi::AnyBuffer>()  // positions
                           .Arg<ffi::AnyBuffer>()  // counts
                           .Ret<ffi::AnyBuffer>()  // x
                           .Attr<ffi::Span<const int64_t>>("tile"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers CooHandlers() {
  return {{"jsc_coo", kCoo},
          {"jsc_coo_by_density", kCooByDensity},
          {"jsc_coo_lists", kCooOfLists},
          {"jsc_coo_fromdense", kCooFromDense},
          {"jsc_coo_todense", kCooToDense}};
}

}  // namespace jsc
