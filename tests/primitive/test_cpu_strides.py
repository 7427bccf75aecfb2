"""3x3 with strides of 2 on a CPU: pixel by pixel from a packed kernel, against float64; and the stems of images."""

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
from kernel_checks import TOLERANCE, run
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native

SAME: Any = ((1, 1), (1, 1))
UNEVEN: Any = ((0, 2), (2, 0))
STRIDED = [
    Case("wide", (1, 14, 14, 64), 64, strides=2, padding=SAME, bias=True, activation="relu", zeros=0.6),
    Case("batch of odd sizes", (3, 9, 13, 40), 48, strides=2, padding=SAME, zeros=0.4),
    Case("32 and more chunks", (2, 7, 8, 130), 32, strides=2, padding=SAME, zeros=0.9),
    Case("16 and uneven padding", (1, 8, 11, 17), 16, strides=2, padding=UNEVEN, zeros=0.3),
    Case("a block that is not full", (1, 12, 10, 33), 20, strides=2, padding="VALID", bias=True, zeros=0.5),
    Case("groups", (2, 9, 9, 64), 96, strides=2, padding=SAME, groups=2, zeros=0.7),
    Case("one pixel", (1, 1, 1, 64), 64, strides=2, padding=SAME, zeros=0.2),
    Case("one column", (1, 9, 1, 32), 64, strides=2, padding=SAME, zeros=0.5),
    Case("all zeros", (1, 6, 6, 64), 64, strides=2, padding=SAME, bias=True, zeros=1.0),
    Case("pool", (1, 16, 16, 64), 64, strides=2, padding=SAME, pool="max", zeros=0.5),
]


@pytest.fixture
def phases() -> Iterator[None]:
    """The loop by phases, wherever it can run."""
    if PLATFORM != "cpu" or _native.cpu_isa() != "avx512":
        pytest.skip("the loop by phases needs a CPU with AVX-512")
    _native.set_cpu_loop("phases")
    yield
    _native.set_cpu_loop("auto")


def function_of(case: Case, inputs: cases.Inputs, implementation: str | None) -> Any:
    """The call as a function of x, whose kernel is a constant and so packed."""
    options: dict[str, Any] = {"strides": case.strides, "padding": case.padding, "feature_group_count": case.groups}
    options |= {"activation": case.activation, "implementation": implementation}
    if case.pool is None:
        return lambda x: jsc.conv(x, inputs.kernel, inputs.bias, residual=inputs.residual, **options)
    return lambda x: jsc.conv_pool(x, inputs.kernel, inputs.bias, pool=case.pool, window_shape=case.window, **options)


def on_device(inputs: cases.Inputs) -> cases.Inputs:
    return cases.Inputs(*(None if value is None else jnp.asarray(value) for value in inputs))


@pytest.mark.parametrize("case", STRIDED, ids=lambda case: case.name)
def test_against_float64(case: Case, phases: None) -> None:
    inputs = cases.inputs(case)
    function = function_of(case, on_device(inputs), "ecr" if case.pool is None else "pecr")
    lowered = jax.jit(function).lower(jnp.asarray(inputs.x))
    assert "has_packed = 1" in lowered.as_text()
    result = lowered.compile()(jnp.asarray(inputs.x))
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_where_it_is(value: float, phases: None) -> None:
    case = Case("not finite", (1, 8, 8, 64), 64, strides=2, padding=SAME, zeros=0.5)
    inputs = cases.inputs(case)
    inputs.x[0, 3, 5, 7] = value
    result = np.asarray(jax.jit(function_of(case, on_device(inputs), "ecr"))(inputs.x))
    finite = np.isfinite(result).all(axis=-1)[0]
    reached = np.zeros((4, 4), bool)
    reached[1:3, 2:4] = True  # rows 1 and 2 read row 3 of x, columns 2 and 3 column 5
    np.testing.assert_array_equal(finite, ~reached)


def test_results_do_not_depend_on_the_batch(phases: None) -> None:
    case = Case("batch", (4, 14, 14, 128), 128, strides=2, padding=SAME, zeros=0.6)
    inputs = on_device(cases.inputs(case))
    function = jax.jit(function_of(case, inputs, "ecr"))
    whole = np.asarray(function(inputs.x))
    np.testing.assert_array_equal(np.asarray(jax.vmap(lambda x: function(x[None])[0])(inputs.x)), whole)


STEMS = [
    Case("ResNet", (2, 34, 38, 3), 64, kernel=(7, 7), strides=2, padding=((3, 3), (3, 3)), bias=True, zeros=0.0),
    Case("VGG", (1, 18, 20, 3), 64, padding=SAME, activation="relu", zeros=0.0),
    Case("LeNet", (3, 28, 28, 1), 6, kernel=(5, 5), zeros=0.8),
    Case("dilated", (1, 20, 20, 3), 40, dilation=2, zeros=0.0),
    Case("pool of 3x3", (2, 30, 31, 3), 64, kernel=(7, 7), strides=2, padding=((3, 3), (3, 3)), pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=SAME, bias=True, zeros=0.0),
    Case("pool of 3x3 at the edges", (1, 9, 9, 3), 33, padding=SAME, pool="max", window=(3, 3), window_strides=(1, 1),
         window_padding=SAME, bias=True, zeros=0.0),
    Case("pool of 2x2", (1, 12, 14, 3), 48, padding=SAME, pool="max", zeros=0.0),
]  # fmt: skip


@pytest.mark.parametrize("implementation", ["direct", None])
@pytest.mark.parametrize("case", STEMS, ids=lambda case: case.name)
def test_stems(case: Case, implementation: str | None, cpu_isa: str) -> None:
    inputs = cases.inputs(case)
    result = run(case, inputs, implementation)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("window", [2, 3])
def test_max_pools_keep_nan(window: int, cpu_isa: str) -> None:
    """By windows that lie within the map and by those at its edges."""
    x = np.ones((1, 12, 12, 3), np.float32)
    x[0, 0, 0, 0] = x[0, 6, 6, 1] = np.nan
    options: Any = {"padding": 0, "window_shape": window, "window_strides": 2, "window_padding": window // 2}
    kernel = np.ones((1, 1, 3, 16), np.float32)
    found = np.asarray(jsc.conv_pool(x, kernel, implementation="direct", **options))
    wanted = np.asarray(jsc.conv_pool(x, kernel, implementation="xla", **options))
    assert np.isnan(wanted).any()
    assert not np.isnan(wanted).all()
    np.testing.assert_array_equal(found, wanted)
