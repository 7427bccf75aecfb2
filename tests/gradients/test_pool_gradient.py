"""Gradients of max pools: each window's goes to one pixel, the one that XLA's `select_and_scatter` takes."""

from __future__ import annotations

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax import lax
from kernel_checks import TOLERANCE, call
from platforms import PLATFORM
from pool_checks import derivatives

from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.problem.geometry import Pool

WINDOWS = ((2, 2), (3, 3), (1, 2), (3, 1), (4, 4))
VALUES = ("random", "ties", "zeros behind a ReLU", "NaN", "infinities")


def pool_of(window: tuple[int, int], strides: tuple[int, int] | None = None, pad: int = 0) -> Pool:
    return Pool("max", window, strides or window, ((pad, 0), (0, pad)))


def values_of(name: str, dtype: Any = np.float32, shape: tuple[int, ...] = (2, 9, 11, 5)) -> jax.Array:
    rng = np.random.default_rng(sum(map(ord, name)))
    y = rng.standard_normal(shape)
    if name == "ties":
        y = rng.integers(-1, 2, shape) * np.where(rng.random(shape) < 0.5, -1.0, 1.0)  # -0.0 and 0.0, too
    elif name == "zeros behind a ReLU":
        y = np.maximum(y - 1.2, 0)
    elif name in ("NaN", "infinities"):
        y[rng.random(shape) < 0.4] = np.nan if name == "NaN" else -np.inf
        y[:, :4, :4] = np.nan if name == "NaN" else -np.inf  # whole windows
    return jnp.asarray(y, dtype)


def by_lax(y: jax.Array, pool: Pool) -> jax.Array:
    padding = ((0, 0), *pool.padding, (0, 0))
    return lax.reduce_window(y, -np.inf, lax.max, (1, *pool.window, 1), (1, *pool.strides, 1), padding)


def one_by_one(y: np.ndarray, cotangent: np.ndarray, pool: Pool) -> np.ndarray:
    """A pixel gives way to a later one of its window unless it is greater or equal."""
    found = np.zeros_like(y)
    for n, row, column, channel in np.ndindex(cotangent.shape):
        first = (row * pool.strides[0], column * pool.strides[1])
        best = first
        for i, j in np.ndindex(pool.window):
            at = (first[0] + i, first[1] + j)
            if not y[n, *best, channel] >= y[n, *at, channel]:
                best = at
        found[n, *best, channel] += cotangent[n, row, column, channel]
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(function: Any, pool: Pool, y: jax.Array, cotangent: Any) -> jax.Array:
    return jax.vjp(lambda y: function(y, pool), y)[1](cotangent)[0]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_one_pixel_of_each_window(name: str, window: tuple[int, int]) -> None:
    """Rows and columns behind the last window get nothing."""
    y, pool = values_of(name), pool_of(window)
    g = np.random.default_rng(0).standard_normal(by_lax(y, pool).shape).astype(np.float32)
    found = backward(reference.pool, pool, y, g)
    np.testing.assert_array_equal(found, one_by_one(np.asarray(y), g, pool))
    if PLATFORM == "cpu":
        np.testing.assert_array_equal(found, backward(by_lax, pool, y, g))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        y, pool = values_of("ties", dtype), pool_of((2, 2))
        g = values_of("random", dtype, (2, 4, 5, 5))
        found = backward(reference.pool, pool, y, g)
        assert found.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(found, one_by_one(np.asarray(y), np.asarray(g), pool))


@pytest.mark.parametrize(
    ("pool", "shape", "is_xlas"),
    [
        (pool_of((2, 2)), (1, 8, 8, 4), False),
        (pool_of((4, 4)), (1, 9, 9, 4), False),
        (pool_of((3, 3)), (1, 2, 2, 4), False),  # no window at all
        (pool_of((2, 2)), (0, 8, 8, 4), False),
        (pool_of((2, 2), (1, 1)), (1, 8, 8, 4), True),
        (pool_of((2, 2), (3, 3)), (1, 8, 8, 4), True),
        (pool_of((2, 2), pad=1), (1, 8, 8, 4), True),
        (pool_of((7, 7)), (1, 7, 7, 4), True),
    ],
    ids=str,
)
def test_what_is_left_to_xla(pool: Pool, shape: tuple[int, ...], is_xlas: bool) -> None:
    y = values_of("zeros behind a ReLU", shape=shape)
    gradient = jax.jit(jax.grad(lambda y: (reference.pool(y, pool) ** 2).sum()))
    assert ("select_and_scatter" in gradient.lower(y).as_text()) is is_xlas
    np.testing.assert_array_equal(gradient(y), jax.grad(lambda y: (by_lax(y, pool) ** 2).sum())(y))


@pytest.mark.parametrize("name", ["random", "ties"])
def test_transformations(name: str) -> None:
    """Forward, batched and second derivatives, against those of lax."""
    pool = pool_of((2, 2))
    y, tangent = values_of(name, shape=(1, 5, 4, 2)), values_of("random", shape=(1, 5, 4, 2))
    operands = (pool, y, tangent)
    both = derivatives(reference.pool, *operands), derivatives(by_lax, *operands)
    for found, wanted in zip(*both, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_strict_settings() -> None:
    y = values_of("ties", jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = jax.grad(lambda y: reference.pool(y, pool_of((2, 2))).sum())(y)
    assert found.dtype == jnp.bfloat16
    assert float(found.sum()) == 2 * 4 * 5 * 5


@pytest.mark.parametrize("implementation", ["pecr", None, "xla"])
@pytest.mark.parametrize(
    "case",
    [
        Case("rows left over", (2, 9, 7, 16), 16, bias=True, activation="relu", pool="max"),
        Case("all-zero windows", (2, 8, 8, 16), 16, activation="relu", pool="max", zeros=1.0),
        Case("3x3", (1, 11, 10, 8), 16, bias=True, activation="relu", pool="max", window=(3, 3)),
    ],
    ids=lambda case: case.name,
)
def test_conv_pool(case: Case, implementation: str | None) -> None:
    inputs = cases.inputs(case)
    loss = lambda x, kernel: (call(case, x, kernel, inputs.bias, None, implementation) ** 2).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss, (0, 1)))(inputs.x, inputs.kernel)
    for ours, wanted in zip(found, oracle.gradients(case, inputs), strict=True):
        assert oracle.relative_error(ours, wanted) <= TOLERANCE["float32"]
