"""Batch norm in training with what follows it, in one native call on a CPU (`cpu/ffi/batch_norm.h`), and its gradient.

    y = relu((x - mean) / sqrt(variance + epsilon) * scale + bias + residual)

over all axes of x [..., C] but the last (Ioffe and Szegedy 2015, algorithm 1). XLA for CPUs takes four passes over the
map and six for the gradient; a call takes two each, with sums that depend on no number of threads.

Three primitives. Of each a gradient, the last two are linear in the last operands and each other's transpose:

    jsc_batch_norm            x, scale, bias, residual? -> y, mean, variance
    jsc_batch_norm_tangent    x, scale, bias, mean, variance, y?, tangents of the first's operands -> of its results
    jsc_batch_norm_gradient   the same, cotangents of the first's results -> of its operands

y is an operand where a ReLU follows a residual: it has the ReLU's zeros, which are computed again from x otherwise.
Rows of channels are float32, or float64 for a float64 x. Derivatives of derivatives, `vmap`, several devices and
everything that is no CPU are of XLA's operations, by the same formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.primitive import explicit, jax_internals, partitioning
from jax_sparse_conv._src.primitive.primitives import same_varying_axes
from jax_sparse_conv._src.problem import geometry as geo


@dataclasses.dataclass(frozen=True)
class Norm:
    """What a batch norm is but for its arrays.

    Attributes:
      epsilon: added to the variance.
      relu: whether a ReLU follows.
      has_residual: whether another map is added in front of the ReLU.
    """

    epsilon: float
    relu: bool
    has_residual: bool

    @property
    def reads_result(self) -> bool:
        """Whether derivatives have y as an operand."""
        return self.relu and self.has_residual


def takes(x: Any) -> bool:
    """Whether `batch_norm` is faster for x [..., C] than XLA's operations, in a program for a CPU.

    Types that say how x is split are XLA's, and so are few elements, by "batch norm" of `dispatch/model.json`.
    """
    if devices.default_platform() != "cpu" or _native.why_missing(_FORWARD, "cpu", x.dtype) is not None:
        return False
    if x.ndim < 2 or geo.is_symbolic(*x.shape) or explicit.is_split(x):
        return False
    return bool(math.prod(x.shape) >= model.shipped("batch norm")["elements, least"])


def batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, *, epsilon: float, relu: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """y like x [..., C], and mean and variance [C], of x's own elements.

    scale and bias [C] are taken in the dtype of sums, in which mean and variance are.
    """
    dtype = _dtype_of_sums(x.dtype)
    operands = [x, scale.astype(dtype), bias.astype(dtype)] + ([] if residual is None else [residual])
    norm = Norm(float(epsilon), relu, residual is not None)
    y, mean, variance = forward_p.bind(*same_varying_axes(operands), norm=norm)
    return y, mean, variance


def _dtype_of_sums(dtype: Any) -> Any:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


# --- the same in lax -------------------------------------------------------------------------------------------------


def _pixels(x: jax.Array) -> tuple[int, ...]:
    return tuple(range(x.ndim - 1))


def _forward(x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array, norm: Norm) -> list[jax.Array]:
    wide = x.astype(scale.dtype)
    mean = jnp.mean(wide, _pixels(x))
    variance = jnp.maximum(0, jnp.mean(wide * wide, _pixels(x)) - mean * mean)
    y = ((wide - mean) * (lax.rsqrt(variance + norm.epsilon) * scale) + bias).astype(x.dtype)
    y = y + residual[0] if residual else y
    return [jnp.maximum(y, 0) if norm.relu else y, mean, variance]


@dataclasses.dataclass
class _At:
    """Where derivatives are taken: the operands that both kinds share, and what is made of them."""

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    variance: jax.Array
    norm: Norm
    y: jax.Array | None = None

    def __post_init__(self) -> None:
        self.centered = self.x.astype(self.scale.dtype) - self.mean
        self.spread = self.variance + self.norm.epsilon
        self.factor = lax.rsqrt(self.spread)

    def masked(self, values: jax.Array) -> jax.Array:
        """With the ReLU's zeros."""
        if not self.norm.relu:
            return values
        y = self.y
        if y is None:
            y = (self.centered * (self.factor * self.scale) + self.bias).astype(self.x.dtype)
        return jnp.where(lax.stop_gradient(y) > 0, values, jnp.zeros_like(values))


def _tangent(*operands: jax.Array, norm: Norm) -> list[jax.Array]:
    at, (x, scale, bias, *residual) = _split(operands, norm)
    wide, axes = x.astype(scale.dtype), _pixels(x)
    mean = jnp.mean(wide, axes)
    variance = 2 * jnp.mean(at.centered * wide, axes)
    slope = at.factor * scale - variance * at.scale * at.factor / (2 * at.spread)
    y = (wide - mean) * (at.factor * at.scale) + at.centered * slope + bias
    if residual:
        y = y + residual[0].astype(y.dtype)
    return [at.masked(y).astype(x.dtype), mean, variance]


def _gradient(*operands: jax.Array, norm: Norm) -> list[jax.Array]:
    at, (y, mean, variance) = _split(operands, norm)
    masked, axes = at.masked(y), _pixels(y)
    wide = masked.astype(at.scale.dtype)
    bias, product = jnp.sum(wide, axes), jnp.sum(wide * at.centered, axes)
    factor, pixels = at.factor * at.scale, math.prod(y.shape[:-1])
    slope = (2 * variance - factor * product / at.spread) / pixels
    x = factor * wide + slope * at.centered + (mean - factor * bias) / pixels
    of_residual = [masked] if norm.has_residual else []
    return [x.astype(y.dtype), product * at.factor, bias, *of_residual]


def _split(operands: Sequence[jax.Array], norm: Norm) -> tuple[_At, Sequence[jax.Array]]:
    """Where derivatives are taken, and what they are linear in."""
    count = _shared(norm)
    x, scale, bias, mean, variance, *y = operands[:count]
    return _At(x, scale, bias, mean, variance, norm, y[0] if y else None), operands[count:]


def _shared(norm: Norm) -> int:
    return 5 + norm.reads_result


# --- the native calls ------------------------------------------------------------------------------------------------


def _native_call(*operands: jax.Array, norm: Norm) -> list[jax.Array]:
    x, row = _types(operands)
    return list(_ffi_call(_FORWARD, (x, row, row), norm)(*operands))


def _native_gradient(*operands: jax.Array, norm: Norm) -> list[jax.Array]:
    shared, linear = operands[:5], operands[_shared(norm) :]
    x, row = _types(operands)
    types = (x, row, row) + ((x,) if norm.reads_result else ())
    found = list(_ffi_call(_GRADIENT, types, norm)(*shared, *linear, *operands[5 : _shared(norm)]))
    return [*found, linear[0]] if norm.has_residual and not norm.relu else found


def _types(operands: Sequence[jax.Array]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    x, scale = operands[:2]
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(scale.shape, scale.dtype)


def _ffi_call(method: str, types: Sequence[jax.ShapeDtypeStruct], norm: Norm) -> Any:
    call = jax.ffi.ffi_call(_native.target_name(method), types)
    return functools.partial(call, epsilon=np.float64(norm.epsilon), relu=np.int64(norm.relu))


def _lower(ctx: Any, *operands: Any, norm: Norm, by_lax: Any) -> Any:
    """Of XLA's operations."""
    return mlir.lower_fun(functools.partial(by_lax, norm=norm), multiple_results=True)(ctx, *operands)


def _lower_on_cpu(ctx: Any, *operands: Any, norm: Norm, by_lax: Any, native: Any) -> Any:
    x = ctx.avals_in[0]
    is_xlas = partitioning.is_partitioned(ctx) or math.prod(x.shape) == 0
    return _lower(ctx, *operands, norm=norm, by_lax=by_lax if is_xlas else native)


# --- rules -----------------------------------------------------------------------------------------------------------


def _abstract_forward(x: Any, scale: Any, *_: Any, norm: Norm) -> list[Any]:
    return [x.update(weak_type=False), scale.update(weak_type=False), scale.update(weak_type=False)]


def _abstract_gradient(x: Any, scale: Any, *_: Any, norm: Norm) -> list[Any]:
    return [*_abstract_forward(x, scale, norm=norm), *([x.update(weak_type=False)] if norm.has_residual else [])]


def _jvp_of_forward(primals: Sequence[Any], tangents: Sequence[Any], *, norm: Norm) -> tuple[Any, Any]:
    y, mean, variance = forward_p.bind(*primals, norm=norm)
    shared = [*primals[:3], mean, variance, *([y] if norm.reads_result else [])]
    linear = [ad.instantiate_zeros(each) for each in tangents]
    return [y, mean, variance], tangent_p.bind(*same_varying_axes([*shared, *linear]), norm=norm)


def _jvp_of_linear(
    primals: Sequence[Any], tangents: Sequence[Any], *, norm: Norm, primitive: Any, by_lax: Any
) -> tuple[Any, Any]:
    """Linear in the last operands; in the others by XLA's operations."""
    out, count = primitive.bind(*primals, norm=norm), _shared(norm)
    if all(isinstance(each, ad.Zero) for each in tangents[:count]):
        linear = [ad.instantiate_zeros(each) for each in tangents[count:]]
        return out, primitive.bind(*same_varying_axes([*primals[:count], *linear]), norm=norm)
    every = [ad.instantiate_zeros(each) for each in tangents]
    return out, jax.jvp(functools.partial(by_lax, norm=norm), tuple(primals), tuple(every))[1]


def _transpose(cotangents: Sequence[Any], *operands: Any, norm: Norm, other: Any) -> list[Any]:
    count = _shared(norm)
    is_wanted = [ad.is_undefined_primal(each) for each in operands]
    if all(isinstance(each, ad.Zero) for each in cotangents):
        return [ad.Zero(each.aval) if wanted else None for each, wanted in zip(operands, is_wanted, strict=True)]
    given = [ad.instantiate_zeros(each) for each in cotangents]
    found = [None] * count + list(other.bind(*same_varying_axes([*operands[:count], *given]), norm=norm))
    return [each if wanted else None for each, wanted in zip(found, is_wanted, strict=True)]


def _batch(values: Sequence[Any], axes: Sequence[Any], *, norm: Norm, by_lax: Any) -> tuple[Any, Any]:
    """XLA's operations: each of the batch has a mean of its own."""
    out = jax.vmap(functools.partial(by_lax, norm=norm), in_axes=tuple(axes))(*values)
    return out, [0] * len(out)


_FORWARD, _TANGENT, _GRADIENT = "batch_norm", "batch_norm_tangent", "batch_norm_gradient"
forward_p = jex_core.Primitive(_native.target_name(_FORWARD))
tangent_p = jex_core.Primitive(_native.target_name(_TANGENT))
gradient_p = jex_core.Primitive(_native.target_name(_GRADIENT))
for _primitive, _abstract, _by_lax, _native_of in (
    (forward_p, _abstract_forward, _forward, _native_call),
    (tangent_p, _abstract_forward, _tangent, None),
    (gradient_p, _abstract_gradient, _gradient, _native_gradient),
):
    _primitive.multiple_results = True
    jax_internals.needs_devices(_primitive)
    jax_internals.runs_alone(_primitive)
    jax_internals.checks_nans(_primitive)
    _primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(_primitive, functools.partial(_lower, by_lax=_by_lax))
    if _native_of is not None:
        _on_cpu = functools.partial(_lower_on_cpu, by_lax=_by_lax, native=_native_of)
        mlir.register_lowering(_primitive, _on_cpu, platform="cpu")
    batching.primitive_batchers[_primitive] = functools.partial(_batch, by_lax=_by_lax)
ad.primitive_jvps[forward_p] = _jvp_of_forward
for _primitive, _other, _by_lax in ((tangent_p, gradient_p, _tangent), (gradient_p, tangent_p, _gradient)):
    ad.primitive_jvps[_primitive] = functools.partial(_jvp_of_linear, primitive=_primitive, by_lax=_by_lax)
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, other=_other)
