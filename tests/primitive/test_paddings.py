"""Paddings that XLA's convolutions for CPUs read out of bounds with, forward and in derivatives, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native

pytestmark = pytest.mark.usefixtures("float32_products")

# Padding of height and width, strides. Negative and positive at once; more than the window; all of a side cropped.
PADDINGS: list[tuple[Any, tuple[int, int]]] = [
    (((0, 0), (-5, 3)), (1, 1)),
    (((4, 1), (4, 1)), (1, 1)),
    (((-2, 0), (1, -3)), (1, 1)),
    (((7, -6), (0, 9)), (2, 1)),
    (((3, 3), (-6, 5)), (1, 2)),
    (((-9, 9), (0, 3)), (1, 2)),
]
X_SHAPE, KERNEL_SHAPE = (1, 9, 7, 3), (3, 3, 3, 4)


def exact(x: Any, kernel: Any, padding: Any, strides: tuple[int, int]) -> np.ndarray:
    """The convolution in float64, tap by tap."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    for axis, (low, high) in enumerate(padding, 1):
        x = np.take(x, range(max(-low, 0), x.shape[axis] - max(-high, 0)), axis)
        x = np.pad(x, [(max(low, 0), max(high, 0)) if each == axis else (0, 0) for each in range(4)])
    size = [(x.shape[1 + i] - kernel.shape[i]) // strides[i] + 1 for i in range(2)]
    out = np.zeros((x.shape[0], *size, kernel.shape[3]))
    for row in range(kernel.shape[0]):
        for column in range(kernel.shape[1]):
            rows = slice(row, row + (size[0] - 1) * strides[0] + 1, strides[0])
            columns = slice(column, column + (size[1] - 1) * strides[1] + 1, strides[1])
            out += np.einsum("nhwc,ck->nhwk", x[:, rows, columns], kernel[row, column])
    return out


@pytest.mark.parametrize(("padding", "strides"), PADDINGS)
@pytest.mark.parametrize("implementation", [None, "xla", "ecr", "direct", "lax's signature", "its xla", "accelerate"])
def test_values_and_derivatives(implementation: str | None, padding: Any, strides: tuple[int, int]) -> None:
    method = "ecr" if implementation in (None, "xla", "lax's signature", "its xla", "accelerate") else implementation
    if reason := _native.why_missing(str(method), PLATFORM, "float32"):
        pytest.skip(reason)
    keys = jax.random.split(jax.random.key(0), 5)
    x, dx = (jax.random.normal(key, X_SHAPE) for key in keys[:2])
    kernel, dkernel = (jax.random.normal(key, KERNEL_SHAPE) for key in keys[2:4])
    numbers = ("NHWC", "HWIO", "NHWC")

    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if implementation in ("lax's signature", "its xla"):
            of = "xla" if implementation == "its xla" else None
            return jsc.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, implementation=of)
        if implementation == "accelerate":
            plain = lambda x, kernel: lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers)  # noqa: E731
            return jsc.accelerate(plain)(x, kernel)  # type: ignore[no-any-return]
        return jsc.conv(x, kernel, strides=strides, padding=padding, implementation=implementation)  # type: ignore[no-any-return]

    y = jax.jit(conv)(x, kernel)
    np.testing.assert_allclose(y, exact(x, kernel, padding, strides), rtol=1e-4, atol=1e-4)
    weights = jax.random.normal(keys[4], y.shape)
    gradients = jax.jit(jax.grad(lambda x, kernel: jnp.sum(conv(x, kernel) * weights), argnums=(0, 1)))(x, kernel)
    for gradient, moved, wanted in (
        (gradients[0], dx, exact(dx, kernel, padding, strides)),
        (gradients[1], dkernel, exact(x, dkernel, padding, strides)),
    ):
        np.testing.assert_allclose(
            jnp.sum(gradient * moved), np.sum(wanted * np.asarray(weights)), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("implementation", [None, "xla", "ecr"])
def test_gradients_of_windows_side_by_side_do_not_end_the_process(implementation: str | None, dtype: str) -> None:
    """XLA exchanges x and kernel in a gradient without padding, where windows lie side by side along one axis."""
    if reason := _native.why_missing(implementation or "ecr", PLATFORM, dtype):
        pytest.skip(reason)
    strides, padding = (2, 2), ((1, 3), (3, 1))
    integers = np.random.default_rng(0).integers
    x, kernel, weights = (
        jnp.asarray(integers(-3, 4, shape), dtype) for shape in ((2, 2, 2, 1), (4, 2, 1, 33), (2, 2, 3, 33))
    )

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jsc.conv(x, kernel, strides=strides, padding=padding, implementation=implementation)
        return jnp.sum((y * weights).astype(jnp.float32))

    of_x, of_kernel = jax.jit(jax.grad(loss, (0, 1)))(x, kernel)
    for found, place in ((of_x, 0), (of_kernel, 1)):
        wanted = np.zeros(found.shape)
        for index in np.ndindex(found.shape):
            given: list[Any] = [np.asarray(x, np.float64), np.asarray(kernel, np.float64)]
            given[place] = np.zeros(found.shape)
            given[place][index] = 1
            wanted[index] = np.sum(exact(*given, padding, strides) * np.asarray(weights, np.float64))
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2e-3, atol=1e-3)


# x, kernel, padding, strides, groups: the result has no rows or no columns, or x has none.
EMPTY: list[tuple[Any, Any, Any, Any, int]] = [
    ((2, 28, 2, 6), (5, 5, 1, 6), ((-3, 1), (1, -3)), (1, 1), 6),
    ((2, 3, 9, 4), (3, 3, 4, 8), ((-3, 0), (0, 0)), (1, 1), 1),
    ((2, 3, 9, 4), (3, 3, 4, 8), ((-4, 2), (5, -13)), (1, 1), 1),
    ((2, 6, 1, 4), (7, 5, 1, 8), ((-1, 0), (2, 1)), (3, 3), 4),
    ((2, 0, 5, 17), (2, 2, 17, 9), ((3, 3), (3, 3)), (3, 3), 1),
]


@pytest.mark.parametrize(("x", "kernel", "padding", "strides", "groups"), EMPTY)
@pytest.mark.parametrize("implementation", [None, "xla", "ecr", "accelerate"])
def test_of_nothing(
    implementation: str | None, x: Any, kernel: Any, padding: Any, strides: tuple[int, int], groups: int
) -> None:
    if implementation == "ecr" and (reason := _native.why_missing("ecr", PLATFORM, "float32")):
        pytest.skip(reason)
    numbers = ("NHWC", "HWIO", "NHWC")

    def of_lax(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.nn.relu(
            lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, feature_group_count=groups)
        )

    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if implementation == "accelerate":
            return jsc.accelerate(of_lax)(x, kernel)  # type: ignore[no-any-return]
        settings: dict[str, Any] = {"strides": strides, "padding": padding, "feature_group_count": groups}
        return jsc.conv(x, kernel, activation="relu", implementation=implementation, **settings)  # type: ignore[no-any-return]

    both = jnp.ones((3, *x)), jnp.ones((3, *kernel))
    y = jax.jit(jax.vmap(conv))(*both)
    assert y.shape == jax.eval_shape(jax.vmap(of_lax), *both).shape
    assert not np.any(y)  # of zeros of the padding alone, if it has elements
    for mapped in (jax.vmap, lambda gradient: lambda x, kernel: gradient(x[0], kernel[0])):
        found = jax.jit(mapped(jax.grad(lambda *xk: jnp.sum(conv(*xk)), argnums=(0, 1))))(*both)
        for each, like in zip(found, both, strict=True):
            assert each.shape in (like.shape, like.shape[1:])
            assert not np.any(each)


def test_lax_s_function_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = jnp.ones((1, 6, 6, 4)), jnp.ones((3, 3, 4, 16))
    wanted = jsc.conv(x, kernel, implementation="xla")
    monkeypatch.setattr(lax, "conv_general_dilated", jsc.conv_general_dilated)
    numbers = ("NHWC", "HWIO", "NHWC")
    for implementation in (None, "xla"):
        found = jax.jit(lambda x, name=implementation: jsc.conv(x, kernel, implementation=name))(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    found = jax.jit(lambda x: lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
