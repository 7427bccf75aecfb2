"""What can be a layer of a fused chain (`chains`), and where a chain is expected to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.primitive import custom_call, lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import MAX_ELEMENTS
from jax_sparse_conv._src.problem.workload import Workload

# Fitted by hand (`dispatch/model.json`).
_RULES = model.shipped("gpu chains")
MAX_IMAGES = int(_RULES["images, most"])
"""Most images of a batch of which a layer is fused. Beyond, cuDNN has enough work to fill the device."""
MAX_LAYERS = 256
"""Most layers of one call, a pool counted as a layer. Longer chains become several calls."""
LEAST_LAYERS = int(_RULES["layers, least"])
"""Fewest layers of a chain that may pay. Shorter ones have not been measured."""

_FAR = 2**13  # rows, columns, strides and reach of a window
_COPY_BYTES = 16
_LEAST_GROUP_OUT_CHANNELS = 32  # of a group, for tiles of 64
_DTYPES = ("float32", "bfloat16", "float16")
_BESIDE_ROW = 2**16  # bytes of shared memory beside the inputs of a dense layer (cuda/sparse/matvec/row.cu)
# An average over pixels: pixels that a block takes at a time, channels of a block, blocks that share the channels, and
# up to how many bytes of results they do. Up to the last number of rounds it costs less than a kernel of its own.
_AVERAGED, _PIECE, _PARTS, _SHARED_RESULTS, _MOST_ROUNDS = 64, 256, 8, 7680, 8
# A chain is expected to gain over its layers one by one, under `implementation=None`, on this compute capability. It
# has at least `LEAST_LAYERS` layers and at most so many operations a layer. At HIGHEST that holds for one image.
_MEASURED = (9, 0)


def why_not(config: Config, x: Any, kernel: Any, shared_memory: int | None = None) -> str | None:
    """Why a convolution or dense layer with these operands cannot be part of a fused chain, or None.

    Args:
      config: of the separate operation.
      x: its x, as shape and dtype.
      kernel: its kernel, as shape.
      shared_memory: bytes that a block of the device may have; None where the device is not known yet.
    """
    geometry, pool = config.geometry, config.geometry.pool
    if config.has_nonzeros:
        return "it chooses by the zeros that another operation counts"
    if config.tile is not None:
        return "it reads the stored lists of a CooStar"
    if any(map(jax.export.is_symbolic_dim, (*x.shape, *kernel.shape))):
        return "its sizes are not known yet"
    if config.method == "dense":
        return _why_not_dense(config, x, kernel, shared_memory)
    if not 1 <= x.shape[0] <= MAX_IMAGES:
        return f"x has {x.shape[0]} images, not 1 to {MAX_IMAGES}"
    if kernel.shape[0] != 1:
        return f"it has {kernel.shape[0]} kernels, not one"
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype} is not one of {', '.join(_DTYPES)}"
    if kernel.shape[4] * x.dtype.itemsize % 16:
        return f"K={kernel.shape[4]} does not come in whole 16 bytes"
    if pool is not None and pool.kind != "max":
        return f"its pool is {pool.kind!r}"
    sizes = (x.shape[1:3], geometry.conv_size(x.shape[1:3], kernel.shape[1:3]))
    if min(*sizes[1], *geometry.out_size(x.shape[1:3], kernel.shape[1:3]), *x.shape) < 1:
        return "it has nothing to compute"
    if math.prod(x.shape) > MAX_ELEMENTS or x.shape[0] * math.prod(sizes[1]) * kernel.shape[4] > MAX_ELEMENTS:
        return "its map is too large"
    windows = zip(kernel.shape[1:3], geometry.dilation, geometry.padding, geometry.strides, x.shape[1:3], strict=True)
    for size, dilation, (low, high), stride, length in windows:
        if max(length, size, dilation, (size - 1) * dilation, abs(low), abs(high), stride) > _FAR:
            return "its map or window is too large"
    if pool is not None and max(*pool.window, *pool.strides, *(1 + max(pads) for pads in pool.padding)) > _FAR:
        return "its pool's window is too large"
    return _why_not_direct(lowering.workload_of(x, kernel, config))


def _why_not_dense(config: Config, x: Any, kernel: Any, shared_memory: int | None) -> str | None:
    """Why the kernel of one row (`cuda/sparse/matvec/row.cu`) does not take a dense layer."""
    channels, out_channels = kernel.shape[3:]
    if x.shape[0] != 1 or kernel.shape[0] != 1:
        return f"it is a product of {x.shape[0]} rows and {kernel.shape[0]} kernels, not of one"
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype} is not one of {', '.join(_DTYPES)}"
    if config.has_residual or min(channels, out_channels) < 1:
        return "it has a residual, or nothing to compute"
    if channels * x.dtype.itemsize % 16 or out_channels * x.dtype.itemsize % 16:
        return f"C={channels} or K={out_channels} does not come in whole 16 bytes"
    if shared_memory is not None and channels * x.dtype.itemsize + _BESIDE_ROW > shared_memory:
        return f"its C={channels} inputs do not fit shared memory"
    return None if channels * out_channels <= MAX_ELEMENTS else "its kernel is too large"


def why_not_average(shape: Sequence[int], out_channels: int, itemsize: int) -> str | None:
    """Why a dense layer does not average a map [1, H, W, C] that it reads: blocks would take too long over it."""
    parts = _PARTS if out_channels * itemsize <= _SHARED_RESULTS else 1
    rounds = -(-shape[1] * shape[2] // _AVERAGED) * -(-shape[3] // (_PIECE * parts))
    return f"the average of {tuple(shape)} takes a block {rounds} rounds" if rounds > _MOST_ROUNDS else None


def _why_not_direct(workload: Workload) -> str | None:
    """Why "direct" is not a good kernel for a layer of a chain."""
    device = devices.current()
    family = Layer.of(workload).dense(device, in_chain=True).candidate.family
    if family == "per_output" and workload.geometry.pool is not None:  # the pool is then a step of its own
        family = Layer.of(workload.unpooled()).dense(device, in_chain=True).candidate.family
    if family == "per_output":
        return "no dense kernel takes its channels and groups"
    if workload.kernel_shape[3] * workload.itemsize % _COPY_BYTES and family != "few_channels":
        return "its channels do not come in whole 16 bytes, and are copied one by one"
    groups, out_channels = workload.geometry.groups, workload.kernel_shape[4] // workload.geometry.groups
    if groups > 1 and out_channels < _LEAST_GROUP_OUT_CHANNELS and "grouped" not in _families(workload, device):
        return f"its {groups} groups are too narrow"
    most = _RULES["operations, most, HIGHEST" if workload.is_precise else "operations, most"]  # that were measured
    return "it has so much work that its start does not matter" if workload.flops > most else None


def _families(workload: Workload, device: devices.Device) -> set[str]:
    return {each.candidate.family for each in Layer.of(workload).candidates(device, 1)}


def is_precise(config: Config, dtype: Any) -> bool:
    """Whether float32 is to be multiplied as float32."""
    return str(dtype) == "float32" and int(custom_call.attributes(config)["precision"]) == 2


def pays(calls: Sequence[tuple[Config, Any, Any]]) -> bool:
    """Whether a chain of these (config, x, kernel) is expected to be faster than each under `implementation=None`.

    Dense layers, which come last, do not count.
    """
    calls = [call for call in calls if call[0].method != "dense"]
    config, x, _ = calls[0]
    images, exact = x.shape[0], is_precise(config, x.dtype)
    if devices.current().capability != _MEASURED or len(calls) < LEAST_LAYERS:
        return False
    if images > _RULES["images, most, HIGHEST" if exact else "images, most"]:
        return False
    most = _RULES["operations, mean, one image" if images == 1 else "operations, mean"]
    return sum(lowering.workload_of(x, kernel, config).flops for config, x, kernel in calls) <= most * len(calls)
