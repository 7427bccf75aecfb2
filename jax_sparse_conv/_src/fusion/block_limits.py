"""What blocks the one call of `dense_block` takes, on GPUs and on a CPU, and where it is expected to be faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.api import arguments
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.fusion.block_parameters import BlockSizes, DenseBlockLayer, DenseTransition, parts_of
from jax_sparse_conv._src.primitive import custom_call
from jax_sparse_conv._src.problem.geometry import MAX_ELEMENTS

_GROWTH, _MIDDLE, _CHANNELS = 32, 128, 32  # kGrowth, kMiddle, kDenseChannels
_MAX_CHANNELS, _MAX_LAYERS, _FAR = 4096, 128, 2**13
_LEAST_CHANNELS, _MAX_CPU_CHANNELS = 16, 2**16  # on a CPU: a vector, and what the call takes
_MAX_TRANSITION, _OUT_CHANNELS_STEP = 2048, 8  # channels of a transition's input; of its result, a multiple of
_DTYPES = ("float32", "bfloat16", "float16")


def described(operands: Sequence[Any], packed: BlockSizes | None) -> tuple[Any, list[DenseBlockLayer], Any]:
    """x, the layers and the transition of operands as the primitive has them; of packed ones without values."""
    x, *parameters = operands
    return x, *(parts_of(parameters) if packed is None else packed.abstract(parameters[0].dtype))


def most_images(dtype: Any, precision: Any) -> int:
    """Images of a batch up to which the kernels for few are expected to be faster than layers one by one.

    It counts where there are no kernels for many.
    """
    kind = "16 bits" if str(dtype) != "float32" else "HIGHEST" if custom_call.is_highest(precision) else "TF32"
    return int(model.shipped("gpu chains")[f"block images, {kind}"])


def is_one_call_on_cpu(
    x: jax.Array, layers: Sequence[DenseBlockLayer], transition: DenseTransition | None = None
) -> bool:
    """Whether `implementation=None` runs such a block as one call on a CPU, if its parameters are known."""
    return why_not_on_cpu([x, *(parameter for layer in layers for parameter in layer), *(transition or ())]) is None


def is_one_call(
    x: jax.Array,
    layers: Sequence[DenseBlockLayer],
    precision: lax.PrecisionLike = None,
    transition: DenseTransition | None = None,
) -> bool:
    """Whether `implementation=None` would run such a block as one call where there is a GPU for it."""
    reason = why_not([x, *(parameter for layer in layers for parameter in layer), *(transition or ())])
    return reason is None and may_join(x, arguments.canonical_precision(precision))


def may_join(x: Any, precision: Any, packed: BlockSizes | None = None) -> bool:
    """Whether a CPU, or some GPU that this installation has kernels for, is expected to be faster with one call."""
    if packed is not None and packed.is_for_cpu:
        return True
    return bool(x.shape[0] <= most_images(x.dtype, precision)) or _native.has_warpgroups()


def why_not(operands: Sequence[Any], packed: BlockSizes | None = None) -> str | None:
    """Why a block cannot be one call on any device that this installation has kernels for, or None."""
    if packed is not None and packed.is_for_cpu:
        return why_not_on_cpu(operands, packed)
    x, block, transition = described(operands, packed)
    layers = len(block)
    if (missing := _native.why_missing("dense_block", "cuda", x.dtype)) is not None:
        return missing
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return "its sizes are not known yet"
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype} is not one of {', '.join(_DTYPES)}"
    sizes = [(layer.kernel1.shape[3], layer.kernel2.shape[3]) for layer in block]
    other = next((size for size in sizes if size != (_MIDDLE, _GROWTH)), None)
    if other is not None:
        return f"M={other[0]} and G={other[1]} of its layers are not {_MIDDLE} and {_GROWTH}"
    if x.shape[3] % _CHANNELS or x.shape[3] + layers * _GROWTH > _MAX_CHANNELS:
        return f"C0={x.shape[3]} is not a multiple of {_CHANNELS}, or the result has more than {_MAX_CHANNELS} channels"
    if layers > _MAX_LAYERS:
        return f"it has {layers} layers, more than {_MAX_LAYERS}"
    if min(x.shape) < 1:
        return "it has nothing to compute"
    if max(x.shape[1:3]) > _FAR or math.prod(x.shape[:3]) * (x.shape[3] + layers * _GROWTH) > MAX_ELEMENTS:
        return "its map is too large"
    return None if transition is None else _why_no_transition(x, transition)


def why_not_on_cpu(operands: Sequence[Any], packed: BlockSizes | None = None) -> str | None:
    """Why a block cannot be one call on a CPU, or None."""
    x, block, transition = described(operands, packed)
    if (missing := _native.why_missing("dense_block", "cpu", x.dtype)) is not None:
        return missing
    if str(x.dtype) != "float32":
        return f"dtype {x.dtype} is not float32"
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return "its sizes are not known yet"
    sizes = {(layer.kernel1.shape[3], layer.kernel2.shape[3]) for layer in block}
    if len(sizes) > 1:
        return "M or G of its layers differ"
    middle, growth = sizes.pop()
    if min(middle, growth) < _LEAST_CHANNELS:
        return f"M={middle} or G={growth} of its layers is below {_LEAST_CHANNELS}"
    if min(x.shape) < 1 or (transition is not None and transition.kernel.shape[3] < 1):
        return "it has nothing to compute"
    channels = x.shape[3] + len(block) * growth
    if channels > _MAX_CPU_CHANNELS or math.prod(x.shape[1:3]) * max(channels, middle) > MAX_ELEMENTS:
        return "its map is too large"
    return None


def _why_no_transition(x: Any, transition: DenseTransition) -> str | None:
    channels, out_channels = transition.kernel.shape[2:]
    if channels > _MAX_TRANSITION or out_channels % _OUT_CHANNELS_STEP or not 0 < out_channels <= _MAX_CHANNELS:
        return (
            f"its transition from C={channels} to K={out_channels} channels is not from at most {_MAX_TRANSITION} to a "
            f"multiple of {_OUT_CHANNELS_STEP}"
        )
    return "its map is too small for a pool" if min(x.shape[1:3]) < 2 else None
