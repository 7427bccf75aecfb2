"""The dense kernels of "direct" against float64 lax: long sums, layers for tensor cores, pools, groups, extremes."""

from __future__ import annotations

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tile_cases
from cases import Case
from direct_checks import check_counts, check_stacks, name_of, of_large_kinds, on_cuda_alone
from kernel_checks import TF32, TOLERANCE, run
from platforms import PLATFORM, require
from tile_cases import SHARED_TILES

import jax_sparse_conv as jsc
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import choice


@pytest.mark.parametrize("case", cases.LONG_CASES, ids=name_of)
def test_direct_adds_sums_of_chunks(case: Case) -> None:
    require("direct", "float32")
    inputs = cases.inputs(case)
    assert oracle.relative_error(run(case, inputs, "direct"), oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("precision", [None, "high"])
@pytest.mark.parametrize("case", cases.CONV_CASES, ids=name_of)
def test_direct_at_default_precision(case: Case, precision: str | None) -> None:
    """TF32 where the platform has it, which the native side is told by an attribute."""
    require("direct", "float32")
    inputs = cases.inputs(case)
    error = oracle.relative_error(run(case, inputs, "direct", precision), oracle.expected(case, inputs))
    assert error <= (TF32 if PLATFORM == "cuda" else TOLERANCE["float32"])


@on_cuda_alone
@of_large_kinds
@pytest.mark.parametrize("case", [*cases.LARGE_CASES, *cases.LARGE_POOL_CASES], ids=name_of)
def test_direct_of_large_layers(case: Case, dtype: str, precision: str | None, tolerance: float) -> None:
    """Close to float64, and bit for bit the same in every run."""
    require("direct", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    first = run(case, inputs, "direct", precision)
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= tolerance
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(case, inputs, "direct", precision)), np.asarray(first))


@of_large_kinds
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("case", [case for case in tile_cases.SMALL_CASES if "padding" not in case.name], ids=name_of)
def test_direct_of_small_maps_skips_nothing(
    case: Case, value: float, dtype: str, precision: str | None, tolerance: float
) -> None:
    """Infinities and NaN come out where float64 has them, of weights under SAME padding too."""
    require("direct", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.x[-1, -1, 0, 3] = value
    inputs.kernel[0, -1, 1, 5] = -value
    result = run(case, inputs, "direct", precision)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= tolerance


@pytest.mark.parametrize("case", cases.LARGE_POOL_CASES, ids=name_of)
def test_a_pool_of_pairs_is_in_direct_on_hopper(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """And its counts are of the pooled result."""
    if PLATFORM != "cuda" or not devices.current().has_warpgroups:
        pytest.skip("only Hopper GPUs' warpgroup products have pools")
    inputs = cases.inputs(case, jnp.dtype(jnp.bfloat16))
    layer = functools.partial(jsc.conv_pool, **case.arguments, implementation="direct", count_nonzeros=True)
    layer = jax.jit(layer)
    monkeypatch.setattr(choice, "pools_apart", lambda _: False)  # whatever is expected to be faster
    operands = [cases.on_device(v) for v in (inputs.x, inputs.kernel, inputs.bias)]
    assert "reduce-window" not in (layer.lower(*operands).compile().as_text() or "")
    y, counts = layer(*operands)
    rows = np.asarray(counts).sum(0)
    assert 0 < rows[1] <= y.size
    assert rows[0] <= rows[1]
    assert oracle.relative_error(y, oracle.expected(case, inputs)) <= TOLERANCE["bfloat16"]


@of_large_kinds
@pytest.mark.parametrize("case", [*cases.IMAGE_CASES, *cases.IMAGE_POOL_CASES, *tile_cases.SMALL_CASES], ids=name_of)
def test_direct_of_images_and_small_maps(case: Case, dtype: str, precision: str | None, tolerance: float) -> None:
    """Few channels, or few results: close to float64, and bit for bit the same in every run."""
    require("direct", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    first = run(case, inputs, "direct", precision)
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= tolerance
    np.testing.assert_array_equal(np.asarray(run(case, inputs, "direct", precision)), np.asarray(first))


@of_large_kinds
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("case", [cases.IMAGE_CASES[1], cases.IMAGE_CASES[4]], ids=name_of)
def test_direct_of_images_skips_nothing(
    case: Case, value: float, dtype: str, precision: str | None, tolerance: float
) -> None:
    """Values beside a window meet no weight, though they are multiplied with zeros; padding meets infinite weights."""
    require("direct", dtype)
    case = dataclasses.replace(case, padding="VALID")
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.kernel[2, 0, 0, 5] = value
    inputs.x[1, 17, 18:20, 2] = value
    result = run(case, inputs, "direct", precision)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= tolerance


@on_cuda_alone
@of_large_kinds
def test_direct_of_places_that_32_bits_do_not_number(dtype: str, precision: str | None, tolerance: float) -> None:
    """Two taps so far apart that one of them lies in padding everywhere."""
    require("direct", dtype)
    far = 180_000_001
    padding = ((far, 0), (0, 0))
    case = Case("far", (1, 4, 15, 8), 8, kernel=(2, 1), dilation=(far, 1), padding=padding, bias=True, zeros=0.3)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    result = run(case, inputs, "direct", precision)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= tolerance


@of_large_kinds
@pytest.mark.parametrize("value", [None, np.inf])
@pytest.mark.parametrize("case", [cases.IMAGE_CASES[1], *tile_cases.SMALL_CASES[::3]], ids=name_of)
def test_direct_of_images_and_small_maps_in_stacks(
    case: Case, value: float | None, dtype: str, precision: str | None, tolerance: float
) -> None:
    check_stacks(case, value, dtype, precision, tolerance)


@of_large_kinds
@pytest.mark.parametrize("case", [*cases.IMAGE_CASES, *tile_cases.SMALL_CASES], ids=name_of)
def test_direct_counts_what_it_makes(case: Case, dtype: str, precision: str | None, tolerance: float) -> None:
    check_counts(case, dtype, precision)


@on_cuda_alone
@of_large_kinds
def test_direct_of_large_stacks(dtype: str, precision: str | None, tolerance: float) -> None:
    """Several kernels in one call, each with images of its own, which no tile divides."""
    require("direct", dtype)
    case = Case("stacked", (3, 29, 27, 64), 136, zeros=0.3)
    inputs = [cases.inputs(case, jnp.dtype(dtype), seed) for seed in range(3)]
    x, kernel = (jnp.stack([jnp.asarray(value) for value in values]) for values in list(zip(*inputs, strict=True))[:2])
    result = jax.vmap(lambda x, k: jsc.conv(x, k, precision=precision, implementation="direct"))(x, kernel)
    wanted = np.stack([oracle.expected(case, each) for each in inputs])
    assert oracle.relative_error(result, wanted) <= tolerance


@on_cuda_alone
@of_large_kinds
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("pool", [None, "max", "avg"])
def test_direct_of_large_layers_skips_nothing(
    pool: str | None, value: float, dtype: str, precision: str | None, tolerance: float
) -> None:
    require("direct", dtype)
    case = Case("non-finite", (2, 40, 39, 64), 136, bias=True, padding="VALID", pool=pool, zeros=0.6)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.kernel[1, 1, 5, 3] = value
    inputs.x[1, 17, 38, 7] = value
    result = run(case, inputs, "direct", precision)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= tolerance


@on_cuda_alone  # XLA's pool on a CPU loses NaN
@of_large_kinds
def test_pools_of_infinite_sums_and_biases(dtype: str, precision: str | None, tolerance: float) -> None:
    """Many tiles. Where a sum and a bias make NaN, so is the window's result, whichever of its sums is the greatest."""
    require("direct", dtype)
    case = dataclasses.replace(cases.LARGE_POOL_CASES[-1], pool="max")
    inputs = cases.inputs(case, jnp.dtype(dtype))
    assert inputs.bias is not None
    inputs.x[0, 7, 9, 3], inputs.x[0, -8, -8, 5] = np.inf, -np.inf
    inputs.bias[::3], inputs.bias[1::3] = np.inf, -np.inf
    wanted = oracle.expected(case, inputs)
    assert np.isnan(wanted).any()
    assert np.isposinf(wanted).any()
    assert oracle.relative_error(run(case, inputs, "direct", precision), wanted) <= tolerance


@on_cuda_alone
@pytest.mark.parametrize("case", cases.LARGE_EXACT_CASES, ids=name_of)
def test_direct_of_large_layers_in_parts(case: Case) -> None:
    """Long sums, of one sign, of values whose magnitudes differ: as accurate as small layers."""
    require("direct", "float32")
    inputs = cases.inputs(case)
    assert oracle.relative_error(run(case, inputs, "direct"), oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@on_cuda_alone
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize(("value", "weight"), [(np.inf, 1.0), (-np.inf, 0.1), (np.nan, 1.0), (3.4028e38, 0.7)])
def test_direct_of_extremes_in_large_layers(value: float, weight: float, kernel: tuple[int, int]) -> None:
    """What their sums in parts cannot tell is computed again, result by result."""
    require("direct", "float32")
    case = Case("large extremes", (2, 60, 58, 128), 200, kernel=kernel, padding="VALID", bias=True, zeros=0.0)
    inputs = cases.inputs(case)
    inputs.kernel[-1, -1, 9, 100:] = weight
    inputs.x[1, 33, 34, 9], inputs.x[0, 0, 0, 9] = value, value
    result = run(case, inputs, "direct")
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@on_cuda_alone
@of_large_kinds
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("case", SHARED_TILES, ids=name_of)
def test_blocks_that_share_a_tile_skip_nothing(
    case: Case, value: float, dtype: str, precision: str | None, tolerance: float
) -> None:
    """Sums of one block are non-finite, or of several; and the same bits in every run."""
    require("direct", dtype)
    for channels in ((3,), (1, case.x[-1] - 2)):
        inputs = cases.inputs(case, jnp.dtype(dtype))
        inputs.x[0, 2, 5, list(channels)] = value
        inputs.kernel[0, 0, 40, 7] = value
        result = run(case, inputs, "direct", precision)
        assert oracle.relative_error(result, oracle.expected(case, inputs)) <= tolerance
        again = run(case, inputs, "direct", precision)
        np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(again, np.float64))


# Layers whose blocks have two consumer warpgroups at HIGHEST on 132 SMs: one or two blocks of a tile, of 56 and 112
# pixels; several that send sums to DSMEM slots, apart from the stages or in their place, of which the last may have one
# step, so that its second warpgroup has none; and the layers above, most of which do.
WARPGROUP_CASES = (
    Case("one block of a high tile", (1, 112, 55, 64), 72, bias=True, activation="relu", pool="max"),
    Case("two blocks of a tile", (1, 56, 55, 96), 64, bias=True, residual=True, activation="relu"),
    Case("slots apart", (1, 20, 11, 128), 128, bias=True, activation="relu"),
    Case("windows", (1, 22, 10, 984), 288, kernel=(1, 1), residual=True),
    Case("slots apart, high", (1, 22, 7, 96), 432, bias=True, activation="relu", pool="max"),
    Case("slots in place, high", (1, 23, 7, 128), 400, activation="relu", pool="max"),
    *SHARED_TILES,
)


@on_cuda_alone
@pytest.mark.parametrize("value", [None, np.inf])
@pytest.mark.parametrize("case", WARPGROUP_CASES, ids=name_of)
def test_warpgroups_of_a_block_share_its_steps(case: Case, value: float | None) -> None:
    """Results of float32 at HIGHEST, and the same bits in every run."""
    require("direct", "float32")
    inputs = cases.inputs(case)
    if value is not None:
        inputs.x[0, -1, 5, -1] = value
    first = run(case, inputs, "direct")
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= TOLERANCE["float32"]
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(case, inputs, "direct")), np.asarray(first))
    if value is None and case.pool is None:
        check_counts(case, "float32", "highest")


@on_cuda_alone
@pytest.mark.parametrize("value", [None, np.inf])
@pytest.mark.parametrize("case", tile_cases.TF32_WARPGROUP_CASES, ids=name_of)
def test_warpgroups_share_steps_in_tf32(case: Case, value: float | None) -> None:
    """Results, counts, and the same bits in every run."""
    require("direct", "float32")
    inputs = cases.inputs(case)
    if value is not None:
        inputs.x[0, -1, 5, -1] = value
    first = run(case, inputs, "direct", None)
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= TF32
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(case, inputs, "direct", None)), np.asarray(first))
    if value is None and case.pool is None:
        check_counts(case, "float32", None)


@on_cuda_alone
@of_large_kinds
@pytest.mark.parametrize("strides", [1, 2])
def test_groups_of_large_layers_stay_apart(strides: int, dtype: str, precision: str | None, tolerance: float) -> None:
    """No infinity of one group meets another's kernel, not even where that is zero."""
    require("direct", dtype)
    case = Case("groups apart", (2, 40, 39, 192), 192, groups=3, strides=strides, bias=True, padding="VALID", zeros=0.6)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.x[..., 64:128] = np.inf
    result = np.asarray(run(case, inputs, "direct", precision)).astype(np.float64)
    wanted = oracle.expected(case, inputs)
    assert not np.isfinite(result[..., 64:128]).any()
    for kept in (slice(64), slice(128, None)):
        assert oracle.relative_error(result[..., kept], wanted[..., kept]) <= tolerance


@pytest.mark.parametrize("precision", ["highest", None])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_direct_skips_nothing(value: float, precision: str | None) -> None:
    """A zero of x times a non-finite weight is NaN, as in lax; values and weights without one stay finite."""
    require("direct", "float32")
    case = Case("non-finite kernel and zeros", (2, 7, 7, 32), 40, padding="VALID", zeros=0.6)
    inputs = cases.inputs(case)
    inputs.kernel[1, 1, 5, 3] = value
    inputs.x[1, 2, 2, 7] = value
    result = run(case, inputs, "direct", precision)
    tolerance = TOLERANCE["float32"] if precision or PLATFORM == "cpu" else TF32
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= tolerance


@pytest.mark.parametrize(("value", "weight"), [(np.inf, 1.0), (-np.inf, 0.1), (np.nan, 1.0), (3.4028e38, 0.7)])
def test_direct_of_extremes_in_parts(value: float, weight: float) -> None:
    """Infinity times weights that TF32 holds or rounds up, and values that round up to infinity in TF32."""
    require("direct", "float32")
    case = Case("extremes", (1, 20, 9, 64), 72, kernel=(1, 1), zeros=0.0)
    inputs = cases.inputs(case)
    inputs.kernel[:] = weight
    inputs.x[0, 3, 4, 17] = value
    result = run(case, inputs, "direct")
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


def test_direct_of_tiny_values() -> None:
    """Below 2^-113 a float32 has fewer digits where tensor cores multiply it in parts, and below 2^-137 none."""
    require("direct", "float32")
    kernel = np.full((1, 1, 32, 8), 2.0**96, np.float32)
    for exponent, tolerance in ((-112, 1e-6), (-120, 1e-4), (-126, 1e-2), (-130, 0.1)):
        x = np.full((1, 4, 4, 32), 1.7 * 2.0**exponent, np.float32)
        result = np.asarray(jsc.conv(x, kernel, precision="highest", implementation="direct"), np.float64)
        np.testing.assert_allclose(result, 32 * float(x.flat[0]) * 2.0**96, rtol=tolerance)


@pytest.mark.skipif(PLATFORM != "cpu", reason="only the CPU's kernels look at x before they choose a loop")
@pytest.mark.parametrize("images", [1, 3, 8])
def test_none_skips_zeros_in_batches(images: int) -> None:
    """Loops add in different orders: the bits of the result say which of them ran."""
    require("ecr", "float32")
    rng = np.random.default_rng(images)
    shape = (images, 14, 14, 64)
    x = jnp.asarray(np.where(rng.random(shape) < 0.85, 0, rng.standard_normal(shape)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((3, 3, 64, 64)), jnp.float32)
    results = {
        name: np.asarray(jax.jit(functools.partial(jsc.conv, kernel=kernel, padding=1, implementation=name))(x))
        for name in (None, "ecr", "direct")
    }
    assert not np.array_equal(results["ecr"], results["direct"])
    assert np.array_equal(results[None], results["ecr"])
