"""What `implementation=None` does without a plan: a cost model of sizes, dtype, precision and device.

The model answers one question: up to which density of x is the sparse kernel expected to be at least as fast as XLA's
dense convolution? (Convolutions that are small for the device go to "direct", whatever the density, see
`direct_choice`.) Density is not known before the program runs, so
- above 1, the sparse kernel always serves; at 0, the dense convolution;
- a CPU decides in the running program, by a sample of x: convolutions inside the native call, which has a dense kernel
  of its own, dense layers of several rows by a branch to XLA's (`is_at_most`), for which counts of the non-zeros serve
  as well;
- in between, a GPU decides by `ASSUMED_DENSITY`. With a branch of XLA's the host would wait for the device; one custom
  call that holds "ecr" and "direct", which is what "adaptive" runs, costs about as much as it can gain
  (benchmarks/NOTES.md).

The papers' own rule (OCPA, Xu et al. 2023, section 7: PECR where a pool follows, ECR elsewhere) is what naming the
implementations gives. The decision is made while a program is lowered, so it sees the images that `vmap` added.
"""

from __future__ import annotations

import math
from typing import Any

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import crossing, direct_choice
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.workload import Workload

ASSUMED_DENSITY = 0.75
"""Of a feature map that nothing is known of, on a GPU: early layers have about 25 % zeros, and None shall not lose."""

_DENSE_ROWS = 16  # of x up to which a dense layer is a stream of its weights, so that skipping kernel rows pays
# On CUDA, for a kernel each: cuBLAS streams its weights for some rows as fast as for one, and ours does not (4096 to
# 4096 without zeros in TF32: 19 us for 1 row; 19 and 22 for 2, 20 and 24 for 8; in 16 bits 7 and 14 for 2; 4096 to 1000
# at HIGHEST 8 and 14 for 8). More rows share fewer zeros, too.
_CUDA_DENSE_ROWS = 1
# With fewer weights XLA is faster: it takes 0.5 and 0.8 of our time for 840 and 10,080 (h200_small_layers_dense.json).
# 48,000 are 1.3 times as fast by ours in float32 and 0.94 in bfloat16, 384,000 as fast (h200_small_layers.json).
_CUDA_DENSE_WEIGHTS = 4e4
# Bytes of weights that are many, but may still lie in the cache when they are read again: from there cuBLAS reads them
# half again as fast as from memory, and ours does not (4096 to 4096 in 16 bits without zeros: 7 and 10.5 us, and from
# memory 10.5 and 10.7; h200_network_layers_dense16.json, h200_network_layers_cold.json). 8 MB are 2.8 times as fast by
# ours from the cache, too.
_CUDA_CACHED_BYTES = 2.4e7, 5e7  # float32 of so many was not measured

# CPU, of calls that choose by a branch. Grouped, depthwise and 16-bit convolutions of XLA's are slower than ours at any
# density, and so are dense layers of one row (benchmarks/results/cpu_zoo.json).
_CPU_CROSSOVER = 0.65
_CPU_FEW_PIXELS = 64
_CPU_FEW_ROWS = 4  # of a dense layer with many weights; more rows share fewer zeros
_CPU_ROWS_CROSSOVER = 0.35
_CPU_SMALL = 1e5  # operations: such calls are over before a branch pays
# Weights of a dense layer: with several rows a branch costs small ones up to 10 %, and skipping gains little below 80 %
# zeros. One row loses nothing without zeros, but 5 to 14 % in VGG's first layer.
_CPU_ROW_WEIGHTS = (4e6, 5e7)
_CPU_FEW_WEIGHTS = 1e7
_CPU_STRIDED_FLOPS = 1e9  # of a 1x1 convolution that strides, from which "direct" is up to a quarter slower than XLA
# 1x1 convolutions to many more channels, from so many pixels on: "direct" is up to a tenth slower than XLA for 256 to
# 1024 channels at 8 x 14x14 and 1.4 times as fast for 512 to 2048 at 8 x 7x7.
_CPU_WIDENING, _CPU_WIDE_CHANNELS, _CPU_WIDE_PIXELS = 4, 256, 1024
# Pooled 1x1 convolutions: "direct" takes a tenth longer than XLA for 256 to 128 channels at 8 x 56x56.
_CPU_POOLED_FLOPS = 1e9
# Results of more bytes are memory that is new in every call: nearly without zeros our loops take a tenth longer than
# XLA for 64 to 128 channels at 8 x 112x112.
_CPU_LARGE_RESULT, _CPU_LARGE_CROSSOVER = 2**25, 0.9

# CUDA, microseconds on an H200 from benchmarks/results/h200_layers.json and h200_run_*.json, as shares of what the
# device's properties promise, so that they carry over. Checked with paper/networks.json, where None is level with XLA
# or ahead on four networks at two precisions, whichever of XLA's flag sets is the faster, and layer by layer, against
# XLA under its default flags, with h200_plan_resnet50_*.json: ahead in all 54.
_SPARSE_FLOOR = 5.5  # us: launch, first data, meeting of the cluster
_SPARSE_LISTS = 0.9  # of the peak of FFMA, for dense-equivalent operations whatever the density
_SPARSE_SUMS = 0.75  # and for those of non-zeros
_SPARSE_WEIGHTS = 0.31  # of memory bandwidth
_DENSE_FLOOR = 10.0  # us
_FFMA_SHARE = 0.34  # of the peak, for 4 GFLOP or less; more work fills the device better
_FFMA_FILL = 4e9
_FFMA_STEP = 53  # cycles for each of a result's products: cuDNN's loop over them when there are few blocks
_TENSOR_SHARE = 0.6
_TENSOR_STEP = 4
_AVERAGED_IMAGES = 8  # from which on averages first were measured to be faster in 16 bits
_LEAST_LIST_FEATURES = 32  # output channels of a group that a warp's lanes cover


def crossover(workload: Workload, platform: str) -> float:
    """The density of x up to which the sparse kernel is expected to be as fast as the dense convolution; 0 for none."""
    if workload.method == "dense" and workload.x_shape[0] > _DENSE_ROWS:
        return 0.0
    if platform == "cpu":
        return _cpu_crossover(workload)
    if workload.method == "dense":
        is_row = workload.x_shape[0] <= _CUDA_DENSE_ROWS * workload.kernel_shape[0]
        weights = math.prod(workload.kernel_shape[1:])
        least, most = _CUDA_CACHED_BYTES
        is_cached = least <= weights * workload.itemsize <= most
        return math.inf if is_row and weights >= _CUDA_DENSE_WEIGHTS and not is_cached else 0.0
    if workload.is_image or workload.flops == 0:
        return 0.0
    if _is_behind_tensor_cores(workload):
        return 0.0
    device = devices.current()
    if workload.kernel_shape[4] // workload.geometry.groups < 4:
        return 0.0  # nearly depthwise: a list would serve too few channels
    fixed, per_density = _sparse_us(workload, device)
    return max(0.0, (_dense_us(workload, device) - fixed) / per_density)


def _is_behind_tensor_cores(workload: Workload) -> bool:
    """Whether cuDNN's TF32 and 16 bits are not slower than the sparse kernel on Hopper GPUs, under command buffers.

    RegNetX-400MF's groups of 16 channels without zeros were level at batch 1, 0.93 to 1.05 times as fast
    (h200_small_layers_dense.json), and the network at batch 8 in bfloat16, with "ecr" for 19 of them, which are
    "direct"'s since, 0.87 times as fast as XLA's (h100_networks_chains.json). Where channels are not whole copies
    cuDNN is slow: LeNet's second layer in bfloat16 is 2.0 times as fast by ours (h200_small_layers.json).
    """
    return direct_choice.has_warpgroups() and direct_choice.is_copied(workload) and not workload.is_precise


def _cpu_crossover(workload: Workload) -> float:
    if workload.is_image:
        return 0.0
    if workload.flops < _CPU_SMALL:
        return math.inf
    if workload.method == "dense":
        return _cpu_rows_crossover(workload.x_shape[0], math.prod(workload.kernel_shape))
    if workload.geometry.groups > 1 or workload.itemsize == 2 or workload.pixels <= _CPU_FEW_PIXELS:
        return math.inf
    return _CPU_LARGE_CROSSOVER if _has_large_result(workload) else _CPU_CROSSOVER


def _has_large_result(workload: Workload) -> bool:
    return (
        workload.geometry.pool is None
        and workload.pixels * workload.kernel_shape[4] * workload.itemsize > _CPU_LARGE_RESULT
    )


def _cpu_rows_crossover(rows: int, weights: int) -> float:
    """Of a dense layer."""
    if rows == 1:
        return math.inf if weights <= _CPU_ROW_WEIGHTS[1] else _CPU_CROSSOVER
    if rows > _CPU_FEW_ROWS:
        return _CPU_ROWS_CROSSOVER if weights > _CPU_FEW_WEIGHTS else 0.0
    if weights > _CPU_FEW_WEIGHTS:
        return _CPU_CROSSOVER
    return _CPU_ROWS_CROSSOVER if weights > _CPU_ROW_WEIGHTS[0] else 0.0


def chooses_natively(workload: Workload, platform: str) -> bool:
    """Whether the native call chooses by itself, by a sample of x, between sparse loops and a dense one."""
    if platform != "cpu" or workload.method not in ("ecr", "pecr") or workload.is_symbolic:
        return False
    if _has_large_result(workload) or _is_xlas_at_full_density(workload):
        return False
    return not workload.is_image and workload.geometry.groups == 1 and workload.itemsize > 2


def _is_xlas_at_full_density(workload: Workload) -> bool:
    """Whether XLA is the fastest for a convolution without zeros on a CPU."""
    channels, features = workload.kernel_shape[3:]
    if workload.kernel_shape[1] * workload.kernel_shape[2] > 1:
        return False
    if workload.geometry.pool is not None and workload.flops > _CPU_POOLED_FLOPS:
        return True
    widens = channels >= _CPU_WIDE_CHANNELS and features >= _CPU_WIDENING * channels
    strides = max(workload.geometry.strides) > 1
    return (widens and workload.pixels >= _CPU_WIDE_PIXELS) or (strides and workload.flops > _CPU_STRIDED_FLOPS)


def threshold(workload: Workload, platform: str) -> float:
    """As `crossover`, but infinite or 0 where the decision is made now; without sizes, whatever always runs."""
    if workload.is_symbolic:
        return math.inf if platform == "cpu" else 0.0  # CUDA kernels want a workspace of known size
    found = crossover(workload, platform)
    if found >= 1:
        return math.inf
    if platform == "cpu":
        return found
    return math.inf if found >= ASSUMED_DENSITY else 0.0


def prefers_averages(images: Any, dtype: Any, platform: str | None) -> bool:
    """Whether an average pool is expected to be faster in front of a 1x1 convolution, by DenseNet's transitions.

    On a CPU these take 0.2 to 0.6 of the time so, and 0.5 to 0.95 at 95 % zeros, of which averages have fewer
    (cpu_zoo_average_first.json, cpu_zoo_average_behind.json). On Hopper GPUs it is 0.59 to 0.98 of the time in TF32 at
    batch 1 to 32 (h100_zoo_average_first.json, h100_zoo_average_behind.json); HIGHEST was not measured, but saves three
    quarters of products that take longer. In 16 bits they are 1.2 to 1.5 times as fast as XLA at batch 8 and 32
    (h100_network_layers_*.json), and slower than with the pool behind for one image of 56x56 pixels.
    """
    if platform != "cuda" or not direct_choice.has_warpgroups():
        return platform == "cpu"
    if dtype.itemsize == 2:
        return isinstance(images, int) and images >= _AVERAGED_IMAGES  # or symbolic
    return bool(dtype == "float32")


def crossover_with_direct(workload: Workload) -> float:
    """The density of x up to which the sparse CUDA kernel is expected to be as fast as "direct".

    Infinite or 0 where one of them is to run whatever the density.
    """
    if workload.is_symbolic or workload.flops == 0:
        return math.inf
    device = devices.current()
    has_mma = device.has_fast_tf32 if workload.is_precise else device.has_tf32
    products: crossing.Products = "mma" if has_mma or workload.dtype != "float32" else "ffma"
    if direct_choice.has_warpgroups() and direct_choice.takes_warpgroups(workload):
        products = "warpgroups"
    return crossing.density(workload, device, crossing.direct_us(workload, device, products))


def _sparse_us(workload: Workload, device: devices.Device) -> tuple[float, float]:
    """Microseconds of the sparse kernel: those that do not depend on the density, and those at a density of 1."""
    group_features = workload.kernel_shape[4] // workload.geometry.groups
    flops = workload.flops * max(1.0, _LEAST_LIST_FEATURES / group_features) * _recomputed(workload.geometry)
    weights = math.prod(workload.kernel_shape) * workload.itemsize / (_SPARSE_WEIGHTS * device.memory_bytes_per_second)
    fixed = _SPARSE_FLOOR + 1e6 * (weights + flops / (_SPARSE_LISTS * device.flops))
    return fixed, 1e6 * flops / (_SPARSE_SUMS * device.flops)


def _recomputed(geometry: Geometry) -> float:
    """How often PECR computes a result that several pooling windows share."""
    if geometry.pool is None:
        return 1.0
    pairs = zip(geometry.pool.window, geometry.pool.strides, strict=True)
    return math.prod(max(1.0, window / stride) for window, stride in pairs)


def _dense_us(workload: Workload, device: devices.Device) -> float:
    """Microseconds of XLA's dense convolution, rather too few than too many."""
    rate, step = _FFMA_SHARE * device.flops, _FFMA_STEP
    rate *= max(1.0, math.sqrt(workload.flops / _FFMA_FILL))
    tensor = 0.0 if workload.is_precise else _TENSOR_SHARE * device.tensor_flops(workload.dtype)
    if tensor > rate:
        rate, step = tensor, _TENSOR_STEP
    chain = workload.products * step / device.clock_hz
    return _DENSE_FLOOR + 1e6 * max(chain, workload.flops / rate)
