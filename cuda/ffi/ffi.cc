// The custom calls of the CUDA extension and their registration with JAX.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/chain/decode.h"
#include "cuda/dense_conv/plan/mma_plan.h"
#include "cuda/densenet/decode.h"
#include "cuda/densenet/layers.h"
#include "cuda/ffi/handle.h"
#include "cuda/sparse/ecr/plan.h"
#include "cuda/training/kernel_gradient.h"
#include "native/decode.h"

namespace nb = nanobind;

namespace jsc {
namespace {

// What a handler does with a checked call, on its device.
using Run = ffi::Error (*)(const DeviceCall& call, Workspace workspace, ffi::Dictionary attributes, int device,
                           cudaStream_t stream);

template <Run kRun>
ffi::Error Handler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                   ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                   ffi::RemainingRets counted, ffi::Dictionary attributes) {
  return Handle(
      stream, device, x, kernel, optional, out, workspace, counted, attributes,
      [&](const DeviceCall& call, Workspace scratch) { return kRun(call, scratch, attributes, device, stream); });
}

ffi::Error RunEcr(const DeviceCall& call, Workspace workspace, ffi::Dictionary, int device, cudaStream_t stream) {
  if (call.args.pool != Pool::kNone) return Invalid("jsc_ecr has no pool; jsc_pecr has");
  return Ecr(call, workspace, device, stream);
}

ffi::Error RunPecr(const DeviceCall& call, Workspace workspace, ffi::Dictionary, int device, cudaStream_t stream) {
  const auto run = call.args.pool == Pool::kNone ? Ecr : Pecr;
  return run(call, workspace, device, stream);
}

ffi::Error RunDirect(const DeviceCall& call, Workspace workspace, ffi::Dictionary, int device, cudaStream_t stream) {
  return Direct(call, workspace, device, stream);
}

ffi::Error RunDense(const DeviceCall& call, Workspace workspace, ffi::Dictionary, int device, cudaStream_t stream) {
  if (call.counts != nullptr) return Invalid("jsc_dense does not count; jsc_ecr, jsc_pecr and jsc_direct do");
  return Dense(call, workspace, device, stream);
}

ffi::Error AdaptiveHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                           ffi::BufferR2<ffi::S32> nonzeros, ffi::RemainingArgs optional,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                           ffi::RemainingRets counted, ffi::Dictionary attributes) {
  return Handle(stream, device, x, kernel, optional, out, workspace, counted, attributes,
                [&](const DeviceCall& call, Workspace scratch) -> ffi::Error {
                  const auto threshold = attributes.get<float>("threshold");
                  if (!threshold.has_value()) return Invalid("attribute threshold must be a float32");
                  if (ffi::Error error = CheckNonzeros(nonzeros); error.failure()) return error;
                  Gate gate;
                  gate.nonzeros = nonzeros.typed_data();
                  gate.rows = static_cast<int>(nonzeros.dimensions()[0]);
                  gate.threshold = *threshold;
                  return Adaptive(call, gate, scratch, device, stream);
                });
}

ffi::Error ChainHandler(cudaStream_t stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                        ffi::Dictionary attributes) {
  return CheckAndLaunch(
      device, [&] { return MakeChainCall(operands, results, attributes); },
      [&](const ChainCall& call) { return Chain(call, device, stream); });
}

ffi::Error DenseBlockHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::RemainingArgs parameters,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                             ffi::RemainingRets rest, ffi::Dictionary attributes) {
  return CheckAndLaunch(
      device, [&] { return MakeDenseBlockCall(x, parameters, *out, rest, attributes); },
      [&](const DenseBlockCall& call) {
        if (workspace->size_bytes() == 0) return DenseBlock(call, device, stream);
        return DenseLayers(call, Workspace{workspace->untyped_data(), workspace->size_bytes()}, device, stream);
      });
}

ffi::Error KernelGradientHandler(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer cotangent,
                                 ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                                 ffi::Dictionary attributes) {
  return CheckAndLaunch(
      device, [&] { return MakeKernelGradientArgs(x, cotangent, *out, attributes); },
      [&](const ConvArgs& args) -> ffi::Error {
        if (TypeOf(x) != DataType::F32 || TypeOf(cotangent) != DataType::F32 || TypeOf(*out) != DataType::F32 ||
            out->dimensions()[0] != 1) {
          return Invalid("on CUDA the gradient of a kernel is of float32, and of one kernel");
        }
        const auto tile = attributes.get<ffi::Span<const int64_t>>("tile");
        constexpr int64_t kMost = int64_t{1} << 30;
        if (!tile.has_value() || tile->size() != 4 ||
            std::any_of(tile->begin(), tile->end(), [](int64_t n) { return n < 0 || n > kMost; })) {
          return Invalid("attribute tile must be 4 int64 from 0 to 2^30");
        }
        const KernelGradientTile told{static_cast<int>((*tile)[0]), (*tile)[1] != 0, static_cast<int>((*tile)[2]),
                                      static_cast<int>((*tile)[3])};
        const KernelGradientBuffers buffers{
            static_cast<const float*>(x.untyped_data()), static_cast<const float*>(cotangent.untyped_data()),
            static_cast<float*>(out->untyped_data()), workspace->untyped_data(), workspace->size_bytes()};
        return KernelGradient(args, KernelGradientPlanOf(told, args, GetDeviceInfo(device)), buffers, stream);
      });
}

// Handlers only enqueue kernels on the call's stream, so XLA may capture them in command buffers.
XLA_FFI_DEFINE_HANDLER(kEcr, Handler<RunEcr>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kPecr, Handler<RunPecr>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDirect, Handler<RunDirect>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDense, Handler<RunDense>, Binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAdaptive, AdaptiveHandler, BindingWithNonzeros(), {ffi::Traits::kCmdBufferCompatible});

// A chain of convolutions; operands, results and attributes are described in chain/decode.h.
XLA_FFI_DEFINE_HANDLER(kChain, ChainHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()  // maps, kernels and biases
                           .RemainingRets()  // maps, then the workspace
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kDenseBlock, DenseBlockHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()  // x [N, H, W, C0]
                           .RemainingArgs()  // of each layer what DenseLayerArgs has; a transition's; or one array
                           .Ret<ffi::AnyBuffer>()  // its result, or [N, H, W, C0 + 32 * layers]
                           .Ret<ffi::AnyBuffer>()  // workspace: dense_layers_bytes, or nothing for few images
                           .RemainingRets()        // [N, H, W, C0 + 32 * layers] with a transition
                           .Attrs(),               // precision (0 default, 1 high, 2 highest); offsets of that array
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kKernelGradient, KernelGradientHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()  // x [N, H, W, C]
                           .Arg<ffi::AnyBuffer>()  // cotangent [N, Ho, Wo, K]
                           .Ret<ffi::AnyBuffer>()  // out [1, kh, kw, C, K]
                           .Ret<ffi::AnyBuffer>()  // workspace uint8 [bytes], as the planner says
                           .Attrs(),               // stride, padding, dilation, groups; tile: KernelGradientTile
                       {ffi::Traits::kCmdBufferCompatible});

nb::dict Registrations() {
  nb::dict handlers;
  handlers["jsc_ecr"] = nb::capsule(reinterpret_cast<void*>(+kEcr));
  handlers["jsc_pecr"] = nb::capsule(reinterpret_cast<void*>(+kPecr));
  handlers["jsc_direct"] = nb::capsule(reinterpret_cast<void*>(+kDirect));
  handlers["jsc_dense"] = nb::capsule(reinterpret_cast<void*>(+kDense));
  handlers["jsc_adaptive"] = nb::capsule(reinterpret_cast<void*>(+kAdaptive));
  handlers["jsc_chain"] = nb::capsule(reinterpret_cast<void*>(+kChain));
  handlers["jsc_kernel_gradient"] = nb::capsule(reinterpret_cast<void*>(+kKernelGradient));
  handlers["jsc_dense_block"] = nb::capsule(reinterpret_cast<void*>(+kDenseBlock));
  for (const auto& [name, handler] : CooHandlers()) handlers[name] = nb::capsule(reinterpret_cast<void*>(handler));
  return handlers;
}

// Bytes of the workspace operand for x [N, H, W, C], kernel [S, kh, kw, C / groups, K] and the sizes of the
// convolution's and the operation's results, on a device. More does not help, less only costs speed. Where blocks meet
// in clusters, from Hopper on, there is nothing to put there.
size_t WorkspaceBytes(const std::string& target, const std::vector<int64_t>& x_shape,
                      const std::vector<int64_t>& kernel_shape, const std::vector<int64_t>& conv_size,
                      const std::vector<int64_t>& out_size, int device) {
  if (x_shape.size() != 4 || kernel_shape.size() != 5 || conv_size.size() != 2 || out_size.size() != 2) {
    throw nb::value_error("workspace_bytes takes x_shape [4], kernel_shape [5], conv_size [2] and out_size [2]");
  }
  if (GetDeviceInfo(device).clusters[1] > 0) return 0;
  if (target == "jsc_dense") return 0;
  const size_t direct = MmaWorkspaceBytes(x_shape[0] * conv_size[0] * conv_size[1], kernel_shape[4],
                                          kernel_shape[1] * kernel_shape[2] * kernel_shape[3]);
  if (target == "jsc_direct") return direct;
  const size_t sparse = EcrWorkspaceBytes(x_shape[0], conv_size[0], conv_size[1], kernel_shape[4]);
  return target == "jsc_adaptive" ? std::max(sparse, direct) : sparse;
}

nb::dict DeviceProperties(int device) {
  const std::pair<const char*, cudaDeviceAttr> wanted[] = {
      {"multiprocessors", cudaDevAttrMultiProcessorCount},
      {"threads", cudaDevAttrMaxThreadsPerMultiProcessor},
      {"blocks", cudaDevAttrMaxBlocksPerMultiprocessor},
      {"registers", cudaDevAttrMaxRegistersPerMultiprocessor},
      {"shared_memory", cudaDevAttrMaxSharedMemoryPerMultiprocessor},
      {"block_shared_memory", cudaDevAttrMaxSharedMemoryPerBlockOptin},
      {"clock_khz", cudaDevAttrClockRate},
      {"memory_clock_khz", cudaDevAttrMemoryClockRate},
      {"memory_bus_bits", cudaDevAttrGlobalMemoryBusWidth},
      {"l2_bytes", cudaDevAttrL2CacheSize},
      {"major", cudaDevAttrComputeCapabilityMajor},
      {"minor", cudaDevAttrComputeCapabilityMinor}};
  nb::dict properties;
  for (const auto& [name, attribute] : wanted) {
    int value = 0;
    if (const cudaError_t status = cudaDeviceGetAttribute(&value, attribute, device)) {
      throw std::runtime_error(std::string("device ") + std::to_string(device) + ": " + cudaGetErrorString(status));
    }
    properties[name] = value;
  }
  const DeviceInfo& info = GetDeviceInfo(device);
  if (info.error) throw std::runtime_error("device " + std::to_string(device) + ": " + info.error);
  properties["tensor_maps"] = info.tensor_maps;
  properties["clusters"] = nb::tuple(nb::cast(std::vector<int>(info.clusters, info.clusters + kMaxSplits + 1)));
  return properties;
}

}  // namespace
}  // namespace jsc

NB_MODULE(_cuda, m) {
  m.def("device_properties", &jsc::DeviceProperties, nb::arg("device"),
        "What the cost model has to know of a device, by the name that devices.py gives it.");
  m.def("registrations", &jsc::Registrations, "Custom call targets and their handlers, for jax.ffi");
  m.def("workspace_bytes", &jsc::WorkspaceBytes, nb::arg("target"), nb::arg("x_shape"), nb::arg("kernel_shape"),
        nb::arg("conv_size"), nb::arg("out_size"), nb::arg("device"));
  m.def("dense_layers_bytes", &jsc::DenseLayersBytes, nb::arg("element_bytes"), nb::arg("precise"), nb::arg("pixels"),
        nb::arg("channels"), nb::arg("layers"), "Bytes of the workspace of a dense block of many images.");
}
