"""What batch norms in training are made of, as native calls on a CPU (`cpu/ffi/channels.h`), and their gradients.

    sums(x)                                    x, and sums of x, x * x and (x - mean)^2 over the pixels of each channel
    affine(x, center, scale, shift, residual)  relu((x - center) * scale + shift + residual), each [C] but the maps

    masked(y, tangent, of_bias)                tangent + of_bias where y > 0: what a bias and a ReLU make of a tangent

A map is [..., C]. XLA for CPUs takes more passes over maps, and slower ones; each call here is one pass, with sums that
do not depend on threads.

The first two have three primitives. The last two are linear in their last operands, and each other's transpose:

    jsc_channel_sums            x -> sums, squares, spread
    jsc_channel_sums_tangent    x, mean, tangent of x -> the same, tangents of sums, squares and spread
    jsc_channel_sums_gradient   x, mean, cotangents of x, sums, squares and spread -> cotangent of x

    jsc_channel_affine          x, center, scale, shift, residual? -> y
    jsc_channel_affine_tangent  x, center, scale, shift, y?, tangents of the first five -> tangent of y
    jsc_channel_affine_gradient x, center, scale, shift, y?, cotangent of y -> cotangents of the first five

    jsc_channel_masked           y, tangent, of_bias -> tangent behind both
    jsc_channel_masked_gradient  y, cotangent -> cotangent with the ReLU's zeros, and its sums

The sums give x back so that what else is computed of it adds its cotangent in the same pass. y is an operand where a
ReLU follows a residual: it has the ReLU's zeros, which are computed again from x otherwise. [C] are float32, or float64
for a float64 x. Derivatives of derivatives, `vmap`, several devices and everything that is no CPU are of XLA's
operations, by the same formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.primitive import explicit, jax_internals, partitioning
from jax_sparse_conv._src.primitive.primitives import same_varying_axes
from jax_sparse_conv._src.problem import geometry as geo


@dataclasses.dataclass(frozen=True)
class Affine:
    """What follows the scale and the shift.

    Attributes:
      relu: whether a ReLU does.
      has_residual: whether another map is added in front of it.
    """

    relu: bool = False
    has_residual: bool = False

    @property
    def shared(self) -> int:
        """How many operands derivatives are not linear in."""
        return 4 + (self.relu and self.has_residual)


@dataclasses.dataclass(frozen=True)
class Masked:
    """Whether there is a ReLU behind a bias."""

    relu: bool
    shared: int = 1


def takes(x: Any) -> bool:
    """Whether a call is faster for x [..., C] than XLA's operations, in a program for a CPU.

    Types that say how x is split are XLA's. So are few elements or channels, by "channels" of `dispatch/model.json`.
    """
    if devices.default_platform() != "cpu" or _native.why_missing(_SUMS, "cpu", x.dtype) is not None:
        return False
    if x.ndim < 2 or geo.is_symbolic(*x.shape) or explicit.is_split(x):
        return False
    least = model.shipped("channels")
    return bool(math.prod(x.shape) >= least["elements, least"] and x.shape[-1] >= least["channels, least"])


@jax.custom_jvp
def sums(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x [..., C], for everything else that reads it, and sums over all axes but the last, [C] each.

    They are of x, of x * x, and of (x - mean)^2. The last loses no digits to a mean far from 0, unless the mean of 16
    pixels that lie evenly over the map is many standard deviations off.
    """
    return (x, *sums_p.bind(x, given=None))


@sums.defjvp
def _sums_jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    found = sums(*primals)
    mean = found[1] / math.prod(primals[0].shape[:-1])
    return found, tuple(sums_tangent_p.bind(*same_varying_axes([*primals, mean, *tangents]), given=None))


def affine(
    x: jax.Array,
    center: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    residual: jax.Array | None = None,
    *,
    relu: bool = False,
) -> jax.Array:
    """y like x [..., C]; center, scale and shift [C] are taken in the dtype of sums."""
    dtype = dtype_of_sums(x.dtype)
    operands = [x, *(each.astype(dtype) for each in (center, scale, shift))]
    operands += [] if residual is None else [residual]
    (y,) = affine_p.bind(*same_varying_axes(operands), given=Affine(relu, residual is not None))
    result: jax.Array = y
    return result


def masked(y: jax.Array, tangent: jax.Array, of_bias: jax.Array, *, relu: bool) -> jax.Array:
    """What a bias, of which there is a tangent [C], and a ReLU make of the tangent of a map [..., C] in front of them.

    y is their result, which is read for its zeros where there is a ReLU.
    """
    operands = same_varying_axes([lax.stop_gradient(y), tangent, of_bias.astype(dtype_of_sums(y.dtype))])
    (found,) = masked_p.bind(*operands, given=Masked(relu))
    result: jax.Array = found
    return result


def dtype_of_sums(dtype: Any) -> Any:
    """Of a map's dtype."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


# --- the same in lax -------------------------------------------------------------------------------------------------


def _axes(x: jax.Array) -> tuple[int, ...]:
    """Of pixels."""
    return tuple(range(x.ndim - 1))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(dtype_of_sums(x.dtype))


def _sums(x: jax.Array, *, given: None) -> list[jax.Array]:
    wide, axes = _wide(x), _axes(x)
    total = jnp.sum(wide, axes)
    centered = wide - total / max(1, math.prod(x.shape[:-1]))
    return [total, jnp.sum(wide * wide, axes), jnp.sum(centered * centered, axes)]


def _sums_tangent(x: jax.Array, mean: jax.Array, tangent: jax.Array, *, given: None) -> list[jax.Array]:
    wide, moved, axes = _wide(x), _wide(tangent), _axes(x)
    centered = 2 * jnp.sum((wide - mean) * moved, axes)
    return [tangent, jnp.sum(moved, axes), 2 * jnp.sum(wide * moved, axes), centered]


def _sums_gradient(x: jax.Array, mean: jax.Array, *linear: jax.Array, given: None) -> list[jax.Array]:
    cotangent, of_sums, of_squares, of_spread = linear
    slope = 2 * (of_squares + of_spread) * (_wide(x) - mean)
    return [(_wide(cotangent) + (slope + (of_sums + 2 * of_squares * mean))).astype(x.dtype)]


def affine_by_lax(
    x: jax.Array, center: jax.Array, scale: jax.Array, shift: jax.Array, *residual: jax.Array, given: Affine
) -> list[jax.Array]:
    y = ((_wide(x) - center) * scale + shift).astype(x.dtype)
    y = y + residual[0] if residual else y
    return [jax.nn.relu(y) if given.relu else y]


def affine_tangent_by_lax(*operands: jax.Array, given: Affine) -> list[jax.Array]:
    x, center, scale, *_ = operands
    of_x, of_center, of_scale, of_shift, *of_residual = operands[given.shared :]
    y = (_wide(of_x) - of_center) * scale + (_wide(x) - center) * of_scale + of_shift
    if of_residual:
        y = y + of_residual[0].astype(y.dtype)
    return [_masked(y, operands, given).astype(x.dtype)]


def affine_gradient_by_lax(*operands: jax.Array, given: Affine) -> list[jax.Array]:
    x, center, scale, *_ = operands
    masked = _masked(operands[given.shared], operands, given)
    wide = _wide(masked)
    of_shift = jnp.sum(wide, _axes(x))
    of_scale = jnp.sum(wide * (_wide(x) - center), _axes(x))
    of_residual = [masked] if given.has_residual else []
    return [(wide * scale).astype(x.dtype), -scale * of_shift, of_scale, of_shift, *of_residual]


def _masked_tangent(y: jax.Array, tangent: jax.Array, of_bias: jax.Array, *, given: Masked) -> list[jax.Array]:
    found = (_wide(tangent) + of_bias).astype(y.dtype)
    return [jnp.where(lax.stop_gradient(y) > 0, found, jnp.zeros_like(found)) if given.relu else found]


def _masked_gradient(y: jax.Array, cotangent: jax.Array, *, given: Masked) -> list[jax.Array]:
    found = jnp.where(lax.stop_gradient(y) > 0, cotangent, jnp.zeros_like(cotangent)) if given.relu else cotangent
    return [found, jnp.sum(_wide(found), _axes(y))]


def _masked(values: jax.Array, operands: Sequence[jax.Array], given: Affine) -> jax.Array:
    """With the ReLU's zeros."""
    if not given.relu:
        return values
    x, center, scale, shift, *y = operands[: given.shared]
    found = y[0] if y else ((_wide(x) - center) * scale + shift).astype(x.dtype)
    return jnp.where(lax.stop_gradient(found) > 0, values, jnp.zeros_like(values))


# --- the native calls ------------------------------------------------------------------------------------------------


def _like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def row_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[-1:], dtype_of_sums(x.dtype))


def _native_sums(x: jax.Array, *, given: None) -> list[jax.Array]:
    return list(native_call(_SUMS)([row_of(x)] * 3)(x))


def _native_sums_gradient(x: jax.Array, *others: jax.Array, given: None) -> list[jax.Array]:
    return list(native_call(_SUMS_GRADIENT)(_like(x))(x, *others))


def _native_affine(*operands: jax.Array, given: Affine) -> list[jax.Array]:
    return list(native_call(_AFFINE)(_like(operands[0]))(*operands, relu=np.int64(given.relu)))


def _native_affine_gradient(*operands: jax.Array, given: Affine) -> list[jax.Array]:
    x, center, scale, shift, *y = operands[: given.shared]
    cotangent = operands[given.shared]
    results = [*_like(x), *[row_of(x)] * 2, *(_like(x) if y else [])]
    call = native_call(_AFFINE_GRADIENT)(results)
    of_x, of_scale, of_shift, *masked = call(x, center, scale, shift, cotangent, *y, relu=np.int64(given.relu))
    of_residual = (masked or [cotangent]) if given.has_residual else []
    return [of_x, -scale * of_shift, of_scale, of_shift, *of_residual]


def _native_masked_gradient(y: jax.Array, cotangent: jax.Array, *, given: Masked) -> list[jax.Array]:
    if not given.relu:
        (sums,) = native_call(_MASKED_GRADIENT)([row_of(y)])(cotangent)
        return [cotangent, sums]
    sums, masked = native_call(_MASKED_GRADIENT)([row_of(y), *_like(y)])(cotangent, y)
    return [masked, sums]


def native_call(method: str) -> Callable[..., Any]:
    return functools.partial(jax.ffi.ffi_call, _native.target_name(method))


def _lower(ctx: Any, *operands: Any, given: Any, by_lax: Any) -> Any:
    """Of XLA's operations."""
    return mlir.lower_fun(functools.partial(by_lax, given=given), multiple_results=True)(ctx, *operands)


def _lower_on_cpu(ctx: Any, *operands: Any, given: Any, by_lax: Any, native: Any) -> Any:
    return _lower(ctx, *operands, given=given, by_lax=by_lax if partitioning.is_partitioned(ctx) else native)


# --- rules -----------------------------------------------------------------------------------------------------------


def row_aval(x: Any) -> Any:
    return x.update(shape=x.shape[-1:], dtype=dtype_of_sums(x.dtype), weak_type=False)


def _abstract_sums(x: Any, *, given: None) -> list[Any]:
    return [row_aval(x)] * 3


def _abstract_sums_tangent(x: Any, *_: Any, given: None) -> list[Any]:
    return [x.update(weak_type=False), *[row_aval(x)] * 3]


def _abstract_map(x: Any, *_: Any, given: Any) -> list[Any]:
    return [x.update(weak_type=False)]


def _abstract_affine_gradient(x: Any, *_: Any, given: Affine) -> list[Any]:
    like_x = x.update(weak_type=False)
    return [like_x, *[row_aval(x)] * 3, *([like_x] if given.has_residual else [])]


def _abstract_masked_gradient(y: Any, _: Any, *, given: Masked) -> list[Any]:
    return [y.update(weak_type=False), row_aval(y)]


def _affine_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, given: Affine) -> tuple[Any, Any]:
    (y,) = affine_p.bind(*primals, given=given)
    shared = [*primals[:4], *([y] if given.shared > 4 else [])]
    linear = [ad.instantiate_zeros(each) for each in tangents]
    return [y], affine_tangent_p.bind(*same_varying_axes([*shared, *linear]), given=given)


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, given: Any, primitive: Any, by_lax: Any
) -> tuple[Any, Any]:
    """Linear in the last operands; in the others by XLA's operations."""
    out, count = primitive.bind(*primals, given=given), _shared(given)
    every = [ad.instantiate_zeros(each) for each in tangents]
    if all(isinstance(each, ad.Zero) for each in tangents[:count]):
        return out, primitive.bind(*same_varying_axes([*primals[:count], *every[count:]]), given=given)
    return out, jax.jvp(functools.partial(by_lax, given=given), tuple(primals), tuple(every))[1]


def _transpose(cotangents: Sequence[Any], *operands: Any, given: Any, other: Any) -> list[Any]:
    count = _shared(given)
    is_wanted = [ad.is_undefined_primal(each) for each in operands]
    if all(isinstance(each, ad.Zero) for each in cotangents):
        return [ad.Zero(each.aval) if wanted else None for each, wanted in zip(operands, is_wanted, strict=True)]
    linear = [ad.instantiate_zeros(each) for each in cotangents]
    found = [None] * count + list(other.bind(*same_varying_axes([*operands[:count], *linear]), given=given))
    return [each if wanted else None for each, wanted in zip(found, is_wanted, strict=True)]


def _shared(given: Any) -> int:
    return 2 if given is None else given.shared


def _batch(values: Sequence[Any], axes: Sequence[Any], *, given: Any, by_lax: Any) -> tuple[Any, Any]:
    """XLA's operations: each of the batch has sums of its own."""
    out = jax.vmap(functools.partial(by_lax, given=given), in_axes=tuple(axes))(*values)
    return out, [0] * len(out)


def _taylor(primals: Sequence[Any], series: Sequence[Any], *, given: Any, by_lax: Any) -> tuple[Any, Any]:
    """The rule of `jax.experimental.jet`, whose terms have no factorials."""
    function = functools.partial(by_lax, given=given)
    found: tuple[Any, Any] = jet.jet(function, tuple(primals), tuple(map(list, series)), factorial_scaled=False)
    return found


_SUMS, _SUMS_TANGENT, _SUMS_GRADIENT = "channel_sums", "channel_sums_tangent", "channel_sums_gradient"
_AFFINE, _AFFINE_TANGENT, _AFFINE_GRADIENT = "channel_affine", "channel_affine_tangent", "channel_affine_gradient"

_MASKED, _MASKED_GRADIENT = "channel_masked", "channel_masked_gradient"


def new_primitive(method: str, abstract: Callable[..., Any], by_lax: Callable[..., Any], native: Any = None) -> Any:
    primitive = jex_core.Primitive(_native.target_name(method))
    primitive.multiple_results = True
    jax_internals.needs_devices(primitive)
    jax_internals.runs_alone(primitive)
    jax_internals.checks_nans(primitive)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, functools.partial(_lower, by_lax=by_lax))
    if native is not None:
        mlir.register_lowering(primitive, functools.partial(_lower_on_cpu, by_lax=by_lax, native=native), "cpu")
    batching.primitive_batchers[primitive] = functools.partial(_batch, by_lax=by_lax)
    jax_internals.has_taylor(primitive, functools.partial(_taylor, by_lax=by_lax))
    return primitive


def are_transposes(*pair: tuple[Any, Callable[..., Any]]) -> None:
    """Rules of two primitives, each with the same of XLA's operations, that are linear in their last operands."""
    for (one, by_lax), (other, _) in (pair, pair[::-1]):
        ad.primitive_jvps[one] = functools.partial(_linear_jvp, primitive=one, by_lax=by_lax)
        ad.primitive_transposes[one] = functools.partial(_transpose, other=other)


sums_p = new_primitive(_SUMS, _abstract_sums, _sums, _native_sums)
sums_tangent_p = new_primitive(_SUMS_TANGENT, _abstract_sums_tangent, _sums_tangent)
sums_gradient_p = new_primitive(_SUMS_GRADIENT, _abstract_map, _sums_gradient, _native_sums_gradient)
affine_p = new_primitive(_AFFINE, _abstract_map, affine_by_lax, _native_affine)
affine_tangent_p = new_primitive(_AFFINE_TANGENT, _abstract_map, affine_tangent_by_lax)
affine_gradient_p = new_primitive(
    _AFFINE_GRADIENT, _abstract_affine_gradient, affine_gradient_by_lax, _native_affine_gradient
)
masked_p = new_primitive(_MASKED, _abstract_map, _masked_tangent)
masked_gradient_p = new_primitive(
    _MASKED_GRADIENT, _abstract_masked_gradient, _masked_gradient, _native_masked_gradient
)
ad.primitive_jvps[affine_p] = _affine_jvp
are_transposes((sums_tangent_p, _sums_tangent), (sums_gradient_p, _sums_gradient))
are_transposes((affine_tangent_p, affine_tangent_by_lax), (affine_gradient_p, affine_gradient_by_lax))
are_transposes((masked_p, _masked_tangent), (masked_gradient_p, _masked_gradient))
