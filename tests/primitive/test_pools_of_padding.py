"""Pools whose windows have little but padding, in NumPy and float64, as XLA's own are wrong on CPUs.

Windows of nothing but padding, and maps of one row or column with padding behind it, which XLA's sums of windows for
CPUs repeat there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax import export, lax
from jax.experimental import jet
from kernel_checks import TOLERANCE, call, run
from oracle import relative_error
from platforms import PLATFORM, require

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

IMPLEMENTATIONS = (None, "xla", "ecr", "pecr", "direct", "coo", "adaptive")
COLUMN = Case("column", (2, 5, 1, 100), 160, (1, 1), groups=4, pool="avg", window_padding=((0, 0), (2, 0)))
ALONE = (
    dataclasses.replace(COLUMN, bias=True, activation="relu"),
    dataclasses.replace(COLUMN, name="column, max", pool="max", bias=True, activation="relu"),
    Case("row", (2, 1, 5, 40), 24, (1, 1), bias=True, pool="avg", window_padding=((2, 0), (0, 0))),
    Case("row, max", (2, 1, 5, 40), 24, (1, 1), bias=True, pool="max", window_padding=((2, 0), (0, 0))),
    Case("apart", (1, 3, 1, 20), 16, pool="avg", window_strides=(4, 4), window_padding=((2, 1), (3, 1))),
    Case("behind", (2, 1, 1, 48), 33, bias=True, pool="avg", window_padding=((0, 5), (0, 5))),
    Case("5x5", (1, 1, 4, 16), 16, (5, 5), pool="avg", window=(3, 2), window_padding=((3, 3), (0, 2))),
    Case("depthwise", (1, 3, 1, 20), 20, groups=20, pool="max", window_padding=((0, 0), (2, 2))),
)
# So many elements that XLA for CPUs leaves sums of windows to YNNPACK.
REPEATED = (
    Case("row", (64, 1, 4, 32), 32, bias=True, pool="avg", window_padding="SAME"),
    Case("column", (64, 4, 1, 32), 32, (1, 1), bias=True, pool="avg", window_padding=((0, 1), (0, 1))),
    Case("pixel", (130, 1, 1, 32), 40, (1, 1), groups=2, bias=True, pool="avg", window=(3, 3),
         window_padding=((0, 2), (0, 2))),
    Case("more windows", (64, 1, 3, 32), 32, bias=True, pool="avg", window_padding=((0, 5), (0, 3))),
    Case("windows of one", (64, 1, 3, 32), 32, bias=True, pool="avg", window=(1, 2), window_strides=(2, 2),
         window_padding=((0, 3), (0, 1))),
    Case("padding in front", (64, 4, 1, 32), 32, bias=True, pool="avg", window_strides=(3, 2),
         window_padding=((4, 1), (2, 1))),
    Case("maxima", (64, 1, 1, 32), 32, bias=True, pool="max", window_padding=((0, 5), (0, 3))),
)  # fmt: skip


def convolved(case: Case, x: Any, kernel: Any, bias: Any = None) -> np.ndarray:
    """What the pool is of: "SAME", without strides."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    rows, columns, inputs, channels = kernel.shape
    padded = np.pad(x, ((0, 0), (rows // 2, rows // 2), (columns // 2, columns // 2), (0, 0)))
    taps = np.lib.stride_tricks.sliding_window_view(padded, (rows, columns), (1, 2))
    taps = taps.reshape(*x.shape[:3], case.groups, inputs, rows, columns)
    weights = kernel.reshape(rows, columns, inputs, case.groups, channels // case.groups)
    y = np.einsum("nhwgcij,ijcgk->nhwgk", taps, weights).reshape(*x.shape[:3], channels)
    y = y if bias is None else y + np.asarray(bias, np.float64)
    return np.maximum(y, 0) if case.activation == "relu" else y


def pooled(case: Case, y: np.ndarray) -> np.ndarray:
    strides = case.window_strides or case.window
    pads = case.window_padding
    if isinstance(pads, str):
        pads = lax.padtype_to_pads(y.shape[1:3], case.window, strides, pads)
    padded = np.pad(y, ((0, 0), *pads, (0, 0)), constant_values=0 if case.pool == "avg" else -np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, case.window, (1, 2))
    windows = windows[:, :: strides[0], :: strides[1]]
    found: np.ndarray = windows.mean((-2, -1)) if case.pool == "avg" else windows.max((-2, -1))
    return found


def exact(case: Case, x: Any, kernel: Any, bias: Any = None) -> np.ndarray:
    return pooled(case, convolved(case, x, kernel, bias))


def operands(case: Case, dtype: str) -> list[Any]:
    """x, kernel and bias, if there is one."""
    return [cases.on_device(v) for v in cases.inputs(case, jnp.dtype(dtype)) if v is not None]


def function_of(case: Case, implementation: str | None) -> Any:
    def function(x: Any, kernel: Any, bias: Any = None) -> jax.Array:
        return call(case, x, kernel, bias, None, implementation)

    return function


def require_if_named(implementation: str | None, dtype: str) -> None:
    if implementation not in (None, "xla"):
        require(implementation, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_windows_of_padding_alone_in_every_loop(dtype: str, cpu_isa: str, cpu_loop: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        for case in ALONE:
            inputs = cases.inputs(case, jnp.dtype(dtype))
            wanted = exact(case, inputs.x, inputs.kernel, inputs.bias)
            assert relative_error(run(case, inputs, "pecr"), wanted) <= TOLERANCE[dtype], case


@pytest.mark.parametrize("case", [*ALONE, *REPEATED], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values(implementation: str | None, dtype: str, case: Case) -> None:
    require_if_named(implementation, dtype)
    with jax.enable_x64(dtype == "float64"):
        given = operands(case, dtype)
        found = jax.jit(function_of(case, implementation))(*given)
        assert relative_error(found, exact(case, *given)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", [None, "xla", "ecr"])
def test_vmap(implementation: str | None, case: Case) -> None:
    require_if_named(implementation, "float32")
    x, kernel, bias = operands(case, "float32")
    function = function_of(case, implementation)
    stacked = [jnp.stack([value, -value, 3 * value]) for value in (x, kernel, bias)]
    for mapped in (0, 2), (2,), (1,), (0, 1, 2):
        axes = [0 if index in mapped else None for index in range(3)]
        given = [stacked[index] if index in mapped else value for index, value in enumerate((x, kernel, bias))]
        found = jax.jit(jax.vmap(function, axes))(*given)
        for index in range(3):
            wanted = exact(case, *(v[index] if axis == 0 else v for v, axis in zip(given, axes, strict=True)))
            assert relative_error(found[index], wanted) <= TOLERANCE["float32"], mapped


@pytest.mark.parametrize("case", [case for case in REPEATED if case.pool == "avg"], ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", [None, "xla", "ecr"])
def test_derivatives_of_averages(implementation: str | None, case: Case) -> None:
    """A linear function's derivative is itself, and its gradient is what has the same products."""
    require_if_named(implementation, "float32")
    x, kernel, _ = operands(case, "float32")
    dx = jax.random.normal(jax.random.key(0), x.shape)
    function = functools.partial(function_of(case, implementation), kernel=kernel)
    wanted = exact(case, dx, kernel)
    _, tangent = jax.jit(lambda x, dx: jax.jvp(function, (x,), (dx,)))(x, dx)
    assert relative_error(tangent, wanted) <= TOLERANCE["float32"]
    weights = jax.random.normal(jax.random.key(1), wanted.shape)
    (gradient,) = jax.jit(lambda x, weights: jax.vjp(function, x)[1](weights))(x, weights)
    products = np.asarray(gradient, np.float64) * np.asarray(dx, np.float64)
    size = np.linalg.norm(gradient) * np.linalg.norm(dx)
    np.testing.assert_allclose(products.sum(), (wanted * np.asarray(weights)).sum(), atol=1e-5 * size)


def test_second_derivatives_and_taylor_terms() -> None:
    case = REPEATED[0]
    x, kernel, bias = operands(case, "float32")
    function = functools.partial(function_of(case, None), kernel=kernel, bias=bias)
    wanted = exact(case, x, kernel, bias)

    def loss(scale: jax.Array) -> jax.Array:
        return jnp.sum(function(scale * x) ** 2) / 2

    linear = exact(case, x, kernel)  # of the scale
    found = jax.jit(jax.grad(jax.grad(loss)))(1.0)
    np.testing.assert_allclose(found, (linear**2).sum(), rtol=1e-5)
    out, (first,) = jet.jet(function, (x,), ((x,),))
    assert relative_error(out, wanted) <= TOLERANCE["float32"]
    assert relative_error(first, linear) <= TOLERANCE["float32"]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("added", ["bias", "another map"])
def test_accelerate(added: str, layout: str) -> None:
    case = REPEATED[0]
    x, kernel, bias = operands(case, "float32")
    other = jax.random.normal(jax.random.key(0), (*x.shape[:3], case.out_channels))
    wanted = pooled(case, convolved(case, x, kernel) + np.asarray(bias if added == "bias" else other, np.float64))

    def on_map(values: tuple[Any, Any], others: Any) -> tuple[Any, ...]:
        return (others, others, *values) if layout == "NCHW" else (others, *values, others)

    def of_user(x: jax.Array, bias: jax.Array, other: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=(layout, "HWIO", layout))
        y = y + (bias[:, None, None] if layout == "NCHW" else bias) if added == "bias" else y + other
        window = on_map((2, 2), 1)
        return lax.reduce_window(y, np.float32(0), lax.add, window, window, on_map(((0, 1), (0, 0)), (0, 0))) / 4

    if layout == "NCHW":
        x, other = (jnp.moveaxis(value, 3, 1) for value in (x, other))
    fast = jsc.accelerate(of_user)
    found = jax.jit(fast)(x, bias, other)
    assert relative_error(jnp.moveaxis(found, 1, 3) if layout == "NCHW" else found, wanted) <= TOLERANCE["float32"]


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU pads as it is told")
def test_of_what_a_user_has_padded() -> None:
    """A 1x1 convolution's averages come first, and XLA would make the user's padding the window's."""
    case = Case("average", (64, 1, 4, 32), 16, (1, 1), pool="avg", window_padding=((0, 1), (0, 0)))
    x, kernel = operands(case, "float32")

    def of_user(x: jax.Array) -> jax.Array:
        return jsc.conv_pool(jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))), kernel, pool="avg", activation=None)

    assert relative_error(jax.jit(of_user)(x), exact(case, x, kernel)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.name)
def test_of_any_height_and_width(case: Case) -> None:
    """Sizes are known only when the program runs."""
    x, kernel, bias = operands(case, "float32")
    unknown = jax.ShapeDtypeStruct(export.symbolic_shape("n,h,w,32"), x.dtype)
    function = functools.partial(function_of(case, "xla"), kernel=kernel, bias=bias)
    program = export.export(jax.jit(function))(unknown)
    for size in (x.shape[1:3], (1, 1), (1, 4), (6, 1), (5, 7)):
        x = jax.random.normal(jax.random.key(0), (x.shape[0], *size, 32))
        assert relative_error(program.call(x), exact(case, x, kernel, bias)) <= TOLERANCE["float32"], size
