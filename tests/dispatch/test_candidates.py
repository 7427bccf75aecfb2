"""Candidates of every kernel family: what planners list, and that a call told one of them is right or refused."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax import lax
from kernel_checks import poison
from platforms import PLATFORM
from tile_cases import ECR_CASES, GROUP_CASES, IMAGE_CASES, SMALL_CASES, SPLITK_CASES, TF32_WARPGROUP_CASES

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import planner
from jax_sparse_conv._src.dispatch.planner import FAMILIES, Candidate, Layer
from jax_sparse_conv._src.primitive.primitives import Config, conv_p
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

TOLERANCE = {"highest": 2e-6, "default": 5e-4, "bfloat16": 6e-3, "float16": 8e-4}
KINDS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default"), ("float16", "default")]
CASES = (
    Case("3x3 of a small map", (1, 7, 9, 96), 64, bias=True, activation="relu"),
    Case("3x3 of several images", (3, 14, 14, 64), 136, bias=True, residual=True, activation="relu"),
    Case("3x3 with strides", (2, 29, 27, 72), 136, strides=2, padding=((1, 0), (2, 1)), activation="relu"),
    Case("1x1", (2, 14, 14, 256), 128, kernel=(1, 1), bias=True, residual=True, activation="relu"),
    Case("1x1 with strides", (1, 15, 13, 128), 64, kernel=(1, 1), strides=2),
    Case("deep", (1, 7, 7, 512), 256, bias=True),
    Case("dilated", (1, 21, 19, 40), 64, dilation=(2, 3), kernel=(3, 5), padding=((3, 1), (0, 5))),
    Case("narrow groups", (2, 14, 14, 96), 96, groups=4, bias=True, activation="relu"),
    Case("wide groups", (1, 14, 14, 256), 256, groups=2, strides=2, activation="relu"),
    Case("an image", (2, 32, 30, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", zeros=0.0),
    Case("odd channels", (1, 9, 9, 10), 18, bias=True),
)  # fmt: skip


def layer_of(case: Case, dtype: str, precision: str) -> tuple[Layer, Geometry]:
    arguments = {name: value for name, value in case.arguments.items() if name != "activation"}
    kernel = (*case.kernel, case.x[3] // case.groups, case.out_channels)
    geometry = geo.resolve(case.x, kernel, **arguments)
    sizes, pool = planner.numbers(case.x, (1, *kernel), geometry)
    return Layer(sizes, pool, jnp.dtype(dtype).itemsize, precision == "highest", case.residual), geometry


@pytest.fixture
def h200() -> Any:
    with mock.patch.object(_native, "has_warpgroups", return_value=True):
        yield devices.Device()


def test_planners_list_every_family(h200: devices.Device) -> None:
    found = {
        each.candidate.family
        for case in CASES
        for kind in KINDS
        for each in layer_of(case, *kind)[0].candidates(h200, 2)
    }
    assert found == set(FAMILIES) - {"model", "per_output"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_candidates_are_distinct_and_in_order_and_have_the_models_choice(case: Case, h200: devices.Device) -> None:
    for kind in KINDS:
        layer = layer_of(case, *kind)[0]
        found = layer.candidates(h200, 1000)
        candidates = [each.candidate for each in found]
        assert len(set(candidates)) == len(candidates)
        assert [each.us for each in found] == sorted(each.us for each in found)
        assert layer.dense(h200).candidate in candidates


def test_a_gpu_without_warpgroup_products_has_no_candidate_with_them(h200: devices.Device) -> None:
    older = dataclasses.replace(h200, capability=(8, 0), clusters=(0,) * 17)
    for case in CASES:
        for kind in KINDS:
            families = {each.candidate.family for each in layer_of(case, *kind)[0].candidates(older, 1)}
            assert families <= {"mma", "few_channels", "ecr"}


@pytest.mark.parametrize(
    ("family", "tile", "reason"),
    [
        ("wgmmma", (64, 56, 1, 1), "family='wgmmma' is not one of 'model', 'few_channels'"),
        ("wgmma", (64, 56, 1), "is not 4 numbers"),
        ("wgmma", (64, 56, 1, -1), "is not 4 numbers of 0 or more"),
        ("mma", (1, 1, 1), "is not 2 numbers"),
    ],
)
def test_what_is_no_candidate(family: str, tile: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Candidate.of(family, tile)


def test_the_attribute_has_the_family_and_eight_numbers() -> None:
    assert Candidate("mma", (3, 2)).attribute.tolist() == [5, 3, 2, 0, 0, 0, 0, 0]
    assert Candidate.of("mma", (3, 2, 0, 0, 0, 0, 0)) == Candidate("mma", (3, 2))


OF_FAMILY = {
    "mma": (SMALL_CASES[1::8], KINDS),
    "few_channels": (IMAGE_CASES, KINDS),
    "ecr": (ECR_CASES, [KINDS[0], *KINDS[2:]]),
    "splitk_channels": (SPLITK_CASES[::2], KINDS[:2]),
    "grouped": (GROUP_CASES[::2], KINDS),
    "wgmma": ([case for case in TF32_WARPGROUP_CASES if case.pool is None], KINDS[1:3]),
}
"""Cases that a family is for, and the kinds of products that it has."""


def shape_of(candidate: Candidate) -> tuple[int, ...]:
    """What a kernel is compiled for, without how a call is cut into its tiles."""
    tile = candidate.tile
    of_family = {
        "mma": (tile[0], tile[1] > 1),  # whether blocks share the products
        "few_channels": tile[:1],
        "ecr": (tile[0], tile[1] > 1),
        "splitk_channels": tile[:3],
        "grouped": (),
        "wgmma": tile[:3],
    }
    return of_family[candidate.family]


def of_shapes(family: str, case: Case, dtype: str, precision: str, device: devices.Device) -> list[Candidate]:
    """The best candidate of each shape of a family."""
    found = [each.candidate for each in layer_of(case, dtype, precision)[0].candidates(device, 1000)]
    of_family = [candidate for candidate in found if candidate.family == family]
    return list({shape_of(candidate): candidate for candidate in reversed(of_family)}.values())


@pytest.mark.parametrize(
    ("family", "shapes"),
    [("mma", 10), ("few_channels", 2), ("ecr", 6), ("splitk_channels", 6), ("grouped", 1), ("wgmma", 18)],
)
def test_cases_of_a_family_have_all_its_kernels(family: str, shapes: int, h200: devices.Device) -> None:
    of, kinds = OF_FAMILY[family]
    for kind in kinds:
        found = [of_shapes(family, case, *kind, h200) for case in of]
        assert all(found)
        assert len({shape_of(candidate) for each in found for candidate in each}) == shapes


# --- what they compute -----------------------------------------------------------------------------------------------


def told(case: Case, candidate: Candidate, geometry: Geometry, precision: str, inputs: cases.Inputs) -> jax.Array:
    method = "ecr" if candidate.family == "ecr" else "direct"
    config = Config(
        geometry,
        method,
        activation=case.arguments.get("activation"),
        has_bias=inputs.bias is not None,
        has_residual=inputs.residual is not None,
        precision=lax.Precision(precision),
        candidate=candidate,
    )
    leading = (inputs.x, inputs.kernel[None], None if inputs.bias is None else inputs.bias[None], inputs.residual)
    operands = [jnp.asarray(value) for value in leading if value is not None]
    return jax.jit(lambda *of: conv_p.bind(*of, config=config))(*operands)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=[f"{dtype} {precision}" for dtype, precision in KINDS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_candidate_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    """Of each family the model's best, and others evenly among all that fit, twice each: results repeat bitwise."""
    layer, geometry = layer_of(case, dtype, precision)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    wanted = oracle.expected(case, inputs)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    found = layer.candidates(devices.Device.of(0), 1000)
    assert found
    for family in {each.candidate.family for each in found}:
        of_family = [each.candidate for each in found if each.candidate.family == family]
        for candidate in of_family[:: -(-len(of_family) // 4)]:
            poisoned = [jnp.full(wanted.shape, jnp.nan, dtype) for _ in range(4)]
            jax.block_until_ready(poisoned)
            del poisoned
            result = told(case, candidate, geometry, precision, inputs)
            assert oracle.relative_error(result, wanted) <= tolerance, candidate
            again = told(case, candidate, geometry, precision, inputs)
            np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(again, np.float64))


@pytest.mark.parametrize(
    ("family", "case", "kind"),
    [
        pytest.param(family, case, kind, id=f"{case.name} {' '.join(kind)}")
        for family, (of, kinds) in OF_FAMILY.items()
        for case in of
        for kind in kinds
    ],
)
def test_every_kernel_of_a_family_against_the_oracle(
    family: str, case: Case, kind: tuple[str, str], gpu: jax.Device
) -> None:
    """By its best tile for the case."""
    dtype, precision = kind
    geometry = layer_of(case, *kind)[1]
    inputs = cases.inputs(case, jnp.dtype(dtype))
    wanted = oracle.expected(case, inputs)
    for candidate in of_shapes(family, case, *kind, devices.Device.of(0)):
        poison(wanted.shape, dtype)
        result = told(case, candidate, geometry, precision, inputs)
        assert oracle.relative_error(result, wanted) <= TOLERANCE[precision if dtype == "float32" else dtype], candidate


LARGE = (
    Case("3x3", (1, 28, 28, 64), 128),
    Case("1x1", (1, 28, 28, 256), 128, kernel=(1, 1)),
    Case("an image", (1, 56, 56, 3), 64, kernel=(7, 7), padding=3),
    Case("groups", (1, 28, 28, 224), 224, groups=4),
)
of_dense = pytest.mark.parametrize("family", [name for name in OF_FAMILY if name != "ecr"])
of_large = pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)


@of_dense
@of_large
def test_what_tensor_cores_truncate_is_given_back(family: str, case: Case, gpu: jax.Device) -> None:
    """At HIGHEST sums are neither too large nor too small: they were too small by 0.8e-7 to 1.8e-7 of themselves."""
    case = dataclasses.replace(case, zeros=0.5)
    inputs = cases.inputs(case)
    wanted = oracle.expected(case, inputs)
    for candidate in of_shapes(family, case, "float32", "highest", devices.Device.of(0)):
        result = told(case, candidate, layer_of(case, "float32", "highest")[1], "highest", inputs)
        bias = np.vdot(np.asarray(result, np.float64) - wanted, wanted) / np.vdot(wanted, wanted)
        assert abs(bias) < 3e-8, candidate


@of_dense
@of_large
def test_sums_of_integers_are_exact(family: str, case: Case, gpu: jax.Device) -> None:
    """Of integers that TF32 holds."""
    rng = np.random.default_rng(5)
    inputs = cases.inputs(case)
    x = rng.integers(-40, 40, inputs.x.shape) * (inputs.x != 0)
    whole = inputs._replace(x=x.astype(np.float32), kernel=rng.integers(-9, 9, inputs.kernel.shape).astype(np.float32))
    wanted = oracle.expected(case, whole)
    for candidate in of_shapes(family, case, "float32", "highest", devices.Device.of(0)):
        result = told(case, candidate, layer_of(case, "float32", "highest")[1], "highest", whole)
        np.testing.assert_array_equal(np.asarray(result), wanted, err_msg=str(candidate))


def test_a_candidate_that_does_not_fit_is_an_error(gpu: jax.Device) -> None:
    case = CASES[0]
    inputs = cases.inputs(case, jnp.dtype("float32"))
    _, geometry = layer_of(case, "float32", "default")
    for candidate in (
        Candidate("grouped", (1, 7, 7, 1, 1)),
        Candidate("few_channels", (32, 1, 8)),
        Candidate("ecr", (5, 1, 1, 1, 1, 1, 160)),
        Candidate("mma", (99, 1)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="candidate: no kernel has this tile"):
            jax.block_until_ready(told(case, candidate, geometry, "default", inputs))


def test_elsewhere_a_candidate_is_nothing() -> None:
    """A CPU has no candidates: the call is the same."""
    if PLATFORM != "cpu":
        pytest.skip("this is a GPU")
    case = CASES[0]
    inputs = cases.inputs(case, jnp.dtype("float32"))
    _, geometry = layer_of(case, "float32", "highest")
    result = told(case, Candidate("ecr", (16, 1, 1, 1, 1, 1, 160)), geometry, "highest", inputs)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["highest"]
