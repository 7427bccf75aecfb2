// Where the time goes in the kernel of Cheng et al. 2018, Figs. 5 to 12, written as they print it: loading a chunk of
// pixels and filters into shared memory, and computing with it. Figs. 8 and 14 are the shares before and after
// unrolling, Figs. 9 and 13 the sums in local memory and in registers. Part of direct_ablation.cu's program.
//
// A block has 16 x 4 threads and one pixel of 64 images for 16 filters; a thread has 4 images and 4 filters. Layouts
// are cuda-convnet2's: images [feature, y, x, image], filters [feature, tap, filter], results [filter, pixel, image].
#include "benchmarks/suites/ablation.cuh"

namespace jsc {
namespace {

constexpr int kX = 16, kY = 4, kEach = 4, kCached = 4, kFeatures = 3;
constexpr int kImages = kX * kEach, kFilters = kY * kEach;  // of a block

struct Problem {
  int images, height, width, filters, size;  // size: rows and columns of a filter
};

// cycles[0] and cycles[1]: of loading and of computing, of all warps together.
template <bool kUnrolled>
__global__ void __launch_bounds__(kX* kY)
    PartsKernel(Problem p, const float* images, const float* filters, float* out, unsigned long long* cycles) {
  __shared__ float image_pixel[kFeatures * kCached][kImages], filter_pixel[kFeatures * kCached][kFilters];
  const int pixel = blockIdx.y, y0 = pixel / p.width - p.size / 2, x0 = pixel % p.width - p.size / 2;
  const int first_image = blockIdx.x * kImages, first_filter = blockIdx.z * kFilters;
  const int taps = p.size * p.size, pixels = p.height * p.width;
  float result[kEach][kEach];
#pragma unroll
  for (int i = 0; i < kEach * kEach; ++i) result[i / kEach][i % kEach] = 0.f;
  long long loading = 0, computing = 0;
#pragma unroll 1
  for (int tap = 0; tap < taps; tap += kCached) {
    const long long begin = clock64();
    const int own = tap + threadIdx.y;  // kCached == kY: a row of threads loads a tap
    const int y = y0 + own / p.size, x = x0 + own % p.size;
    const bool inside = own < taps && y >= 0 && y < p.height && x >= 0 && x < p.width;
#pragma unroll 1
    for (int f = 0; f < kFeatures; ++f) {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const int image = first_image + threadIdx.x + i * kX;
        image_pixel[f * kCached + threadIdx.y][threadIdx.x + i * kX] =
            inside && image < p.images ? images[(f * pixels + y * p.width + x) * p.images + image] : 0.f;
      }
      filter_pixel[f * kCached + threadIdx.y][threadIdx.x] =
          own < taps ? filters[(f * taps + own) * p.filters + first_filter + threadIdx.x] : 0.f;
    }
    __syncthreads();
    const long long loaded = clock64();
#pragma unroll 1
    for (int i = 0; i < kFeatures * kCached; ++i) {
      if constexpr (kUnrolled) {
#pragma unroll
        for (int f = 0; f < kEach; ++f) {
#pragma unroll
          for (int g = 0; g < kEach; ++g) {
            result[f][g] += image_pixel[i][threadIdx.x + g * kX] * filter_pixel[i][threadIdx.y * kEach + f];
          }
        }
      } else {
#pragma unroll 1
        for (int f = 0; f < kEach; ++f) {
#pragma unroll 1
          for (int g = 0; g < kEach; ++g) {
            result[f][g] += image_pixel[i][threadIdx.x + g * kX] * filter_pixel[i][threadIdx.y * kEach + f];
          }
        }
      }
    }
    __syncthreads();
    loading += loaded - begin;
    computing += clock64() - loaded;
  }
#pragma unroll
  for (int f = 0; f < kEach; ++f) {
#pragma unroll
    for (int g = 0; g < kEach; ++g) {
      const int image = first_image + threadIdx.x + g * kX, filter = first_filter + threadIdx.y * kEach + f;
      if (image < p.images) out[(static_cast<int64_t>(filter) * pixels + pixel) * p.images + image] = result[f][g];
    }
  }
  if ((threadIdx.y * kX + threadIdx.x) % 32 == 0) {
    atomicAdd(cycles, static_cast<unsigned long long>(loading));
    atomicAdd(cycles + 1, static_cast<unsigned long long>(computing));
  }
}

// As Compare, in these layouts and without ReLU.
__global__ void CompareParts(Problem p, const float* images, const float* filters, const float* out, double* sums) {
  const int taps = p.size * p.size, pixels = p.height * p.width, total = p.filters * pixels * p.images;
  for (int i = blockIdx.x * 128 + threadIdx.x; i < total; i += gridDim.x * 128) {
    const int image = i % p.images, pixel = i / p.images % pixels, filter = i / p.images / pixels;
    double sum = 0;
    for (int tap = 0; tap < taps; ++tap) {
      const int y = pixel / p.width - p.size / 2 + tap / p.size, x = pixel % p.width - p.size / 2 + tap % p.size;
      if (y < 0 || y >= p.height || x < 0 || x >= p.width) continue;
      for (int f = 0; f < kFeatures; ++f) {
        sum += static_cast<double>(images[(f * pixels + y * p.width + x) * p.images + image]) *
               filters[(f * taps + tap) * p.filters + filter];
      }
    }
    const double difference = static_cast<double>(out[i]) - sum;
    atomicAdd(sums, difference * difference);
    atomicAdd(sums + 1, sum * sum);
  }
}

template <bool kUnrolled>
void Report(const char* layer, const Problem& p, cudaStream_t stream) {
  const int pixels = p.height * p.width, taps = p.size * p.size;
  const int64_t counts[3] = {int64_t{kFeatures} * pixels * p.images, int64_t{kFeatures} * taps * p.filters,
                             int64_t{p.filters} * pixels * p.images};
  float* buffers[3];
  for (int i = 0; i < 3; ++i) {
    buffers[i] = Allocate(counts[i], 1 + i, -0.5f, 1.f);
  }
  unsigned long long *cycles, found[2];
  double *sums, errors[2];
  Check(cudaMalloc(&cycles, sizeof(found)), "cudaMalloc");
  Check(cudaMalloc(&sums, sizeof(errors)), "cudaMalloc");
  Check(cudaMemsetAsync(sums, 0, sizeof(errors), stream), "cudaMemsetAsync");
  const dim3 grid((p.images + kImages - 1) / kImages, pixels, p.filters / kFilters), block(kX, kY);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 2; ++i) {  // the first to warm up
    Check(cudaMemsetAsync(cycles, 0, sizeof(found), stream), "cudaMemsetAsync");
    Check(cudaEventRecord(begin, stream), "cudaEventRecord");
    for (int call = 0; call < kCalls; ++call) {
      PartsKernel<kUnrolled><<<grid, block, 0, stream>>>(p, buffers[0], buffers[1], buffers[2], cycles);
    }
    Check(cudaEventRecord(end, stream), "cudaEventRecord");
    Check(cudaGetLastError(), "cudaGetLastError");
  }
  CompareParts<<<256, 128, 0, stream>>>(p, buffers[0], buffers[1], buffers[2], sums);
  Check(cudaMemcpyAsync(found, cycles, sizeof(found), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  Check(cudaMemcpyAsync(errors, sums, sizeof(errors), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  float milliseconds = 0;
  Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  cudaFuncAttributes attributes;
  Check(cudaFuncGetAttributes(&attributes, PartsKernel<kUnrolled>), "cudaFuncGetAttributes");
  const double all = static_cast<double>(found[0] + found[1]), error = std::sqrt(errors[0] / errors[1]);
  std::printf(
      "{\"layer\": \"%s\", \"step\": \"parts\", \"engine\": \"%s\", \"addresses\": \"recomputed\", "
      "\"hoisted_checks\": false, \"images_per_thread\": %d, \"filters_per_thread\": %d, \"threads_x\": %d, "
      "\"threads_y\": %d, \"cached_pixels\": %d, \"stages\": 1, \"copy_bytes\": 4, \"us\": %.4f, \"error\": %.3e, "
      "\"load_percent\": %.2f, \"compute_percent\": %.2f, \"local_bytes\": %d}\n",
      layer, kUnrolled ? "outer products" : "local sums", kEach, kEach, kX, kY, kCached, milliseconds * 1e3 / kCalls,
      std::isfinite(error) ? error : 1e30, 100 * found[0] / all, 100 * found[1] / all,
      static_cast<int>(attributes.localSizeBytes));
  std::fflush(stdout);
  for (float* buffer : buffers) Check(cudaFree(buffer), "cudaFree");
  Check(cudaFree(cycles), "cudaFree");
  Check(cudaFree(sums), "cudaFree");
}

}  // namespace

void ReportParts(const char* layer, int images, int height, int width, int filters, int size, cudaStream_t stream) {
  const Problem problem = {images, height, width, filters, size};
  Report<false>(layer, problem, stream);
  Report<true>(layer, problem, stream);
}

}  // namespace jsc
