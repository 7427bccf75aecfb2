"""What users of JAX find slow or wrong: gradients of grouped, depthwise and transposed convolutions, and of each image.

Against float64, as `jsc.conv_general_dilated` is called, under `jit` and `vmap`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import oracle
import pytest
from jax import lax
from kernel_checks import TOLERANCE
from platforms import PLATFORM

import jax_sparse_conv as jsc

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
# Shape of x, of the kernel, and the arguments.
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one group": ((2, 8, 7, 9), (3, 3, 9, 16), {}),
    "groups": ((2, 8, 7, 24), (3, 3, 6, 32), {"feature_group_count": 4}),
    "many groups": ((2, 8, 7, 32), (3, 3, 2, 48), {"feature_group_count": 16, "window_strides": (2, 2)}),
    "depthwise": ((2, 8, 7, 24), (3, 3, 1, 24), {"feature_group_count": 24}),
    "depthwise, stride 2": ((2, 8, 7, 24), (5, 5, 1, 24), {"feature_group_count": 24, "window_strides": (2, 2)}),
    "depthwise, 2 of each": ((2, 8, 7, 24), (3, 3, 1, 48), {"feature_group_count": 24}),
    "transposed": ((2, 6, 5, 12), (4, 4, 12, 16), {"lhs_dilation": (2, 2), "padding": ((2, 2), (2, 2))}),
    "transposed, groups": (
        (2, 6, 5, 12),
        (3, 3, 3, 16),
        {"lhs_dilation": (2, 3), "padding": ((1, 1), (1, 2)), "feature_group_count": 4},
    ),
}
by_name = pytest.mark.parametrize("name", CONVOLUTIONS)


def values_of(name: str, several: tuple[int, ...] = (0, 0)) -> list[np.ndarray]:
    """x with zeros, and the kernel; so many of each, if not 0."""
    rng = np.random.default_rng(sum(map(ord, name)))
    shapes = [(n, *shape) if n else shape for n, shape in zip(several, CONVOLUTIONS[name][:2], strict=True)]
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [np.maximum(x, 0), kernel]


def squares(function: Any, name: str) -> Any:
    arguments = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": DIMENSIONS} | CONVOLUTIONS[name][2]
    return lambda x, kernel: (function(x, kernel, **arguments) ** 2).sum()


def exact(name: str, x: Any, kernel: Any) -> list[np.ndarray]:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        gradient = jax.grad(squares(lax.conv_general_dilated, name), (0, 1))
        return [np.asarray(each) for each in gradient(np.float64(x), np.float64(kernel))]


def check(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert oracle.relative_error(ours, theirs) <= TOLERANCE["float32"]


@by_name
def test_jit(name: str) -> None:
    values = values_of(name)
    with jax.default_matmul_precision("highest"):
        check(jax.jit(jax.grad(squares(jsc.conv_general_dilated, name), (0, 1)))(*values), exact(name, *values))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@by_name
def test_gradients_of_each(name: str, axes: tuple[int | None, int | None]) -> None:
    """`vmap(grad)`: a gradient of its own for each image, for each kernel, or for each pair."""
    values = values_of(name, tuple(0 if axis is None else 3 for axis in axes))
    gradient = jax.grad(squares(jsc.conv_general_dilated, name), (0, 1))
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.vmap(gradient, axes))(*values)
    for index in range(3):
        one = [value if axis is None else value[index] for value, axis in zip(values, axes, strict=True)]
        check([each[index] for each in found], exact(name, *one))


@pytest.mark.parametrize("name", ["groups", "depthwise, 2 of each"])
def test_vmap_of_vmap(name: str) -> None:
    values = values_of(name, (2, 3))
    gradient = jax.grad(squares(jsc.conv_general_dilated, name), (0, 1))
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.vmap(jax.vmap(gradient, (None, 0)), (0, None)))(*values)
        turned = jax.jit(jax.vmap(jax.vmap(gradient, (0, None)), (None, 0)))(*values)
    for i, j in np.ndindex(2, 3):
        wanted = exact(name, values[0][i], values[1][j])
        check([each[i, j] for each in found], wanted)
        check([each[j, i] for each in turned], wanted)


@pytest.mark.parametrize("axes", [None, (0, None), (None, 0), (0, 0)], ids=str)
@by_name
@pytest.mark.skipif(PLATFORM != "cpu", reason="these are the CPU's gradients")
def test_who_computes_them(name: str, axes: tuple[int | None, int | None] | None) -> None:
    """XLA's convolution has the transposed ones alone, of these."""
    gradient = jax.grad(squares(jsc.conv_general_dilated, name), (0, 1))
    if axes is not None:
        gradient = jax.vmap(gradient, axes)
    values = values_of(name, (0, 0) if axes is None else tuple(0 if axis is None else 3 for axis in axes))
    program = jax.jit(gradient).lower(*values).as_text()
    assert ("stablehlo.convolution" in program) is name.startswith("transposed")


def test_a_transposed_convolution_by_name_is_an_error() -> None:
    x, kernel = values_of("transposed")
    with pytest.raises(ValueError, match=r"lhs_dilation=\(2, 2\) is not 1; None or 'xla' can"):
        jsc.conv_general_dilated(
            x, kernel, (1, 1), "SAME", lhs_dilation=(2, 2), dimension_numbers=DIMENSIONS, implementation="ecr"
        )


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(axes: int) -> None:
    """Convolutions of one and of three axes are lax's, as are their gradients."""
    rng = np.random.default_rng(axes)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, *[6] * axes, 8), (*[3] * axes, 8, 8)))
    order = {1: ("NWC", "WIO", "NWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}[axes]

    def gradients(function: Any) -> Any:
        loss = lambda x, k: (function(x, k, (1,) * axes, "SAME", dimension_numbers=order) ** 2).sum()  # noqa: E731
        return jax.grad(loss, (0, 1))(x, kernel)

    for ours, theirs in zip(gradients(jsc.conv_general_dilated), gradients(lax.conv_general_dilated), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="x"):
        jsc.conv(x, kernel)
