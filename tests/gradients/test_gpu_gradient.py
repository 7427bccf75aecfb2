"""Gradients by convolutions, as GPUs have them: their arithmetic, and what a GPU takes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import relative_error
from platforms import PLATFORM, on_a_gpu

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import gpu_gradient
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry, Pads

pytestmark = pytest.mark.usefixtures("float32_products")

NUMBERS = ("NHWC", "HWIO", "NHWC")
# x, kernel, strides, padding, dilation
CASES: dict[str, tuple[Any, Any, Any, Pads, Any]] = {
    "3x3": ((8, 9, 7, 16), (3, 3, 16, 32), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "3x3 stride 2": ((8, 10, 9, 16), (3, 3, 16, 24), (2, 2), ((0, 1), (1, 1)), (1, 1)),
    "3x3 stride 2, uneven": ((8, 11, 12, 8), (3, 3, 8, 16), (2, 2), ((0, 0), (0, 2)), (1, 1)),
    "5x3 dilation 2": ((8, 13, 12, 8), (5, 3, 8, 16), (1, 1), ((4, 4), (0, 0)), (2, 2)),
    "1x1": ((8, 6, 5, 16), (1, 1, 16, 64), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "1x1 stride 2": ((8, 7, 8, 16), (1, 1, 16, 64), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    "1x1 padded": ((8, 7, 8, 16), (1, 1, 16, 64), (1, 1), ((1, 0), (0, 2)), (1, 1)),
    "7x1": ((8, 14, 5, 16), (7, 1, 16, 32), (1, 1), ((3, 3), (0, 0)), (1, 1)),
    "cropped": ((8, 14, 9, 16), (3, 3, 16, 32), (1, 1), ((-2, 1), (0, -3)), (1, 1)),
}


def exact(case: str, x: Any, kernel: Any, cotangent: Any) -> list[np.ndarray]:
    """Gradients by x and by the kernel in float64."""
    _, _, strides, padding, dilation = CASES[case]
    padded = [(max(0, low), max(0, high)) for low, high in padding]
    crops = [slice(max(0, -low), size - max(0, -high)) for size, (low, high) in zip(x.shape[1:3], padding, strict=True)]
    with jax.enable_x64(True):

        def conv(x: Any, kernel: Any) -> Any:
            x = jnp.pad(x[:, crops[0], crops[1]], ((0, 0), *padded, (0, 0)))
            return lax.conv_general_dilated(
                x, kernel, strides, "VALID", rhs_dilation=dilation, dimension_numbers=NUMBERS
            )

        wide = [jnp.asarray(np.asarray(each), jnp.float64) for each in (x, kernel, cotangent)]
        return [np.asarray(each) for each in jax.vjp(conv, *wide[:2])[1](wide[2])]


def operands(case: str) -> tuple[jax.Array, jax.Array, jax.Array, Config]:
    x_shape, kernel_shape, strides, padding, dilation = CASES[case]
    geometry = Geometry(strides, padding, dilation, 1)
    size = geometry.conv_size(x_shape[1:3], kernel_shape[:2])
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.nn.relu(jax.random.normal(keys[0], x_shape))
    kernel = jax.random.normal(keys[1], kernel_shape)
    cotangent = jax.random.normal(keys[2], (x_shape[0], *size, kernel_shape[3]))
    return x, kernel, cotangent, Config(geometry, "ecr", fallback=True, precision=lax.Precision.HIGHEST)


@pytest.mark.parametrize("case", CASES)
def test_arithmetic(case: str) -> None:
    if reason := _native.why_missing("direct", PLATFORM, "float32"):
        pytest.skip(reason)
    x, kernel, cotangent, config = operands(case)
    wanted = exact(case, x, kernel, cotangent)
    for by_kernel, other, like in ((False, kernel[None], x), (True, x, kernel[None])):
        rule = functools.partial(gpu_gradient.gradient, config=config, like=jax.typeof(like), by_kernel=by_kernel)
        found = jax.jit(rule)(other, cotangent)
        assert found.shape == like.shape
        assert relative_error(found.reshape(wanted[by_kernel].shape), wanted[by_kernel]) < 2e-6


@pytest.mark.parametrize("case", CASES)
def test_through_grad(case: str) -> None:
    x, kernel, cotangent, config = operands(case)
    geometry = config.geometry

    def conv(x: jax.Array, kernel: jax.Array) -> Any:
        return jsc.conv(
            x,
            kernel,
            strides=geometry.strides,
            padding=geometry.padding,
            kernel_dilation=geometry.dilation,
            precision="highest",
        )

    found = jax.jit(lambda x, kernel, cotangent: jax.vjp(conv, x, kernel)[1](cotangent))(x, kernel, cotangent)
    for each, wanted in zip(found, exact(case, x, kernel, cotangent), strict=True):
        assert relative_error(each, wanted) < 2e-6


TAKEN: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, tuple[bool, bool]]] = {
    "a stage of ResNet-50": ((32, 28, 28, 128), (3, 3, 128, 128), 1, (True, True)),
    "with strides": ((32, 56, 56, 128), (3, 3, 128, 128), 2, (True, True)),
    "1x1": ((32, 28, 28, 512), (1, 1, 512, 128), 1, (True, True)),
    "1x1, many pixels": ((32, 56, 56, 256), (1, 1, 256, 64), 1, (True, False)),
    "what cuDNN transforms": ((32, 56, 56, 256), (3, 3, 256, 256), 1, (True, False)),
    "an image": ((32, 224, 224, 3), (7, 7, 3, 64), 2, (False, False)),
    "one image": ((1, 28, 28, 128), (3, 3, 128, 128), 1, (True, False)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_gpu_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    x_shape, kernel_shape, stride, wanted = TAKEN[name]
    pads = lax.padtype_to_pads(x_shape[1:3], kernel_shape[:2], (stride, stride), "SAME")
    geometry = Geometry((stride, stride), (pads[0], pads[1]), (1, 1), 1)
    size = geometry.conv_size(x_shape[1:3], kernel_shape[:2])
    config = Config(geometry, "ecr", fallback=True, precision=lax.Precision.HIGHEST)
    x, kernel, cotangent = (
        jax.core.ShapedArray(shape, jnp.dtype("float32"))
        for shape in (x_shape, (1, *kernel_shape), (x_shape[0], *size, kernel_shape[3]))
    )
    for capability, expected in (((9, 0), wanted), ((8, 9), (False, False))):
        on_a_gpu(monkeypatch, capability, has_warpgroups=True)
        taken = (
            gpu_gradient.takes(kernel, cotangent, config, x, by_kernel=False),
            gpu_gradient.takes(x, cotangent, config, kernel, by_kernel=True),
        )
        assert taken == expected
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    coarse = dataclasses.replace(config, precision=None)
    assert not gpu_gradient.takes(kernel, cotangent, coarse, x, by_kernel=False)  # which is XLA's
