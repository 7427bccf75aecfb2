"""NaN in front of a pool is in the result: for every implementation, dtype, pool and transform, and in `accelerate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from platforms import require

import jax_sparse_conv as jsc
from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.problem.geometry import Pool

DTYPES = ("float32", "bfloat16", "float16", "float64")
WINDOWS = (((2, 2), (2, 2)), ((3, 3), (2, 2)), ((5, 1), (1, 3)), ((9, 7), (4, 5)))
SIZE, CHANNELS = 28, 16  # so large that XLA's own 2x2 pools lose NaN on a CPU


@pytest.fixture(autouse=True, scope="module")
def optimized() -> Iterator[None]:
    """LLVM optimizes, as it does for users."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def operands(dtype: str) -> tuple[Any, Any]:
    """x with some NaN, and a kernel of 1x1 that keeps channels apart but for a factor."""
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((2, SIZE, SIZE, CHANNELS)), 0)
    x[rng.random(x.shape[:3]) < 0.02] = np.nan
    return x.astype(jnp.dtype(dtype)), np.diag(rng.standard_normal(CHANNELS)).astype(jnp.dtype(dtype))[None, None]


def has_nan(x: Any, window: tuple[int, int], strides: tuple[int, int]) -> np.ndarray:
    """[N, P, Q, C], which windows have a NaN."""
    nan = np.isnan(np.asarray(x).astype(np.float64))
    parts = np.lib.stride_tricks.sliding_window_view(nan, window, (1, 2))[:, :: strides[0], :: strides[1]]
    return parts.any((-2, -1))


def check(found: Any, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(np.asarray(found).astype(np.float64)), wanted)


def skip_what_cudnn_loses(implementation: str | None, dtype: str, activation: str | None) -> None:
    """XLA on a GPU has one cuDNN call for a float32 convolution with a ReLU, and cuDNN's max(NaN, 0) is 0."""
    if implementation == "xla" and activation and dtype == "float32" and jax.default_backend() == "gpu":
        pytest.skip("cuDNN's ReLU takes NaN for 0")


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [None, *ops.CONV_POOL_IMPLEMENTATIONS])
def test_every_implementation_keeps_nan(
    implementation: str | None, dtype: str, pool: str, activation: str | None
) -> None:
    if implementation not in (None, "xla"):
        require(implementation, dtype)
    skip_what_cudnn_loses(implementation, dtype, activation)
    with jax.enable_x64(dtype == "float64"):
        x, kernel = operands(dtype)
        settings: dict[str, Any] = {"pool": pool, "activation": activation, "implementation": implementation}
        check(jax.jit(lambda x: jsc.conv_pool(x, kernel, **settings))(x), has_nan(x, (2, 2), (2, 2)))


@pytest.mark.parametrize("implementation", [None, "xla", "pecr"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_keep_nan(transform: str, implementation: str | None) -> None:
    if implementation == "pecr":
        require("pecr", "float32")
    skip_what_cudnn_loses(implementation, "float32", "relu")
    x, kernel = operands("float32")
    wanted = has_nan(x, (2, 2), (2, 2))

    def call(x: jax.Array) -> Any:
        return jsc.conv_pool(x, kernel, implementation=implementation)

    if transform == "vmap":
        check(jax.jit(jax.vmap(call))(x[None])[0], wanted)
    elif transform == "grad":
        out, pull = jax.vjp(call, jnp.asarray(x))
        check(out, wanted)
        assert pull(out)[0].shape == x.shape
    else:
        check(jax.jit(lambda x: jax.jvp(call, (x,), (x,))[0])(x), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "strides"), WINDOWS)
def test_maxima_are_those_of_windows(window: tuple[int, int], strides: tuple[int, int], dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        x, _ = operands(dtype)
        found = jax.jit(lambda x: reference.pool(x, Pool("max", window, strides, ((0, 0), (0, 0)))))(x)
        assert found.dtype == x.dtype
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), window, (1, 2))
    wanted = windows[:, :: strides[0], :: strides[1]].max((-2, -1))  # which keeps NaN
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), wanted)


def test_derivatives_are_those_of_lax() -> None:
    """Of equal values one is chosen, as lax does it."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, (1, 9, 9, 4)), jnp.float32)
    spec = Pool("max", (3, 3), (2, 2), ((1, 1), (0, 1)))

    def of_lax(y: jax.Array) -> jax.Array:
        return lax.reduce_window(y, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0)))

    for function in (jax.grad, jax.jacfwd):
        found, wanted = (
            jax.jit(function(lambda y, of=of: jnp.sum(of(y) ** 2)))(x)
            for of in (lambda y: reference.pool(y, spec), of_lax)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_accelerate_keeps_nan(pool: str, activation: str | None, dtype: str) -> None:
    """Of a pool that joins a convolution, whatever XLA's own does."""
    x, kernel = operands(dtype)

    def function(x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu(y) if activation else y
        start, of = (-np.inf, lax.max) if pool == "max" else (0, lax.add)
        window = (1, 2, 2, 1)
        return lax.reduce_window(y, np.asarray(start, y.dtype), of, window, window, "VALID")

    fast = jsc.accelerate(function)
    assert "pool" in str(fast.report(x)) or pool == "avg"
    check(jax.jit(fast)(x), has_nan(x, (2, 2), (2, 2)))
