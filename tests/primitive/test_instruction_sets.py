"""The CPU's kernels of every instruction set against float64 lax: all loops, dtypes and the extremes.

Those of another processor run here too, under an emulator: `tests/emulated/emulate.sh`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE, inputs_and_result, run
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="these are the CPU's instruction sets")

DTYPES = ("float32", "bfloat16", "float16", "float64")
RUNS = cases.runs()
OF_LOOPS = [(case, name) for case, name in RUNS if name in ("ecr", "pecr")]
OTHERS = [(case, name) for case, name in RUNS if name not in ("ecr", "pecr", "adaptive")]


def check_all(runs: list[tuple[Case, str]], dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        for case, implementation in runs:
            inputs, wanted = inputs_and_result(case, dtype)
            result = run(case, inputs, implementation)
            assert result.dtype == jnp.dtype(dtype)
            assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype], (case, implementation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loops(dtype: str, cpu_isa: str, cpu_loop: str) -> None:
    assert _native.cpu_isa() == cpu_isa
    check_all(OF_LOOPS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_and_coo(dtype: str, cpu_isa: str) -> None:
    check_all(OTHERS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_layers(dtype: str, cpu_isa: str) -> None:
    for (rows, channels, out_channels), zeros in cases.DENSE_CASES[:10]:
        case = Case("dense", (rows, 1, 1, channels), out_channels, kernel=(1, 1), bias=True, zeros=zeros)
        inputs, wanted = inputs_and_result(case, dtype)
        with jax.enable_x64(dtype == "float64"):
            x, kernel, bias = (cases.on_device(v) for v in (inputs.x[:, 0, 0], inputs.kernel[0, 0], inputs.bias))
            result = jsc.dense(x, kernel, bias, implementation="ecr")
        assert oracle.relative_error(result, wanted[:, 0, 0]) <= TOLERANCE[dtype], (rows, channels, out_channels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_kernels(dtype: str, cpu_isa: str, cpu_loop: str) -> None:
    case = Case("stacked", (2, 9, 7, 37), 41)
    inputs = [cases.inputs(case, jnp.dtype(dtype), seed) for seed in range(3)]
    wanted = np.stack([oracle.expected(case, each) for each in inputs])
    with jax.enable_x64(dtype == "float64"):
        x, kernel = (jnp.asarray(np.stack(values)) for values in list(zip(*inputs, strict=True))[:2])
        result = jax.vmap(lambda x, kernel: jsc.conv(x, kernel, implementation="ecr"))(x, kernel)
    assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype]


# Vectors of sums and an incomplete one, and the windows of each loop; no padding, whose zeros lax does not skip.
EXTREMES = (
    Case("3x3", (1, 9, 9, 12), 21, padding="VALID"),
    Case("1x1", (1, 9, 9, 12), 21, kernel=(1, 1)),
    Case("5x5", (1, 9, 9, 12), 21, kernel=(5, 5), padding="VALID"),
    Case("strides", (1, 9, 9, 12), 21, strides=2, padding="VALID"),
    Case("depthwise", (1, 9, 9, 21), 21, groups=21, padding="VALID"),
    Case("max pool", (1, 9, 9, 12), 21, padding="VALID", bias=True, pool="max"),
    Case("average pool", (1, 9, 9, 12), 21, padding="VALID", activation="relu", pool="avg"),
)


def check_extremes(case: Case, inputs: cases.Inputs, dtype: str) -> None:
    wanted = oracle.expected(case, inputs)
    for implementation in ("ecr", "direct", "coo") if case.pool is None else ("pecr",):
        if not cases.computes(implementation, case):
            continue
        with jax.enable_x64(dtype == "float64"):
            result = run(case, inputs, implementation)
        assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype], implementation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EXTREMES, ids=lambda case: case.name)
def test_non_finite_and_tiny_values(case: Case, dtype: str, cpu_isa: str, cpu_loop: str) -> None:
    """Those of x are not zeros, and those of the kernel count wherever x is not zero."""
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.x[0, 1, 1, 3], inputs.x[0, 4, 7, 0], inputs.x[0, 7, 2, 5] = np.nan, np.inf, -np.inf
    inputs.x[0, 8, 8, 2] = tiny(dtype)
    check_extremes(case, inputs, dtype)
    inputs = cases.inputs(dataclasses.replace(case, zeros=0.0), jnp.dtype(dtype))
    inputs.kernel[-1, 0, 0, 3], inputs.kernel[0, -1, -1, 20] = np.inf, np.nan
    check_extremes(case, inputs, dtype)


def tiny(dtype: str) -> Any:
    """A subnormal."""
    return jnp.finfo(dtype).smallest_subnormal * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_of_x_count(dtype: str, cpu_isa: str, cpu_loop: str) -> None:
    """Whatever modes XLA's threads run in."""
    large = float(jnp.finfo(dtype).max) / 64
    x, kernel = np.full((1, 3, 3, 4), tiny(dtype)), np.full((3, 3, 4, 21), large)
    case = Case("subnormals", x.shape, 21, padding="VALID")
    inputs = cases.Inputs(x.astype(jnp.dtype(dtype)), kernel.astype(jnp.dtype(dtype)), None, None)
    wanted = np.full((1, 1, 1, 21), 36 * float(inputs.x[0, 0, 0, 0]) * float(inputs.kernel[0, 0, 0, 0]))
    assert wanted.min() > 0
    for implementation in ("ecr", "direct", "coo"):
        with jax.enable_x64(dtype == "float64"):
            result = run(case, inputs, implementation)
        assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype], implementation


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_zero_drops_what_the_kernel_has(dtype: str, cpu_isa: str, cpu_loop: str) -> None:
    """Infinities and NaN too, whether the zero has a sign or not."""
    x = np.full((2, 4, 4, 6), -0.0)
    x[0], x[..., 0] = 0.0, 1.0
    kernel = np.ones((3, 3, 6, 21))
    kernel[:, :, 1], kernel[:, :, 2] = np.inf, np.nan
    with jax.enable_x64(dtype == "float64"):
        x, kernel = x.astype(jnp.dtype(dtype)), kernel.astype(jnp.dtype(dtype))
        for implementation in ("ecr", "coo"):
            result = np.asarray(jsc.conv(x, kernel, padding="VALID", implementation=implementation))
            np.testing.assert_array_equal(result.astype(np.float64), np.full((2, 2, 2, 21), 9.0))
        pooled = np.asarray(jsc.conv_pool(x, kernel, padding="VALID", implementation="pecr"))
        np.testing.assert_array_equal(pooled.astype(np.float64), np.full((2, 1, 1, 21), 9.0))
        row = np.asarray(jsc.dense(x[:, 0, 0], kernel[0, 0], implementation="ecr"))
        np.testing.assert_array_equal(row.astype(np.float64), np.full((2, 21), 1.0))


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 2.0**-12, 600.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value(dtype: str, factor: float, cpu_isa: str, cpu_loop: str) -> None:
    """Widened, multiplied in float32 and rounded to even, by vectors and by what is left of one."""
    values = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype)).reshape(1, 256, 256, 1)
    weight = np.asarray(factor, jnp.dtype(dtype))
    with np.errstate(all="ignore"):
        wanted = (values.astype(np.float32) * weight.astype(np.float32)).astype(jnp.dtype(dtype))
    kernel = np.full((1, 1, 1, 21), weight)
    for implementation in ("ecr", "direct", "coo"):
        result = np.asarray(jsc.conv(values, kernel, implementation=implementation))
        wanted_of_all = np.broadcast_to(wanted, result.shape)
        np.testing.assert_array_equal(result.astype(np.float32), wanted_of_all.astype(np.float32), implementation)
