// wgmma products whose rows are pixels and whose columns are output channels, as the layers of DenseNet blocks use
// them: with the pixels in registers, or both operands in shared memory. Both have their input channels side by side.
//
// sums[4 * j + 2 * h + e] of lane l of warp w: pixel 16 * w + 8 * h + l / 4, output channel 8 * j + 2 * (l % 4) + e.
#ifndef JSC_CUDA_DENSENET_LAYERS_PRODUCTS_CUH_
#define JSC_CUDA_DENSENET_LAYERS_PRODUCTS_CUH_

#include "cuda/core/wgmma.cuh"

namespace jsc {

// 64 pixels x 32 bytes of channels, in registers as mma.sync has them, or a matrix in shared memory; by kOutChannels.
template <typename T, int kOutChannels>
struct PixelProduct;

// clang-format off
#define JSC_SUMS_8(i) \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
  "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define JSC_SUMS_32 JSC_SUMS_8(0), JSC_SUMS_8(8)
#define JSC_SUMS_64 JSC_SUMS_32, JSC_SUMS_8(16), JSC_SUMS_8(24)
#define JSC_SUMS_96 JSC_SUMS_64, JSC_SUMS_8(32), JSC_SUMS_8(40)
#define JSC_SUMS_128 JSC_SUMS_96, JSC_SUMS_8(48), JSC_SUMS_8(56)
#define JSC_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7" \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JSC_NAMES_64 JSC_NAMES_32 \
  ", %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JSC_NAMES_96 JSC_NAMES_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JSC_NAMES_128 JSC_NAMES_96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
// The numbers are of the operands after the sums. `end`: what follows the signs of the operands.
#define JSC_PIXEL_PRODUCT(T, out_channels, results, depth, types, end, a, b, c, d, p, add) \
  template <> \
  struct PixelProduct<T, out_channels> { \
    static __device__ __forceinline__ void Multiply(float (&sums)[results], const uint32_t* pixels, uint64_t kernel, \
                                                    bool adds) { \
      asm volatile( \
          "{\n .reg .pred add;\n setp.ne.b32 add, %" #add ", 0;\n" \
          " wgmma.mma_async.sync.aligned.m64n" #out_channels depth ".f32." types " {" JSC_NAMES_##out_channels \
          "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #p ", add, 1, 1" end ";\n}" \
          : JSC_SUMS_##out_channels \
          : "r"(pixels[0]), "r"(pixels[1]), "r"(pixels[2]), "r"(pixels[3]), "l"(kernel), "r"(static_cast<int>(adds))); \
    } \
  };
#define JSC_SHARED_PRODUCT(T, depth, types, end) \
  template <> \
  struct PixelProduct<T, 96> { \
    static __device__ __forceinline__ void Multiply(float (&sums)[48], uint64_t pixels, uint64_t kernel, bool adds) { \
      asm volatile( \
          "{\n .reg .pred add;\n setp.ne.b32 add, %50, 0;\n" \
          " wgmma.mma_async.sync.aligned.m64n96" depth ".f32." types " {" JSC_NAMES_96 \
          "}, %48, %49, add, 1, 1" end ";\n}" \
          : JSC_SUMS_96 \
          : "l"(pixels), "l"(kernel), "r"(static_cast<int>(adds))); \
    } \
  };

JSC_PIXEL_PRODUCT(float, 32, 16, "k8", "tf32.tf32", "", 16, 17, 18, 19, 20, 21)
JSC_PIXEL_PRODUCT(float, 64, 32, "k8", "tf32.tf32", "", 32, 33, 34, 35, 36, 37)
JSC_PIXEL_PRODUCT(float, 128, 64, "k8", "tf32.tf32", "", 64, 65, 66, 67, 68, 69)
JSC_SHARED_PRODUCT(float, "k8", "tf32.tf32", "")
JSC_PIXEL_PRODUCT(__nv_bfloat16, 32, 16, "k16", "bf16.bf16", ", 0", 16, 17, 18, 19, 20, 21)
JSC_PIXEL_PRODUCT(__nv_bfloat16, 64, 32, "k16", "bf16.bf16", ", 0", 32, 33, 34, 35, 36, 37)
JSC_PIXEL_PRODUCT(__nv_bfloat16, 128, 64, "k16", "bf16.bf16", ", 0", 64, 65, 66, 67, 68, 69)
JSC_SHARED_PRODUCT(__nv_bfloat16, "k16", "bf16.bf16", ", 0, 0")
JSC_PIXEL_PRODUCT(__half, 32, 16, "k16", "f16.f16", ", 0", 16, 17, 18, 19, 20, 21)
JSC_PIXEL_PRODUCT(__half, 64, 32, "k16", "f16.f16", ", 0", 32, 33, 34, 35, 36, 37)
JSC_PIXEL_PRODUCT(__half, 128, 64, "k16", "f16.f16", ", 0", 64, 65, 66, 67, 68, 69)
JSC_SHARED_PRODUCT(__half, "k16", "f16.f16", ", 0, 0")
// clang-format on

#undef JSC_SHARED_PRODUCT
#undef JSC_PIXEL_PRODUCT
#undef JSC_NAMES_128
#undef JSC_NAMES_96
#undef JSC_NAMES_64
#undef JSC_NAMES_32
#undef JSC_SUMS_128
#undef JSC_SUMS_96
#undef JSC_SUMS_64
#undef JSC_SUMS_32
#undef JSC_SUMS_8

}  // namespace jsc

#endif  // JSC_CUDA_DENSENET_LAYERS_PRODUCTS_CUH_
