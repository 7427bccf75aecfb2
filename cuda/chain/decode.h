// A chain from XLA's FFI to a checked call, for its handler.
#ifndef JSC_CUDA_CHAIN_DECODE_H_
#define JSC_CUDA_CHAIN_DECODE_H_

#include "cuda/chain/call.h"
#include "native/decode.h"

namespace jsc {

// A dense layer has one image: x is [1, H, W, C] and out [1, 1, 1, K]. window is H and W where x is averaged over its
// pixels first, and 1 and 1 where it is taken as H W C inputs. All other numbers are those of a 1x1 convolution.
//
// Attributes, int64. precision. values [n, kValueFields]: where it is (0 operand, 1 result, 2 workspace, 3 nowhere);
// which operand or result, or at which byte; N, H, W, C; at which byte of the workspace there is room for its low
// parts, or -1, as of all but float32 at HIGHEST. layers [n, kStepFields]: kind; value of x; operand of the kernel [1,
// kh, kw, C / groups, K] or -1; operand of the bias [1, K] or -1; value of the residual or -1; value of out; then rows
// and columns of window, stride, padding (low, high of H, then of W) and dilation; 1 for a ReLU; groups. tiles [n,
// kTileFields], which may be left out: output channels and pixels of each layer's tile, 1 where it is a patch, and
// splits. Zeros stand for what the model chooses, which also runs where the tile does not fit the layer on the device.
// packed [n, kPackedFields], which may be left out: the last operand is one array [size] that holds n operands,
// numbered on from the others; of each the element at which it starts, a multiple of kPackedAlignment, its axes and
// their sizes. The last result is the workspace, uint8. A value is nowhere if a convolution hands it to the pool that
// is the next layer, inside its kernel. Such a call was lowered for a device whose kernel takes the pool
// (chain/plans.h), and is an error on others. With a place the map is written where the kernel does not take the pool.
ffi::ErrorOr<ChainCall> MakeChainCall(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                      ffi::Dictionary attributes);

}  // namespace jsc

#endif  // JSC_CUDA_CHAIN_DECODE_H_
