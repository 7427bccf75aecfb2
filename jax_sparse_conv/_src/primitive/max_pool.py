"""Max pools and their derivatives: native calls on a CPU (`cpu/training/max_pool_kernel.h`), else XLA's operations.

Two primitives, each linear in its second operand, and each other's transpose:

    jsc_max_pool_gradient   x [N, H, W, C], cotangent [N, Ho, Wo, C] -> [N, H, W, C]
    jsc_max_pool_tangent    x [N, H, W, C], tangent [N, H, W, C] -> [N, Ho, Wo, C]

Each window has one pixel that both go through: its last NaN or, without one, its first maximum. On a CPU they are XLA's
`select_and_scatter`, which may lose a NaN beside padding, for fewer channels than fill a vector, and for maps of so few
elements that a call takes longer, by "max pool gradients" of `dispatch/model.json` (`benchmarks gradients`). Elsewhere
they are sums over the places of a window, and XLA's for large windows. On several devices `partitioning` splits them:
XLA's partitioner has wrong gradients where a window is twice as long as its stride, or longer, along an axis that is
split. The pool itself is `reference.pool`.
"""

from __future__ import annotations

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
from jax.sharding import PartitionSpec

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.primitive import explicit, jax_internals, partitioning, reference
from jax_sparse_conv._src.primitive.primitives import same_varying_axes
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Pool

_MOST_ELEMENTS = 2**31 - 1  # of one image, and of what a window is made of (`native/call.cc`)
# Of a window whose pixels are compared one by one in XLA, each in operations of its own; and added one by one.
_MOST_TAPS, _MOST_ADDED_TAPS = 256, 25


def pool(y: jax.Array, spec: Pool | None) -> jax.Array:
    """`reference.pool` of y [N, H, W, C], with these derivatives where it is a max pool."""
    if spec is None or not takes(y, spec) or _is_better_selected(y, spec):
        return reference.pool(y, spec)
    return _max_pool(explicit.whole(y, 1, 2), spec)


def takes(y: Any, spec: Pool) -> bool:
    """Whether the primitives are of such a pool: of maxima of two pixels or more, the kernels' dtypes, known sizes."""
    if spec.kind != "max" or str(y.dtype) not in _native.DTYPES["cpu"] or geo.is_symbolic(*y.shape):
        return False
    if max(spec.window) == 1:
        return False
    sizes = (*spec.window, *spec.strides, *y.shape[1:], *(pad for pads in spec.padding for pad in pads))
    along = zip(y.shape[1:3], spec.window, spec.strides, spec.padding, strict=True)
    height, width = (geo.windowed_size(size, window, stride, pads, 1) for size, window, stride, pads in along)
    images = max(y.shape[1] * y.shape[2], height * width) * y.shape[3]
    return min(sizes) >= 0 and max(*sizes, images) <= _MOST_ELEMENTS


def _is_better_selected(y: Any, spec: Pool) -> bool:
    """Whether windows lie apart in a program for a GPU: `reference` keeps a byte for each of them, and no map."""
    return devices.default_platform() != "cpu" and reference.is_selection(y, spec)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(y: jax.Array, spec: Pool) -> jax.Array:
    return reference.pool(y, spec)


@_max_pool.defjvp
def _max_pool_jvp(spec: Pool, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
    return _max_pool(*primals, spec), _bound(tangent_p, lax.stop_gradient(primals[0]), tangents[0], spec)


def gradient(x: jax.Array, cotangent: jax.Array, spec: Pool) -> jax.Array:
    """Of x, as `jax.vjp` of the pool has it; shapes as in the module's docstring."""
    return _bound(gradient_p, x, cotangent, spec)


def _bound(primitive: Any, x: jax.Array, linear: jax.Array, spec: Pool) -> jax.Array:
    """A primitive's result, on each device where types say how arrays are split."""

    def bind(x: jax.Array, linear: jax.Array) -> jax.Array:
        out: jax.Array = primitive.bind(*same_varying_axes([x, linear]), spec=spec)
        return out

    if not explicit.is_split(x, linear):
        return bind(x, linear)
    images, _, _, channels = explicit.spec_of(x if explicit.is_split(x) else linear)
    split = PartitionSpec(images, None, None, channels)
    found: jax.Array = explicit.on_devices(bind, [x, linear], [split, split], split)
    return found


# --- the same in lax -------------------------------------------------------------------------------------------------


def _tangent_by_lax(x: jax.Array, tangent: jax.Array, *, spec: Pool) -> jax.Array:
    found: jax.Array = jax.jvp(lambda y: reference.pool(y, spec), (x,), (tangent,))[1]
    return found


def _tangent_by_taps(x: jax.Array, tangent: jax.Array, *, spec: Pool) -> jax.Array:
    """Off a CPU XLA reduces no pairs, so lax would round x and the tangent to half of their bits each."""
    if math.prod(spec.window) > _MOST_TAPS:
        return _tangent_by_lax(x, tangent, spec=spec)
    chosen, padded = _chosen(x, spec), _padded(tangent, spec)
    found = jnp.zeros(chosen.shape, x.dtype)
    for number, tap in enumerate(np.ndindex(*spec.window)):
        found = jnp.where(chosen == number, _tap(padded, tap, spec), found)
    return found


def _chosen(x: jax.Array, spec: Pool) -> jax.Array:
    """The number of the place in each window that its last NaN or first maximum has; -1 where all is padding."""
    is_pixel, padded = _padded(jnp.ones((1, *x.shape[1:3], 1), bool), spec), _padded(x, spec)
    best = jnp.zeros(_result(x, x, spec=spec, method=_TANGENT).shape, x.dtype)
    number_type = np.dtype(np.int8 if math.prod(spec.window) <= np.iinfo(np.int8).max else np.int16)
    chosen = jnp.full(best.shape, -1, number_type)
    for number, tap in enumerate(np.ndindex(*spec.window)):
        value = _tap(padded, tap, spec)
        takes = _tap(is_pixel, tap, spec) & ((chosen < 0) | (value > best) | jnp.isnan(value))
        best, chosen = jnp.where(takes, value, best), jnp.where(takes, number_type.type(number), chosen)
    return chosen


def _padded(x: jax.Array, spec: Pool) -> jax.Array:
    return jnp.pad(x, ((0, 0), *spec.padding, (0, 0)))


def _tap(padded: Any, tap: Sequence[int], spec: Pool) -> Any:
    """The pixel at one place of every window."""
    for axis, (at, window, stride) in enumerate(zip(tap, spec.window, spec.strides, strict=True), 1):
        count = geo.windowed_size(padded.shape[axis], window, stride, (0, 0), 1)
        padded = reference.strided_slice(padded, axis, at, count, stride)
    return padded


def _gradient_by_taps(x: jax.Array, cotangent: jax.Array, *, spec: Pool) -> jax.Array:
    """XLA's `select_and_scatter` adds window by window on a GPU. This gathers what each pixel is the choice of."""
    if math.prod(spec.window) > _MOST_ADDED_TAPS:
        return _gradient_by_lax(x, cotangent, spec=spec)
    if 0 in cotangent.shape:
        return jnp.zeros_like(x)
    chosen = _chosen(x, spec)
    wide = x.dtype if x.dtype.itemsize > 4 else np.dtype(np.float32)
    zero, found = np.zeros((), wide), jnp.zeros(x.shape, wide)
    for number, tap in enumerate(np.ndindex(*spec.window)):
        parts = jnp.where(chosen == number, cotangent.astype(wide), zero)
        edges = [(0, 0, 0)]
        for axis, (at, stride, (low, _)) in enumerate(zip(tap, spec.strides, spec.padding, strict=True), 1):
            reach = (parts.shape[axis] - 1) * stride + 1
            edges.append((at - low, x.shape[axis] - reach - (at - low), stride - 1))
        found += lax.pad(parts, zero, (*edges, (0, 0, 0)))
    return found.astype(x.dtype)


def _gradient_by_lax(x: jax.Array, cotangent: jax.Array, *, spec: Pool) -> jax.Array:
    found: jax.Array = jax.vjp(lambda y: reference.pool(y, spec), x)[1](cotangent)[0]
    return found


# --- the native calls ------------------------------------------------------------------------------------------------


def _native_call(x: jax.Array, linear: jax.Array, *, spec: Pool, method: str) -> jax.Array:
    call = jax.ffi.ffi_call(_native.target_name(method), _result(x, linear, spec=spec, method=method))
    found: jax.Array = call(
        x,
        linear,
        window=np.asarray(spec.window, np.int64),
        window_stride=np.asarray(spec.strides, np.int64),
        window_padding=np.asarray(spec.padding, np.int64).ravel(),
    )
    return found


def _result(x: Any, linear: Any, *, spec: Pool, method: str) -> jax.ShapeDtypeStruct:
    if method == _GRADIENT:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    along = zip(x.shape[1:3], spec.window, spec.strides, spec.padding, strict=True)
    size = (geo.windowed_size(size, window, stride, pads, 1) for size, window, stride, pads in along)
    return jax.ShapeDtypeStruct((x.shape[0], *size, x.shape[3]), x.dtype)


def _lower(ctx: Any, *operands: Any, spec: Pool, by_lax: Any) -> Any:
    """Of XLA's operations."""
    return _lowered(ctx, operands, by_lax, spec=spec)


def _lower_on_cpu(ctx: Any, *operands: Any, spec: Pool, method: str, by_lax: Any) -> Any:
    x = ctx.avals_in[0]
    is_partitioned, is_exported = partitioning.is_partitioned(ctx), partitioning.is_exported(ctx)
    # JAX lowers lax's derivatives on a thread of the compiler, where jax.enable_x64 is off.
    is_hidden = is_partitioned and not is_exported and x.dtype.itemsize == 8
    is_little = _is_little(x) and not is_hidden
    if (is_partitioned and is_exported) or is_little or _native.why_missing(method, "cpu", x.dtype) is not None:
        return _lowered(ctx, operands, by_lax, spec=spec)
    return _lowered(ctx, operands, _native_call, spec=spec, method=method)


def _lowered(ctx: Any, operands: Sequence[Any], run: Any, *, spec: Pool, **parameters: Any) -> Any:
    function: Any = functools.partial(run, spec=spec, **parameters)
    if partitioning.is_partitioned(ctx) and not partitioning.is_exported(ctx):
        function = partitioning.partitioned_pool(run, spec=spec, **parameters)
        ctx = partitioning.with_mesh(ctx)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _is_little(x: Any) -> bool:
    """Whether XLA's operations are faster than a call."""
    least = model.shipped("max pool gradients")
    return x.shape[3] < least["channels, least"] or 0 < math.prod(x.shape) < least["elements, least"]


# --- rules -----------------------------------------------------------------------------------------------------------


def _abstract_eval(x: Any, linear: Any, *, spec: Pool, method: str) -> Any:
    return linear.update(shape=_result(x, linear, spec=spec, method=method).shape, weak_type=False)


def _batch(values: Sequence[Any], axes: Sequence[Any], *, spec: Pool, primitive: Any) -> tuple[jax.Array, int]:
    """As many more images."""
    size = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None)

    def every(value: jax.Array, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(value, (size, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)

    def folded(x: jax.Array, linear: jax.Array) -> jax.Array:
        images = [value.reshape(value.shape[0] * value.shape[1], *value.shape[2:]) for value in (x, linear)]
        out = primitive.bind(*same_varying_axes(images), spec=spec)
        return out.reshape(*x.shape[:2], *out.shape[1:])

    x, linear = (every(value, axis) for value, axis in zip(values, axes, strict=True))
    if not explicit.is_split(x, linear):
        return folded(x, linear), 0
    split = PartitionSpec(*(a or b for a, b in zip(*(explicit.spec_of(each)[:2] for each in (x, linear)), strict=True)))
    return explicit.on_devices(folded, [x, linear], [split, split], split), 0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Pool, primitive: Any) -> tuple[jax.Array, Any]:
    """Linear in the second operand; x chooses, and that is the same in all directions."""
    out = primitive.bind(*primals, spec=spec)
    if isinstance(tangents[1], ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, primitive.bind(primals[0], tangents[1], spec=spec)


def _transpose(cotangent: Any, x: Any, linear: Any, *, spec: Pool, other: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [None, ad.Zero(linear.aval)]
    return [None, other.bind(*same_varying_axes([x, cotangent]), spec=spec)]


_GRADIENT, _TANGENT = "max_pool_gradient", "max_pool_tangent"
gradient_p = jex_core.Primitive(_native.target_name(_GRADIENT))
tangent_p = jex_core.Primitive(_native.target_name(_TANGENT))
for _primitive, _other, _method, _by_lax, _off_cpus in (
    (gradient_p, tangent_p, _GRADIENT, _gradient_by_lax, _gradient_by_taps),
    (tangent_p, gradient_p, _TANGENT, _tangent_by_lax, _tangent_by_taps),
):
    jax_internals.needs_devices(_primitive)
    jax_internals.runs_alone(_primitive)
    jax_internals.checks_nans(_primitive)
    _primitive.def_abstract_eval(functools.partial(_abstract_eval, method=_method))
    mlir.register_lowering(_primitive, functools.partial(_lower, by_lax=_off_cpus))
    _on_cpu = functools.partial(_lower_on_cpu, method=_method, by_lax=_by_lax)
    mlir.register_lowering(_primitive, _on_cpu, platform="cpu")
    batching.primitive_batchers[_primitive] = functools.partial(_batch, primitive=_primitive)
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, primitive=_primitive)
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, other=_other)
