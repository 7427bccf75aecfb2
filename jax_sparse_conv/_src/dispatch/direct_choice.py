"""When "direct", the dense kernels after Cheng et al., is expected to be the fastest on a GPU, and which of them runs.

There are kernels for images, for Hopper's warpgroup products and for the products of a warp, each with sizes that it
takes and sizes that it wins at. What a kernel takes `cuda/*_plan.cc` decides again when the program runs. Where it wins
was measured on an H200 and an H100, as each constant says; what was not measured is left to others.
"""

from __future__ import annotations

import math

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import group_choice
from jax_sparse_conv._src.problem.geometry import Pool
from jax_sparse_conv._src.problem.workload import Workload

_DTYPES = ("float32", "bfloat16", "float16")

# Operations up to which products of a warp beat cuDNN's TF32: in all 53 convolutions of ResNet-50 at batch 1, of which
# the largest has 236 MFLOP, by 1.4 to 4.1 times under default flags (h200_plan_resnet50_default.json), 0.94 to 2.7 of 7
# under command buffers (h200_direct_layers_default.json).
_TF32_FLOPS = 2.5e8
# The same in 16 bits: VGG-19's conv5_1 with 925 MFLOP 1.8 times as fast as cuDNN under command buffers, ResNet-50's
# smaller ones 0.97 to 2.5 times (h200_direct_layers_bfloat16.json). Beside "ecr" even direct's products of float32 in
# parts, which take 1.5 times as long, are at most a quarter slower at the zeros of DenseNet's 3x3 layers.
_16BIT_FLOPS = 9.3e8
_16BIT_COPY = 8  # channels, as _COPY
# Without groups, to fewer than so many features: DenseNet's 3x3 layers of 6,272 pixels with 462 MFLOP took 1.08 to 1.18
# times as long as cuDNN's, those with up to 231 MFLOP 0.59 to 0.86 times (h200_network_layers_*.json, of kernels before
# those for small maps; where there are warpgroup products, below).
_16BIT_FEATURES = 64
_16BIT_FEW_FLOPS = 2.5e8
# The same at HIGHEST, where tensor cores multiply float32 in parts: of the layers in paper/fig9.json, fig12.json and
# cusnn_fig11.json 1.07 to 10 times as fast as cuDNN up to here, with groups of 128 channels too, and 0.7 to 1.3 times
# beyond. Beside "ecr" and "pecr", at the zeros that they have, XLA's pool behind it included: VGG-19's 1.0 to 1.4 times
# as fast, ResNet-50's 1.0 to 1.8 but for conv5's 3x3 (0.85), RegNetX-16GF's grouped ones 1.2 to 1.8.
_EXACT_FLOPS = 1.5e10
_EXACT_FEATURES = 64  # of a group, fewer only ...
_FEW_FEATURES = 32
_FEW_FLOPS = 5e8  # ... with as much work: DenseNet's 3x3 layers from a batch of 4 to 16 on ...
# ... or, where there are warpgroup products, with so many for each result of 3x3 windows, as DenseNet's layers have: of
# 7x7 to 56x56 at batch 1 to 64, 0.9 to 2.8 times as fast as "ecr" at 0 to 94 % zeros (paper/cusnn_fig10.json,
# cusnn_fig11.json), and with the kernels since then at 28x28 by 2.4 us of 13 at 70 % and by 0.8 of 11 on nothing but
# zeros, the layer in front included (h200_adaptive.json).
_FEW_FEATURES_PRODUCTS = 1152
# And 1x1 convolutions from so few channels, RegNets' first ones at batch 1, 8 and 32, 1.8 to 2.9 times as fast as
# cuDNN's and 1.6 to 2.8 times as "ecr" without zeros (h100_zoo_few_features.json).
_FEW_CHANNELS = 48
_COPY = 4  # channels of a copy: others are copied one by one

# Layers of so few operations take kernels for small maps (cuda/dense_conv/{mma/small_map,splitk_channels/kernel}.cuh),
# at any precision: those of LeNet, GoogLeNet, ResNet-18, DenseNet-121 and RegNetX-400MF at batch 1 are 1.02 to 14 times
# as fast as cuDNN's, RegNetX-400MF's groups of 16 channels too (h200_small_layers.json). In 16 bits and groups with
# whole copies.
_SMALL_FLOPS = 2e7
_SMALL_PIXELS = 56 * 56  # results without their features, the most among them
_SMALL_FEATURES = 8

# Where there are Hopper's warpgroup products, in TF32 and 16 bits, by the layers of four networks at batch 1, 8, 32 and
# 128 under command buffers (h200_network_layers_*.json; those of which `None` took none until then are in *_left_*):
# cuDNN is ahead once the maps of a call and its kernel have more than so many elements for each multiprocessor, because
# no tile's results are written while the next is multiplied. The sparse kernels are behind both there.
_TF32_ELEMENTS = 2e5
_16BIT_ELEMENTS = 1.4e5  # windows, and products with strides
# Two of its layers lost on an H100 (h100_network_layers_*.json): with groups at 2e5, 0.90 times as fast as cuDNN's TF32
# (1.01 on an H200; 1.3 to 1.5 at 1.4e5), and windows with strides to a tile of features at 1.2e5, 0.96 (1.02), which in
# 16 bits were level (0.97 and 1.00).
_TF32_GROUP_ELEMENTS = 1.5e5
_TILE_FEATURES, _STRIDED_TILE_ELEMENTS = 128, 1e5
_16BIT_PRODUCT_ELEMENTS = 2.5e4  # 1x1 convolutions without strides, matrix products of cuDNN's ...
_16BIT_PRODUCT_PIXELS = 400  # ... but for those of so few pixels, whose kernels are most of it
_WARPGROUP_MOST_FLOPS = 6e10  # the most among them
_WARPGROUP_FEATURES = 64  # of a tile; fewer, as DenseNet's 32, ...
_WARPGROUP_FEW_FLOPS = 2.5e8  # ... with as much work as measured
_WARPGROUP_ROW = 128  # bytes of channels of a step, which has to end where a group does
_WARPGROUP_BYTES = 16  # of channels, and of features, that the copy engine moves at the least
_WARPGROUP_CAPABILITY = (9, 0)
# Windows of `_is_3x3` from 64 channels to 64 features are ahead of cuDNN's TF32 at any of these sizes, 1.08 to 1.33
# times (h200_network_layers_left_default_*.json).
_TF32_FEW_FEATURES, _TF32_FEW_CHANNELS, _TF32_FEW_FLOPS = 64, 64, 4.8e11
# So are DenseNet's, of `_is_deep`, to 32, 1.03 to 1.45 times, in 16 bits on maps of more than so many pixels: 28x28 and
# 56x56 0.99 to 1.30 times. 14x14 at batch 32 is 1.33 times as fast (h200_zoo_tiles_left.json; maps
# of sizes between these by inference); other small ones had been 0.93 to 1.05 times.
_DEEP_FLOPS = 3e10
_16BIT_DEEP_PIXELS = 400
_16BIT_DEEP_MAP, _16BIT_DEEP_FLOPS = 196, 4.7e8
# 1x1 convolutions without strides from so few channels are cuDNN's: 0.7 to 1.02 times as fast.
_PRODUCT_FEW_CHANNELS = 32
# Those to a whole tile of features on more pixels than this, 25,088 and 100,352, are ahead of cuDNN's by the faster of
# its two times, in TF32 from 160 channels on 1.00 to 1.09 times as fast, in 16 bits 1.01 to 1.41 times, up to so many
# elements for each multiprocessor (h200_zoo_tiles_left.json). Not so TF32's of 96 and 128 channels, 0.98 and 0.99, as
# whose operations lie between _PRODUCT_TILE_FLOPS, and those with a residual between _RESIDUAL_TILE_FLOPS, also to
# fewer features, which had been 0.88 to 0.95 times as fast (h200_network_layers_left_to_xla.json,
# h100_zoo_regnets.json; not measured again).
_PRODUCT_TILE_PIXELS = 1e4
_PRODUCT_TILE_ELEMENTS = 3e5
_PRODUCT_TILE_CHANNELS = 512  # the most that were measured
_PRODUCT_TILE_FLOPS = 6e8, 1e9
_RESIDUAL_TILE_FLOPS = 4.5e8, 1.24e9
# On fewer pixels, 6,272, TF32's are 1.0 to 1.5 times as fast, but for those of 608 to 736 channels, which are level
# (0.96 to 1.09 times; h200_zoo_tiles_batches_{1,2,3}.json).
_FEWER_TILE_PIXELS = 5e3
_FEWER_TILE_FLOPS = 9.6e8, 1.2e9
# In 16 bits ResNet's expansions with their residual, to four times as many features as channels: 1.2 to 1.4 times as
# fast, and more elements 0.97 times and less (h200_zoo_tiles_left.json).
_EXPANDED, _16BIT_EXPANDED_ELEMENTS = 4, 6.3e4
# At HIGHEST VGG-19's and ResNet-50's layers are 1.5 to 4.5 times as fast at batch 8 and 32, the largest of which has
# _EXACT_MANY_FLOPS (h200_direct_layers_highest_batches.json). RegNetX-16GF's with groups are 1.5 to 3.3 times as fast
# up to _EXACT_GROUPS_FLOPS, and 3x3 ones to 64 to 256 features 2.4 to 3.4 times up to _EXACT_3X3_FLOPS, at batch 128,
# where cuDNN has another algorithm to 512 features (0.94 to 1.1; h200_network_layers_changed_highest.json and
# h200_network_layers_left_highest*.json).
_EXACT_MANY_FLOPS = 1.2e11
_EXACT_GROUPS_FLOPS = 2.4e11
_EXACT_3X3_FLOPS, _EXACT_3X3_FEATURES = 4.8e11, 256
_CHAIN_FLOPS = 3.8e9  # in chains of kernels, of TF32 and 16 bits
# Convolutions of TF32 and 16 bits with their pool in the kernel, VGG-19's at batch 8, 32 and 128: to few features
# faster than cuDNN's with XLA's pool at all sizes (1.1 to 1.9 times), and to more only up to _*_POOL_FLOPS about as
# fast as with XLA's pool behind them, beyond up to 1.12 times slower (h200_network_layers_pooled.json). What was not
# measured there has its pool in the kernel as it had before.
_TF32_POOL_FEATURES, _16BIT_POOL_FEATURES = 128, 64
_TF32_POOL_FLOPS, _16BIT_POOL_FLOPS = 1e10, 3e10
_FEW_POOL_FLOPS, _OTHER_POOL_FLOPS = 4.8e11, 3.8e9
_WARPGROUP_REACH = 8  # pixels, of a window: patches of 28 rows and their rims then have room in shared memory twice

# Images have a kernel of their own. On an H200 under command buffers, first layers of VGG, ResNet (with their pool),
# RegNet and AlexNet at batch 1 and 8 in TF32, at HIGHEST and in bfloat16: 0.97 to 4.8 times as fast as cuDNN's (a
# development run of benchmarks.zoo), at batch 32 and 128 1.4 to 3.6 times (h200_network_layers_left_*.json); with fewer
# features or more work not measured.
_IMAGE_CHANNELS = 4
_IMAGE_FEATURES = 32
_IMAGE_FLOPS = 3.1e10
_IMAGE_POOL = 3  # side of a window, of pools in the same kernel ...
_IMAGE_STRIDE = 4  # ... behind convolutions whose weights and pixels find room in shared memory
_IMAGE_PRODUCTS = 400


def prefers_direct(workload: Workload, platform: str) -> bool:
    """Whether the dense kernel of Cheng et al. is expected to be the fastest at any likely density of x."""
    if platform != "cuda" or workload.method != "ecr" or workload.dtype not in _DTYPES:
        return False
    if workload.is_symbolic:
        return False
    device = devices.current()
    channels, features = workload.kernel_shape[3], workload.kernel_shape[4] // workload.geometry.groups
    if workload.is_image:
        is_measured = device.capability == _WARPGROUP_CAPABILITY and features >= _IMAGE_FEATURES
        return is_measured and has_image_kernel(workload) and 0 < workload.flops <= _IMAGE_FLOPS
    if _is_small(workload):
        return device.has_fast_tf32 if workload.is_precise else device.has_tf32
    if has_warpgroups() and group_choice.is_faster_by_groups(workload):
        return True
    if has_warpgroups() and not workload.is_precise:
        if takes_warpgroups(workload):
            return _is_faster_by_warpgroups(workload)
        if _is_deep(workload):
            return _is_faster_to_few_features(workload)
    if workload.itemsize == 2:
        if channels % _16BIT_COPY or features % _16BIT_COPY or features < _FEW_FEATURES:
            return False  # not measured
        is_narrow = workload.geometry.groups == 1 and features < _16BIT_FEATURES
        return 0 < workload.flops <= (_16BIT_FEW_FLOPS if is_narrow else _16BIT_FLOPS) and device.has_tf32
    if not workload.exact:
        is_small = workload.flops <= _TF32_FLOPS and workload.geometry.groups == 1  # others: not measured
        return is_small and device.has_tf32
    if channels % _COPY or features % _COPY or features < _least_exact_features(workload):
        return False  # not measured
    return 0 < workload.flops <= _most_exact_flops(workload) and device.has_fast_tf32


def _least_exact_features(workload: Workload) -> int:
    """Features of a group from which on "direct" is expected to be the fastest at HIGHEST."""
    is_measured = workload.flops >= _FEW_FLOPS or (
        has_warpgroups() and (_is_deep(workload) or _is_of_few_products(workload))
    )
    return _FEW_FEATURES if is_measured else _EXACT_FEATURES


def _most_exact_flops(workload: Workload) -> float:
    """Operations up to which "direct" is expected to be the fastest at HIGHEST."""
    if not has_warpgroups():
        return _EXACT_FLOPS
    if _is_deep(workload):
        return _DEEP_FLOPS
    groups, features = workload.geometry.groups, workload.kernel_shape[4]
    if features // groups < _WARPGROUP_FEATURES:
        return _EXACT_FLOPS
    if groups > 1:
        return _EXACT_GROUPS_FLOPS
    return _EXACT_3X3_FLOPS if _is_3x3(workload) and features <= _EXACT_3X3_FEATURES else _EXACT_MANY_FLOPS


def _is_of_few_products(workload: Workload) -> bool:
    """Whether it is a 1x1 convolution of as few channels as RegNets' first ones."""
    geometry, channels = workload.geometry, workload.kernel_shape[3]
    is_1x1 = workload.kernel_shape[1:3] == (1, 1) and geometry.groups == 1 and max(geometry.strides) <= 2
    return is_1x1 and _FEW_FEATURES <= channels <= _FEW_CHANNELS


def _is_deep(workload: Workload) -> bool:
    """Whether windows have as many products as DenseNet's, and as few features."""
    is_as_deep = _is_3x3(workload) and workload.products >= _FEW_FEATURES_PRODUCTS and is_copied(workload)
    return is_as_deep and _FEW_FEATURES <= workload.kernel_shape[4] < _EXACT_FEATURES


def _is_3x3(workload: Workload) -> bool:
    """Whether windows are 3x3, without strides, dilation and groups."""
    geometry = workload.geometry
    is_plain = geometry.strides == (1, 1) and geometry.dilation == (1, 1) and geometry.groups == 1
    return is_plain and workload.kernel_shape[1:3] == (3, 3)


def is_copied(workload: Workload) -> bool:
    """Whether channels and features come in whole copies of the copy engine."""
    return not any(sides * workload.itemsize % _WARPGROUP_BYTES for sides in workload.kernel_shape[3:])


def _is_small(workload: Workload) -> bool:
    """Whether "direct" takes small blocks (cuda/dense_conv/plan/mma_plan.cc), on sizes as measured."""
    groups, (channels, features) = workload.geometry.groups, workload.kernel_shape[3:]
    if (
        features // groups < _SMALL_FEATURES
        or workload.pixels > _SMALL_PIXELS
        or not 0 < workload.flops <= _SMALL_FLOPS
    ):
        return False
    copy = _16BIT_COPY if workload.itemsize == 2 else _COPY if groups > 1 else 1
    return channels % copy == 0 and features // groups % copy == 0


def has_warpgroups() -> bool:
    """Whether "direct" has Hopper's warpgroup products on this CUDA device."""
    return devices.current().has_warpgroups


def most_chain_flops(workload: Workload) -> float:
    """Operations up to which a layer is worth its place in a chain of kernels."""
    if not workload.is_precise:
        return _CHAIN_FLOPS
    is_measured = workload.geometry.groups == 1 and workload.kernel_shape[4] >= _WARPGROUP_FEATURES
    return _EXACT_MANY_FLOPS if is_measured and has_warpgroups() else _EXACT_FLOPS


def takes_warpgroups(workload: Workload) -> bool:
    """Whether "direct" takes warpgroup products (cuda/dense_conv/plan/wgmma_plan.cc), on sizes as measured."""
    groups, (channels, features) = workload.geometry.groups, workload.kernel_shape[3:]
    if workload.flops == 0:
        return False
    if groups > 1:
        return channels * workload.itemsize % _WARPGROUP_ROW == 0 and features // groups % _WARPGROUP_FEATURES == 0
    if not is_copied(workload):
        return False
    is_small = features >= _FEW_FEATURES and workload.flops <= _WARPGROUP_FEW_FLOPS
    return features >= _WARPGROUP_FEATURES or is_small


def _is_faster_by_warpgroups(workload: Workload) -> bool:
    """Whether warpgroup products of TF32 or 16 bits are expected to beat cuDNN's."""
    channels, features = workload.kernel_shape[3:]
    is_to_few = _is_3x3(workload) and features <= _TF32_FEW_FEATURES and channels >= _TF32_FEW_CHANNELS
    if workload.itemsize > 2 and is_to_few and workload.flops <= _TF32_FEW_FLOPS:
        return True
    elements = workload.elements / devices.current().multiprocessors
    if workload.flops > _WARPGROUP_MOST_FLOPS or elements > _most_elements(workload):
        return False
    if math.prod(workload.kernel_shape[1:3]) > 1 or max(workload.geometry.strides) > 1:
        return True
    if channels <= _PRODUCT_FEW_CHANNELS:
        return False
    if workload.itemsize == 2:
        is_small = elements <= _16BIT_PRODUCT_ELEMENTS or workload.pixels <= _16BIT_PRODUCT_PIXELS
        expands = features >= _EXPANDED * channels and workload.residual and elements <= _16BIT_EXPANDED_ELEMENTS
        return features >= _WARPGROUP_FEATURES and (is_small or expands or _is_to_a_whole_tile(workload))
    return not _is_as_fast_by_cudnn(workload)


def _is_as_fast_by_cudnn(workload: Workload) -> bool:
    """Whether TF32 products to the features of a tile have the operations of those that lost or were level."""
    if _is_to_a_tile(workload):
        least, most = _RESIDUAL_TILE_FLOPS if workload.residual else _PRODUCT_TILE_FLOPS
    elif _is_to_a_tile(workload, _FEWER_TILE_PIXELS) and not workload.residual:
        least, most = _FEWER_TILE_FLOPS
    else:
        return False
    return least < workload.flops < most


def _is_to_a_tile(workload: Workload, pixels: float = _PRODUCT_TILE_PIXELS) -> bool:
    """Whether it is a 1x1 convolution without strides and groups of more pixels to the features of a single tile."""
    is_1x1 = (
        workload.geometry.groups == 1
        and math.prod(workload.kernel_shape[1:3]) == 1
        and max(workload.geometry.strides) == 1
    )
    is_a_tile = _WARPGROUP_FEATURES < workload.kernel_shape[4] <= _TILE_FEATURES
    return is_1x1 and is_a_tile and workload.pixels > pixels


def _is_to_a_whole_tile(workload: Workload) -> bool:
    """Whether it is such a convolution to as many features as a tile has, without a residual."""
    is_whole = workload.kernel_shape[4] == _TILE_FEATURES and workload.kernel_shape[3] <= _PRODUCT_TILE_CHANNELS
    return _is_to_a_tile(workload) and is_whole and not workload.residual


def _most_elements(workload: Workload) -> float:
    """Elements of a call's maps and kernel for each multiprocessor up to which warpgroup products may beat cuDNN's."""
    geometry = workload.geometry
    has_strided_windows = math.prod(workload.kernel_shape[1:3]) > 1 and max(geometry.strides) > 1
    if has_strided_windows and workload.kernel_shape[4] <= _TILE_FEATURES:
        return _STRIDED_TILE_ELEMENTS
    if _is_to_a_whole_tile(workload):
        return _PRODUCT_TILE_ELEMENTS
    if workload.itemsize == 2:
        return _16BIT_ELEMENTS
    return _TF32_ELEMENTS if geometry.groups == 1 else _TF32_GROUP_ELEMENTS


def _is_faster_to_few_features(workload: Workload) -> bool:
    """Whether "direct" is expected to beat cuDNN's TF32 and 16 bits in layers of `_is_deep`."""
    if workload.flops > _DEEP_FLOPS:
        return False
    of_map = workload.pixels // max(1, workload.x_shape[0])
    is_small = of_map >= _16BIT_DEEP_MAP and workload.flops <= _16BIT_DEEP_FLOPS
    return workload.itemsize > 2 or of_map > _16BIT_DEEP_PIXELS or is_small


def has_image_kernel(workload: Workload) -> bool:
    """Whether "direct" has a kernel for so few channels (cuda/dense_conv/plan/few_channels_plan.cc)."""
    geometry = workload.geometry
    if workload.x_shape[3] > _IMAGE_CHANNELS or geometry.groups > 1 or geometry.dilation != (1, 1):
        return False
    return not workload.exact or workload.itemsize == 2 or devices.current().has_fast_tf32


def prefers_pooled(workload: Workload) -> bool:
    """Whether "direct" with a pool in its kernel is expected to be the fastest, though it might not be without."""
    return pools_in_direct(workload) and not workload.is_precise and _pools_few_features(workload)


def _pools_few_features(workload: Workload) -> bool:
    """Whether a pool of TF32 or 16 bits in the kernel of its convolution gains as VGG-19's first ones do."""
    pool, (channels, features) = workload.geometry.pool, workload.kernel_shape[3:]
    most = _TF32_POOL_FEATURES if workload.itemsize > 2 else _16BIT_POOL_FEATURES
    is_measured = _is_3x3(workload) and min(channels, features) >= _WARPGROUP_FEATURES
    return is_measured and pool is not None and pool.kind == "max" and features <= most


def _most_pooled_flops(workload: Workload) -> float:
    """Operations up to which a pool of pairs is in the kernel of its convolution."""
    if workload.is_precise:
        return _most_exact_flops(workload)
    if _pools_few_features(workload):
        return _FEW_POOL_FLOPS
    if not _is_3x3(workload) or workload.kernel_shape[4] < _WARPGROUP_FEATURES:
        return _OTHER_POOL_FLOPS
    return _TF32_POOL_FLOPS if workload.itemsize > 2 else _16BIT_POOL_FLOPS


def pools_in_direct(workload: Workload) -> bool:
    """Whether "direct" takes the pool into its kernel on this CUDA device: cuda/*_plan.cc have the same lists."""
    pool, geometry = workload.geometry.pool, workload.geometry
    if pool is None or workload.is_symbolic:
        return False
    if has_image_kernel(workload):
        return _pools_images(workload, pool)
    if not has_warpgroups():
        return False
    is_of_pairs = pool.window == (2, 2) and pool.strides == (2, 2) and not any(map(any, pool.padding))
    reach = [(side - 1) * step for side, step in zip(workload.kernel_shape[1:3], geometry.dilation, strict=True)]
    if not is_of_pairs or geometry.strides != (1, 1) or max(reach) == 0 or max(reach) > _WARPGROUP_REACH:
        return False
    if workload.flops == 0 or workload.flops > _most_pooled_flops(workload):
        return False
    return workload.dtype in _DTYPES and geometry.groups == 1 and is_copied(workload)


def _pools_images(workload: Workload, pool: Pool) -> bool:
    """Whether the kernel for few channels takes a pool and is expected to be faster than with XLA's pool behind it."""
    if workload.dtype not in _DTYPES or workload.flops == 0 or pool.kind != "max":
        return False
    if max(pool.window) > _IMAGE_POOL or min(pool.strides) < 2 or workload.products > _IMAGE_PRODUCTS:
        return False
    is_too_large = workload.is_precise and workload.flops > _TF32_FLOPS  # what tiles compute twice costs more there
    return max(workload.geometry.strides) <= _IMAGE_STRIDE and not is_too_large
