"""Up to which density of x "ecr" is expected to be ahead of "direct" on a GPU: the threshold of "adaptive".

Both times are a floor and shares of what the device's properties promise, fitted on an H200. "ecr" lists entries of 2x2
pixels, of which one is left out only where all four are zero: of density d, 1 - (1 - d)^4 are listed, so its time falls
slowly until few non-zeros are left and then steeply.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.problem.workload import Workload

Products: TypeAlias = Literal["ffma", "mma", "warpgroups"]

# Shares of what the device promises, cycles of a multiprocessor for each of a result's products, and a floor.
# "ecr", 11 % (rms) from 233 times at HIGHEST of layers of 3x3 and 1x1, with strides and groups, batch 1 to 128, on
# independent zeros (paper/fig9.json, fig11.json, fig12.json, size.json, table3.json).
_SPARSE_FLOOR = 6.3  # us
_SPARSE_MEMORY = 0.91  # of bandwidth, for maps and kernel
_SPARSE_LISTS = 3.9  # of the peak of FFMA, for dense-equivalent operations: making lists, of nothing too
_SPARSE_SUMS = 0.5  # and for what is listed
_SPARSE_STEP = 0.96  # cycles, of what is listed
_SPARSE_SIDE = 2  # pixels of an entry
_LEAST_LIST_FEATURES = 32  # output channels of a group that a warp's lanes cover


class _Rates(NamedTuple):
    """Of "direct"."""

    floor: float  # us
    peak: float  # share, for its operations
    step: float  # cycles
    memory: float = math.inf  # share, for maps and kernel


# By warpgroups at HIGHEST 14 % (rms) at batch 1, from h200_direct_layers_highest.json, h200_cusnn_layers_auto.json and
# h200_network_layers_highest_batch1.json, and 16 to 18 % at batch 8 to 128, from h200_network_layers_highest.json, of
# older kernels; below it 16 % from h200_direct_layers_*.json and h200_network_layers*.json; by mma.sync 7 to 8 % from
# some of those files before there were warpgroups, and by FFMA from a plan of ResNet-50 that it served at HIGHEST
# before. By bytes of an element where they differ.
_FFMA = _Rates(4.7, 0.47, 4.2)
_MMA_EXACT = _Rates(4.7, 0.105, 3.0)  # of the peak of TF32
_MMA = {4: _Rates(4.7, 0.19, 3.1), 2: _Rates(4.7, 0.24, 1.6)}
_WARPGROUPS_EXACT = _Rates(4.3, 0.236, 0.0, 0.53)
_WARPGROUPS = {4: _Rates(5.1, 0.67, 0.75, 1.0), 2: _Rates(4.9, 0.67, 0.05, 0.72)}

# Both sides in one call cost 0.9 to 2.1 us more than the one that runs would cost alone (H200), and a wrong side alone
# is not to cost more than 3 % and 2 us. Where "ecr" is slower by no more than that without zeros, it may run alone.
_ALLOWED_US, _ALLOWED_SHARE = 2.0, 0.03
# Of "ecr" on an empty map, us, up to which "direct" runs alone. So little because both times are 10 % off: of 13 layers
# that were measured for this one of a true gain of 3 us has an expected one of 0.8.
_LEAST_GAIN = 0.7
# The threshold is for a gain that is smaller by so much, because the sparse side costs more beside the other, and its
# time rises faster than what is listed where that is little; and for so much at the least, without which both would not
# run. So the side that is taken, with the other beside it, was within 3 % and 2 us of the faster one alone at 0 to 85 %
# and at 98 to 100 % zeros of these layers; in between five are beyond it at some densities, by 0.1 to 2.6 us.
_GAIN_LOST, _GAIN_PRESUMED = 1.2, 1.5


def density(workload: Workload, device: Device, direct: float) -> float:
    """The density of x up to which "ecr" is expected to be ahead; infinite or 0 where one side is to run alone.

    Args:
      workload: the call, of known sizes.
      device: the GPU.
      direct: microseconds of the other side, by `direct_us`.
    """
    empty, full = sparse_us(workload, device, 0.0), sparse_us(workload, device, 1.0)
    gain, allowed = direct - empty, _ALLOWED_US + _ALLOWED_SHARE * direct
    if full - direct <= allowed:
        return math.inf if gain > allowed else 0.0
    if gain <= _LEAST_GAIN:
        return 0.0
    listed = max(gain - _GAIN_LOST, _GAIN_PRESUMED) / (full - empty)
    return float(1 - (1 - listed) ** (1 / _SPARSE_SIDE**2))


def sparse_us(workload: Workload, device: Device, density: float) -> float:
    """Microseconds of "ecr" where x is of a density."""
    group_features = workload.kernel_shape[4] // workload.geometry.groups
    size = workload.geometry.conv_size(workload.x_shape[1:3], workload.kernel_shape[1:3])
    entries = math.prod(math.ceil(length / _SPARSE_SIDE) * _SPARSE_SIDE / length for length in size)
    flops = workload.flops * entries * max(1.0, _LEAST_LIST_FEATURES / group_features)
    listed = 1 - (1 - density) ** _SPARSE_SIDE**2
    sums = flops / (_SPARSE_SUMS * device.flops) + workload.products * _SPARSE_STEP / device.clock_hz
    seconds = listed * sums + flops / (_SPARSE_LISTS * device.flops)
    return _SPARSE_FLOOR + 1e6 * (seconds + _bytes(workload) / (_SPARSE_MEMORY * device.memory_bytes_per_second))


def direct_us(workload: Workload, device: Device, products: Products) -> float:
    """Microseconds of "direct", without its pool.

    Args:
      workload: the call.
      device: the GPU.
      products: what multiplies.
    """
    exact = workload.is_precise
    if products == "ffma":
        rates, peak = _FFMA, device.flops
    elif products == "mma":
        rates, peak = _MMA_EXACT if exact else _MMA[workload.itemsize], device.tensor_flops(workload.dtype)
    else:
        rates, peak = (
            _WARPGROUPS_EXACT if exact else _WARPGROUPS[workload.itemsize],
            device.tensor_flops(workload.dtype),
        )
    memory = _bytes(workload) / (rates.memory * device.memory_bytes_per_second)
    return rates.floor + 1e6 * (
        workload.products * rates.step / device.clock_hz + workload.flops / (rates.peak * peak) + memory
    )


def _bytes(workload: Workload) -> float:
    """Of the pixels of x that windows reach, the kernel and the result."""
    sides = zip(workload.kernel_shape[1:3], workload.geometry.strides, strict=True)
    x = math.prod(workload.x_shape) * math.prod(min(1.0, side / stride) for side, stride in sides)
    return workload.itemsize * (x + math.prod(workload.kernel_shape) + workload.pixels * workload.kernel_shape[4])
