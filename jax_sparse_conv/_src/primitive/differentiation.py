"""Derivatives of the primitive: sparse where the sparse operand is, dense elsewhere.

The result of a convolution that is differentiated has the name `SAVED` for the policies of `jax.checkpoint`, whose
`dots_saveable` knows JAX's own primitives alone.

Gradients of x and of the kernel are a primitive of their own, `jsc_gradient`, so that `split` decides what each of
several devices computes. XLA's partitioner adds more parts of them than there are on some meshes of two axes. What runs
on one CPU is in `cpu_gradient`, on one GPU in `gpu_gradient`; the rest are XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import jet
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.primitive import (
    channels,
    cpu_gradient,
    explicit,
    gpu_gradient,
    jax_internals,
    max_pool,
    partitioning,
    reference,
)
from jax_sparse_conv._src.primitive.primitives import Config, Operands, after, bind, conv_p, reference_conv, result_aval
from jax_sparse_conv._src.problem.geometry import is_symbolic

SAVED = "jsc_conv"
"""What `jax.checkpoint_policies.save_only_these_names` takes to keep the results of convolutions and dense layers."""


def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, config: Config) -> tuple[jax.Array, Any]:
    if config.is_bare:
        out, terms = _linear(primals, tangents, config)
        return out, functools.reduce(jnp.add, terms)
    is_one_call = _is_one_call(primals, config)
    if is_one_call and config.geometry.pool is None:
        return _jvp_of_one_call(primals, tangents, config)

    def unfused(*values: Any) -> jax.Array:
        operands = Operands.of(values, config)
        given = {"nonzeros": operands.nonzeros, "lists": operands.lists}
        if is_one_call:
            before = dataclasses.replace(config.bare(), activation=config.activation)
            y = bind(operands.x, operands.kernel, operands.bias, operands.residual, before, **given)
            return max_pool.pool(y, config.geometry.pool)
        y = bind(operands.x, operands.kernel, None, None, config.bare(), **given)
        pool = reference.pool if config.by_lax else max_pool.pool
        return after(y, operands.bias, operands.residual, config, pool)

    found: tuple[jax.Array, Any] = jvp_of(unfused, primals, tangents)
    return found


def _is_one_call(primals: Sequence[Any], config: Config) -> bool:
    """Whether bias, residual and ReLU stay in the convolution's call: `channels.masked` has their derivatives."""
    kernel = primals[1]
    if config.by_lax or kernel.shape[0] != 1:
        return False
    without_pool = dataclasses.replace(config, geometry=config.geometry.without_pool())
    return channels.takes(result_aval(*map(jax.typeof, primals), config=without_pool))


def _jvp_of_one_call(primals: Sequence[Any], tangents: Sequence[Any], config: Config) -> tuple[jax.Array, Any]:
    out, terms = _linear(primals, tangents, config)
    moving = Operands.of(tangents, config)
    if moving.residual is not None and not isinstance(moving.residual, ad.Zero):
        terms.append(moving.residual)
    tangent = functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)
    is_relu = config.activation is not None
    if moving.bias is not None and not isinstance(moving.bias, ad.Zero):
        return out, channels.masked(out, tangent, moving.bias[0], relu=is_relu)
    return out, jnp.where(out > 0, tangent, jnp.zeros_like(out)) if is_relu else tangent


def _linear(primals: Sequence[Any], tangents: Sequence[Any], config: Config) -> tuple[jax.Array, list[jax.Array]]:
    """The result, and d conv(x, k) = conv(dx, k) + conv(x, dk): dense where dx is dense, sparse again where x is."""
    operands = Operands.of(primals, config)
    x, kernel, nonzeros = operands.x, operands.kernel, operands.nonzeros
    dx, dkernel = tangents[:2]
    given = operands.packed, nonzeros, operands.lists
    out = checkpoint_name(bind(x, kernel, operands.bias, operands.residual, config, *given), SAVED)
    config = config.bare()
    terms = []
    if not isinstance(dx, ad.Zero):
        terms.append(bind(dx, kernel, None, None, dataclasses.replace(config, by_lax=True)))
    if not isinstance(dkernel, ad.Zero):
        terms.append(bind(x, dkernel, None, None, config, nonzeros=nonzeros))
    return out, terms


def transpose(cotangent: Any, *values: Any, config: Config) -> list[Any]:
    """The bare convolution is linear in x and in kernel; its transposes are dense."""
    missing = [index for index, value in enumerate(values) if ad.is_undefined_primal(value)]
    types = [value.aval if index in missing else value for index, value in enumerate(values)]
    if len(missing) > 1 or isinstance(cotangent, ad.Zero):
        return transposed(lambda *operands: [reference_conv(*operands, config=config)], [cotangent], values)
    (index,) = missing
    results: list[Any] = [None] * len(values)
    other = values[1 - index]
    bare = dataclasses.replace(config.bare(), by_lax=False, tile=None)  # the gradients read no lists
    results[index] = gradient_p.bind(other, cotangent, config=bare, like=types[index], by_kernel=index == 1)
    return results


def transposed(function: Callable[..., Sequence[Any]], cotangents: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The cotangents of those values that are missing, of a function that is linear in them; None for the others."""
    results: list[Any] = [None] * len(values)
    missing = [i for i, value in enumerate(values) if ad.is_undefined_primal(value)]
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return results

    def linear(*unknown: Any) -> list[Any]:
        filled = list(values)
        for index, value in zip(missing, unknown, strict=True):
            filled[index] = value
        return list(function(*filled))

    gradients = jax.linear_transpose(linear, *[values[i].aval for i in missing])(
        [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    )
    for index, gradient in zip(missing, gradients, strict=True):
        results[index] = gradient
    return results


def taylor(primals: Sequence[Any], series: Sequence[Any], *, config: Config) -> tuple[jax.Array, list[jax.Array]]:
    """The rule of `jax.experimental.jet`: of the same operation in lax.

    Raises:
      NotImplementedError: a max pool, which jet has no rule for.
    """
    pool = config.geometry.pool
    if pool is not None and pool.kind == "max":
        raise NotImplementedError(
            "jax.experimental.jet has no rule for max pools, so conv_pool(pool='max') has none; pool='avg' and conv do"
        )
    plain = dataclasses.replace(config, activation=None, geometry=config.geometry.without_pool())

    def function(*values: Any) -> jax.Array:
        y = reference_conv(*values, config=plain)
        y = y if config.activation is None else lax.max(y, jnp.zeros_like(y))  # jet does not take jax.nn.relu
        return reference.pool(y, pool)

    return taylor_of(function, primals, series)


def jvp_of(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Result and tangent of a function, by what of its operands varies."""
    varying = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def moving(*values: Any) -> Any:
        operands = list(primals)
        for place, value in zip(varying, values, strict=True):
            operands[place] = value
        return function(*operands)

    return jax.jvp(moving, [primals[place] for place in varying], [tangents[place] for place in varying])


def taylor_of(function: Callable[..., Any], primals: Sequence[Any], series: Sequence[Any]) -> Any:
    """Result and Taylor terms of a function, for rules of `jax.experimental.jet`, whose terms have no factorials."""
    return jet.jet(function, tuple(primals), tuple(map(list, series)), factorial_scaled=False)


jax_internals.has_taylor(conv_p, taylor)
ad.primitive_jvps[conv_p] = jvp
ad.primitive_transposes[conv_p] = transpose


# --- gradients -------------------------------------------------------------------------------------------------------

gradient_p = jex_core.Primitive("jsc_gradient")
jax_internals.needs_devices(gradient_p)
jax_internals.runs_alone(gradient_p)


def gradient(other: jax.Array, cotangent: jax.Array, *, config: Config, like: Any, by_kernel: bool) -> jax.Array:
    """Of x, or of the kernel, whose type `like` is, from the other one and the cotangent [N, Ho, Wo, K].

    Of several kernels each by itself: XLA's gradient of a convolution in groups, which those are else, is slow.
    """
    if explicit.is_split(other, cotangent, like):
        return partitioning.explicit_gradient(gradient, other, cotangent, config=config, like=like, by_kernel=by_kernel)
    stacks = like.shape[0]
    if by_kernel and not is_symbolic(stacks) and stacks > 1:
        one = functools.partial(gradient, config=config, like=like.update(shape=(1, *like.shape[1:])), by_kernel=True)
        parts = (each.reshape(stacks, each.shape[0] // stacks, *each.shape[1:]) for each in (other, cotangent))
        found: jax.Array = jax.vmap(one)(*parts)
        return found[:, 0]

    def linear(unknown: jax.Array) -> jax.Array:
        x, kernel = (other, unknown) if by_kernel else (unknown, other)
        return reference_conv(x, kernel, config=config)

    (out,) = jax.linear_transpose(linear, like)(cotangent)
    result: jax.Array = out
    return result


def _gradient_abstract_eval(*_: Any, like: Any, **__: Any) -> Any:
    return like


def _gradient_lower(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    function: Any = functools.partial(gradient, **parameters)
    is_split = explicit.is_split(*ctx.avals_in, *ctx.avals_out)  # then `gradient` itself says how
    if partitioning.is_partitioned(ctx) and not partitioning.is_exported(ctx) and not is_split:
        function = partitioning.partitioned_gradient(gradient, ctx.avals_in[0].shape, **parameters)
        ctx = partitioning.with_mesh(ctx)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


@devices.for_lowering
def _gradient_lower_on_one(ctx: Any, *operands: Any, rules: Any, **parameters: Any) -> Any:
    """By the rules of a platform, `cpu_gradient` or `gpu_gradient`, what they take on one device."""
    is_split = partitioning.is_partitioned(ctx) or explicit.is_split(*ctx.avals_in, *ctx.avals_out)
    if is_split or not rules.takes(*ctx.avals_in, **parameters):
        return _gradient_lower(ctx, *operands, **parameters)
    function = functools.partial(rules.gradient, **parameters)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _gradient_batch(values: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> tuple[jax.Array, int]:
    """As many more images, and kernels; of one kernel more images alone, of one x more output channels.

    Split types keep their axes apart.
    """
    size = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None)
    if size == 0 or explicit.is_split(*values, parameters["like"]):
        return jax.vmap(functools.partial(gradient, **parameters), in_axes=tuple(axes))(*values), 0
    like, by_kernel = parameters["like"], parameters["by_kernel"]
    if axes[0] is None and by_kernel and like.shape[0] == 1:
        return _gradient_of_more_channels(*values, size=size, axis=axes[1], **parameters), 0

    def folded(value: Any, axis: int | None) -> Any:
        every = jnp.broadcast_to(value, (size, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)
        return every.reshape(size * every.shape[1], *every.shape[2:])

    first, *rest = like.shape
    is_shared = axes[0] is None and not by_kernel and values[0].shape[0] == 1
    other = values[0] if is_shared else folded(values[0], axes[0])
    parameters["like"] = like.update(shape=(size * first, *rest))
    out = gradient_p.bind(other, folded(values[1], axes[1]), **parameters)
    return out.reshape(size, first, *rest), 0


def _gradient_of_more_channels(
    x: jax.Array, cotangent: jax.Array, *, size: int, axis: int, config: Config, like: Any, by_kernel: bool
) -> jax.Array:
    """Of as many kernels as there are cotangents, one beside the other in each group."""
    groups, (*window, channels) = config.geometry.groups, like.shape
    apart = jnp.moveaxis(cotangent, axis, 3)
    apart = apart.reshape(*apart.shape[:4], groups, channels // groups).swapaxes(3, 4)
    together = apart.reshape(*apart.shape[:3], size * channels)
    wide = like.update(shape=(*window, size * channels))
    out = gradient_p.bind(x, together, config=config, like=wide, by_kernel=by_kernel)
    out = jnp.moveaxis(out.reshape(*window, groups, size, channels // groups), -2, 0)
    return out.reshape(size, *like.shape)


def _gradient_jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
    """Linear in the other one and in the cotangent. Of split types it stays one call, which needs no rules of lax's."""
    of = gradient_p.bind if explicit.is_split(*primals, parameters["like"]) else gradient
    out = gradient_p.bind(*primals, **parameters)
    pairs = ((tangents[0], primals[1]), (primals[0], tangents[1]))
    moving = [pair for pair, tangent in zip(pairs, tangents, strict=True) if not isinstance(tangent, ad.Zero)]
    return out, functools.reduce(jnp.add, (of(*pair, **parameters) for pair in moving))


def _gradient_taylor(primals: Sequence[Any], series: Sequence[Any], **parameters: Any) -> Any:
    return taylor_of(functools.partial(gradient, **parameters), primals, series)


def _gradient_transpose(cotangent: Any, *values: Any, **parameters: Any) -> list[Any]:
    """By the cotangent that is the convolution, by the other operand the other gradient."""
    (index,) = [index for index, value in enumerate(values) if ad.is_undefined_primal(value)]
    results: list[Any] = [None, None]
    if isinstance(cotangent, ad.Zero):
        return results
    config, by_kernel = parameters["config"], parameters["by_kernel"]
    if index == 1:
        x, kernel = (values[0], cotangent) if by_kernel else (cotangent, values[0])
        results[1] = bind(x, kernel, None, None, dataclasses.replace(config, by_lax=True))
    else:
        results[0] = gradient_p.bind(cotangent, values[1], config=config, like=values[0].aval, by_kernel=not by_kernel)
    return results


gradient_p.def_abstract_eval(_gradient_abstract_eval)
mlir.register_lowering(gradient_p, _gradient_lower)
for _platform, _rules in (("cpu", cpu_gradient), ("cuda", gpu_gradient)):
    mlir.register_lowering(gradient_p, functools.partial(_gradient_lower_on_one, rules=_rules), platform=_platform)
batching.primitive_batchers[gradient_p] = _gradient_batch
ad.primitive_jvps[gradient_p] = _gradient_jvp
ad.primitive_transposes[gradient_p] = _gradient_transpose
jax_internals.checks_nans(gradient_p)
jax_internals.has_taylor(gradient_p, _gradient_taylor)
