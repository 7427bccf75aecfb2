"""The kernel of "direct" for groups of few channels, against float64 lax; by itself and in chains."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tile_cases
from cases import Case
from chain_checks import KIND_IDS, KINDS, TOLERANCE, as_equation, require_kernel
from direct_checks import check_counts, check_stacks, name_of, of_large_kinds
from kernel_checks import poison, run
from platforms import PLATFORM, require

from jax_sparse_conv._src.fusion import chains

pytestmark = pytest.mark.skipif(PLATFORM != "cuda", reason="a CPU has no kernels of its own for groups")
of_cases = pytest.mark.parametrize("case", tile_cases.GROUP_CASES, ids=name_of)


@of_large_kinds
@of_cases
def test_groups(case: Case, dtype: str, precision: str | None, tolerance: float) -> None:
    """Close to float64 in memory that was NaN, and bit for bit the same in every run."""
    require("direct", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    wanted = oracle.expected(case, inputs)
    poison(wanted.shape, jnp.dtype(dtype))
    first = run(case, inputs, "direct", precision)
    assert oracle.relative_error(first, wanted) <= tolerance
    for _ in range(3):
        again = run(case, inputs, "direct", precision)
        np.testing.assert_array_equal(np.asarray(again, np.float64), np.asarray(first, np.float64))


@of_large_kinds
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -0.0])
@pytest.mark.parametrize("case", tile_cases.GROUP_CASES[:9], ids=name_of)
def test_groups_skip_nothing(case: Case, value: float, dtype: str, precision: str | None, tolerance: float) -> None:
    """Infinities and NaN come out where float64 has them, of weights under SAME padding too, and in no other group."""
    require("direct", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.x[-1, -1, 0, 3] = value
    inputs.kernel[0, -1, 1, 5] = -value
    assert oracle.relative_error(run(case, inputs, "direct", precision), oracle.expected(case, inputs)) <= tolerance


@of_large_kinds
@pytest.mark.parametrize("value", [None, np.inf])
@pytest.mark.parametrize("case", tile_cases.GROUP_CASES[::4], ids=name_of)
def test_groups_in_stacks(case: Case, value: float | None, dtype: str, precision: str | None, tolerance: float) -> None:
    check_stacks(case, value, dtype, precision, tolerance)


@of_large_kinds
@pytest.mark.parametrize("case", [case for case in tile_cases.GROUP_CASES if case.zeros < 1], ids=name_of)
def test_groups_count_what_they_make(case: Case, dtype: str, precision: str | None, tolerance: float) -> None:
    check_counts(case, dtype, precision)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("case", [case for case in tile_cases.GROUP_CASES if case.x[0] <= 8], ids=name_of)
def test_groups_in_chains(case: Case, dtype: str, precision: str) -> None:
    """As the first layer of a chain, whose second reads what it wrote."""
    require_kernel(dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    equation, operands = as_equation(case, inputs, precision)
    bound = jax.jit(lambda *of: chains.fused_chain_p.bind(*of, **equation.params))
    results = [bound(*operands) for _ in range(3)]
    wanted = oracle.expected(case, inputs)
    assert oracle.relative_error(results[0][0], wanted) <= TOLERANCE[precision if dtype == "float32" else dtype]
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))
