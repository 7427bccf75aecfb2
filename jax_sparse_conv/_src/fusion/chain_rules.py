"""What can be a layer of a fused chain (`chains`), and where a chain is expected to pay.

What the kernels take is theirs to say (`cuda/chain/limits.h`); where a chain pays is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.primitive import custom_call, lowering
from jax_sparse_conv._src.primitive.primitives import Config

# Fitted by hand (`dispatch/model.json`).
_RULES = model.shipped("gpu chains")
MAX_IMAGES = int(_RULES["images, most"])
"""Most images of a batch of which a layer is fused. Beyond, cuDNN has enough work to fill the device."""
MAX_LAYERS = 256
"""Most layers of one call, a pool counted as a layer. Longer chains become several calls."""
LEAST_LAYERS = int(_RULES["layers, least"])
"""Fewest layers of a chain that may pay. Shorter ones have not been measured."""

_MOST_ROUNDS = _RULES["rounds of an average, most"]  # up to which it costs less than a kernel of its own
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
    if config.has_nonzeros:
        return "it chooses by the zeros that another operation counts"
    if config.tile is not None:
        return "it reads the stored lists of a CooStar"
    if any(map(jax.export.is_symbolic_dim, (*x.shape, *kernel.shape))):
        return "its sizes are not known yet"
    if str(x.dtype) not in _native.DTYPES["cuda"]:
        return f"dtype {x.dtype} is not one of {', '.join(_native.DTYPES['cuda'])}"
    if config.method == "dense":
        sizes = (x.shape[0], kernel.shape[0], *kernel.shape[3:])
        of_call = config.has_residual, x.dtype.itemsize, shared_memory or 0
        return _native.planner().why_no_dense_in_chain(*sizes, *of_call) or None
    if not 1 <= x.shape[0] <= MAX_IMAGES:
        return f"x has {x.shape[0]} images, not 1 to {MAX_IMAGES}"
    if kernel.shape[0] != 1:
        return f"it has {kernel.shape[0]} kernels, not one"
    workload = lowering.workload_of(x, kernel, config)
    if (reason := Layer.of(workload).why_not_in_chain(devices.current())) is not None:
        return reason
    most = _RULES["operations, most, HIGHEST" if workload.is_precise else "operations, most"]  # that were measured
    return "it has so much work that its start does not matter" if workload.flops > most else None


def why_not_average(shape: Sequence[int], out_channels: int, itemsize: int) -> str | None:
    """Why a dense layer does not average a map [1, H, W, C] that it reads: blocks would take too long over it."""
    _, height, width, channels = shape
    described = devices.current().description()
    rounds = _native.planner().average_rounds(height * width, channels, out_channels, itemsize, described)
    return f"the average of {tuple(shape)} takes a block {rounds} rounds" if rounds > _MOST_ROUNDS else None


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
