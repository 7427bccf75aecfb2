"""Max pools in training: of functions that `accelerate` rewrites, and of gradients that a function takes itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from platforms import PLATFORM

import jax_sparse_conv as jsc

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="the calls are the CPU's")

CALL = "jsc_max_pool_gradient"
RNG = np.random.default_rng(0)
KERNEL = jnp.asarray(RNG.standard_normal((3, 3, 3, 16)) / 5, jnp.float32)
X = jnp.asarray(RNG.standard_normal((2, 13, 12, 3)), jnp.float32)
POOLS = (((3, 3), (2, 2), "SAME"), ((2, 2), (2, 2), "VALID"), ((3, 3), (1, 1), ((1, 1), (1, 1))))


def normed(y: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A batch norm by the batch's own statistics: nothing behind it joins a convolution."""
    mean, variance = y.mean(axes, keepdims=True), y.var(axes, keepdims=True)
    return jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-5))


def channels_last(kernel: jax.Array, x: jax.Array, pool: Any, has_norm: bool = True) -> jax.Array:
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = normed(y, (0, 1, 2)) if has_norm else jax.nn.relu(y)
    return (linen.max_pool(y, *pool) ** 2).sum()


def channels_first(kernel: jax.Array, x: jax.Array, pool: Any) -> jax.Array:
    window, strides, padding = pool
    y = lax.conv_general_dilated(
        x.transpose(0, 3, 1, 2),
        kernel.transpose(3, 2, 0, 1),
        (1, 1),
        "SAME",
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    padding = padding if isinstance(padding, str) else ((0, 0), (0, 0), *padding)
    y = lax.reduce_window(normed(y, (0, 2, 3)), -jnp.inf, lax.max, (1, 1, *window), (1, 1, *strides), padding)
    return (y**2).sum()


def check(function: Any, wanted: Any, *operands: Any, is_native: bool = True) -> None:
    compiled = jax.jit(function)
    text = compiled.lower(*operands).as_text()
    assert (CALL in text) is is_native
    assert ("select_and_scatter" in text) is not is_native
    for found, expected in zip(jax.tree.leaves(compiled(*operands)), jax.tree.leaves(wanted(*operands)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("loss", [channels_last, channels_first])
def test_the_gradient_of_a_rewritten_loss(loss: Any, pool: Any) -> None:
    fast = jsc.accelerate(lambda kernel, x: loss(kernel, x, pool))
    check(jax.grad(fast, (0, 1)), jax.grad(lambda kernel, x: loss(kernel, x, pool), (0, 1)), KERNEL, X)


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("loss", [channels_last, channels_first])
def test_a_step_that_differentiates_by_itself(loss: Any, pool: Any) -> None:
    step = jax.value_and_grad(lambda kernel, x: loss(kernel, x, pool))
    check(jsc.accelerate(step), step, KERNEL, X)


def test_a_pool_that_joins_a_convolution() -> None:
    loss = lambda kernel, x: channels_last(kernel, x, POOLS[0], has_norm=False)  # noqa: E731
    check(jax.grad(jsc.accelerate(loss)), jax.grad(loss), KERNEL, X)


def test_a_pool_of_what_is_no_map() -> None:
    """In front of the convolution, and its own gradient."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        pooled = linen.max_pool(jnp.tile(x, 6) ** 2, *POOLS[0])[..., :3]
        y = lax.conv_general_dilated(pooled, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y**2).sum()

    for function in (lambda f: jax.grad(jsc.accelerate(f), 1), lambda f: jsc.accelerate(jax.grad(f, 1))):
        check(function(loss), jax.grad(loss, 1), KERNEL, X)


def test_what_a_user_asks_xla_for_stays() -> None:
    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        y = jsc.conv_pool(x, kernel, implementation="xla", window_shape=3, window_strides=2)
        return jsc.conv(y, jnp.ones((1, 1, 16, 8))).sum()

    check(jax.grad(jsc.accelerate(loss)), jax.grad(loss), KERNEL, X, is_native=False)


@pytest.mark.parametrize(
    "pooled",
    [
        lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 2), (1, 2, 2, 2), "VALID"),  # channels, too
        lambda y: lax.reduce_window(y, jnp.inf, lax.min, (1, 3, 3, 1), (1, 2, 2, 1), "VALID"),
    ],
    ids=["channels", "minima"],
)
def test_other_pools_stay(pooled: Any) -> None:
    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (pooled(normed(y, (0, 1, 2))) ** 2).sum()

    fast = jax.jit(jax.grad(jsc.accelerate(loss)))
    assert CALL not in fast.lower(KERNEL, X).as_text()
    np.testing.assert_allclose(fast(KERNEL, X), jax.grad(loss)(KERNEL, X), rtol=1e-3, atol=1e-3)
