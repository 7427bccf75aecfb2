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
from kernel_checks import poison
from oracle import relative_error
from platforms import PLATFORM, on_a_gpu

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import planner
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
    "3x3 stride 2, an end unread": ((8, 10, 10, 16), (3, 3, 16, 32), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    "cropped": ((8, 14, 9, 16), (3, 3, 16, 32), (1, 1), ((-2, 1), (0, -3)), (1, 1)),
}
# and for the gradient of the kernel alone: several blocks of channels, of taps and of columns, and of many steps
KERNEL_CASES: dict[str, tuple[Any, Any, Any, Pads, Any]] = {
    "channels beside blocks": ((3, 10, 9, 68), (3, 3, 68, 132), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "1x1 of many channels": ((5, 7, 8, 260), (1, 1, 260, 96), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "1x1 stride 2 of many channels": ((5, 8, 9, 392), (1, 1, 392, 64), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    "5x5": ((2, 20, 33, 64), (5, 5, 64, 64), (1, 1), ((2, 2), (2, 2)), (1, 1)),
    "2x2 stride 2": ((2, 40, 70, 192), (2, 2, 192, 64), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    "stride 3": ((2, 22, 25, 64), (3, 3, 64, 64), (3, 3), ((1, 1), (1, 1)), (1, 1)),
    "stride across": ((2, 9, 41, 32), (1, 3, 32, 64), (1, 2), ((0, 0), (1, 1)), (1, 1)),
    "wide": ((1, 3, 300, 64), (3, 3, 64, 64), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "wide, dilation 40": ((1, 3, 150, 16), (1, 3, 16, 16), (1, 1), ((0, 0), (40, 40)), (1, 40)),
    "one pixel": ((7, 1, 1, 64), (1, 1, 64, 64), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "one column": ((4, 30, 1, 64), (3, 1, 64, 64), (1, 1), ((1, 1), (0, 0)), (1, 1)),
    "many steps": ((16, 56, 56, 64), (3, 3, 64, 64), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "many steps, 128 channels": ((16, 28, 28, 128), (3, 3, 128, 64), (1, 1), ((1, 1), (1, 1)), (1, 1)),
}


def exact(case: str, x: Any, kernel: Any, cotangent: Any) -> list[np.ndarray]:
    """Gradients by x and by the kernel in float64."""
    _, _, strides, padding, dilation = (CASES | KERNEL_CASES)[case]
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
    x_shape, kernel_shape, strides, padding, dilation = (CASES | KERNEL_CASES)[case]
    geometry = Geometry(strides, padding, dilation, 1)
    size = geometry.conv_size(x_shape[1:3], kernel_shape[:2])
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.nn.relu(jax.random.normal(keys[0], x_shape))
    kernel = jax.random.normal(keys[1], kernel_shape)
    cotangent = jax.random.normal(keys[2], (x_shape[0], *size, kernel_shape[3]))
    return x, kernel, cotangent, Config(geometry, "ecr", fallback=True, precision=lax.Precision.HIGHEST)


@pytest.mark.parametrize("case", CASES)
def test_arithmetic_of_x(case: str) -> None:
    if reason := _native.why_missing("direct", PLATFORM, "float32"):
        pytest.skip(reason)
    x, kernel, cotangent, config = operands(case)
    rule = functools.partial(gpu_gradient.gradient, config=config, like=jax.typeof(x), by_kernel=False)
    found = jax.jit(rule)(kernel[None], cotangent)
    assert relative_error(found, exact(case, x, kernel, cotangent)[0]) < 2e-6


def plans_of(case: str) -> list[planner.KernelGradient]:
    x, kernel, _, config = operands(case)
    sizes, _ = planner.numbers(x.shape, (1, *kernel.shape), config.geometry)
    return planner.Layer(sizes, (), 4, precise=True).kernel_gradients(devices.current(), 1 << 10)


def of_kernel(x: Any, cotangent: Any, kernel: Any, config: Config) -> jax.Array:
    """By the kernel for a GPU, whatever XLA would take."""
    if not devices.current().has_warpgroups:
        pytest.skip("gradients of kernels need Hopper's warpgroup products")
    poison((1, *kernel.shape), jnp.float32)
    rule = functools.partial(gpu_gradient.gradient, config=config, like=jax.typeof(kernel[None]), by_kernel=True)
    return jax.jit(rule)(x, cotangent)


@pytest.mark.skipif(PLATFORM != "cuda", reason="these kernels are for a GPU")
@pytest.mark.parametrize("case", [*CASES, *KERNEL_CASES])
def test_arithmetic_of_kernel(case: str) -> None:
    x, kernel, cotangent, config = operands(case)
    found = of_kernel(x, cotangent, kernel, config)
    assert found.shape == (1, *kernel.shape)
    assert relative_error(found[0], exact(case, x, kernel, cotangent)[1]) < 1e-6
    assert np.array_equal(found, of_kernel(x, cotangent, kernel, config))


@pytest.mark.skipif(PLATFORM != "cuda", reason="these kernels are for a GPU")
@pytest.mark.parametrize("case", ["3x3 stride 2", "channels beside blocks", "1x1 of many channels", "one column"])
def test_every_plan(case: str) -> None:
    plans = plans_of(case)
    if not plans:
        pytest.skip("gradients of kernels need Hopper's warpgroup products")
    x, kernel, cotangent, config = operands(case)
    wanted, like = exact(case, x, kernel, cotangent)[1], jax.typeof(kernel[None])
    for plan in plans:
        poison(like.shape, jnp.float32)
        rule = functools.partial(gpu_gradient.of_kernel, geometry=config.geometry, like=like, plan=plan)
        assert relative_error(jax.jit(rule)(x, cotangent)[0], wanted) < 1e-6, plan


@pytest.mark.parametrize("case", [*CASES, *KERNEL_CASES])
def test_plans_are_sorted_and_told_apart(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    plans = plans_of(case)
    assert plans
    assert [each.us for each in plans] == sorted(each.us for each in plans)
    assert len({each.tile[:3] for each in plans}) == len(plans)
    whole = 4 * np.prod(operands(case)[1].shape)
    for each in plans:
        partials = each.tile[3] * (2 if each.tile[1] else 1)
        assert each.workspace_bytes == (0 if partials == 1 else partials * whole)


@pytest.mark.skipif(PLATFORM != "cuda", reason="these kernels are for a GPU")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38, 1e-42])
@pytest.mark.parametrize("case", ["3x3", "3x3 stride 2", "1x1 of many channels"])
def test_extremes_of_kernel(case: str, value: float) -> None:
    x, kernel, cotangent, config = operands(case)
    for moved in (x.at[1, 2, 3, 5].set(value), x.at[-1, -1, -1, :].set(value)):
        wanted = exact(case, moved, kernel, cotangent)[1]
        with np.errstate(over="ignore"):
            wanted = wanted.astype(np.float32).astype(np.float64)
        found = np.asarray(of_kernel(moved, cotangent, kernel, config)[0], np.float64)
        finite = np.isfinite(wanted)
        assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True)
        scale = np.abs(wanted[finite]).max(initial=1e-30)
        assert np.abs(found[finite] - wanted[finite]).max(initial=0) <= 2e-6 * scale


@pytest.mark.skipif(PLATFORM != "cuda", reason="these kernels are for a GPU")
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("case", ["cropped", "1x1 stride 2", "3x3 stride 2, an end unread"])
def test_what_no_window_reads_is_in_no_sum(case: str, value: float) -> None:
    x, kernel, cotangent, config = operands(case)
    unread = np.s_[:, 1, :] if case == "1x1 stride 2" else np.s_[:, :, -1] if case != "cropped" else np.s_[:, :2]
    wanted = exact(case, x.at[unread].set(0), kernel, cotangent)[1]
    found = of_kernel(x.at[unread].set(value), cotangent, kernel, config)[0]
    assert relative_error(found, wanted) < 1e-6


@pytest.mark.skipif(PLATFORM != "cuda", reason="these kernels are for a GPU")
@pytest.mark.parametrize(
    ("tile", "scratch", "dtype", "message"),
    [
        ((9, 0, 8, 1), 0, "float32", "a tile that fits the call"),
        ((3, 0, 33, 1), 0, "float32", "a tile that fits the call"),
        ((3, 0, 8, 10**6), 0, "float32", "a tile that fits the call"),
        ((3, 1, 8, 2), 16, "float32", "workspace of the gradient of a kernel must have"),
        ((3, 0, -1, 1), 0, "float32", "4 int64"),
        ((3, 0, 8), 0, "float32", "4 int64"),
        ((3, 0, 8, 1), 0, "bfloat16", "of float32"),
    ],
)
def test_a_wrong_call_is_an_error(tile: tuple[int, ...], scratch: int, dtype: str, message: str) -> None:
    if not devices.current().has_warpgroups:
        pytest.skip("gradients of kernels need Hopper's warpgroup products")
    x = jnp.zeros((2, 8, 8, 64), dtype)
    results = (jax.ShapeDtypeStruct((1, 3, 3, 64, 64), np.float32), jax.ShapeDtypeStruct((scratch,), np.uint8))
    call = jax.ffi.ffi_call("jsc_kernel_gradient", results)
    pairs = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "tile": tile}
    given = {name: np.asarray(value, np.int64) for name, value in pairs.items()}
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(call(x, x, groups=np.int64(1), **given))


def test_plans_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)

    def plan(*sizes: int, stride: int = 1, pad: int = 1) -> planner.KernelGradient | None:
        images, size, channels, window, out_channels = sizes
        windows = (stride, stride, *4 * (pad,), 1, 1)
        layer = planner.Layer(
            (images, size, size, channels, window, window, out_channels, *windows, 1), (), 4, precise=True
        )
        return next(iter(layer.kernel_gradients(device)), None)

    large = plan(32, 56, 64, 3, 64)
    assert large is not None
    tiles, shares, columns, splits = large.tile
    assert (tiles, shares) == (3, 1)  # three taps of a row; 64 channels for both warpgroups
    assert columns <= 32
    assert large.workspace_bytes == 2 * splits * 9 * 64 * 64 * 4
    more = plan(64, 56, 64, 3, 64)
    assert more is not None
    assert 1.5 < more.us / large.us < 2.5
    assert plan(32, 56, 66, 3, 64) is None  # channels in multiples of 4
    assert plan(8, 56, 64, 1, 64, stride=2, pad=1) is None  # x is its columns under the results, from the first on
    assert plan(8, 56, 64, 1, 64, stride=2, pad=0) is not None
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=False)
    assert plan(32, 56, 64, 3, 64) is None


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
    "1x1, many pixels": ((32, 56, 56, 256), (1, 1, 256, 64), 1, (True, True)),
    "many channels": ((32, 56, 56, 256), (3, 3, 256, 256), 1, (True, True)),
    "what cuDNN transforms": ((32, 28, 28, 512), (3, 3, 512, 512), 1, (True, False)),
    "an image": ((32, 224, 224, 3), (7, 7, 3, 64), 2, (False, False)),
    "one image, many pixels": ((1, 28, 28, 128), (3, 3, 128, 128), 1, (True, True)),
    "one image, few pixels": ((1, 14, 14, 256), (3, 3, 256, 256), 1, (True, False)),
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
