"""`jax.lax.conv_general_dilated` that skips zeros: lax's arguments and errors around `ops.conv`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.api.arguments import CONV_IMPLEMENTATIONS, ConvImplementation, check_implementation
from jax_sparse_conv._src.problem.geometry import pair, too_far

_lax_conv = lax.conv_general_dilated  # lax's own, also where the function below is put in its place
_NHWC = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def conv_general_dilated(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    implementation: ConvImplementation | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` that skips the zeros of `lhs` where it can, to pass to a Flax layer.

    It takes lax's arguments. Two-dimensional convolutions with NHWC input and output and an HWIO kernel run as `conv`.
    They must be without input dilation, batch groups or another result dtype. Anything else is lax's own convolution
    under `implementation=None` and `"xla"`, and an error under another name. `out_sharding` is passed on.

    Args:
      lhs: [N, H, W, C], or what lax takes; float32, bfloat16, float16 or float64.
      rhs: [kh, kw, C / feature_group_count, K], or what lax takes; of the dtype of `lhs`.
      implementation: see `conv`.
      others: as in lax.

    Returns:
      [N, Ho, Wo, K] of the dtype of `lhs`, or what lax returns.

    Raises:
      ValueError: a convolution that the named implementation does not have; and whatever lax raises, by its names.
    """
    check_implementation(implementation, CONV_IMPLEMENTATIONS, "conv_general_dilated", jnp.asarray(lhs).dtype)
    reason = _why_not_conv(lhs, rhs, lhs_dilation, dimension_numbers, batch_group_count, preferred_element_type)
    reason = reason or _why_too_far(window_strides, padding, rhs_dilation)
    if reason is not None and implementation not in (None, "xla"):
        raise ValueError(f"implementation={implementation!r} cannot run this convolution: {reason}; None or 'xla' can")
    dense = functools.partial(
        _lax_conv,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if reason is not None:
        return dense(jnp.asarray(lhs), jnp.asarray(rhs), out_sharding=out_sharding)
    for name, value in (("window_strides", window_strides), ("rhs_dilation", rhs_dilation)):
        if value is not None:
            pair(name, value)
    # Lax's own errors, which name the arguments as this caller knows them.
    jax.eval_shape(dense, *(jax.ShapeDtypeStruct(jnp.shape(a), jnp.asarray(a).dtype) for a in (lhs, rhs)))
    out = ops.conv(
        lhs,
        rhs,
        strides=tuple(window_strides),
        padding=padding,
        kernel_dilation=1 if rhs_dilation is None else tuple(rhs_dilation),
        feature_group_count=feature_group_count,
        precision=precision,
        implementation=implementation,
    )
    return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)


def _why_not_conv(
    lhs: Any,
    rhs: Any,
    lhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    batch_group_count: int,
    preferred_element_type: Any,
) -> str | None:
    """Why a call of lax's signature is not one of `conv`, or None."""
    lhs_shape, rhs_shape = jnp.shape(lhs), jnp.shape(rhs)
    if len(lhs_shape) != 4 or len(rhs_shape) != 4:
        return f"lhs.shape={lhs_shape} is not two-dimensional (four axes)"
    if lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers) != _NHWC:
        return f"dimension_numbers={dimension_numbers!r} is not ('NHWC', 'HWIO', 'NHWC')"
    if lhs_dilation is not None and any(d != 1 for d in lhs_dilation):
        return f"lhs_dilation={tuple(lhs_dilation)} is not 1"
    if batch_group_count != 1:
        return f"batch_group_count={batch_group_count} is not 1"
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) != jnp.asarray(lhs).dtype:
        return f"preferred_element_type={preferred_element_type!r} is not lhs's dtype"
    if 0 in rhs_shape[:2]:
        return f"rhs.shape={rhs_shape} has an empty window"
    return None


def _why_too_far(
    window_strides: Sequence[int], padding: str | Sequence[tuple[int, int]], rhs_dilation: Sequence[int] | None
) -> str | None:
    """Why `conv` has no place for sizes that lax takes, or None; what is no size at all has errors of its own."""
    pads = () if isinstance(padding, str) else padding
    try:
        return too_far(window_strides, pads, (1, 1) if rhs_dilation is None else rhs_dilation)
    except TypeError:
        return None
