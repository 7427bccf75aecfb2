// The custom calls of the CPU, from XLA's call frames to checked calls.
#include "cpu/ffi/handlers.h"

#include <algorithm>
#include <exception>

#include "cpu/ffi/channels.h"
#include "cpu/ffi/coo_star.h"
#include "cpu/ffi/dense_block.h"
#include "cpu/ffi/host.h"
#include "cpu/ffi/huge_pages.h"
#include "cpu/ffi/joined_channels.h"
#include "cpu/ffi/turned_kernel.h"
#include "native/decode.h"
#include "native/decode_coo.h"

namespace jsc {
namespace {

using Runner = ffi::Error (*)(ffi::ThreadPool&, const ConvCall&);

// Decodes the call, runs it and turns whatever goes wrong into an error of the call.
template <Runner kRun>
ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::RemainingArgs optional,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  try {
    ffi::ErrorOr<ConvCall> call = MakeConvCall(x, kernel, optional, out, attributes);
    if (!call.has_value()) return call.error();
    AdviseHugePages(*out);
    return kRun(pool, *call);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

ffi::Error RunWithoutPool(ffi::ThreadPool& pool, const ConvCall& call) {
  if (call.args.pool != Pool::kNone) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_ecr and jsc_dense take pool = 0; jsc_pecr pools");
  }
  return RunConvCall(pool, call);
}

ffi::Error RunDirectWithoutPool(ffi::ThreadPool& pool, const ConvCall& call) {
  if (call.args.pool != Pool::kNone) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jsc_direct takes pool = 0; jsc_pecr pools");
  }
  return RunDirectCall(pool, call);
}

ffi::Error RunCooOfMap(ffi::ThreadPool& pool, const ConvCall& call) { return RunCooCall(pool, call, nullptr); }

ffi::Error CooOfLists(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer positions, ffi::AnyBuffer counts,
                      ffi::AnyBuffer kernel, ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Dictionary attributes) {
  try {
    const ffi::ErrorOr<CooListsCall> call =
        MakeCooListsCall(values, positions, counts, kernel, optional, out, attributes);
    if (!call.has_value()) return call.error();
    AdviseHugePages(*out);
    return RunCooCall(pool, call->call, &call->lists);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

ffi::Error KernelGradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cotangent,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  try {
    const ffi::ErrorOr<ConvArgs> args = MakeKernelGradientArgs(x, cotangent, *out, attributes);
    if (!args.has_value()) return args.error();
    if (ffi::Error error = CheckKernelGradientOnCpu(*args); error.failure()) return error;
    const DataType dtype = TypeOf(x);
    const DataType sums = dtype == DataType::F64 ? dtype : DataType::F32;
    if (TypeOf(cotangent) != dtype || TypeOf(*out) != sums) {
      return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                        "cotangent must have x's dtype, and the gradient be float64 for float64 and else float32");
    }
    const int64_t chunks = out->dimensions()[0];
    AdviseHugePages(*out);
    return RunKernelGradientCall(pool, dtype,
                                 {*args, x.untyped_data(), cotangent.untyped_data(), chunks, out->untyped_data()});
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

// A derivative of a max pool; `pooled` is the buffer of the pool's result.
ffi::Error MaxPool(ffi::ThreadPool& pool, ffi::AnyBuffer x, ffi::AnyBuffer linear, ffi::AnyBuffer out,
                   ffi::AnyBuffer pooled, ffi::AnyBuffer like_x, ffi::Dictionary attributes,
                   ffi::Error (*run)(ffi::ThreadPool&, DataType, const MaxPoolCall&)) {
  try {
    const ffi::ErrorOr<ConvArgs> args = MakeMaxPoolArgs(x, pooled, attributes);
    if (!args.has_value()) return args.error();
    const DataType dtype = TypeOf(x);
    const auto size = x.dimensions(), other = like_x.dimensions();
    if (TypeOf(linear) != dtype || TypeOf(out) != dtype ||
        !std::equal(size.begin(), size.end(), other.begin(), other.end())) {
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, "tangents must have x's dtype, and of x also its shape");
    }
    AdviseHugePages(out);
    return run(pool, dtype, {*args, x.untyped_data(), linear.untyped_data(), out.untyped_data()});
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

ffi::Error MaxPoolGradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cotangent,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  return MaxPool(pool, x, cotangent, *out, cotangent, *out, attributes, &RunMaxPoolGradientCall);
}

ffi::Error MaxPoolTangent(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer tangent,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  return MaxPool(pool, x, tangent, *out, *out, tangent, attributes, &RunMaxPoolTangentCall);
}

#define JSC_BIND                                                                                                             \
  ffi::Ffi::Bind()                                                                                                           \
      .Ctx<ffi::ThreadPool>() /* XLA's own threads */                                                                        \
      .Arg<ffi::AnyBuffer>()  /* x [N, H, W, C], f32, bf16, f16 or f64; the others have the same dtype */                    \
      .Arg<ffi::AnyBuffer>()  /* kernel [S, kh, kw, C / groups, K] */                                                        \
      .RemainingArgs()        /* bias [S, K] if has_bias, residual [N, Ho, Wo, K] if has_residual, the                       \
                                 packed kernel if has_packed, see native/call.h */                                           \
      .Ret<ffi::AnyBuffer>()  /* out [N, Ho, Wo, K], after the pool if there is one */                                       \
      .Attrs()                /* stride[2], padding[4], dilation[2], groups, has_bias, has_residual,                         \
                                 has_packed, may_be_dense, activation, pool, window[2], window_stride[2], window_padding[4], \
                                 precision:                                                                                  \
                                 all int64, see native/call.h */

// conv + bias + residual + ReLU
XLA_FFI_DEFINE_HANDLER(kEcr, Handle<RunWithoutPool>, JSC_BIND);
// conv + bias + ReLU + max or average pool
XLA_FFI_DEFINE_HANDLER(kPecr, Handle<RunConvCall>, JSC_BIND);
// conv + bias + residual + ReLU over COO* lists, for the kernels and strides of native/coo_variants.h
XLA_FFI_DEFINE_HANDLER(kCoo, Handle<RunCooOfMap>, JSC_BIND);
// the same of a CooStar, whose lists come in x's place
XLA_FFI_DEFINE_HANDLER(kCooOfLists, CooOfLists,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // values
                           .Arg<ffi::AnyBuffer>()  // positions
                           .Arg<ffi::AnyBuffer>()  // counts
                           .Arg<ffi::AnyBuffer>()  // kernel
                           .RemainingArgs()        // bias, residual
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attrs());              // as above, and tile[3], map[3]
// the same, dense
XLA_FFI_DEFINE_HANDLER(kDirect, Handle<RunDirectWithoutPool>, JSC_BIND);
// conv 1x1 on maps of one pixel: x [M, 1, 1, C], kernel [S, 1, 1, C, K]
XLA_FFI_DEFINE_HANDLER(kDense, Handle<RunDenseCall>, JSC_BIND);

// the gradient of a kernel, float32 or float64
XLA_FFI_DEFINE_HANDLER(kKernelGradient, KernelGradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x [N, H, W, C]
                           .Arg<ffi::AnyBuffer>()  // cotangent [N, Ho, Wo, K]
                           .Ret<ffi::AnyBuffer>()  // [chunks, kh, kw, C / groups, K]
                           .Attrs());              // stride[2], padding[4], dilation[2], groups

// a kernel turned round
XLA_FFI_DEFINE_HANDLER(kTurnedKernel, TurnedKernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // kernel [S, kh, kw, C / groups, K]
                           .Arg<ffi::AnyBuffer>()  // what is there before; it is not read
                           .Ret<ffi::AnyBuffer>()  // [S, rows, columns, K / groups, C]
                           .Attrs());              // first[2], step[2], groups

// derivatives of a max pool
#define JSC_BIND_MAX_POOL                                                            \
  ffi::Ffi::Bind()                                                                   \
      .Ctx<ffi::ThreadPool>()                                                        \
      .Arg<ffi::AnyBuffer>() /* x [N, H, W, C], before the pool */                   \
      .Arg<ffi::AnyBuffer>() /* cotangent [N, Ho, Wo, C], or tangent [N, H, W, C] */ \
      .Ret<ffi::AnyBuffer>() /* the other one */                                     \
      .Attrs()               /* window[2], window_stride[2], window_padding[4] */
XLA_FFI_DEFINE_HANDLER(kMaxPoolGradient, MaxPoolGradient, JSC_BIND_MAX_POOL);
XLA_FFI_DEFINE_HANDLER(kMaxPoolTangent, MaxPoolTangent, JSC_BIND_MAX_POOL);

// what batch norms in training are made of; what the buffers hold is in cpu/ffi/channels.h
XLA_FFI_DEFINE_HANDLER(kChannelSums, ChannelSums,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()    // x
                           .Ret<ffi::AnyBuffer>()    // sums
                           .Ret<ffi::AnyBuffer>()    // of squares
                           .Ret<ffi::AnyBuffer>());  // of squares around the mean
XLA_FFI_DEFINE_HANDLER(kChannelSumsGradient, ChannelSumsGradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()    // x
                           .Arg<ffi::AnyBuffer>()    // mean
                           .Arg<ffi::AnyBuffer>()    // cotangent of x from elsewhere
                           .Arg<ffi::AnyBuffer>()    // of sums
                           .Arg<ffi::AnyBuffer>()    // of squares
                           .Arg<ffi::AnyBuffer>()    // of squares around the mean
                           .Ret<ffi::AnyBuffer>());  // of x
XLA_FFI_DEFINE_HANDLER(kChannelAffine, ChannelAffine,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // center
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Arg<ffi::AnyBuffer>()  // shift
                           .RemainingArgs()        // residual
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("relu"));
XLA_FFI_DEFINE_HANDLER(kChannelAffineGradient, ChannelAffineGradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // center
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Arg<ffi::AnyBuffer>()  // shift
                           .Arg<ffi::AnyBuffer>()  // cotangent
                           .RemainingArgs()        // y
                           .Ret<ffi::AnyBuffer>()  // of x
                           .Ret<ffi::AnyBuffer>()  // of scale
                           .Ret<ffi::AnyBuffer>()  // of shift
                           .RemainingRets()        // of the residual
                           .Attr<int64_t>("relu"));
XLA_FFI_DEFINE_HANDLER(kChannelJoined, ChannelJoined,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // center
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Arg<ffi::AnyBuffer>()  // shift
                           .RemainingArgs()        // maps
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("relu")
                           .Attr<int64_t>("sums"));
XLA_FFI_DEFINE_HANDLER(kChannelJoinedGradient, ChannelJoinedGradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // center
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Arg<ffi::AnyBuffer>()  // shift
                           .Arg<ffi::AnyBuffer>()  // cotangent of y
                           .RemainingArgs()        // maps, and their cotangents from elsewhere
                           .Ret<ffi::AnyBuffer>()  // of scale
                           .Ret<ffi::AnyBuffer>()  // of shift
                           .RemainingRets()        // of maps
                           .Attr<int64_t>("relu")
                           .Attr<int64_t>("sums"));

XLA_FFI_DEFINE_HANDLER(kChannelMaskedGradient, ChannelMaskedGradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // cotangent
                           .RemainingArgs()        // y
                           .Ret<ffi::AnyBuffer>()  // sums
                           .RemainingRets());      // masked

// a dense block of DenseNet; what the buffers hold is in cpu/ffi/dense_block.h
XLA_FFI_DEFINE_HANDLER(kDenseBlock, DenseBlock,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // parameters
                           .Ret<ffi::AnyBuffer>()  // out
                           .RemainingRets()        // middle, and the map where out is a transition's
                           .Attrs());              // layers, middle, growth, out_channels, offsets[]

// CooStar; the shapes of the buffers are in native/coo_star_args.h.
XLA_FFI_DEFINE_HANDLER(kCooFromDense, CooFromDense,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // positions
                           .Ret<ffi::AnyBuffer>()  // counts
                           .Attr<ffi::Span<const int64_t>>("tile"));
XLA_FFI_DEFINE_HANDLER(kCooToDense, CooToDense,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // values
                           .Arg<ffi::AnyBuffer>()  // positions
                           .Arg<ffi::AnyBuffer>()  // counts
                           .Ret<ffi::AnyBuffer>()  // x
                           .Attr<ffi::Span<const int64_t>>("tile"));

}  // namespace

std::vector<Target> Targets() {
  return {{"jsc_ecr", kEcr},
          {"jsc_pecr", kPecr},
          {"jsc_direct", kDirect},
          {"jsc_dense", kDense},
          {"jsc_coo", kCoo},
          {"jsc_coo_lists", kCooOfLists},
          {"jsc_kernel_gradient", kKernelGradient},
          {"jsc_turned_kernel", kTurnedKernel},
          {"jsc_max_pool_gradient", kMaxPoolGradient},
          {"jsc_max_pool_tangent", kMaxPoolTangent},
          {"jsc_channel_sums", kChannelSums},
          {"jsc_channel_sums_gradient", kChannelSumsGradient},
          {"jsc_channel_affine", kChannelAffine},
          {"jsc_channel_affine_gradient", kChannelAffineGradient},
          {"jsc_channel_joined", kChannelJoined},
          {"jsc_channel_joined_gradient", kChannelJoinedGradient},
          {"jsc_channel_masked_gradient", kChannelMaskedGradient},
          {"jsc_dense_block", kDenseBlock},
          {"jsc_coo_fromdense", kCooFromDense},
          {"jsc_coo_todense", kCooToDense}};
}

}  // namespace jsc
