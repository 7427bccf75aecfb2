"""The CPU's loop of dot products, for few output channels, against float64, and where `None` takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
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
POINT: Any = {"kernel": (1, 1), "padding": "VALID"}
CASES = [
    *(Case(f"{channels} channels", (2, 7, 9, 20), channels, bias=True, activation="relu") for channels in range(1, 9)),
    *(Case(f"1x1, {channels} channels", (2, 6, 5, 37), channels, bias=True, **POINT) for channels in range(1, 9)),
    Case("one of each", (1, 1, 1, 1), 1, zeros=0.0),
    Case("residual", (2, 6, 7, 40), 3, residual=True, bias=True, activation="relu", zeros=0.2),
    Case("several chunks", (1, 6, 5, 2300), 3, bias=True, zeros=0.1),
    Case("1x1, several chunks", (1, 3, 3, 9001), 2, zeros=0.1, **POINT),
    Case("several tiles", (1, 70, 164, 48), 4, bias=True, zeros=0.3),
    Case("many images", (9, 7, 7, 16), 1, zeros=0.3),
    Case("5x5", (2, 9, 8, 19), 5, kernel=(5, 5), padding=((2, 2), (2, 2)), zeros=0.2),
    Case("1x7", (1, 4, 12, 24), 2, kernel=(1, 7), padding=((0, 0), (3, 3)), zeros=0.2),
    Case("strides", (2, 11, 12, 21), 3, strides=(2, 3), padding=SAME, zeros=0.2),
    Case("1x1, strides", (2, 9, 17, 33), 6, kernel=(1, 1), strides=(2, 8), padding="VALID", zeros=0.2),
    Case("dilated", (1, 12, 11, 18), 4, dilation=(2, 3), padding="VALID", zeros=0.2),
    Case("padded 1x1", (1, 4, 5, 24), 2, kernel=(1, 1), padding=((1, 2), (0, 3)), zeros=0.0),
    Case("uneven padding", (2, 5, 6, 24), 3, padding=((2, 1), (0, 3)), zeros=0.0),
    Case("negative padding", (2, 7, 6, 8), 2, padding=((-1, 2), (3, -1)), zeros=0.0),
    Case("an image", (1, 12, 12, 3), 4, zeros=0.0),
    Case("max pool", (2, 15, 14, 40), 3, bias=True, activation="relu", pool="max", zeros=0.2),
    Case("max pool of 5", (1, 9, 9, 20), 5, bias=True, pool="max", window=(3, 3), window_strides=(1, 1),
         window_padding=SAME, zeros=0.0),
    Case("average pool", (1, 12, 12, 24), 1, pool="avg", activation="relu", zeros=0.1),
    Case("pool, several chunks and tiles", (1, 41, 60, 1200), 2, bias=True, pool="max", zeros=0.3),
    Case("no output", (1, 2, 2, 8), 2, padding="VALID"),
]  # fmt: skip


@pytest.fixture
def dots(any_isa: str) -> Iterator[str]:
    """Has the CPU run the loop wherever it can, on each instruction set that this machine has."""
    if PLATFORM != "cpu":
        pytest.skip("the backend is not the CPU")
    with on_cpu(loop="dots"):
        yield any_isa


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, dots: str) -> None:
    inputs = cases.inputs(case)
    assert oracle.relative_error(run(case, inputs, None), oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_other_types(dtype: str, kernel: tuple[int, int], dots: str) -> None:
    case = Case("typed", (2, 7, 6, 45), 3, kernel=kernel, bias=True, activation="relu", zeros=0.3)
    with jax.enable_x64(dtype == "float64"):
        inputs = cases.inputs(case, jnp.dtype(dtype))
        assert oracle.relative_error(run(case, inputs, None), oracle.expected(case, inputs)) <= TOLERANCE[dtype]


def test_kernels_of_their_own(dots: str) -> None:
    check_kernels_of_their_own(24, 2)


def test_it_is_as_exact_as_xla(dots: str) -> None:
    check_as_exact_as_xla(Case("long", (1, 8, 8, 2048), 2, zeros=0.0))


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("channels", [20, 64])
def test_only_what_a_value_reaches_changes(value: float, channels: int, dots: str) -> None:
    """Nor do zeros behind the end of a run meet what is read there."""
    case = Case("a large element", (1, 8, 8, channels), 3, zeros=0.0)
    inputs = cases.inputs(case)
    inputs.x[0, 3, 4, 0] = value
    wanted = oracle.expected(case, inputs)
    result = np.asarray(run(case, inputs, None))
    reached = np.zeros((8, 8), bool)
    reached[2:5, 3:6] = True
    np.testing.assert_allclose(result[0, ~reached], wanted[0, ~reached], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted))


def test_results_do_not_depend_on_tiles(dots: str) -> None:
    case = Case("batch", (5, 41, 39, 80), 3, bias=True, zeros=0.1)
    inputs = cases.inputs(case)
    check_images_alone(jax.jit(lambda x: jsc.conv(x, inputs.kernel, inputs.bias)), inputs.x)


def test_a_named_implementation_skips_zeros(dots: str) -> None:
    check_named_ones_skip(32, 2)


MACHINES = {"avx2": (32 << 10, 512 << 10, 32, 2), "avx512": (48 << 10, 1 << 20, 64, 2)}
"""Bytes of L1, L2 and a vector, and threads."""


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_runs_where_few_output_channels_are(machine: tuple[int, ...]) -> None:
    def loop(out_channels: int, *, density: float = 0.6, channels: int = 64, may_be_dense: bool = True) -> str:
        key = key_of((1, 56, 56, channels), (1, 3, 3, channels, out_channels), Geometry(padding=SAME))
        return str(_cpu.plan(key[:16], list(key[16:]), 4, may_be_dense, density, machine, False)[0])

    assert loop(1) == loop(3) == loop(4) == "dots"
    assert loop(64) != "dots"
    assert loop(1, channels=1) != "dots"
    assert loop(3, may_be_dense=False) != "dots"


@pytest.mark.parametrize("out_channels", [1, 3, 8])
def test_none_leaves_few_output_channels_to_the_native_call(out_channels: int) -> None:
    if PLATFORM != "cpu":
        pytest.skip("the backend is not the CPU")
    x = jax.ShapeDtypeStruct((1, 56, 56, 64), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, out_channels), jnp.float32)
    text = jax.jit(jsc.conv).lower(x, kernel).as_text()
    assert "jsc_ecr" in text
    assert "stablehlo.convolution" not in text


def test_pixels_with_strides_are_read_where_they_lie() -> None:
    """A 1x1 convolution with strides is not a copy of some pixels first, as it is for other loops."""
    if PLATFORM != "cpu":
        pytest.skip("the backend is not the CPU")
    x = jax.ShapeDtypeStruct((1, 33, 33, 64), jnp.float32)

    def text(out_channels: int) -> str:
        kernel = jax.ShapeDtypeStruct((1, 1, 64, out_channels), jnp.float32)
        return str(jax.jit(lambda *operands: jsc.conv(*operands, strides=2)).lower(x, kernel).as_text())

    assert "jsc_ecr" in text(4)
    assert "slice" not in text(4)
    assert "slice" in text(64)
