"""Whether the one call of `dense_block` takes a block, on GPUs and on a CPU, and where it is expected to be faster.

What the kernels take is theirs to say (`cuda/densenet/limits.h`, `cpu/ffi/dense_block.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.api import arguments
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.fusion.block_parameters import BlockSizes, DenseBlockLayer, DenseTransition, parts_of
from jax_sparse_conv._src.primitive import custom_call


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
    if (missing := _native.why_missing("dense_block", "cuda", x.dtype)) is not None:
        return missing
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return "its sizes are not known yet"
    if str(x.dtype) not in _native.DTYPES["cuda"]:
        return f"dtype {x.dtype} is not one of {', '.join(_native.DTYPES['cuda'])}"
    sizes = [(layer.kernel1.shape[3], layer.kernel2.shape[3]) for layer in block]
    out_channels = 0 if transition is None else transition.kernel.shape[3]
    reason = _native.planner().why_no_dense_block(*x.shape, sizes, out_channels, transition is not None)
    return reason or None


def why_not_on_cpu(operands: Sequence[Any], packed: BlockSizes | None = None) -> str | None:
    """Why a block cannot be one call on a CPU, or None."""
    x, block, transition = described(operands, packed)
    if (missing := _native.why_missing("dense_block", "cpu", x.dtype)) is not None:
        return missing
    is_paired = str(x.dtype) == "bfloat16"
    if str(x.dtype) != "float32" and not (is_paired and _native.cpu_multiplies_pairs()):
        return f"dtype {x.dtype} is neither float32 nor, with AVX512-BF16, bfloat16"
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return "its sizes are not known yet"
    sizes = {(layer.kernel1.shape[3], layer.kernel2.shape[3]) for layer in block}
    if len(sizes) > 1:
        return "M or G of its layers differ"
    if transition is not None and transition.kernel.shape[3] < 1:
        return "it has nothing to compute"
    out_channels = 0 if transition is None else transition.kernel.shape[3]
    return _native.why_no_dense_block_on_cpu(x.shape, len(block), *sizes.pop(), out_channels, is_paired)
