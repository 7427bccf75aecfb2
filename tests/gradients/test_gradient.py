"""Gradients of x and of the kernel as a primitive: vmap, derivatives of them, and what a program has of them."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE, call
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src.primitive import turned_kernel
from jax_sparse_conv._src.primitive.turned_kernel import Taps, swapped

CASE = Case("3x3", (2, 6, 5, 8), 6, strides=2, groups=2)


def squares(x: Any, kernel: Any, implementation: str = "ecr", case: Case = CASE) -> jax.Array:
    return (call(case, x, kernel, None, None, implementation) ** 2).sum()


gradients = jax.grad(squares, (0, 1))


def test_it_is_what_a_backward_pass_has() -> None:
    inputs = cases.inputs(CASE)
    for index in (0, 1):
        program = str(jax.make_jaxpr(jax.grad(squares, index))(inputs.x, inputs.kernel))
        assert program.count("jsc_gradient[") == 1
        assert f"by_kernel={index == 1}" in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [CASE, Case("depthwise", (1, 7, 6, 4), 4, groups=4), Case("dilation", (2, 9, 8, 3), 5, dilation=2, padding=3)],
    ids=lambda case: case.name,
)
def test_against_float64(case: Case, dtype: str) -> None:
    inputs = cases.inputs(case, dtype)
    tolerance = TOLERANCE[dtype] * (1 if dtype == "float32" else 3)  # the result is rounded, too
    wanted = oracle.gradients(case, inputs)
    for ours, theirs in zip(gradients(inputs.x, inputs.kernel, case=case), wanted, strict=True):
        assert ours.dtype == jnp.dtype(dtype)
        assert oracle.relative_error(ours, theirs) <= tolerance


@pytest.mark.parametrize("implementation", [None, "ecr", "direct", "xla"])
@pytest.mark.parametrize(("channels", "strides"), [(8, 1), (16, 1), (16, 2)])
def test_a_relu_lets_nothing_through_where_its_input_is_nan(channels: int, strides: int, implementation: Any) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 8, 8, channels)), rng.normal(size=(3, 3, channels, channels))
    operands = [jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), jnp.zeros(channels).at[2].set(np.nan)]

    def wanted(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        by_lax = jax.lax.conv_general_dilated(
            x, kernel, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        )
        return jax.nn.relu(by_lax + bias)

    def found(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        more = {"strides": strides, "precision": "highest", "implementation": implementation}
        return jsc.conv(x, kernel, bias, activation="relu", **more)

    def gradients_of(function: Any) -> Any:
        return jax.grad(lambda *operands: function(*operands).sum(), (0, 1, 2))

    assert np.isnan(found(*operands)[..., 2]).all()
    for ours, theirs in zip(gradients_of(found)(*operands), gradients_of(wanted)(*operands), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    tangents = [jnp.ones_like(each) for each in operands]
    for function in (found, wanted):
        assert (jax.jvp(function, operands, tangents)[1][..., 2] == 0).all()


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("size", [3, 0])
def test_vmap(axes: tuple[int | None, int | None], size: int) -> None:
    """One gradient for each image or each kernel; x and kernel that are not batched are one for all."""
    each = [cases.inputs(CASE, seed=seed) for seed in range(3)]
    values = [np.stack([getattr(inputs, name) for inputs in each])[:size] for name in ("x", "kernel")]
    given = [value if axis == 0 else getattr(each[0], name)
             for value, axis, name in zip(values, axes, ("x", "kernel"), strict=True)]  # fmt: skip
    found = jax.vmap(gradients, axes)(*given)
    assert [array.shape for array in found] == [(size, *each[0].x.shape), (size, *each[0].kernel.shape)]
    for index in range(size):
        chosen = [each[0 if axis is None else index] for axis in axes]
        wanted = oracle.gradients(CASE, cases.Inputs(chosen[0].x, chosen[1].kernel, None, None))
        for ours, theirs in zip(found, wanted, strict=True):
            assert oracle.relative_error(ours[index], theirs) <= TOLERANCE["float32"]


def test_derivatives_of_it() -> None:
    """Forward and backward, by x and by kernel, against the same derivatives of lax in float64."""
    x, kernel, _, _ = cases.inputs(CASE)
    tangents = cases.inputs(CASE, seed=1)[:2]

    def forward(implementation: str, *values: Any) -> Any:
        gradient = lambda *operands: gradients(*operands, implementation)  # noqa: E731
        return jax.jvp(gradient, values[:2], values[2:])[1]

    def backward(implementation: str, *values: Any) -> Any:
        length = lambda *operands: sum((g**2).sum() for g in gradients(*operands, implementation))  # noqa: E731
        return jax.grad(length, (0, 1))(*values[:2])

    with jax.enable_x64(True):
        wide = [np.asarray(value, np.float64) for value in (x, kernel, *tangents)]
        wanted = [*forward("xla", *wide), *backward("xla", *wide)]
        wanted = [np.asarray(value) for value in wanted]
    found = [*forward("ecr", x, kernel, *tangents), *backward("ecr", x, kernel)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert oracle.relative_error(ours, theirs) <= 3 * TOLERANCE["float32"]


# --- kernels turned round --------------------------------------------------------------------------------------------

on_cpu = pytest.mark.skipif(PLATFORM != "cpu", reason="a CPU's call turns them")
ALL = slice(None, None, -1)
# Shape of the kernel, its groups, and the rows and columns that are taken.
TURNED: dict[str, tuple[tuple[int, ...], int, tuple[slice, slice]]] = {
    "1x1": ((1, 1, 1, 64, 48), 1, (ALL, ALL)),
    "3x3, odd": ((1, 3, 3, 67, 101), 1, (ALL, ALL)),
    "whole strips and rests": ((1, 2, 3, 96, 160), 1, (ALL, ALL)),
    "stacks": ((3, 3, 2, 33, 40), 1, (ALL, ALL)),
    "groups": ((2, 3, 3, 5, 84), 4, (ALL, ALL)),
    "groups of whole squares": ((1, 1, 3, 32, 128), 2, (ALL, ALL)),
    "depthwise": ((1, 3, 3, 1, 40), 40, (ALL, ALL)),
    "depthwise, 2 of each": ((1, 3, 3, 1, 80), 40, (ALL, ALL)),
    "groups of one result": ((1, 3, 3, 2, 40), 40, (ALL, ALL)),
    "one channel": ((1, 3, 3, 1, 1), 1, (ALL, ALL)),
    "one output channel": ((1, 3, 3, 70, 1), 1, (ALL, ALL)),
    "a phase": ((1, 3, 5, 34, 36), 1, (slice(2, None, -2), slice(3, 0, -2))),
    "a tap": ((2, 3, 3, 34, 36), 2, (slice(1, 0, -2), slice(2, 1, -3))),
}
by_kernel = pytest.mark.parametrize("name", TURNED)


def turned_and_by_lax(name: str) -> tuple[tuple[int, ...], Any, Any]:
    """The kernel's shape, the primitive and what it is, of a kernel."""
    shape, groups, slices = TURNED[name]
    rows, columns = map(Taps.of, slices, shape[1:3])
    after = np.zeros(4, np.float32)
    return (
        shape,
        lambda kernel: turned_kernel.turned(kernel, after, rows, columns, groups),
        lambda kernel: swapped(kernel, groups)[:, slices[0], slices[1]],
    )


def kernels(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@by_kernel
def test_turned_kernels(name: str, dtype: str) -> None:
    shape, turned, by_lax = turned_and_by_lax(name)
    with jax.enable_x64(dtype == "float64"):
        kernel = kernels(shape, dtype)
        found = jax.jit(turned)(kernel)
        assert found.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(by_lax(kernel)))


LARGE = Case("3x3", (1, 8, 7, 64), 80)


@on_cpu
@pytest.mark.parametrize("strides", [1, 2])
def test_a_gradient_turns_its_kernels_by_a_call(strides: int) -> None:
    case = Case("large", LARGE.x, LARGE.out_channels, strides=strides, zeros=0.5)
    inputs = cases.inputs(case)
    program = jax.jit(jax.grad(lambda x, kernel: squares(x, kernel, case=case))).lower(inputs.x, inputs.kernel)
    text = program.as_text()
    assert text.count("@jsc_turned_kernel(") == strides**2
    assert not any(name in text for name in ("stablehlo.transpose", "stablehlo.reverse"))
    found, wanted = program.compile()(inputs.x, inputs.kernel), oracle.gradients(case, inputs)[0]
    assert oracle.relative_error(found, wanted) <= TOLERANCE["float32"]


@on_cpu
def test_small_kernels_are_turned_by_xla() -> None:
    inputs = cases.inputs(CASE)
    text = jax.jit(jax.grad(squares)).lower(inputs.x, inputs.kernel).as_text()
    assert "jsc_turned_kernel" not in text
    assert "stablehlo.transpose" in text


@on_cpu
def test_derivatives_of_a_gradient_with_a_large_kernel() -> None:
    inputs = cases.inputs(LARGE)

    def second(implementation: str) -> Any:
        first = jax.grad(lambda x, kernel: squares(x, kernel, implementation, LARGE))
        return jax.grad(lambda x, kernel: (first(x, kernel) ** 2).sum(), (0, 1))(inputs.x, inputs.kernel)

    with jax.default_matmul_precision("highest"):
        for found, wanted in zip(second("ecr"), second("xla"), strict=True):
            assert oracle.relative_error(found, wanted) <= 1e-5


@on_cpu
@pytest.mark.parametrize(
    ("shapes", "changes", "message"),
    [
        (((1, 3, 3, 4, 8), (1, 3, 3, 4, 8)), {}, r"in 1 groups the result must be \[1, rows, columns"),
        (((1, 3, 3, 4, 8), (2, 3, 3, 8, 4)), {}, "the result must be"),
        (((1, 3, 3, 4, 8), (1, 3, 3, 8, 4)), {"groups": 0}, "in 0 groups"),
        (((1, 3, 3, 4, 8), (1, 3, 3, 8, 4)), {"groups": 3}, "in 3 groups"),
        (((1, 3, 3, 4, 8), (1, 3, 3, 8, 4)), {"first": [3, 2]}, "3 taps from 3 on in steps of -1"),
        (((1, 3, 3, 4, 8), (1, 3, 3, 8, 4)), {"first": [-1, 2]}, "3 taps from -1 on"),
        (((1, 3, 3, 4, 8), (1, 4, 3, 8, 4)), {}, "4 taps from 2 on in steps of -1 are not all among the 3"),
        (((1, 3, 3, 4, 8), (1, 3, 2, 8, 4)), {"step": [-1, 1]}, "2 taps from 2 on in steps of 1"),
        (((1, 3, 3, 4, 8), (1, 3, 2, 8, 4)), {"step": [-1, 0]}, "2 taps from 2 on in steps of 0"),
        (((1, 3, 3, 4, 8), (1, 3, 2, 8, 4)), {"step": [-1, -(2**63)]}, "2 taps from 2 on"),
        (((1, 3, 3, 4, 8), (1, 3, 3, 8, 4)), {"first": [2]}, r"first\[2\], step\[2\] and groups, all int64"),
        (((3, 3, 4, 8), (1, 3, 3, 8, 4)), {}, r"the kernel must be \[S, kh, kw"),
    ],
)
def test_a_wrong_call_is_an_error(shapes: Any, changes: dict[str, Any], message: str) -> None:
    given = {"first": [2, 2], "step": [-1, -1], "groups": 1} | changes
    attributes = {name: np.asarray(v, np.int64) if np.ndim(v) else np.int64(v) for name, v in given.items()}
    call = jax.ffi.ffi_call("jsc_turned_kernel", jax.ShapeDtypeStruct(shapes[1], np.float32))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(call(np.zeros(shapes[0], np.float32), np.zeros(1, np.float32), **attributes))


@on_cpu
@pytest.mark.parametrize(
    ("dtypes", "message"), [(("float32", "bfloat16"), "kernel's dtype"), (("int32",) * 2, "must be float32")]
)
def test_wrong_dtypes_are_an_error(dtypes: tuple[str, str], message: str) -> None:
    call = jax.ffi.ffi_call("jsc_turned_kernel", jax.ShapeDtypeStruct((1, 1, 1, 8, 4), dtypes[1]))
    attributes = {"first": np.zeros(2, np.int64), "step": -np.ones(2, np.int64), "groups": np.int64(1)}
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(call(np.zeros((1, 1, 1, 4, 8), dtypes[0]), np.zeros(1, np.float32), **attributes))
