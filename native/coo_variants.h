// The table of COO* convolutions that are compiled in: what the paper's code generator emits, as data.
//
// One row is one micro-kernel: kernel size and stride, the tile of results whose sums a thread keeps in registers, and
// how many output channels it keeps them for. dispatch/coo/cost_model.py chooses a row for a call; its index travels as
// an attribute of the custom call. To add a variant add a row: cuda/sparse/coo/coo.cu instantiates every one.
#ifndef JSC_NATIVE_COO_VARIANTS_H_
#define JSC_NATIVE_COO_VARIANTS_H_

#include <cstdint>

#include "native/call.h"

namespace jsc {

struct CooVariant {
  int kernel;        // R = S
  int stride;        // of rows and columns
  int height;        // TH, results
  int width;         // TW
  int out_channels;  // output channels of a thread

  constexpr int taps() const { return kernel * kernel; }
  constexpr int pixels() const { return height * width; }
  // Sums and weights that a thread keeps, and what its registers leave room for on an SM with 65536 of them: most warps
  // of a block, and blocks of that many warps.
  constexpr int words() const { return (pixels() + taps()) * out_channels; }
  constexpr int max_warps() const { return words() <= 112 ? 8 : 4; }
  constexpr int min_blocks() const { return words() <= 60 ? 3 : words() <= 112 ? 2 : words() <= 124 ? 3 : 2; }
  // A tile of x with its halo; a position in it takes one byte.
  constexpr int patch_height() const { return (height - 1) * stride + kernel; }
  constexpr int patch_width() const { return (width - 1) * stride + kernel; }
  constexpr int positions() const { return patch_height() * patch_width(); }
};

constexpr CooVariant kCooVariants[] = {
    {3, 1, 7, 7, 2}, {3, 1, 7, 7, 1}, {3, 1, 4, 4, 4}, {3, 1, 4, 4, 2},  //
    {3, 2, 4, 4, 4}, {3, 2, 4, 4, 2},                                    //
    {1, 1, 4, 4, 8}, {1, 1, 4, 4, 4},  // of any stride: the others' pixels are not read
    {5, 1, 4, 4, 2}, {5, 2, 4, 4, 2},  //
    {7, 1, 4, 4, 2}, {7, 2, 4, 4, 1},
};
constexpr int kCooVariantCount = static_cast<int>(sizeof(kCooVariants) / sizeof(kCooVariants[0]));

// Whether a row of the table computes convolutions of this kernel, stride and dilation.
constexpr bool CooCovers(const CooVariant& variant, const ConvArgs& a) {
  const bool strides = variant.kernel == 1 || (a.stride[0] == variant.stride && a.stride[1] == variant.stride &&
                                               a.dilation[0] == 1 && a.dilation[1] == 1);
  return strides && a.pool == Pool::kNone && a.kernel_size[0] == variant.kernel && a.kernel_size[1] == variant.kernel;
}

}  // namespace jsc

#endif  // JSC_NATIVE_COO_VARIANTS_H_
