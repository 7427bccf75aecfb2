// Hopper's warpgroup matrix product, wgmma: descriptors of operands in shared memory, and the instruction in the shapes
// that dense_conv/wgmma/kernel.cuh uses. Compiled for sm_90a alone.
//
// accumulators[output channel][pixel] += weights x pixels, for 64 output channels and kPixels pixels, 32 bytes deep.
// Lane l of warp w holds, as sums[4 * j + 2 * h + e], output channel 16 * w + 8 * h + l / 4 and pixel 8 * j + 2 * (l %
// 4) + e.
#ifndef JSC_CUDA_CORE_WGMMA_CUH_
#define JSC_CUDA_CORE_WGMMA_CUH_

#include "cuda/core/elements.cuh"

namespace jsc {

// A matrix in shared memory whose rows are 128 bytes, 16-byte slots permuted as TMA's 128-byte swizzle does it.
// group_bytes: between groups of eight rows; inside one they are 128 bytes apart. The permutation follows from the bits
// of an element's address, so a matrix may begin at any row.
__device__ __forceinline__ uint64_t SwizzledMatrix(uint32_t shared, uint32_t group_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{group_bytes >> 4} << 32 | uint64_t{1} << 16 | (shared >> 4 & 0x3fff);
}

// The address at which it begins, of which a block's place in its cluster is no part.
constexpr uint32_t kMatrixStarts = 0x3ffff;
__device__ __forceinline__ uint32_t StartOfMatrix(uint32_t low_word) { return low_word << 4 & kMatrixStarts; }

// Before the first product that follows other use of its registers.
__device__ __forceinline__ void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the latest kPending groups of products.
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler is not to move uses of the sums across this place.
template <int kCount>
__device__ __forceinline__ void PinSums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// weights: a matrix of rows of weights (16-bit types), or the calling thread's part of 64 x 8 float32 as mma.sync has
// it. pixels: a matrix of rows of channels. Without `add` the sums begin at zero.
template <typename T, int kPixels>
struct Wgmma;

// clang-format off
// Operands of the sums, and their names in the text, which count from 0.
#define JSC_SUMS_4(first) \
  "+f"(sums[first + 0]), "+f"(sums[first + 1]), "+f"(sums[first + 2]), "+f"(sums[first + 3])
#define JSC_SUMS_8(first) JSC_SUMS_4(first), JSC_SUMS_4(first + 4)
#define JSC_SUMS_20(first) JSC_SUMS_8(first), JSC_SUMS_8(first + 8), JSC_SUMS_4(first + 16)
#define JSC_SUMS_32 JSC_SUMS_8(0), JSC_SUMS_8(8)
#define JSC_SUMS_56 JSC_SUMS_20(0), JSC_SUMS_8(20)
#define JSC_SUMS_64 JSC_SUMS_56, JSC_SUMS_4(28)
#define JSC_SUMS_96 JSC_SUMS_56, JSC_SUMS_20(28)
#define JSC_SUMS_112 JSC_SUMS_96, JSC_SUMS_8(48)
#define JSC_SUMS_192 JSC_SUMS_112, JSC_SUMS_20(56), JSC_SUMS_20(76)
#define JSC_SUMS_224 JSC_SUMS_192, JSC_SUMS_8(96), JSC_SUMS_8(104)
#define JSC_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JSC_NAMES_56 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13" \
  ", %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
#define JSC_NAMES_64 JSC_NAMES_56 \
  ", %28, %29, %30, %31"
#define JSC_NAMES_96 JSC_NAMES_56 \
  ", %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41" \
  ", %42, %43, %44, %45, %46, %47"
#define JSC_NAMES_112 JSC_NAMES_96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JSC_NAMES_192 JSC_NAMES_112 \
  ", %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69" \
  ", %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83" \
  ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JSC_NAMES_224 JSC_NAMES_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109" \
  ", %110, %111"

// The last three are the operands after the sums: weights, pixels and whether to add.
#define JSC_WGMMA_16_BIT(T, type, columns, results, a, b, p) \
  template <> \
  struct Wgmma<T, columns> { \
    static __device__ __forceinline__ void Multiply(float (&sums)[results], uint64_t weights, uint64_t pixels, \
                                                    bool add) { \
      asm volatile( \
          "{\n .reg .pred add;\n setp.ne.b32 add, %" #p ", 0;\n" \
          " wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" JSC_NAMES_##columns \
          "}, %" #a ", %" #b ", add, 1, 1, 1, 0;\n}" \
          : JSC_SUMS_##columns \
          : "l"(weights), "l"(pixels), "r"(static_cast<int>(add))); \
    } \
  };
// Weights are four operands here.
#define JSC_WGMMA_TF32(columns, results, a0, a1, a2, a3, b, p) \
  template <> \
  struct Wgmma<float, columns> { \
    static __device__ __forceinline__ void Multiply(float (&sums)[results], const uint32_t (&weights)[4], \
                                                    uint64_t pixels, bool add) { \
      asm volatile( \
          "{\n .reg .pred add;\n setp.ne.b32 add, %" #p ", 0;\n" \
          " wgmma.mma_async.sync.aligned.m64n" #columns "k8.f32.tf32.tf32 {" JSC_NAMES_##columns \
          "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", add, 1, 1;\n}" \
          : JSC_SUMS_##columns \
          : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(pixels), \
            "r"(static_cast<int>(add))); \
    } \
  };

JSC_WGMMA_16_BIT(__nv_bfloat16, "bf16", 32, 16, 16, 17, 18)
JSC_WGMMA_16_BIT(__nv_bfloat16, "bf16", 56, 28, 28, 29, 30)
JSC_WGMMA_16_BIT(__nv_bfloat16, "bf16", 96, 48, 48, 49, 50)
JSC_WGMMA_16_BIT(__nv_bfloat16, "bf16", 112, 56, 56, 57, 58)
JSC_WGMMA_16_BIT(__nv_bfloat16, "bf16", 192, 96, 96, 97, 98)
JSC_WGMMA_16_BIT(__nv_bfloat16, "bf16", 224, 112, 112, 113, 114)
JSC_WGMMA_16_BIT(__half, "f16", 32, 16, 16, 17, 18)
JSC_WGMMA_16_BIT(__half, "f16", 56, 28, 28, 29, 30)
JSC_WGMMA_16_BIT(__half, "f16", 96, 48, 48, 49, 50)
JSC_WGMMA_16_BIT(__half, "f16", 112, 56, 56, 57, 58)
JSC_WGMMA_16_BIT(__half, "f16", 192, 96, 96, 97, 98)
JSC_WGMMA_16_BIT(__half, "f16", 224, 112, 112, 113, 114)
JSC_WGMMA_TF32(32, 16, 16, 17, 18, 19, 20, 21)
JSC_WGMMA_TF32(56, 28, 28, 29, 30, 31, 32, 33)
JSC_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36, 37)
JSC_WGMMA_TF32(96, 48, 48, 49, 50, 51, 52, 53)
JSC_WGMMA_TF32(112, 56, 56, 57, 58, 59, 60, 61)
JSC_WGMMA_TF32(192, 96, 96, 97, 98, 99, 100, 101)
JSC_WGMMA_TF32(224, 112, 112, 113, 114, 115, 116, 117)
// clang-format on

#undef JSC_WGMMA_TF32
#undef JSC_WGMMA_16_BIT
#undef JSC_NAMES_224
#undef JSC_NAMES_192
#undef JSC_NAMES_112
#undef JSC_NAMES_96
#undef JSC_NAMES_64
#undef JSC_NAMES_56
#undef JSC_NAMES_32
#undef JSC_SUMS_224
#undef JSC_SUMS_192
#undef JSC_SUMS_112
#undef JSC_SUMS_96
#undef JSC_SUMS_64
#undef JSC_SUMS_56
#undef JSC_SUMS_32
#undef JSC_SUMS_20
#undef JSC_SUMS_8
#undef JSC_SUMS_4

}  // namespace jsc

#endif  // JSC_CUDA_CORE_WGMMA_CUH_
