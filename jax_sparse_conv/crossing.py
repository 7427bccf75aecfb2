"""Up to which density of x "ecr" is expected to be ahead of "direct" on a GPU: the threshold of "adaptive".

Both times are a floor and shares of what the device's properties promise, fitted on an H200. "ecr" lists entries of 2x2
pixels, of which one is left out only where all four are zero: of density d, 1 - (1 - d)^4 are listed, so its time falls
slowly until few non-zeros are left and then steeply.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from jax_sparse_conv.devices import Device
from jax_sparse_conv.work import Work

Products: TypeAlias = Literal["ffma", "mma", "warpgroups"]

# "ecr", 10 % (rms) and at most 38 % from 209 times of 53 layers of 3x3 and 1x1 at HIGHEST, batch 1 to 128, on
# independent zeros (paper/fig11.json, fig12.json, cusnn_fig10.json, cusnn_fig11.json, table3.json, size.json).
_SPARSE_FLOOR = 6.0  # us
_SPARSE_WEIGHTS = 0.42  # of memory bandwidth, for the kernel
_SPARSE_MAPS = 0.12  # and for x, which every 128 output channels read, and the result
_SPARSE_LIST_FEATURES = 128
_SPARSE_SUMS = 0.5  # of the peak of FFMA, for what is listed
_SPARSE_PIXELS = 4  # of an entry
_LEAST_LIST_FEATURES = 32  # output channels of a group that a warp's lanes cover

# "direct": shares of the peak of what multiplies, and cycles for each of a result's products. By warpgroups 8 to 14 %
# (rms) from h200_direct_layers_*.json, by mma.sync 7 to 8 % from those files before there were any, and by FFMA from a
# plan of ResNet-50 that it served at HIGHEST before.
_DIRECT_FLOOR = 4.7  # us
_FFMA = (0.47, 4.2)
_MMA_EXACT = (0.105, 3.0)  # of the peak of TF32
_MMA = {4: (0.19, 3.1), 2: (0.24, 1.6)}  # by bytes of an element
_WARPGROUPS_EXACT = (0.21, 2.4)
_WARPGROUPS = {4: (0.50, 1.1), 2: (0.49, 0.33)}

# What both sides in one call cost: 1.2 to 2.5 us on an H200 (h200_adaptive.json). Where the slower side is behind by no
# more at any density, one side runs alone.
_BOTH_US, _BOTH_SHARE = 2.0, 0.03


def density(work: Work, device: Device, direct: float) -> float:
    """The density of x up to which "ecr" is expected to be ahead; infinite or 0 where one side is to run alone.

    Args:
      work: the call, of known sizes.
      device: the GPU.
      direct: microseconds of the other side, by `direct_us`.
    """
    empty, full = sparse_us(work, device, 0.0), sparse_us(work, device, 1.0)
    allowed = _BOTH_US + _BOTH_SHARE * direct
    if direct - empty <= allowed:
        return 0.0
    if full - direct <= allowed:
        return math.inf
    listed = (direct - empty) / (full - empty)
    return float(1 - (1 - listed) ** (1 / _SPARSE_PIXELS))


def sparse_us(work: Work, device: Device, density: float) -> float:
    """Microseconds of "ecr" where x is of a density."""
    features, groups = work.kernel_shape[4], work.geometry.groups
    group_features = features // groups
    flops = work.flops * max(1.0, _LEAST_LIST_FEATURES / group_features)
    reads = math.prod(work.x_shape) * max(1.0, group_features / _SPARSE_LIST_FEATURES)
    maps = work.itemsize * (reads + work.pixels * features) / _SPARSE_MAPS
    weights = work.itemsize * math.prod(work.kernel_shape) / _SPARSE_WEIGHTS
    listed = 1 - (1 - density) ** _SPARSE_PIXELS
    sums = listed * flops / (_SPARSE_SUMS * device.flops)
    return _SPARSE_FLOOR + 1e6 * ((maps + weights) / device.memory_bytes_per_second + sums)


def direct_us(work: Work, device: Device, products: Products) -> float:
    """Microseconds of "direct", without its pool.

    Args:
      work: the call.
      device: the GPU.
      products: what multiplies.
    """
    exact = work.exact and work.dtype == "float32"
    peak = device.flops if products == "ffma" else device.tensor_flops(work.dtype)
    if products == "ffma":
        share, step = _FFMA
    elif products == "mma":
        share, step = _MMA_EXACT if exact else _MMA[work.itemsize]
    else:
        share, step = _WARPGROUPS_EXACT if exact else _WARPGROUPS[work.itemsize]
    return _DIRECT_FLOOR + 1e6 * (work.products * step / device.clock_hz + work.flops / (share * peak))
