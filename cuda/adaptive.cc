// A convolution by its sparse or by its dense kernels, whichever the density of x calls for, without asking the host.
//
// Both are enqueued, with opposite gates on the same counts (density.cuh): the kernels of one side return at once. The
// dense side of a pool is Direct into the workspace and the pool after it.
//
// Bound by: what the closed side costs, launch, one read of the counts and the way out of its blocks.
#include <string>

#include "conv_plan.h"
#include "kernels.h"

namespace jsc {
namespace {

// Direct into the workspace's front, whose remainder is its own workspace, then the pool.
ffi::Error DirectThenPool(const ConvCall& call, Workspace workspace, int device, cudaStream_t stream) {
  const ConvArgs& a = call.args;
  const size_t element = call.dtype == ffi::DataType::F32 ? 4 : 2;
  const size_t bytes = (a.images * a.conv_size[0] * a.conv_size[1] * a.features * element + 255) / 256 * 256;
  if (bytes > workspace.bytes) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jsc_adaptive: the workspace of " + std::to_string(workspace.bytes) + " bytes has no room for " +
                          std::to_string(bytes) + " of the unpooled result");
  }
  ConvCall conv = call;
  conv.args.pool = Pool::kNone;
  for (int i = 0; i < 2; ++i) conv.args.out_size[i] = a.conv_size[i];
  conv.out = workspace.data;
  conv.counts = nullptr;
  ffi::Error error =
      Direct(conv, {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes}, device, stream);
  return error.failure() ? error : PoolOf(call, workspace.data, stream);
}

}  // namespace

ffi::Error Adaptive(const ConvCall& call, const Gate& gate, Workspace workspace, int device, cudaStream_t stream) {
  ConvCall sparse = call, dense = call;
  sparse.gate = dense.gate = gate;
  dense.gate.above = true;
  dense.gate.overlaps = GetDeviceInfo(device).clusters[1] > 0;  // Hopper and later have both
  if (call.args.pool == Pool::kNone) {
    ffi::Error error = Ecr(sparse, workspace, device, stream);
    return error.failure() ? error : Direct(dense, workspace, device, stream);
  }
  ffi::Error error = Pecr(sparse, workspace, device, stream);
  return error.failure() ? error : DirectThenPool(dense, workspace, device, stream);
}

}  // namespace jsc
