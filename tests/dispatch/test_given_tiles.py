"""The planner of chains' tiles, and kernels by tiles that a call gives, against the oracle."""

from __future__ import annotations

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chain_checks import KIND_IDS, KINDS, TOLERANCE, as_equation, require_kernel
from chain_keys import LAYER, POOLED, TILE_CASES

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.dispatch.chain_tiles import Tile
from jax_sparse_conv._src.fusion import chains
from jax_sparse_conv._src.fusion.schedule import Schedule

MOST = 12  # tiles of a case, evenly among all that there are


def test_the_planner(h200: Device) -> None:
    found = chain_tiles.candidates(LAYER, "tf32", h200)
    ranks = [(not each.by_model, each.cycles) for each in found]
    assert ranks == sorted(ranks)
    shared = {by_model: [each.tile[3] for each in found if each.by_model == by_model] for by_model in (True, False)}
    assert max(shared[True]) < min(shared[False])
    assert len({each.tile for each in found}) == len(found) > 10
    assert {each.tile[1] for each in chain_tiles.candidates(LAYER, "highest", h200)} == {56, 64, 112}
    assert all(each.tile[2] and each.tile[1] // 8 % 2 == 0 for each in chain_tiles.candidates(POOLED, "16bit", h200))
    image = (1, 224, 224, 3, 7, 7, 64, 2, 2, 3, 3, 3, 3, 1, 1, 1)
    assert chain_tiles.candidates(image, "tf32", h200) == []


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (LAYER[1:], "16 or 17 entries"),
        ((*LAYER, 2), "pool 8, 9 or none"),
        ((0, *LAYER[1:]), "must be 1 or more"),
        ((1, 0, *LAYER[2:]), "must be 1 to 8192"),
        ((1, 1, 1, 256, 5, 5, *LAYER[6:]), "a window is larger than its map"),
        ((*LAYER[:15], 3), "groups must divide"),
        ((2**31 - 1, *LAYER[1:]), "at most 2\\^31 - 1 elements"),
        ((*LAYER, 2, 2, 0, 2, 0, 0, 0, 0), "a pool's windows"),
    ],
)
def test_the_planner_refuses_what_is_no_layer(key: chain_tiles.Key, reason: str, h200: Device) -> None:
    with pytest.raises(ValueError, match=reason):
        chain_tiles.candidates(key, "tf32", h200)


def test_without_an_extension_there_is_no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_modules", {})
    monkeypatch.setattr(_native, "_reasons", {"planner": "it was not built"})
    with pytest.raises(RuntimeError, match="it was not built"):
        chain_tiles.candidates(LAYER, "tf32", Device())


def check_tiles(case: Case, inputs: cases.Inputs, precision: str, most: int, pixels: int | None = None) -> None:
    """The case as the first layer of a chain, by so many of its tiles (of `pixels`), evenly among them all."""
    dtype = inputs.x.dtype.name
    equation, operands = as_equation(case, inputs, precision)
    first, second = equation.params["layers"]
    key = chains.keys([v.aval for v in equation.invars], (first, second))[0]
    kind = chain_tiles.kind_of(inputs.x.itemsize, precision == "highest")
    found = [each for each in chain_tiles.candidates(key, kind, devices.current()) if pixels in (None, each.tile[1])]
    assert found
    wanted = oracle.expected(case, inputs)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    for candidate in (*found[:: -(-len(found) // most)], chain_tiles.Candidate((64, 224, 1, 7), 0.0)):  # or the model's
        layers = (dataclasses.replace(first, tile=candidate.tile), second)
        bound = jax.jit(
            lambda *of, layers=layers: chains.fused_chain_p.bind(*of, **{**equation.params, "layers": layers})
        )
        results = [bound(*operands) for _ in range(3)]
        for result in results[1:]:
            for one, other in zip(result, results[0], strict=True):
                np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))
        error = oracle.relative_error(results[0][0], wanted)
        assert error <= tolerance, f"{candidate.tile}: {error}"


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("case", TILE_CASES, ids=lambda case: case.name)
def test_given_tiles_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check_tiles(case, cases.inputs(case, jnp.dtype(dtype)), precision, MOST)


@pytest.mark.parametrize("pixels", [64, 112])
@pytest.mark.parametrize("case", TILE_CASES, ids=lambda case: case.name)
def test_given_tiles_in_parts(case: Case, pixels: int, gpu: jax.Device) -> None:
    """Blocks alone keep the sums of two steps, and use DSMEM slots where others read each other's."""
    require_kernel("float32")
    check_tiles(case, cases.inputs(case), "highest", 2 * MOST, pixels)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_given_tiles_of_pools_of_infinite_sums_and_biases(dtype: str, precision: str, gpu: jax.Device) -> None:
    """Where a sum and a bias make NaN, that is the window's result, whichever of its sums is the greatest."""
    require_kernel(dtype)
    case = TILE_CASES[4]
    inputs = cases.inputs(case, jnp.dtype(dtype))
    assert inputs.bias is not None
    inputs.x[0, 3, 4, 5] = np.inf
    inputs.bias[::3], inputs.bias[1::3] = np.inf, -np.inf
    wanted = oracle.expected(case, inputs)
    assert np.isnan(wanted).any()
    assert np.isposinf(wanted).any()
    check_tiles(case, inputs, precision, MOST)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("case", TILE_CASES[:6], ids=lambda case: case.name)
def test_given_tiles_at_highest_with_what_is_not_finite(case: Case, value: float, gpu: jax.Device) -> None:
    """Whether blocks hand on sums in registers, from shared memory or keep them: what parts cannot tell is found."""
    require_kernel("float32")
    inputs = cases.inputs(dataclasses.replace(case, zeros=0.3))
    inputs.x[0, 1, 2, 5], inputs.x[0, -1, -1, -1] = value, value
    inputs.kernel[0, 0, 3, 2] = value
    check_tiles(case, inputs, "highest", 2 * MOST)


@pytest.mark.parametrize(
    "tile",
    [
        (32, 56, 0, 1),
        (64, 57, 0, 1),
        (64, 56, 2, 1),
        (64, 56, 0, 17),
        (64, 224, 0, 9),
        (64, 56, 0, 0),
        (-64, 56, 0, 1),
        (2**40,) * 4,
    ],
)
def test_tiles_that_do_not_exist_are_errors(tile: Tile, gpu: jax.Device) -> None:
    require_kernel("float32")
    case = TILE_CASES[0]
    equation, operands = as_equation(case, cases.inputs(case), "highest")
    first, second = equation.params["layers"]
    layers = (first, dataclasses.replace(second, tile=tile))
    bound = jax.jit(functools.partial(chains.fused_chain_p.bind, **{**equation.params, "layers": layers}))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"layer 1: there is no tile of \("):
        jax.block_until_ready(bound(*operands))


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        ([0] * 7, "attribute tiles must be an array of 4 int64 for each layer"),
        ([], "attribute tiles must be an array of 4 int64 for each layer"),
        ([0, 0, 0, 0, 64, 56, 0, 1, 0, 0, 0, 0], "layer 1: only a convolution has a tile"),
    ],
)
def test_attributes_that_make_no_sense_are_errors(tiles: list[int], reason: str, gpu: jax.Device) -> None:
    require_kernel("float32")
    case = TILE_CASES[4]
    equation, operands = as_equation(case, cases.inputs(case), "highest")
    avals = [v.aval for v in equation.invars]
    schedule = Schedule(avals, equation.params["layers"], equation.params["results"])
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    given = {**schedule.attributes(), "tiles": np.asarray(tiles, np.int64)}
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_chain", shapes)(*of, **given))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(call(*operands))


def test_without_the_attribute_the_model_chooses(gpu: jax.Device) -> None:
    """As in programs that were exported before there was one."""
    require_kernel("float32")
    case = TILE_CASES[4]
    inputs = cases.inputs(case)
    equation, operands = as_equation(case, inputs, "highest")
    avals = [v.aval for v in equation.invars]
    schedule = Schedule(avals, equation.params["layers"], equation.params["results"])
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    given = {name: value for name, value in schedule.attributes().items() if name != "tiles"}
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_chain", shapes)(*of, **given))
    assert oracle.relative_error(call(*operands)[0], oracle.expected(case, inputs)) <= TOLERANCE["highest"]
