"""The CPU's loop by Winograd's algorithm against float64, what it leaves to other loops, and where `None` takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import jax
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import (
    TOLERANCE,
    check_as_exact_as_xla,
    check_images_alone,
    check_kernels_of_their_own,
    check_named_ones_skip,
    run,
)
from platforms import PLATFORM, on_cpu

import jax_sparse_conv as jsc
from jax_sparse_conv import _cpu
from jax_sparse_conv._src.dispatch.chain_tiles import key_of
from jax_sparse_conv._src.problem.geometry import Geometry

SAME: Any = ((1, 1), (1, 1))
CASES = [
    Case("whole squares", (1, 14, 14, 64), 64, bias=True, activation="relu", zeros=0.0),
    Case("half squares", (2, 13, 15, 20), 37, residual=True, bias=True, activation="relu", zeros=0.2),
    Case("no padding", (1, 8, 9, 16), 16, padding="VALID", zeros=0.0),
    Case("uneven padding", (2, 5, 6, 24), 8, padding=((2, 1), (0, 3)), zeros=0.0),
    Case("negative padding", (2, 7, 6, 8), 8, padding=((-1, 2), (3, -1)), zeros=0.0),
    Case("many images", (9, 7, 7, 40), 48, zeros=0.3),
    Case("one pixel", (1, 1, 1, 32), 32, zeros=0.0),
    Case("one channel", (1, 12, 12, 1), 4, zeros=0.0),
    Case("odd channels in several chunks", (1, 6, 5, 515), 67, bias=True, zeros=0.1),
    Case("several tiles", (1, 70, 64, 48), 40, zeros=0.3),
    Case("a wide map", (1, 4, 300, 16), 24, zeros=0.0),
    Case("max pool", (2, 15, 14, 32), 40, bias=True, activation="relu", pool="max", zeros=0.2),
    Case("pool over edges", (1, 9, 9, 16), 33, bias=True, pool="max", window=(3, 3), window_strides=(1, 1),
         window_padding=SAME, zeros=0.0),
    Case("average pool", (1, 12, 12, 24), 16, pool="avg", zeros=0.1),
    Case("no output", (1, 2, 2, 8), 8, padding="VALID"),
    *(case for case in (*cases.ACCURACY_CASES, *cases.LONG_CASES) if case.kernel == (3, 3)),
]  # fmt: skip


@pytest.fixture
def winograd(any_isa: str) -> Iterator[str]:
    """Has the CPU run the loop wherever it can, on each instruction set that this machine has."""
    if PLATFORM != "cpu":
        pytest.skip("the backend is not the CPU")
    with on_cpu(loop="winograd"):
        yield any_isa


def constants(case: Case, inputs: cases.Inputs) -> Any:
    """The call as a compiled function of x whose kernel is packed."""
    kernel, bias, residual = (cases.on_device(value) for value in inputs[1:])
    if case.pool is not None:
        return jax.jit(lambda x: jsc.conv_pool(x, kernel, bias, **case.arguments))
    return jax.jit(lambda x: jsc.conv(x, kernel, bias, residual=residual, **case.arguments))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, winograd: str) -> None:
    inputs = cases.inputs(case)
    wanted = oracle.expected(case, inputs)
    assert oracle.relative_error(run(case, inputs, None), wanted) <= TOLERANCE["float32"]
    assert oracle.relative_error(constants(case, inputs)(inputs.x), wanted) <= TOLERANCE["float32"]


def test_kernels_of_their_own(winograd: str) -> None:
    check_kernels_of_their_own(24, 40)


def test_it_is_as_exact_as_xla(winograd: str) -> None:
    check_as_exact_as_xla(Case("of one sign", (1, 14, 14, 256), 64, zeros=0.0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 1e9])
def test_what_a_value_does_not_reach_is_exact(value: float, winograd: str) -> None:
    """Nor are results changed that are in one square with those that it reaches."""
    case = Case("a large element", (1, 8, 8, 32), 24, zeros=0.0)
    inputs = cases.inputs(case)
    inputs.x[0, 3, 4, 7] = value
    wanted = oracle.expected(case, inputs)
    result = np.asarray(run(case, inputs, None))
    reached = np.zeros((8, 8), bool)
    reached[2:5, 3:6] = True
    np.testing.assert_allclose(result[0, ~reached], wanted[0, ~reached], rtol=0, atol=1e-5)
    if not np.isfinite(value):
        np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))
        np.testing.assert_array_equal(np.isinf(result), np.isinf(wanted))


def test_weights_that_are_not_finite(winograd: str) -> None:
    case = Case("an infinite weight", (1, 6, 6, 16), 24, zeros=0.0)
    inputs = cases.inputs(case)
    inputs.kernel[0, 0, 3, 5] = np.inf
    assert oracle.relative_error(run(case, inputs, None), oracle.expected(case, inputs)) <= TOLERANCE["float32"]


def test_results_do_not_depend_on_tiles(winograd: str) -> None:
    case = Case("batch", (5, 21, 19, 80), 96, bias=True, zeros=0.1)
    inputs = cases.inputs(case)
    check_images_alone(constants(case, inputs), inputs.x)


def test_a_named_implementation_skips_zeros(winograd: str) -> None:
    check_named_ones_skip(8, 8)


MACHINES = {"avx2": (32 << 10, 512 << 10, 32, 2), "avx512": (48 << 10, 1 << 20, 64, 2)}
"""Bytes of L1, L2 and a vector, and threads."""


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_runs_where_there_are_few_zeros(machine: tuple[int, ...]) -> None:
    def loop(density: float, channels: int = 128, *, strides: int = 1, may_be_dense: bool = True) -> str:
        geometry = Geometry(strides=(strides, strides), padding=SAME)
        key = key_of((1, 28, 28, channels), (1, 3, 3, channels, 128), geometry)
        return str(_cpu.plan(key[:16], list(key[16:]), 4, may_be_dense, density, machine, False)[0])

    assert (loop(0.1), loop(1.0)) == ("pixels", "winograd")
    assert loop(1.0, strides=2) == loop(1.0, channels=3) == "direct"
    assert loop(1.0, channels=15) != "winograd"  # few, which transforms do not pay for
    assert loop(1.0, may_be_dense=False) == "pixels"
