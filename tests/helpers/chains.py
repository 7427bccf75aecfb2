"""Functions that `fuse` takes apart, and what it makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_sparse_conv as jsc
from jax_sparse_conv._src.fusion import chains
from jax_sparse_conv._src.primitive import primitives
from jax_sparse_conv.models.resnet import ResNet


@functools.cache
def normal(seed: int, *shape: int) -> np.ndarray:
    """Drawn by NumPy: where a traced function draws, XLA would compile a generator into its program."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weights(seed: int, *shape: int) -> jax.Array:
    """A result of the function that is traced, if one is."""
    return jnp.asarray(normal(seed, *shape)) / np.sqrt(np.prod(shape[:-1]))


def block(x: jax.Array, parameters: list[jax.Array], **options: Any) -> jax.Array:
    """A bottleneck with a projection: x [N, H, W, 8] -> [N, H, W, 16]."""
    projection, first, second, third, bias = parameters
    shortcut = jsc.conv(x, projection, bias, **options)
    y = jsc.conv(x, first, activation="relu", **options)
    y = jsc.conv(y, second, activation="relu", **options)
    return jsc.conv(y, third, bias, residual=shortcut, activation="relu", **options)


def block_parameters() -> list[jax.Array]:
    return [weights(1, 1, 1, 8, 16), weights(2, 1, 1, 8, 8), weights(3, 3, 3, 8, 8), weights(4, 1, 1, 8, 16),
            weights(5, 16)]  # fmt: skip


def equations(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Equations of this package, in calls too."""

    def walk(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive in (primitives.conv_p, chains.fused_chain_p):
                yield equation
            elif "jaxpr" in equation.params:
                yield from walk(equation.params["jaxpr"].jaxpr)

    return walk(jax.make_jaxpr(function)(*arguments).jaxpr)


def names(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Names of these equations, with the number of layers of a fused chain."""
    return [
        f"chain {len(e.params['layers'])}" if e.primitive is chains.fused_chain_p else "conv"
        for e in equations(function, *arguments)
    ]


def small_resnet() -> ResNet:
    model = ResNet((1, 2), 10, width=8, rngs=nnx.Rngs(0))
    jsc.models.fold_batch_norm(model)
    model.fuses = False  # without `fuse` it is what a chain is compared with
    return model
