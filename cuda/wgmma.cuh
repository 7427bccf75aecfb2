// Hopper's matrix product of a warpgroup, wgmma: descriptors of operands in shared memory, and the instruction in the
// shapes that direct_warpgroup.cuh uses. Code for sm_90a only.
//
// sums[filter][pixel] += filters x pixels, 64 filters and kPixels pixels, 32 bytes deep. Lane l of warp w holds, as
// sums[4 * j + 2 * h + e], filter 16 * w + 8 * h + l / 4 and pixel 8 * j + 2 * (l % 4) + e.
#ifndef JSC_CUDA_WGMMA_CUH_
#define JSC_CUDA_WGMMA_CUH_

#include "common.cuh"

namespace jsc {

// A matrix in shared memory whose rows are 128 bytes, 16-byte slots permuted as the copy engine's 128-byte swizzle does
// it. group_bytes: between groups of eight rows; inside one they are 128 bytes apart. The permutation follows from
// the bits of an element's address, so a matrix may begin at any row.
__device__ __forceinline__ uint64_t SwizzledMatrix(uint32_t shared, uint32_t group_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{group_bytes >> 4} << 32 | uint64_t{1} << 16 | (shared >> 4 & 0x3fff);
}

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

// filters: a matrix of rows of filters (16-bit types), or the calling thread's part of 64 x 8 float32 as mma.sync has
// it. pixels: a matrix of rows of channels. Without `add` the sums begin at zero.
template <typename T, int kPixels>
struct Wgmma;

// clang-format off
#define JSC_SUMS_56 \
  "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), \
  "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), \
  "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), \
  "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), \
  "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), \
  "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
  "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27])
#define JSC_SUMS_112 \
  "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), \
  "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), \
  "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), \
  "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), \
  "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), \
  "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
  "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), \
  "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), \
  "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), \
  "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), \
  "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), \
  "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), \
  "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), \
  "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55])
#define JSC_SUMS_224 \
  "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), \
  "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), \
  "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), \
  "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), \
  "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), \
  "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
  "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), \
  "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), \
  "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), \
  "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), \
  "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), \
  "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), \
  "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), \
  "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), \
  "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), \
  "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), \
  "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]), \
  "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]), \
  "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), \
  "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]), \
  "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]), \
  "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), \
  "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]), \
  "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]), \
  "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]), \
  "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]), \
  "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]), \
  "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111])
// clang-format on

template <>
struct Wgmma<__nv_bfloat16, 56> {
  static __device__ __forceinline__ void Multiply(float (&sums)[28], uint64_t filters, uint64_t pixels, bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %30, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n56k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27"
        "}, %28, %29, add, 1, 1, 1, 0;\n}"
        : JSC_SUMS_56
        : "l"(filters), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<__half, 56> {
  static __device__ __forceinline__ void Multiply(float (&sums)[28], uint64_t filters, uint64_t pixels, bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %30, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n56k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27"
        "}, %28, %29, add, 1, 1, 1, 0;\n}"
        : JSC_SUMS_56
        : "l"(filters), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<float, 56> {
  static __device__ __forceinline__ void Multiply(float (&sums)[28], const uint32_t (&filters)[4], uint64_t pixels,
                                                  bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %33, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n56k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27"
        "}, {%28, %29, %30, %31}, %32, add, 1, 1;\n}"
        : JSC_SUMS_56
        : "r"(filters[0]), "r"(filters[1]), "r"(filters[2]), "r"(filters[3]), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<__nv_bfloat16, 112> {
  static __device__ __forceinline__ void Multiply(float (&sums)[56], uint64_t filters, uint64_t pixels, bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %58, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
        "}, %56, %57, add, 1, 1, 1, 0;\n}"
        : JSC_SUMS_112
        : "l"(filters), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<__half, 112> {
  static __device__ __forceinline__ void Multiply(float (&sums)[56], uint64_t filters, uint64_t pixels, bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %58, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
        "}, %56, %57, add, 1, 1, 1, 0;\n}"
        : JSC_SUMS_112
        : "l"(filters), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<float, 112> {
  static __device__ __forceinline__ void Multiply(float (&sums)[56], const uint32_t (&filters)[4], uint64_t pixels,
                                                  bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %61, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n112k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
        "}, {%56, %57, %58, %59}, %60, add, 1, 1;\n}"
        : JSC_SUMS_112
        : "r"(filters[0]), "r"(filters[1]), "r"(filters[2]), "r"(filters[3]), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<__nv_bfloat16, 224> {
  static __device__ __forceinline__ void Multiply(float (&sums)[112], uint64_t filters, uint64_t pixels, bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %114, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "
        "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
        "}, %112, %113, add, 1, 1, 1, 0;\n}"
        : JSC_SUMS_224
        : "l"(filters), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<__half, 224> {
  static __device__ __forceinline__ void Multiply(float (&sums)[112], uint64_t filters, uint64_t pixels, bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %114, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n224k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "
        "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
        "}, %112, %113, add, 1, 1, 1, 0;\n}"
        : JSC_SUMS_224
        : "l"(filters), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

template <>
struct Wgmma<float, 224> {
  static __device__ __forceinline__ void Multiply(float (&sums)[112], const uint32_t (&filters)[4], uint64_t pixels,
                                                  bool add) {
    asm volatile(
        "{\n .reg .pred add;\n setp.ne.b32 add, %117, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n224k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "
        "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
        "}, {%112, %113, %114, %115}, %116, add, 1, 1;\n}"
        : JSC_SUMS_224
        : "r"(filters[0]), "r"(filters[1]), "r"(filters[2]), "r"(filters[3]), "l"(pixels), "r"(static_cast<int>(add)));
  }
};

#undef JSC_SUMS_56
#undef JSC_SUMS_112
#undef JSC_SUMS_224

}  // namespace jsc

#endif  // JSC_CUDA_WGMMA_CUH_
