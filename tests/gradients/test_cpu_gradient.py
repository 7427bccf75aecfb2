"""Gradients by the CPU's own calls: against float64, for every instruction set, and what a program has of them."""

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
from kernel_checks import TOLERANCE, call, inputs_and_gradients
from platforms import PLATFORM

import jax_sparse_conv as jsc

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="these are the CPU's gradients")

CASES = (
    Case("3x3", (2, 9, 11, 19), 40, zeros=0.5),
    Case("3x3, many channels", (1, 7, 7, 130), 136, zeros=0.6),
    Case("1x1", (3, 8, 7, 33), 72, kernel=(1, 1), zeros=0.4),
    Case("1x1, few results", (3, 8, 7, 33), 9, kernel=(1, 1), zeros=0.4),
    Case("1x1, 8 vectors", (1, 6, 5, 20), 264, kernel=(1, 1), zeros=0.4),
    Case("1x1 stride 2", (2, 9, 8, 24), 16, kernel=(1, 1), strides=2, zeros=0.5),
    Case("1x1 stride 3, padding", (2, 9, 8, 24), 16, kernel=(1, 1), strides=3, padding=2, zeros=0.5),
    Case("3x3 stride 2", (2, 13, 12, 17), 24, strides=2, zeros=0.5),
    Case("3x3 stride 2x3", (2, 13, 12, 17), 24, strides=(2, 3), padding=((2, 0), (1, 3)), zeros=0.5),
    Case("2x2 stride 3", (1, 11, 13, 8), 8, kernel=(2, 2), strides=3, padding="VALID", zeros=0.3),
    Case("7x7 stride 2", (2, 21, 20, 3), 32, kernel=(7, 7), strides=2, zeros=0.0),
    Case("5x5 dilation 2", (1, 14, 13, 10), 16, kernel=(5, 5), dilation=2, zeros=0.5),
    Case("3x3 dilation 3 stride 2", (1, 17, 18, 10), 16, dilation=3, strides=2, zeros=0.5),
    Case("1x7", (2, 6, 15, 12), 20, kernel=(1, 7), zeros=0.5),
    Case("11x3", (1, 15, 9, 4), 8, kernel=(11, 3), zeros=0.5),
    Case("groups 2", (2, 9, 8, 32), 48, groups=2, zeros=0.5),
    Case("groups 3 stride 2", (2, 9, 8, 30), 24, groups=3, strides=2, zeros=0.5),
    Case("32 groups of 2", (2, 9, 8, 64), 64, groups=32, zeros=0.5),
    Case("groups of 5 and 3, stride 2", (2, 9, 8, 20), 12, groups=4, strides=2, zeros=0.5),
    Case("depthwise", (2, 9, 8, 24), 24, groups=24, zeros=0.5),
    Case("depthwise, 2 of each", (2, 9, 8, 24), 48, groups=24, zeros=0.5),
    Case("depthwise 5x3 stride 2x3", (1, 17, 16, 8), 8, kernel=(5, 3), groups=8, strides=(2, 3), zeros=0.5),
    Case("depthwise dilation 3, negative padding", (1, 19, 18, 9), 9, groups=9, dilation=3,
         padding=((-2, 3), (1, -4)), zeros=0.5),
    Case("depthwise 7x7", (1, 14, 13, 16), 16, kernel=(7, 7), groups=16, zeros=0.5),
    Case("wide padding", (1, 4, 5, 8), 8, padding=5, zeros=0.5),
    Case("negative padding", (1, 12, 11, 8), 8, padding=((-2, 3), (1, -4)), zeros=0.3),
    Case("one pixel", (4, 1, 1, 40), 24, zeros=0.5),
    Case("dense layer", (4, 1, 1, 40), 24, kernel=(1, 1), zeros=0.5),
    Case("several tiles", (1, 70, 61, 6), 8, zeros=0.7),
    Case("several tiles and images", (5, 29, 31, 6), 8, strides=2, zeros=0.7),
    Case("rows of 4,096", (1, 3, 4096, 3), 8, dilation=(1, 60), zeros=0.9),
    Case("nothing but zeros", (1, 6, 6, 8), 8, zeros=1.0),
)  # fmt: skip
DENSE = next(case for case in CASES if case.name == "dense layer")
DEPTHWISE = [case for case in CASES if case.groups == case.x[3] == case.out_channels and case.kernel != (7, 7)]


def squares(x: Any, kernel: Any, case: Case, implementation: str | None) -> jax.Array:
    return (call(case, x, kernel, None, None, implementation) ** 2).sum()


def gradients(case: Case, inputs: cases.Inputs, implementation: str | None = None) -> list[np.ndarray]:
    function = jax.jit(jax.grad(squares, (0, 1)), static_argnums=(2, 3))
    return [np.asarray(each) for each in function(inputs.x, inputs.kernel, case, implementation)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, cpu_isa: str) -> None:
    inputs, both = inputs_and_gradients(case, "float32")
    for found, wanted in zip(gradients(case, inputs), both, strict=True):
        assert oracle.relative_error(found, wanted) <= 1e-6


SPARSE_COTANGENTS = (
    Case("3x3", (2, 19, 21, 32), 40, padding=((1, 1), (1, 1))),
    Case("1x1", (3, 18, 17, 33), 72, kernel=(1, 1), padding=((0, 0), (0, 0))),
    Case("3x3 VALID", (2, 19, 18, 16), 96, padding=((0, 0), (0, 0))),
    Case("5x4 dilation 2", (2, 24, 23, 17), 24, kernel=(5, 4), dilation=2, padding=((3, 4), (2, 5))),
    Case("1x7", (2, 16, 25, 64), 32, kernel=(1, 7), padding=((0, 0), (3, 3))),
    Case("wide padding", (2, 14, 15, 32), 32, padding=((5, 4), (3, 6))),
    Case("negative padding", (2, 22, 21, 32), 32, padding=((-2, 3), (1, -4))),
    Case("3x3 stride 2", (2, 29, 31, 32), 32, strides=2, padding=((1, 1), (1, 1))),
    Case("groups 2", (2, 19, 18, 64), 64, groups=2, padding=((1, 1), (1, 1))),
    Case("chunks", (4, 41, 40, 16), 16, padding=((1, 1), (1, 1))),
)


def kernel_gradient(case: Case, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    """In float64, tap by tap; the cases' paddings are numbers."""
    kh, kw = case.kernel
    step = case.strides if isinstance(case.strides, int) else case.strides[0]
    apart = case.dilation if isinstance(case.dilation, int) else case.dilation[0]
    room = 2 * max(abs(pad) for pads in case.padding for pad in pads)  # so that crops are slices, too
    wide = np.pad(x.astype(np.float64), ((0, 0), (room, room), (room, room), (0, 0)))
    rows, columns = cotangent.shape[1:3]
    grouped = cotangent.astype(np.float64).reshape(*cotangent.shape[:3], case.groups, -1)
    found = []
    for row, column in np.ndindex(kh, kw):
        top, left = room - case.padding[0][0] + row * apart, room - case.padding[1][0] + column * apart
        met = wide[:, top : top + (rows - 1) * step + 1 : step, left : left + (columns - 1) * step + 1 : step]
        met = met.reshape(*met.shape[:3], case.groups, -1)
        found.append(np.einsum("nhwgc,nhwgk->cgk", met, grouped).reshape(met.shape[-1], -1))
    return np.stack(found).reshape(kh, kw, *found[0].shape)


@pytest.mark.parametrize("zeros", [(0.0, 0.97), (0.9, 0.2)], ids=["of the cotangent", "of x"])
@pytest.mark.parametrize("case", SPARSE_COTANGENTS, ids=lambda case: case.name)
def test_either_side_may_have_the_zeros(case: Case, zeros: tuple[float, float], cpu_isa: str) -> None:
    """The call goes through the non-zeros of the sparser one."""
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        with jax.enable_x64(dtype == "float64"):
            rng = np.random.default_rng(0)
            inputs = cases.inputs(case, jnp.dtype(dtype))
            x, cotangent = (rng.standard_normal(shape) for shape in (case.x, call(case, *inputs, None).shape))
            x, cotangent = (
                np.where(rng.random(each.shape) < share, 0, each).astype(jnp.dtype(dtype))
                for each, share in zip((x, cotangent), zeros, strict=True)
            )
            function = lambda kernel, x=x, inputs=inputs: call(case, x, kernel, *inputs[2:], None)  # noqa: E731
            found = jax.vjp(function, inputs.kernel)[1](cotangent)[0]
            error = oracle.relative_error(found, kernel_gradient(case, x, cotangent))
            assert error <= (1e-6 if dtype == "float32" else TOLERANCE[dtype]), dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    "case", [CASES[0], CASES[2], CASES[8], CASES[15], DENSE, *DEPTHWISE[:2]], ids=lambda case: case.name
)
def test_dtypes(case: Case, dtype: str, cpu_isa: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        inputs, both = inputs_and_gradients(case, dtype)
        for found, wanted in zip(gradients(case, inputs), both, strict=True):
            assert found.dtype == jnp.dtype(dtype)
            assert oracle.relative_error(found, wanted) <= TOLERANCE[dtype] * (1 if dtype == "float64" else 3)


def program(case: Case, argument: int) -> str:
    inputs = cases.inputs(case)
    backward = jax.jit(jax.grad(squares, argument), static_argnums=(2, 3))
    return str(backward.lower(inputs.x, inputs.kernel, case, "ecr").as_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_backward_pass_has_no_convolution_of_xlas(case: Case) -> None:
    found = program(case, 1)
    assert found.count("@jsc_kernel_gradient(") == (case not in DEPTHWISE)
    assert "stablehlo.convolution" not in found


def test_the_gradient_of_a_dense_layers_x_turns_no_kernel() -> None:
    found = program(DENSE, 0)
    assert "stablehlo.dot_general" in found
    assert "stablehlo.transpose" not in found


@pytest.mark.parametrize(("case", "parts"), [(CASES[0], 1), (CASES[5], 1), (CASES[7], 4), (CASES[15], 1)], ids=str)
def test_gradients_of_x_are_convolutions_of_this_package(case: Case, parts: int) -> None:
    """One for each phase of the strides that a tap meets."""
    found = program(case, 0)
    assert found.count("@jsc_ecr(") == 1 + parts
    assert "stablehlo.convolution" not in found


@pytest.mark.parametrize(
    "case",
    [
        Case("few results", (1, 7, 7, 8), 4),
        Case("patches", (1, 32, 32, 8), 16, kernel=(4, 4), strides=4, padding="VALID"),
        Case("whole maps", (1, 9, 9, 8), 16, kernel=(9, 9), padding="VALID"),
        Case("far apart", (1, 6, 6, 8), 16, dilation=2900, padding=2900),
        Case("long rows", (1, 2, 4097, 3), 8),
    ],
    ids=lambda case: case.name,
)
def test_what_is_left_to_xla(case: Case) -> None:
    assert "jsc_kernel_gradient" not in program(case, 1)
    inputs = cases.inputs(case)
    for found, wanted in zip(gradients(case, inputs), oracle.gradients(case, inputs), strict=True):
        assert oracle.relative_error(found, wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_strict_settings(dtype: str) -> None:
    inputs = cases.inputs(CASES[0], jnp.dtype(dtype))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for found in gradients(CASES[0], inputs):
            assert found.dtype == jnp.dtype(dtype)


def test_bitwise_repeatable() -> None:
    case = CASES[1]
    inputs = cases.inputs(case)
    first = gradients(case, inputs)
    for _ in range(5):
        for found, before in zip(gradients(case, inputs), first, strict=True):
            np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (8, 8)])
def test_long_sums_are_added_up_in_parts(channels: int, groups: int, cpu_isa: str) -> None:
    """25,600 products of one sign: one chain of float32 additions is off by 2e-6."""
    case = Case("long", (4, 80, 80, channels), 8, kernel=(1, 1), groups=groups, zeros=0.0, one_sign=True)
    inputs, (_, wanted) = inputs_and_gradients(case, "float32")
    assert oracle.relative_error(gradients(case, inputs)[1], wanted) <= 4e-7


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "case",
    [
        Case("a corner", (1, 8, 8, 16), 16, zeros=0.5),
        Case("stride 2, the last row and column are not read", (1, 8, 8, 16), 20, strides=2, padding="VALID"),
        Case("stride 3, nor here", (1, 8, 8, 16), 16, strides=3, padding=0),
        Case("5x5", (2, 8, 8, 11), 9, kernel=(5, 5), zeros=0.5),
        Case("1x1, stride 2", (1, 8, 8, 16), 16, kernel=(1, 1), strides=2, padding="VALID"),
    ],
    ids=lambda case: case.name,
)
def test_what_is_not_finite_reaches_no_tap_that_does_not_read_it(case: Case, value: float, cpu_isa: str) -> None:
    inputs = cases.inputs(case)
    inputs.x[0, -1, -1, 3] = value
    convolve = functools.partial(jsc.conv, jnp.asarray(inputs.x), implementation="ecr", **case.arguments)
    like_lax = functools.partial(jsc.conv, jnp.asarray(inputs.x), implementation="xla", **case.arguments)
    y, back = jax.vjp(convolve, jnp.asarray(inputs.kernel))
    _, back_of_lax = jax.vjp(like_lax, jnp.asarray(inputs.kernel))
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal(y.shape), jnp.float32)
    (found,), (wanted,) = back(cotangent), back_of_lax(cotangent)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(np.asarray(found)[finite], np.asarray(wanted)[finite], rtol=1e-4, atol=1e-4)


def test_subnormals_count_and_nan_stays(cpu_isa: str) -> None:
    x = np.zeros((1, 4, 4, 8), np.float32)
    x[0, 1, 1, 3], x[0, 2, 2, 4] = 1e-40, np.nan
    call = jax.ffi.ffi_call("jsc_kernel_gradient", jax.ShapeDtypeStruct((1, 1, 1, 8, 8), np.float32))
    found = np.asarray(call(x, np.full((1, 4, 4, 8), 1e30, np.float32), **settings()))[0, 0, 0]
    np.testing.assert_allclose(found[3], 1e-10, rtol=1e-4)
    assert np.isnan(found[4]).all()
    assert not found[[0, 1, 2, 5, 6, 7]].any()


def settings(**changes: Any) -> dict[str, Any]:
    given = {"stride": [1, 1], "padding": [0, 0, 0, 0], "dilation": [1, 1], "groups": 1} | changes
    return {name: np.asarray(value, np.int64) if np.ndim(value) else np.int64(value) for name, value in given.items()}


@pytest.mark.parametrize(
    ("shapes", "changes", "message"),
    [
        (((1, 4, 4, 8), (1, 3, 4, 8), (1, 1, 1, 8, 8)), {}, "the convolution gives"),
        (((1, 4, 4, 8), (1, 4, 4, 8), (1, 1, 1, 4, 8)), {}, "does not divide"),
        (((1, 4, 4, 8), (1, 4, 4, 8), (1, 1, 1, 8, 8)), {"stride": [0, 1]}, "at least 1"),
        (((1, 4, 4, 8), (1, 4, 4, 8), (1, 1, 1, 8, 8)), {"stride": [1]}, "array of 2"),
        (((1, 4, 4, 8), (1, 4, 8), (1, 1, 1, 8, 8)), {}, "gradient five"),
        (((0, 4, 4, 8), (0, 4, 4, 8), (1, 1, 1, 8, 8)), {}, "nothing may be empty"),
        (((1, 1, 65536, 1), (1, 1, 65536, 8), (1, 1, 1, 1, 8)), {}, "65536 columns"),
        (
            ((1, 6, 6, 8), (1, 6, 6, 8), (1, 3, 3, 8, 8)),
            {"dilation": [2900, 2900], "padding": [2900] * 4},
            "too large for the gradient",
        ),
        (
            ((1, 1, 65000, 1), (1, 1, 65000, 8), (1, 1, 3, 1, 8)),
            {"dilation": [1, 300], "padding": [0, 0, 300, 300]},
            "too large for the gradient",
        ),
        (((1, 9, 9, 8), (1, 1, 1, 8), (1, 1, 1, 8, 8)), {"stride": [1000, 9]}, "too large for the gradient"),
    ],
)
def test_a_wrong_call_is_an_error(shapes: tuple[Any, ...], changes: dict[str, Any], message: str) -> None:
    x, cotangent = (np.zeros(shape, np.float32) for shape in shapes[:2])
    call = jax.ffi.ffi_call("jsc_kernel_gradient", jax.ShapeDtypeStruct(shapes[2], np.float32))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(call(x, cotangent, **settings(**changes)))


def test_dtypes_must_fit() -> None:
    x = np.zeros((1, 2, 2, 8), np.float32)
    call = jax.ffi.ffi_call("jsc_kernel_gradient", jax.ShapeDtypeStruct((1, 1, 1, 8, 8), jnp.bfloat16))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="float64 for float64 and else float32"):
        jax.block_until_ready(call(x, x, **settings()))
