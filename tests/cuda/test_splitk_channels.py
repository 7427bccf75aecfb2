"""The kernel of "direct" whose blocks split the channels of a small map (`splitk_channels`), against float64 lax."""

from __future__ import annotations

import cases
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tile_cases
from cases import Case
from direct_checks import LARGE_KINDS, check_counts, check_stacks, name_of
from kernel_checks import poison, run
from platforms import PLATFORM, require

pytestmark = pytest.mark.skipif(PLATFORM != "cuda", reason="a CPU has no kernels of its own for small maps")
of_kinds = pytest.mark.parametrize(("precision", "tolerance"), [kind[1:] for kind in LARGE_KINDS[:2]])
of_cases = pytest.mark.parametrize("case", tile_cases.SPLITK_CASES, ids=name_of)


@of_kinds
@of_cases
def test_split_channels(case: Case, precision: str | None, tolerance: float) -> None:
    """Close to float64 in memory that was NaN, and bit for bit the same in every run."""
    require("direct", "float32")
    inputs = cases.inputs(case)
    wanted = oracle.expected(case, inputs)
    poison(wanted.shape, jnp.float32)
    first = run(case, inputs, "direct", precision)
    assert oracle.relative_error(first, wanted) <= tolerance
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(case, inputs, "direct", precision)), np.asarray(first))


@of_kinds
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -0.0])
@pytest.mark.parametrize("case", [case for case in tile_cases.SPLITK_CASES if "padding" not in case.name], ids=name_of)
def test_split_channels_skip_nothing(case: Case, value: float, precision: str | None, tolerance: float) -> None:
    """Infinities and NaN come out where float64 has them, of weights under SAME padding too."""
    require("direct", "float32")
    inputs = cases.inputs(case)
    inputs.x[-1, -1, 0, 3] = value
    inputs.kernel[0, -1, 1, 5] = -value
    assert oracle.relative_error(run(case, inputs, "direct", precision), oracle.expected(case, inputs)) <= tolerance


@of_kinds
@pytest.mark.parametrize("value", [None, np.inf])
@pytest.mark.parametrize("case", tile_cases.SPLITK_CASES[::2], ids=name_of)
def test_split_channels_in_stacks(case: Case, value: float | None, precision: str | None, tolerance: float) -> None:
    check_stacks(case, value, "float32", precision, tolerance)


@of_kinds
@of_cases
def test_split_channels_count_what_they_make(case: Case, precision: str | None, tolerance: float) -> None:
    check_counts(case, "float32", precision)


@of_kinds
def test_split_channels_of_unlike_buffers(precision: str | None, tolerance: float) -> None:
    """One program after another whose maps of the same memory differ."""
    require("direct", "float32")
    for case in (*tile_cases.SPLITK_CASES[:4], *tile_cases.SPLITK_CASES[3::-1]):
        inputs = cases.inputs(case, seed=7)
        assert oracle.relative_error(run(case, inputs, "direct", precision), oracle.expected(case, inputs)) <= tolerance
