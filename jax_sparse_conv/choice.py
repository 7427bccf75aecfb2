"""What `implementation=None` does without a plan: a cost model of sizes, dtype, precision and device.

The model answers one question: up to which density of x is the sparse kernel expected to be at least as fast as XLA's
dense convolution? (Convolutions that are small for the device go to "direct", whatever the density, see
`prefers_direct`.) Density is not known before the program runs, so
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

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_sparse_conv import _native, cost_model, crossing, devices
from jax_sparse_conv.geometry import Geometry, Pool

ASSUMED_DENSITY = 0.75
"""Of a feature map that nothing is known of, on a GPU: early layers have about 25 % zeros, and None shall not lose."""

_IMAGE_CHANNELS = 3  # a map of so few channels is an image: no ReLU has been there
_DENSE_ROWS = 16  # of x up to which a dense layer is a stream of its weights, so that skipping kernel rows pays
# On CUDA, for a kernel each: cuBLAS streams its weights for some rows as fast as for one where tensor cores multiply
# them, and ours does not (4096 to 4096 without zeros in TF32: 19 us for 1 row; 19 and 22 for 2, 20 and 24 for 8; in 16
# bits 7 and 14 for 2). More rows share fewer zeros, too. At HIGHEST FFMA is as good as what cuBLAS has.
_CUDA_DENSE_ROWS, _CUDA_DENSE_ROWS_EXACT = 1, 8

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
# Operations a cycle of a multiprocessor's tensor cores by compute capability: float32 as TF32, 16-bit types.
_TENSOR_CORES = {(8, 0): (1024, 2048), (9, 0): (2048, 4096), (10, 0): (2048, 8192), (10, 3): (2048, 8192)}
_TENSOR_CORES_ELSEWHERE = (256, 512)
_TF32_CAPABILITY = (8, 0)
_DIRECT_DTYPES = ("float32", "bfloat16", "float16")
# Operations up to which "direct" beats cuDNN's TF32: in all 53 convolutions of ResNet-50 at batch 1, of which the
# largest has 236 MFLOP, by 1.4 to 4.1 times under default flags (h200_plan_resnet50_default.json), 0.94 to 2.7 of 7
# under command buffers (h200_direct_layers_default.json).
_DIRECT_FLOPS = 2.5e8
# Images have a kernel of their own. On an H200 under command buffers, first layers of VGG, ResNet (with their pool),
# RegNet and AlexNet at batch 1 and 8 in TF32, at HIGHEST and in bfloat16: 0.97 to 4.8 times as fast as cuDNN's (a
# development run of benchmarks.zoo); with fewer features or more work not measured.
_DIRECT_IMAGE_CHANNELS = 4
_DIRECT_IMAGE_FEATURES = 32
_DIRECT_IMAGE_FLOPS = 2e9
_DIRECT_IMAGE_POOL = 3  # side of a window, of pools in the same kernel ...
_DIRECT_IMAGE_STRIDE = 4  # ... behind convolutions whose weights and pixels find room in shared memory
_DIRECT_IMAGE_PRODUCTS = 400
# The same in 16 bits: VGG-19's conv5_1 with 925 MFLOP 1.8 times as fast as cuDNN under command buffers, ResNet-50's
# smaller ones 0.97 to 2.5 times (h200_direct_layers_bfloat16.json). Beside "ecr" even direct's products of float32 in
# parts, which take 1.5 times as long, are at most a quarter slower at the zeros of DenseNet's 3x3 layers.
_DIRECT_16BIT_FLOPS = 9.3e8
_DIRECT_16BIT_COPY = 8  # channels, as _DIRECT_COPY
# Where "direct" has Hopper's warpgroup products, in TF32 and 16 bits, by 218 calls of four networks at batch 1, 8 and
# 32 under command buffers (a development run; h200_network_layers.json at batch 1): cuDNN is ahead once maps and kernel
# together have more than so many elements for each multiprocessor, because no tile's results are written while the next
# is multiplied. Of what is within, none was below 0.97. The sparse kernels are behind both there.
_WARPGROUP_ELEMENTS = 6.8e4
_WARPGROUP_MOST_FLOPS = 3e10  # the most among them
_WARPGROUP_FEATURES = 64  # of a tile; fewer, as DenseNet's 32, ...
_WARPGROUP_FEW_FLOPS = 2.5e8  # ... with as much work as measured
_WARPGROUP_ROW = 128  # bytes of channels of a step, which has to end where a group does
# 1x1 convolutions without strides are matrix products of cuDNN's: those of one step are its, and in 16 bits those on
# maps larger than 14x14 with more work, where it takes 0.9 to 1.0 times as long, or with small kernels: at batch 1 the
# geometric mean of best times is 0.92 in twelve layers of 12 to 49 thousand elements and 1.02 in five of 53 to 66.
_WARPGROUP_FEW_PIXELS = 400
_WARPGROUP_PRODUCT_FLOPS = 1.1e8
_WARPGROUP_PRODUCT_KERNEL = 5.2e4
_WARPGROUP_FLOPS = 3.8e9  # with a pool in the same kernel, and in chains of kernels
_WARPGROUP_REACH = 8  # pixels, of a window: patches of 28 rows and their rims then have room in shared memory twice
_WARPGROUP_CAPABILITY = (9, 0)
_COPY_BYTES = 16  # of channels, and of features, that the copy engine moves at the least
# The same at HIGHEST, where tensor cores multiply float32 in parts: of the layers in paper/fig9.json, fig12.json and
# cusnn_fig11.json 1.07 to 10 times as fast as cuDNN up to here, with groups of 128 channels too, and 0.7 to 1.3 times
# beyond. Beside "ecr" and "pecr", at the zeros that they have, XLA's pool behind it included: VGG-19's 1.0 to 1.4 times
# as fast, ResNet-50's 1.0 to 1.8 but for conv5's 3x3 (0.85), RegNetX-16GF's grouped ones 1.2 to 1.8.
_DIRECT_EXACT_FLOPS = 1.5e10
# And by warpgroup products, without groups: VGG-19's and ResNet-50's layers 2.6 to 4.5 times as fast at batch 8 and
# 1.5 to 4.5 times at batch 32, where VGG-19's have up to here (h200_direct_layers_highest_batches.json).
_WARPGROUP_EXACT_FLOPS = 1.2e11
_DIRECT_EXACT_FEATURES = 64  # of a group, fewer only ...
_DIRECT_FEW_FEATURES = 32
_DIRECT_FEW_FLOPS = 5e8  # ... with as much work: DenseNet's 3x3 layers from a batch of 4 to 16 on
_DIRECT_COPY = 4  # channels of a copy: others are copied one by one
_LEAST_LIST_FEATURES = 32  # output channels of a group that a warp's lanes cover


@dataclasses.dataclass(frozen=True)
class Work:
    """A call as the model sees it.

    Attributes:
      method: the native target, "dense" for a matrix product.
      x_shape: [N, H, W, C].
      kernel_shape: [S, kh, kw, C / groups, K].
      geometry: of the call.
      dtype: of every operand.
      exact: whether float32 must be float32 in the dense convolution.
    """

    method: str
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    geometry: Geometry
    dtype: str
    exact: bool

    @property
    def pixels(self) -> int:
        """Results of the convolution, over all images."""
        return self.x_shape[0] * math.prod(self.geometry.conv_size(self.x_shape[1:3], self.kernel_shape[1:3]))

    @property
    def products(self) -> int:
        """Multiplications of one result of the dense convolution."""
        return math.prod(self.kernel_shape[1:4])

    @property
    def flops(self) -> float:
        """Operations of the dense convolution."""
        return 2.0 * self.pixels * self.products * self.kernel_shape[4]

    @property
    def is_image(self) -> bool:
        """Whether x has so few channels that no ReLU has been there."""
        return self.kernel_shape[1] * self.kernel_shape[2] > 1 and self.x_shape[3] <= _IMAGE_CHANNELS

    @property
    def is_symbolic(self) -> bool:
        """Whether sizes are unknown, as in `jax.export` of a program for any number of images."""
        return any(map(jax.export.is_symbolic_dim, (*self.x_shape, *self.kernel_shape)))

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)


def crossover(work: Work, platform: str) -> float:
    """The density of x up to which the sparse kernel is expected to be as fast as the dense convolution; 0 for none."""
    if work.method == "dense" and work.x_shape[0] > _DENSE_ROWS:
        return 0.0
    if platform == "cpu":
        return _cpu_crossover(work)
    if work.method == "dense":
        most = _CUDA_DENSE_ROWS_EXACT if work.exact and work.itemsize > 2 else _CUDA_DENSE_ROWS
        return math.inf if work.x_shape[0] <= most * work.kernel_shape[0] else 0.0
    if work.is_image or work.flops == 0:
        return 0.0
    if _has_warpgroups() and _fits_warpgroups(work):
        return 0.0
    device, capability = _device()
    if work.kernel_shape[4] // work.geometry.groups < 4:
        return 0.0  # nearly depthwise: a list would serve too few channels
    fixed, per_density = _sparse_us(work, device)
    return max(0.0, (_dense_us(work, device, capability) - fixed) / per_density)


def _cpu_crossover(work: Work) -> float:
    if work.is_image:
        return 0.0
    if work.flops < _CPU_SMALL:
        return math.inf
    if work.method == "dense":
        return _cpu_rows_crossover(work.x_shape[0], math.prod(work.kernel_shape))
    if work.geometry.groups > 1 or work.itemsize == 2 or work.pixels <= _CPU_FEW_PIXELS:
        return math.inf
    return _CPU_CROSSOVER


def _cpu_rows_crossover(rows: int, weights: int) -> float:
    """Of a dense layer."""
    if rows == 1:
        return math.inf if weights <= _CPU_ROW_WEIGHTS[1] else _CPU_CROSSOVER
    if rows > _CPU_FEW_ROWS:
        return _CPU_ROWS_CROSSOVER if weights > _CPU_FEW_WEIGHTS else 0.0
    if weights > _CPU_FEW_WEIGHTS:
        return _CPU_CROSSOVER
    return _CPU_ROWS_CROSSOVER if weights > _CPU_ROW_WEIGHTS[0] else 0.0


def prefers_direct(work: Work, platform: str) -> bool:
    """Whether the dense kernel of Cheng et al. is expected to be the fastest at any likely density of x."""
    if platform != "cuda" or work.method != "ecr" or work.dtype not in _DIRECT_DTYPES:
        return False
    if work.is_symbolic:
        return False
    capability = _device()[1]
    channels, features = work.kernel_shape[3], work.kernel_shape[4] // work.geometry.groups
    if work.is_image:
        is_measured = capability == _WARPGROUP_CAPABILITY and features >= _DIRECT_IMAGE_FEATURES
        return is_measured and has_image_kernel(work) and 0 < work.flops <= _DIRECT_IMAGE_FLOPS
    if _has_warpgroups() and _fits_warpgroups(work):
        return _is_faster_by_warpgroups(work)
    if work.itemsize == 2:
        if channels % _DIRECT_16BIT_COPY or features % _DIRECT_16BIT_COPY or features < _DIRECT_FEW_FEATURES:
            return False  # not measured
        return 0 < work.flops <= _DIRECT_16BIT_FLOPS and capability >= _TF32_CAPABILITY
    if not work.exact:
        is_small = work.flops <= _DIRECT_FLOPS and work.geometry.groups == 1  # others: not measured
        return is_small and capability >= _TF32_CAPABILITY
    least = _DIRECT_EXACT_FEATURES if work.flops < _DIRECT_FEW_FLOPS else _DIRECT_FEW_FEATURES
    if channels % _DIRECT_COPY or features % _DIRECT_COPY or features < least:
        return False  # not measured
    # Elsewhere tensor cores do TF32 at little more than the rate of FFMA; the same list is in cuda/device_info.cu.
    return 0 < work.flops <= most_direct_flops(work) and capability in _TENSOR_CORES


def _has_warpgroups() -> bool:
    """Whether "direct" has Hopper's warpgroup products on this CUDA device."""
    return _device()[1] == _WARPGROUP_CAPABILITY and _native.has_warpgroups()


def most_direct_flops(work: Work) -> float:
    """Operations from which on cuDNN is expected to beat "direct" in the best case that this was measured for."""
    if not work.exact or work.dtype != "float32":
        return _WARPGROUP_FLOPS
    is_measured = work.geometry.groups == 1 and work.kernel_shape[4] >= _WARPGROUP_FEATURES
    return _WARPGROUP_EXACT_FLOPS if is_measured and _has_warpgroups() else _DIRECT_EXACT_FLOPS


def _fits_warpgroups(work: Work) -> bool:
    """Whether "direct" would take warpgroup products of TF32 or 16 bits."""
    return takes_warpgroups(work) and not (work.exact and work.dtype == "float32")


def takes_warpgroups(work: Work) -> bool:
    """Whether "direct" would take warpgroup products, as cuda/warpgroup_plan.cc decides it, on sizes as measured."""
    groups, (channels, features) = work.geometry.groups, work.kernel_shape[3:]
    if work.flops == 0:
        return False
    if groups > 1:
        return channels * work.itemsize % _WARPGROUP_ROW == 0 and features // groups % _WARPGROUP_FEATURES == 0
    if channels * work.itemsize % _COPY_BYTES or features * work.itemsize % _COPY_BYTES:
        return False
    is_small = features >= _DIRECT_FEW_FEATURES and work.flops <= _WARPGROUP_FEW_FLOPS
    return features >= _WARPGROUP_FEATURES or is_small


def _is_faster_by_warpgroups(work: Work) -> bool:
    """Whether warpgroup products are expected to beat cuDNN's."""
    kernel = math.prod(work.kernel_shape)
    elements = math.prod(work.x_shape) + work.pixels * work.kernel_shape[4] + kernel
    if elements > _WARPGROUP_ELEMENTS * _device()[0].multiprocessors or work.flops > _WARPGROUP_MOST_FLOPS:
        return False
    if math.prod(work.kernel_shape[1:3]) > 1 or max(work.geometry.strides) > 1:
        return True
    if work.kernel_shape[3] * work.itemsize <= _WARPGROUP_ROW:
        return False
    if work.itemsize > 2 or work.pixels <= _WARPGROUP_FEW_PIXELS:
        return True
    return work.flops <= _WARPGROUP_PRODUCT_FLOPS and kernel >= _WARPGROUP_PRODUCT_KERNEL


def has_image_kernel(work: Work) -> bool:
    """Whether "direct" has a kernel for so few channels: cuda/direct_image_plan.cc has the same list."""
    geometry = work.geometry
    if work.x_shape[3] > _DIRECT_IMAGE_CHANNELS or geometry.groups > 1 or geometry.dilation != (1, 1):
        return False
    return not work.exact or work.itemsize == 2 or _device()[1] in _TENSOR_CORES


def pools_in_direct(work: Work) -> bool:
    """Whether "direct" takes the pool into its kernel on this CUDA device: cuda/*_plan.cc have the same lists."""
    pool, geometry = work.geometry.pool, work.geometry
    if pool is None or work.is_symbolic:
        return False
    if has_image_kernel(work):
        return _pools_images(work, pool)
    if not _has_warpgroups():
        return False
    is_of_pairs = pool.window == (2, 2) and pool.strides == (2, 2) and not any(map(any, pool.padding))
    reach = [(side - 1) * step for side, step in zip(work.kernel_shape[1:3], geometry.dilation, strict=True)]
    if not is_of_pairs or geometry.strides != (1, 1) or max(reach) == 0 or max(reach) > _WARPGROUP_REACH:
        return False
    if work.flops == 0 or work.flops > most_direct_flops(work):
        return False
    channels, features = work.kernel_shape[3:]
    is_copied = not (channels * work.itemsize % _COPY_BYTES or features * work.itemsize % _COPY_BYTES)
    return work.dtype in _DIRECT_DTYPES and geometry.groups == 1 and is_copied


def _pools_images(work: Work, pool: Pool) -> bool:
    """Whether the kernel for few channels takes a pool and is expected to be faster than with XLA's pool behind it."""
    if work.dtype not in _DIRECT_DTYPES or work.flops == 0 or pool.kind != "max":
        return False
    if max(pool.window) > _DIRECT_IMAGE_POOL or min(pool.strides) < 2 or work.products > _DIRECT_IMAGE_PRODUCTS:
        return False
    is_exact = work.exact and work.itemsize > 2  # what tiles compute twice costs more there
    return max(work.geometry.strides) <= _DIRECT_IMAGE_STRIDE and not (is_exact and work.flops > _DIRECT_FLOPS)


def chooses_natively(work: Work, platform: str) -> bool:
    """Whether the native call chooses by itself, by a sample of x, between sparse loops and a dense one."""
    if platform != "cpu" or work.method not in ("ecr", "pecr") or work.is_symbolic:
        return False
    if work.kernel_shape[1] * work.kernel_shape[2] == 1 and _is_xlas_at_full_density(work):
        return False
    return not work.is_image and work.geometry.groups == 1 and work.itemsize > 2


def _is_xlas_at_full_density(work: Work) -> bool:
    """Whether XLA is the fastest for a 1x1 convolution without zeros on a CPU."""
    channels, features = work.kernel_shape[3:]
    widens = channels >= _CPU_WIDE_CHANNELS and features >= _CPU_WIDENING * channels
    strides = max(work.geometry.strides) > 1
    return (widens and work.pixels >= _CPU_WIDE_PIXELS) or (strides and work.flops > _CPU_STRIDED_FLOPS)


def threshold(work: Work, platform: str) -> float:
    """As `crossover`, but infinite or 0 where the decision is made now; without sizes, whatever always runs."""
    if work.is_symbolic:
        return math.inf if platform == "cpu" else 0.0  # CUDA kernels want a workspace of known size
    found = crossover(work, platform)
    if found >= 1:
        return math.inf
    if platform == "cpu":
        return found
    return math.inf if found >= ASSUMED_DENSITY else 0.0


def crossover_with_direct(work: Work) -> float:
    """The density of x up to which the sparse CUDA kernel is expected to be as fast as "direct".

    Infinite or 0 where one of them is to run whatever the density.
    """
    if work.is_symbolic or work.flops == 0:
        return math.inf
    device, capability = _device()
    exact = work.exact and work.dtype == "float32"
    peak = _tensor_peak(work, device, capability)
    products: crossing.Products = "mma"
    if _has_warpgroups() and takes_warpgroups(work):
        products = "warpgroups"
    elif work.dtype == "float32" and (peak == 0 or (exact and capability not in _TENSOR_CORES)):
        products, peak = "ffma", device.flops
    return crossing.density(work, device, crossing.direct_us(work, device, products, peak))


def _sparse_us(work: Work, device: cost_model.Device) -> tuple[float, float]:
    """Microseconds of the sparse kernel: those that do not depend on the density, and those at a density of 1."""
    group_features = work.kernel_shape[4] // work.geometry.groups
    flops = work.flops * max(1.0, _LEAST_LIST_FEATURES / group_features) * _recomputed(work.geometry)
    weights = math.prod(work.kernel_shape) * work.itemsize / (_SPARSE_WEIGHTS * device.memory_bytes_per_second)
    fixed = _SPARSE_FLOOR + 1e6 * (weights + flops / (_SPARSE_LISTS * device.flops))
    return fixed, 1e6 * flops / (_SPARSE_SUMS * device.flops)


def _recomputed(geometry: Geometry) -> float:
    """How often PECR computes a result that several pooling windows share."""
    if geometry.pool is None:
        return 1.0
    pairs = zip(geometry.pool.window, geometry.pool.strides, strict=True)
    return math.prod(max(1.0, window / stride) for window, stride in pairs)


def _dense_us(work: Work, device: cost_model.Device, capability: tuple[int, int]) -> float:
    """Microseconds of XLA's dense convolution, rather too few than too many."""
    rate, step = _FFMA_SHARE * device.flops, _FFMA_STEP
    rate *= max(1.0, math.sqrt(work.flops / _FFMA_FILL))
    tensor = _tensor_flops(work, device, capability)
    if tensor > rate:
        rate, step = tensor, _TENSOR_STEP
    chain = work.products * step / device.clock_hz
    return _DENSE_FLOOR + 1e6 * max(chain, work.flops / rate)


def _tensor_flops(work: Work, device: cost_model.Device, capability: tuple[int, int]) -> float:
    if work.dtype == "float32" and work.exact:
        return 0.0
    return _TENSOR_SHARE * _tensor_peak(work, device, capability)


def peak_flops(dtype: str, exact: bool) -> float:
    """Operations a second that the device could do on a dense convolution of this dtype; float32 by TF32 or exact.

    Exact products of float32 take one instruction, or three of the tensor cores.
    """
    device, capability = _device()
    tensor = _tensor_rate(dtype, device, capability)
    return max(device.flops, tensor / 3 if exact and dtype == "float32" else tensor)


def _tensor_peak(work: Work, device: cost_model.Device, capability: tuple[int, int]) -> float:
    """Operations a second of the tensor cores with elements of the work's dtype."""
    return _tensor_rate(work.dtype, device, capability)


def _tensor_rate(dtype: str, device: cost_model.Device, capability: tuple[int, int]) -> float:
    if capability < _TF32_CAPABILITY:
        return 0.0
    cycle = _TENSOR_CORES.get(capability, _TENSOR_CORES_ELSEWHERE)[0 if dtype == "float32" else 1]
    return float(cycle) * device.multiprocessors * device.clock_hz


def _device() -> tuple[cost_model.Device, tuple[int, int]]:
    """The GPU that is lowered for and its compute capability; an H200 for programs compiled where there is none."""
    found = devices.current()
    return found, found.capability
