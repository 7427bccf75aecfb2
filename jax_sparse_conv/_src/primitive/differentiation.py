"""Derivatives of the primitive: sparse where the sparse operand is, dense elsewhere.

The result of a convolution that is differentiated has the name `SAVED` for the policies of `jax.checkpoint`, whose
`dots_saveable` knows JAX's own primitives alone.

The kernel's gradient is a primitive of its own, `jsc_kernel_gradient`, so that `split` decides what each of several
devices computes. XLA's partitioner adds more parts than there are where an axis of the mesh splits nothing.
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

from jax_sparse_conv._src.primitive import explicit, jax_internals, partitioning, reference
from jax_sparse_conv._src.primitive.primitives import Config, Operands, after, bind, conv_p, reference_conv

SAVED = "jsc_conv"
"""What `jax.checkpoint_policies.save_only_these_names` takes to keep the results of convolutions and dense layers."""


def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, config: Config) -> tuple[jax.Array, Any]:
    if config.is_bare:
        return _bilinear_jvp(primals, tangents, config)
    varying = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def unfused(*moving: Any) -> jax.Array:
        values = list(primals)
        for index, value in zip(varying, moving, strict=True):
            values[index] = value
        operands = Operands.of(values, config)
        y = bind(operands.x, operands.kernel, None, None, config.bare(), nonzeros=operands.nonzeros)
        return after(y, operands.bias, operands.residual, config)

    return jax.jvp(unfused, [primals[i] for i in varying], [tangents[i] for i in varying])


def _bilinear_jvp(primals: Sequence[Any], tangents: Sequence[Any], config: Config) -> tuple[jax.Array, Any]:
    """d conv(x, k) = conv(dx, k) + conv(x, dk): dense where dx is dense, sparse again where x is."""
    operands = Operands.of(primals, config)
    x, kernel, nonzeros = operands.x, operands.kernel, operands.nonzeros
    dx, dkernel = tangents[:2]
    out = checkpoint_name(bind(x, kernel, None, None, config, operands.packed, nonzeros), SAVED)
    config = config.bare()
    terms = []
    if not isinstance(dx, ad.Zero):
        terms.append(reference_conv(dx, kernel, config=config))
    if not isinstance(dkernel, ad.Zero):
        terms.append(bind(x, dkernel, None, None, config, nonzeros=nonzeros))
    return out, functools.reduce(jnp.add, terms)


def transpose(cotangent: Any, *values: Any, config: Config) -> list[Any]:
    """The bare convolution is linear in x and in kernel; its transposes are dense."""
    x, kernel = values[:2]
    is_by_kernel = ad.is_undefined_primal(kernel) and not isinstance(cotangent, ad.Zero)
    if not is_by_kernel or explicit.is_split(x, cotangent, kernel.aval):
        return transposed(lambda *operands: [reference_conv(*operands, config=config)], [cotangent], values)
    gradient = kernel_gradient_p.bind(x, cotangent, config=config.bare(), kernel=kernel.aval)
    return [None, gradient, *[None] * (len(values) - 2)]


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


def taylor_of(function: Callable[..., Any], primals: Sequence[Any], series: Sequence[Any]) -> Any:
    """Result and Taylor terms of a function, for rules of `jax.experimental.jet`, whose terms have no factorials."""
    return jet.jet(function, tuple(primals), tuple(map(list, series)), factorial_scaled=False)


jax_internals.has_taylor(conv_p, taylor)
ad.primitive_jvps[conv_p] = jvp
ad.primitive_transposes[conv_p] = transpose


# --- the kernel's gradient -------------------------------------------------------------------------------------------

kernel_gradient_p = jex_core.Primitive("jsc_kernel_gradient")
jax_internals.needs_devices(kernel_gradient_p)
jax_internals.runs_alone(kernel_gradient_p)


def kernel_gradient(x: jax.Array, cotangent: jax.Array, *, config: Config, kernel: Any) -> jax.Array:
    """x [N, H, W, C] and the cotangent [N, Ho, Wo, K] of a result -> the gradient of a kernel of that type."""
    (out,) = jax.linear_transpose(lambda k: reference_conv(x, k, config=config), kernel)(cotangent)
    result: jax.Array = out
    return result


def _gradient_abstract_eval(x: Any, cotangent: Any, *, config: Config, kernel: Any) -> Any:
    del x, cotangent, config
    return kernel


def _gradient_lower(ctx: Any, *operands: Any, config: Config, kernel: Any) -> Any:
    function: Any = functools.partial(kernel_gradient, config=config, kernel=kernel)
    if partitioning.is_partitioned(ctx) and not partitioning.is_exported(ctx):
        x, _ = ctx.avals_in
        function = partitioning.partitioned_gradient(kernel_gradient, config, x.shape, kernel)
        ctx = partitioning.with_mesh(ctx)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _gradient_batch(
    values: Sequence[Any], axes: Sequence[Any], *, config: Config, kernel: Any
) -> tuple[jax.Array, int]:
    """Where both are batched: as many more images, and kernels."""
    size = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None)
    if size == 0 or None in axes:
        function = functools.partial(kernel_gradient, config=config, kernel=kernel)
        return jax.vmap(function, in_axes=tuple(axes))(*values), 0
    moved = (jnp.moveaxis(value, axis, 0) for value, axis in zip(values, axes, strict=True))
    x, cotangent = (value.reshape(size * value.shape[1], *value.shape[2:]) for value in moved)
    stacks, *rest = kernel.shape
    every = kernel.update(shape=(size * stacks, *rest))
    out = kernel_gradient_p.bind(x, cotangent, config=config, kernel=every)
    return out.reshape(size, stacks, *rest), 0


def _gradient_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, config: Config, kernel: Any) -> Any:
    """Linear in x and in the cotangent."""
    out = kernel_gradient_p.bind(*primals, config=config, kernel=kernel)
    (x, cotangent), (dx, dcotangent) = primals, tangents
    pairs = ((dx, cotangent), (x, dcotangent))
    moving = [pair for pair, tangent in zip(pairs, tangents, strict=True) if not isinstance(tangent, ad.Zero)]
    return out, functools.reduce(jnp.add, (kernel_gradient(*pair, config=config, kernel=kernel) for pair in moving))


def _gradient_transpose(cotangent: Any, *values: Any, config: Config, kernel: Any) -> list[Any]:
    return transposed(lambda *operands: [kernel_gradient(*operands, config=config, kernel=kernel)], [cotangent], values)


kernel_gradient_p.def_abstract_eval(_gradient_abstract_eval)
mlir.register_lowering(kernel_gradient_p, _gradient_lower)
batching.primitive_batchers[kernel_gradient_p] = _gradient_batch
ad.primitive_jvps[kernel_gradient_p] = _gradient_jvp
ad.primitive_transposes[kernel_gradient_p] = _gradient_transpose
