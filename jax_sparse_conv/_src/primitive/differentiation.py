"""Derivatives of the primitive: sparse where the sparse operand is, dense elsewhere.

The result of a convolution that is differentiated has the name `SAVED` for the policies of `jax.checkpoint`, whose
`dots_saveable` knows JAX's own primitives alone.
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
from jax.interpreters import ad

from jax_sparse_conv._src.primitive import explicit, jax_internals, reference
from jax_sparse_conv._src.primitive.primitives import Config, Operands, bias_per_image, bind, conv_p, reference_conv

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
        added = (bias_per_image(operands.bias, y.shape[0]), operands.residual)
        bias, residual = (None if value is None else explicit.as_split(value, y) for value in added)
        z = reference.epilogue(y, bias, residual, config.activation)
        return reference.pool(z, config.geometry.pool)

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
    return transposed(lambda *operands: [reference_conv(*operands, config=config)], [cotangent], values)


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
