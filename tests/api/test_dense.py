"""`dense` against float64 lax on the CPU: dtypes, what is not finite, and that results repeat."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import TOLERANCE, poison
from platforms import require

import jax_sparse_conv as jsc


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "zeros"), cases.DENSE_CASES, ids=lambda value: str(value))
def test_dense(sizes: tuple[int, int, int], zeros: float, dtype: str) -> None:
    check_dense(sizes, zeros, dtype)


def check_dense(sizes: tuple[int, int, int], zeros: float, dtype: str) -> None:
    require("dense", dtype)
    rows, channels, out_channels = sizes
    case = Case("dense", (rows, 1, 1, channels), out_channels, kernel=(1, 1), bias=True, activation="relu", zeros=zeros)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    x, kernel, bias = map(cases.on_device, (inputs.x.reshape(rows, channels), inputs.kernel[0, 0], inputs.bias))
    poison((rows, out_channels), dtype)
    result = jsc.dense(x, kernel, bias, activation="relu", implementation="ecr")
    wanted = oracle.expected(case, inputs).reshape(rows, out_channels)
    assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 3])
def test_long_sums_are_added_up_in_parts(rows: int) -> None:
    """One chain of 25,088 additions is off by 3e-6."""
    require("dense", "float32")
    rng = np.random.default_rng(0)
    x = np.abs(rng.standard_normal((rows, 25088), np.float32))
    kernel = rng.standard_normal((25088, 40), np.float32)
    result = jsc.dense(jnp.asarray(x), jnp.asarray(kernel), implementation="ecr", precision="highest")
    assert oracle.relative_error(result, x.astype(np.float64) @ kernel.astype(np.float64)) <= 7e-7


@pytest.mark.parametrize("implementation", [None, "xla", "ecr"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(1, 14, 160), (1, 1024, 10), (2, 1024, 1)])
def test_one_row_or_column_of_16_bits(sizes: tuple[int, int, int], dtype: str, implementation: str | None) -> None:
    """The result is rounded, and no product or sum on the way."""
    if implementation == "ecr":
        require("dense", dtype)
    rows, channels, out_channels = sizes
    rng = np.random.default_rng(rows)
    x, kernel = (
        rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((rows, channels), (channels, out_channels))
    )
    result = jax.jit(lambda *given: jsc.dense(*given, implementation=implementation))(x, kernel)
    wide = [operand.astype(np.float64) for operand in (x, kernel)]
    rounding = float(jnp.finfo(dtype).eps) / 2 * np.abs(wide[0] @ wide[1])
    sums = 1e-6 * (np.abs(wide[0]) @ np.abs(wide[1])) + float(jnp.finfo(dtype).smallest_subnormal)
    assert (np.abs(np.asarray(result, np.float64) - wide[0] @ wide[1]) <= 1.01 * rounding + sums).all()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_with_non_finite_values(rows: int, dtype: str) -> None:
    """What is not finite goes through as in lax where no row of x is zero, and is dropped where all are."""
    require("dense", dtype)
    rng = np.random.default_rng(rows)
    x = np.abs(rng.standard_normal((rows, 900), np.float32)) + np.float32(0.1)
    kernel = rng.standard_normal((900, 136), np.float32)
    x[:, 5::9] = 0.0
    kernel[5::18], kernel[14::18] = np.inf, np.nan  # rows of zeros
    kernel[301, 7], kernel[302, 8], kernel[899, 135], x[0, 411] = np.inf, np.nan, -np.inf, np.inf
    operands = jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)
    result = np.asarray(jsc.dense(*operands, implementation="ecr"), np.float64)
    kept = np.flatnonzero(x[0])
    wide = [np.asarray(operand, np.float64) for operand in operands]
    with np.errstate(invalid="ignore"):
        wanted = wide[0][:, kept] @ wide[1][kept]
    np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))
    infinite = np.isinf(wanted)
    np.testing.assert_array_equal(result[infinite], wanted[infinite])
    finite = np.isfinite(wanted)
    assert not finite.any() or oracle.relative_error(result[finite], wanted[finite]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dense_is_bitwise_repeatable(rows: int, dtype: str) -> None:
    require("dense", dtype)
    rng = np.random.default_rng(rows)
    x = np.maximum(rng.standard_normal((rows, 5000), np.float32), 0)
    kernel, bias = rng.standard_normal((5000, 1000), np.float32), rng.standard_normal(1000, np.float32)
    operands = [jnp.asarray(value, dtype) for value in (x, kernel, bias)]
    results = [np.asarray(jsc.dense(*operands, activation="relu", implementation="ecr")) for _ in range(3)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_of_several_kernels(dtype: str) -> None:
    require("dense", dtype)
    rng = np.random.default_rng(5)
    x = np.maximum(rng.standard_normal((3, 1, 1032), np.float32), 0)
    kernel, bias = rng.standard_normal((3, 1032, 520), np.float32), rng.standard_normal((3, 520), np.float32)
    operands = [jnp.asarray(value, dtype) for value in (x, kernel, bias)]
    result = jax.vmap(functools.partial(jsc.dense, implementation="ecr"))(*operands)
    wide = [np.asarray(operand, np.float64) for operand in operands]
    assert oracle.relative_error(result, wide[0] @ wide[1] + wide[2][:, None]) <= TOLERANCE[dtype]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_dense(data: st.DataObject) -> None:
    rows, channels = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 700))
    out_channels = data.draw(st.integers(1, 300))
    dtype = data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    zeros = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    check_dense((rows, channels, out_channels), zeros, dtype)
