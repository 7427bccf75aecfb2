// A chain of convolutions as one kernel: every block stays on its multiprocessor and goes through all layers. Dense:
// nothing is skipped.
//
//   out[pixel][filter] = relu(sum over taps and channels of x * kernel + bias + residual), or a max pool of x
//
// Layout: maps NHWC, kernels HWIO. Layers are numbered in phases; the layers of a phase need nothing of each other, and
//   between phases all blocks meet at a barrier of the grid. A cluster of 8 blocks takes a phase's units one after the
//   other: a tile of pixels x filters, or up to 8, of which each has as many blocks as share its reduction.
// Why: at batch 1 a layer alone takes 8 to 12 us of which most is launch, first instructions, first data and end; here
// a
//   layer costs a barrier instead (some 2,000 cycles), and its first kernel chunks are on their way before that. The
//   grid is as large as clusters that run at once, and launched cooperatively, so that waiting for all blocks ends.
// Tiles are few and small, so they have one code for all shapes (segment_engine.cuh): eight warps of 32 x 32 results,
//   side by side or sharing the reduction; the copy engine brings pixels by windows (im2col) and kernels, and rounds
//   float32 to TF32. What blocks of a cluster sum is added in the order of the blocks, through shared memory: results
//   are bitwise repeatable.
// Bound by: with ResNet-50 at batch 1, a phase of 7,000 to 10,000 cycles is 2,000 for the barrier, as much until the
//   first pixels are there, 1,000 to 5,000 of mma.sync, and 1,500 to 4,000 for sums, their meeting and the results.
// Lost: copies by threads (cp.async: 429 against 365 us for the network in TF32), descriptors read as kernel parameters
//   (514), kernels asked for only after the barrier's arrival (TF32 361 against 349), clusters of 4.
#ifndef JSC_CUDA_SEGMENT_KERNEL_CUH_
#define JSC_CUDA_SEGMENT_KERNEL_CUH_

#include "segment_engine.cuh"
#include "segment_sums.cuh"

namespace jsc {

constexpr int kClusterLog = 3;
static_assert(kSegmentCluster == 1 << kClusterLog);

__device__ __forceinline__ void ArriveAtAll() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void WaitForAll() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ float4 LoadFromRank(const float* shared, int rank) {
  float4 v;
  asm volatile(
      "{\n .reg .b32 at;\n mapa.shared::cluster.u32 at, %4, %5;\n"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(SharedAddress(shared)), "r"(rank)
      : "memory");
  return v;
}

// A wait of ten seconds ends the program: what is waited for will not come. Checked where a wait has failed.
__device__ __forceinline__ void StopAfter(uint64_t& since) {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (since == 0) since = now;
  if (now - since > 10'000'000'000u) __trap();
}

// Waits until the bytes of a stage are there.
__device__ __forceinline__ void WaitForStage(uint64_t* barrier, unsigned parity) {
  uint64_t since = 0;
  for (;;) {
    unsigned done;
    asm volatile(
        "{\n .reg .pred done;\n mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
    if (done) return;
    StopAfter(since);
  }
}

// All blocks arrive before any goes on; counted from phase to phase, so that nothing is ever reset.
__device__ __forceinline__ void ArriveAtGrid(unsigned* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
}

// Thread 0 waits until `target` blocks have arrived, while others bring the next phase's descriptors.
template <typename T>
__device__ __forceinline__ void WaitForGrid(const SegmentTask<T>& task, unsigned target, int next,
                                            SegmentSlot<T>* slot) {
  const int word = static_cast<int>(threadIdx.x) - 32;
  if (threadIdx.x == 0) {
    uint64_t since = 0;
    while (target > 0) {
      unsigned seen;
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(task.arrivals) : "memory");
      if (seen >= target) break;
      StopAfter(since);
    }
  } else if (next < task.phase_count && word >= 0) {
    const SegmentPhase phase = task.phases[next];
    if (word == 0) slot->phase = phase;
    const auto* from = reinterpret_cast<const uint4*>(&task.layers[phase.first]);
    asm volatile("" : "+l"(from));  // else these are loads of constants, one after the other
    if (word < phase.count * static_cast<int>(sizeof(SegmentLayer<T>) / 16)) {
      reinterpret_cast<uint4*>(slot->layers)[word] = from[word];
    }
    if (const int map = word - 192; map >= 0 && map < 2 * phase.count) {
      const CUtensorMap* maps = &task.maps[phase.first].x;
      asm volatile("prefetch.tensormap [%0];" ::"l"(maps + map) : "memory");
    }
  }
  __syncthreads();
}

template <typename T>
__device__ __forceinline__ SegmentPlace FindPlace(const SegmentSlot<T>& slot, int unit) {
  SegmentPlace at{};
  at.layer = -1;
  if (unit >= slot.phase.units) return at;
  at.layer = 0;
  while (unit >= slot.layers[at.layer].units) unit -= slot.layers[at.layer++].units;
  const SegmentLayer<T>& layer = slot.layers[at.layer];
  const int rank = static_cast<int>(blockIdx.x) & ((1 << kClusterLog) - 1);
  const int tile = (unit << (kClusterLog - layer.splits_log)) + (rank >> layer.splits_log);
  const Quotient by = Divide(tile, layer.by_feature_tiles);
  at.pixel = by.quotient * (kWarpSide << layer.warps_p);
  at.feature = by.remainder * (kWarpSide << layer.warps_f);
  at.split = rank & ((1 << layer.splits_log) - 1);
  at.first_piece = at.split * layer.pieces_per_split;
  at.pieces = max(0, min(layer.pieces_per_split, layer.pieces - at.first_piece));
  if (tile >= layer.tiles) at.pieces = 0, at.pixel = layer.pixels;  // nothing to write
  const Quotient row = Divide(at.pixel, layer.by_out_width), image = Divide(row.quotient, layer.by_out_height);
  at.image = image.quotient;
  at.y = image.remainder * layer.stride[0] - layer.pad_low[0];
  at.x = row.remainder * layer.stride[1] - layer.pad_low[1];
  return at;
}

template <typename T, bool kPrecise>
__global__ void __launch_bounds__(kSegmentThreads, 1) SegmentKernel(const __grid_constant__ SegmentTask<T> task) {
#if __CUDA_ARCH__ >= 900
  using Engine = WarpEngine<T, kPrecise>;
  extern __shared__ __align__(1024) unsigned char shared[];
  float* sums = reinterpret_cast<float*>(shared + kRingBytes);
  int2* windows = reinterpret_cast<int2*>(shared + kRingBytes + kSumBytes);
  auto* slots = reinterpret_cast<SegmentSlot<T>*>(shared + kRingBytes + kSumBytes + kWindowBytes);
  auto* barriers = reinterpret_cast<uint64_t*>(slots + 2);  // [stage]
  const int cluster = static_cast<int>(blockIdx.x) >> kClusterLog;
  const int rank = static_cast<int>(blockIdx.x) & ((1 << kClusterLog) - 1);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int phase = -1, next_phase = 0, unit = cluster;
  unsigned parities = 0;  // a bit a stage
  SegmentPlace at{};
  at.layer = -1;
  ShareWriter<T> writer;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kSegmentStages; ++s) InitBarrier(barriers + s);
    FenceBarriers();
  }
  WaitForGrid(task, 0, 0, slots);
#pragma unroll 1
  for (;;) {
    // The cluster's next unit, and its first kernels, which do not depend on anything that runs: they are on their way
    // while the unit before is completed.
    SegmentPlace next{};
    next.layer = -1;
    if (next_phase < task.phase_count) {
      const SegmentSlot<T>& slot = slots[next_phase & 1];
      next = FindPlace(slot, unit);
      if (next.layer >= 0) {
        const SegmentTile tile(slot.layers[next.layer]);
        AskForPieces(slot.layers[next.layer], task.maps[slot.phase.first + next.layer], next, tile, 0,
                     min(next.pieces, tile.stages * tile.sub), true, false, shared, barriers);
      }
    }
    if (at.layer >= 0) {  // the unit before: its sums to results
      const SegmentLayer<T>& layer = slots[phase & 1].layers[at.layer];
      const int filters_log = layer.warps_f + 5, part = kWarpSide << (layer.warps_p + filters_log);
      auto place = [&](int pixel) { return sums + (pixel << filters_log) + Engine::SumQuad(pixel, writer.quad) * 4; };
      const bool together = layer.splits_log > 0;
      if (together) {
        const int first_rank = rank & ~((1 << layer.splits_log) - 1);
        WaitForAll();
        writer.Write(max(ShareWriter<T>::kMost >> layer.warps_k, 1 << layer.splits_log),
                     [&](int pixel, int of) { return LoadFromRank(place(pixel), first_rank + of); });
      } else {
        writer.Write(ShareWriter<T>::kMost,
                     [&](int pixel, int of) { return *reinterpret_cast<const float4*>(place(pixel) + of * part); });
      }
      if (together && next_phase == phase) {
        ArriveAtAll();
        WaitForAll();
      }
    }
    if (next_phase == task.phase_count) break;
    if (next_phase == phase) {
      __syncthreads();
    } else {
      if (phase >= 0) ArriveAtGrid(task.arrivals);
      phase = next_phase;
      WaitForGrid(task, static_cast<unsigned>(phase) * gridDim.x, phase + 1, slots + ((phase + 1) & 1));
    }
    at = next;
    const SegmentSlot<T>& slot = slots[phase & 1];
    unit += task.clusters;
    if (at.layer < 0) {
      if (slot.layers[0].kind == SegmentKind::kMaxPool) RunPool(slot.layers[0]);
      ++next_phase, unit = cluster;
      continue;
    }
    if (unit >= slot.phase.units) ++next_phase, unit = cluster;

    const SegmentLayer<T>& layer = slot.layers[at.layer];
    const SegmentMaps& maps = task.maps[slot.phase.first + at.layer];
    const SegmentTile tile(layer);
    const bool is_narrow = layer.narrow;
    const int ahead = tile.stages * tile.sub, stage_bytes = tile.sub * tile.piece_bytes;
    SegmentReach<T> narrow;
    if (is_narrow) {
      for (int i = threadIdx.x; i < tile.pixels; i += kSegmentThreads)
        windows[i] = FindSegmentWindow(layer, at.pixel + i);
      narrow.Find(layer, at.first_piece * kDeep<T> + static_cast<int>(threadIdx.x) % kDeep<T>);
      __syncthreads();
#pragma unroll 1
      for (int p = 0; p < min(at.pieces, ahead); ++p) {
        narrow = CopyNarrow<T, kPrecise>(layer, windows, shared + p * tile.piece_bytes, narrow);
      }
      __syncthreads();
    } else {
      asm volatile("fence.proxy.async;" ::: "memory");  // x was written by threads, and the copy engine reads it
      AskForPieces(layer, maps, at, tile, 0, min(at.pieces, ahead), false, true, shared, barriers);
    }
    writer.Find(layer, at);  // while the first pieces are under way
    const int warp_p = warp & ((1 << layer.warps_p) - 1);
    const int warp_f = (warp >> layer.warps_p) & ((1 << layer.warps_f) - 1);
    const int warp_k = warp >> (layer.warps_p + layer.warps_f), warps_k = 1 << layer.warps_k;
    Engine engine;
    engine.Start(tile.pixel_bytes, warp_p, warp_f);
    int stage = 0, before = 0;
#pragma unroll 1
    for (int p = 0; p < at.pieces; p += tile.sub) {
      if (const int from = p - tile.sub + ahead; p > 0 && from < at.pieces) {
        __syncthreads();  // all are done with the stage before
        const int end = min(at.pieces, from + tile.sub);
        AskForPieces(layer, maps, at, tile, from, end, true, !is_narrow, shared + before * stage_bytes,
                     barriers + before);
        if (is_narrow) {
#pragma unroll 1
          for (int i = from; i < end; ++i) {
            unsigned char* piece = shared + before * stage_bytes + (i - from) * tile.piece_bytes;
            narrow = CopyNarrow<T, kPrecise>(layer, windows, piece, narrow);
          }
          __syncthreads();
        }
      }
      WaitForStage(barriers + stage, parities >> stage & 1);
      parities ^= 1u << stage;
#pragma unroll 1
      for (int j = warp_k; j < tile.sub; j += warps_k) {
        if (p + j < at.pieces) engine.Multiply(shared + stage * stage_bytes + j * tile.piece_bytes, warp_f);
      }
      before = stage;
      stage = stage + 1 == tile.stages ? 0 : stage + 1;
    }
    const int part = tile.pixels * tile.filters;
    engine.Store(sums + warp_k * part, tile.filters, warp_p, warp_f);
    __syncthreads();
    if (layer.splits_log > 0) {
      // What warps have is added up here, not by the blocks that read it: these reads are the slow ones.
      for (int i = threadIdx.x; warps_k > 1 && i < part / 4; i += kSegmentThreads) {
        float4 sum = reinterpret_cast<float4*>(sums)[i];
        for (int w = 1; w < warps_k; ++w) sum = sum + reinterpret_cast<float4*>(sums)[w * part / 4 + i];
        reinterpret_cast<float4*>(sums)[i] = sum;
      }
      __syncthreads();
      ArriveAtAll();
    }
  }
  // A block's sums stay until all of its cluster have read them.
  ArriveAtAll();
  WaitForAll();
#endif
}

}  // namespace jsc

#endif  // JSC_CUDA_SEGMENT_KERNEL_CUH_
