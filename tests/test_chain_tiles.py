"""Tiles of chains: the package's table, how a layer's tile comes to its custom call, and what kernels make of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from chains import block, block_parameters, equations, weights
from conftest import PLATFORM
from test_segments import KIND_IDS, KINDS, TOLERANCE, require_kernel, then_another

import jax_sparse_conv as jsc
from jax_sparse_conv import _native, chain_tiles, devices, geometry, segments
from jax_sparse_conv.chain_tiles import BY_MODEL, Searched, Tile
from jax_sparse_conv.devices import Device
from jax_sparse_conv.segment_schedule import Schedule

LAYER = (1, 14, 14, 256, 3, 3, 256, 1, 1, 1, 1, 1, 1, 1, 1, 1)
POOLED = (1, 28, 28, 64, 3, 3, 64, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0)
H200 = Searched("NVIDIA H200", (9, 0), 132, {"tf32": {LAYER: (64, 56, 1, 4), POOLED: (64, 112, 1, 1)}, "16bit": {}})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table in the place of the package's."""
    path = tmp_path / "chain_tiles.json"
    chain_tiles.save(path, [H200])
    monkeypatch.setattr(chain_tiles, "TABLE", path)
    chain_tiles._tiles.cache_clear()
    yield path
    chain_tiles._tiles.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, **device: Any) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(**device)))


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_packages_table_is_one() -> None:
    for table in chain_tiles.load(chain_tiles.TABLE):
        assert table.capability >= (9, 0)
        for kind, tiles in table.tiles.items():
            for key, (filters, pixels, _, splits) in tiles.items():
                assert filters in (64, 128)
                assert pixels in (56, 96, 112, 192, 224)
                assert splits <= 16
                assert kind != "highest" or pixels == 112 or (filters, pixels) == (64, 56)
                images, height, width, channels, *_, groups = key[:16]
                assert min(images, height, width) > 0
                assert channels % groups == key[6] % groups == 0


def test_the_planner_has_every_tile_of_the_table(gpu: jax.Device) -> None:
    require_kernel("float32")
    here = devices.current()
    tables = [t for t in chain_tiles.load(chain_tiles.TABLE) if t.capability == here.capability]
    layers = [
        (kind, key, tile)
        for t in tables
        if t.multiprocessors == here.multiprocessors
        for kind, tiles in t.tiles.items()
        for key, tile in tiles.items()
    ]
    if not layers:
        pytest.skip(f"the table has no tiles for {here.capability} with {here.multiprocessors} multiprocessors")
    for kind, key, tile in layers:
        assert tile in [found.tile for found in chain_tiles.candidates(key, kind, 0)], (kind, key)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = Searched("another", (10, 0), 148, {"highest": {LAYER: (64, 56, 0, 1)}})
    chain_tiles.save(tmp_path / "t.json", [other, H200])
    found = chain_tiles.load(tmp_path / "t.json")
    assert [each.device for each in found] == ["NVIDIA H200", "another"]
    assert found[0].tiles["tf32"] == H200.tiles["tf32"]
    assert found[1].tiles == {"highest": {LAYER: (64, 56, 0, 1)}, "tf32": {}, "16bit": {}}
    chain_tiles.save(tmp_path / "empty.json", [])
    assert chain_tiles.load(tmp_path / "empty.json") == []


def with_layers(*layers: Any, kind: str = "tf32") -> str:
    gpu = {"device": "a", "capability": [9, 0], "multiprocessors": 132, "tiles": {kind: layers}}
    return json.dumps({"format": 1, "gpus": [gpu]})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 7, "gpus": []}', "its format is 7, not 1"),
        ('{"format": 1, "gpus": [{}]}', "KeyError"),
        (with_layers([LAYER, [64, 56, 0, 1]], kind="fp8"), "kind 'fp8' is not one of 'highest', 'tf32', '16bit'"),
        (with_layers([LAYER[1:], [64, 56, 0, 1]]), "is no layer: 16 ints, or 24 with a pool"),
        (with_layers([[*LAYER[1:], 1.5], [64, 56, 0, 1]]), "is no layer"),
        (with_layers([LAYER, [64, 56, 1]]), r"\[64, 56, 1\] is no tile"),
        (with_layers([LAYER, [64, 56, 2, 1]]), "patch is 0 or 1"),
        (with_layers([LAYER, [0, 0, 0, 0]]), "at least 1"),
    ],
)
def test_what_is_no_table_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        chain_tiles.load(tmp_path / "t.json")


def test_tiles_are_added_to_those_of_the_same_gpu() -> None:
    more = dataclasses.replace(H200, tiles={"tf32": {LAYER: (128, 112, 0, 2)}, "16bit": {LAYER: (64, 56, 0, 2)}})
    other = dataclasses.replace(H200, multiprocessors=78)
    found = {each.multiprocessors: each.tiles for each in chain_tiles.merged([other, H200], more)}
    assert found[78] == H200.tiles
    assert found[132]["tf32"] == {LAYER: (128, 112, 0, 2), POOLED: (64, 112, 1, 1)}
    assert found[132]["16bit"] == {LAYER: (64, 56, 0, 2)}


def test_layers_are_known_by_their_geometry() -> None:
    plain = geometry.resolve((1, 14, 14, 256), (3, 3, 256, 256))
    assert chain_tiles.key_of((1, 14, 14, 256), (1, 3, 3, 256, 256), plain) == LAYER
    assert chain_tiles.key_of((2, 14, 14, 256), (1, 3, 3, 256, 256), plain) != LAYER
    options = {"strides": (1, 2), "kernel_dilation": (2, 1), "feature_group_count": 2}
    strided = geometry.resolve((1, 14, 15, 8), (3, 5, 4, 16), **options)  # type: ignore[arg-type]
    key = chain_tiles.key_of((1, 14, 15, 8), (1, 3, 5, 4, 16), strided)
    assert key == (1, 14, 15, 8, 3, 5, 16, 1, 2, 2, 2, 2, 2, 2, 1, 2)
    pooled = geometry.with_pool(
        geometry.resolve((1, 28, 28, 64), (3, 3, 64, 64)), (28, 28), kind="max", window_shape=2, window_strides=None,
        window_padding="VALID",
    )  # fmt: skip
    assert chain_tiles.key_of((1, 28, 28, 64), (1, 3, 3, 64, 64), pooled) == POOLED


def test_kinds() -> None:
    assert [chain_tiles.kind_of(*each) for each in ((4, True), (4, False), (2, False), (2, True))] == [
        "highest",
        "tf32",
        "16bit",
        "16bit",
    ]


def test_tiles_are_those_of_the_gpu_that_is_lowered_for(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    assert chain_tiles.known("tf32") == H200.tiles["tf32"]
    assert chain_tiles.known("highest") == {}
    on(monkeypatch, multiprocessors=114)
    assert chain_tiles.known("tf32") == {}
    on(monkeypatch, capability=(10, 0))
    assert chain_tiles.known("tf32") == {}
    monkeypatch.setattr(devices, "known", lambda: None)
    assert chain_tiles.known("tf32") == {}


# --- the custom call -------------------------------------------------------------------------------------------------


def chain(x: jax.Array, parameters: Sequence[jax.Array], **options: Any) -> jax.Array:
    """x [N, 28, 28, 64]: a layer with a pool, then two of LAYER's kind."""
    pooled, wide, plain = parameters
    y = jsc.conv(jsc.conv_pool(x, pooled, **options), wide, **options)
    return jsc.conv(jsc.conv(y, plain, **options), plain, **options)


def chain_parameters() -> list[jax.Array]:
    return [weights(1, 3, 3, 64, 64), weights(2, 1, 1, 64, 256), weights(3, 3, 3, 256, 256)]


def attributes(function: Any, *arguments: Any) -> np.ndarray:
    """The attribute `tiles` of a function's one segment, a row a step."""
    (equation,) = (e for e in equations(function, *arguments) if e.primitive is segments.segment_p)
    operands = [v.aval for v in equation.invars]
    found = Schedule(operands, equation.params["layers"], equation.params["results"]).attributes()
    return np.asarray(found["tiles"]).reshape(-1, len(BY_MODEL))


def test_a_segment_has_the_tiles_that_are_known(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    x, parameters = weights(0, 1, 28, 28, 64), chain_parameters()
    expected: list[Tile] = [(64, 112, 1, 1), BY_MODEL, BY_MODEL, (64, 56, 1, 4), (64, 56, 1, 4)]
    function = jsc.fuse(chain)
    assert attributes(function, x, parameters).tolist() == list(map(list, expected))
    assert not attributes(jsc.fuse(lambda *of: chain(*of, precision="highest")), x, parameters).any()
    half = [each.astype(jnp.bfloat16) for each in (x, *parameters)]
    assert not attributes(function, half[0], half[1:]).any()
    assert not attributes(function, weights(0, 2, 28, 28, 64), parameters).any()
    on(monkeypatch, multiprocessors=114)
    assert not attributes(function, x, parameters).any()


def test_tiles_reach_the_program(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the table, and in their place those that a layer names, as parameters: no cache mixes them up."""
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    on(monkeypatch)
    x, parameters = weights(0, 1, 28, 28, 64), chain_parameters()
    (equation,) = equations(jsc.fuse(chain), x, parameters)

    def tiles(*named: Tile | None) -> list[int]:
        pairs = zip(equation.params["layers"], named, strict=True)
        layers = tuple(dataclasses.replace(layer, tile=tile) for layer, tile in pairs)
        bound = jax.jit(functools.partial(segments.segment_p.bind, **{**equation.params, "layers": layers}))
        operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        text = str(bound.trace(*operands).lower(lowering_platforms=("cuda",)).as_text())
        (found,) = re.findall(r"tiles = dense<\[([-0-9, ]*)\]>", text)
        return [int(each) for each in found.split(",")]

    assert tiles(None, None, None, None) == [64, 112, 1, 1, *[0] * 8, *[64, 56, 1, 4] * 2]
    assert tiles(BY_MODEL, (128, 56, 0, 2), None, BY_MODEL) == [*[0] * 8, 128, 56, 0, 2, 64, 56, 1, 4, *[0] * 4]


def test_tiles_mean_nothing_elsewhere() -> None:
    x, parameters = weights(0, 1, 9, 9, 8), block_parameters()
    (equation,) = equations(jsc.fuse(block), x, parameters)
    layers = tuple(dataclasses.replace(layer, tile=(64, 56, 0, 1)) for layer in equation.params["layers"])
    operands = [weights(i, *v.aval.shape) for i, v in enumerate(equation.invars)]
    found = segments.segment_p.bind(*operands, **{**equation.params, "layers": layers})
    expected = segments.segment_p.bind(*operands, **equation.params)
    if PLATFORM == "cpu":
        np.testing.assert_array_equal(*map(np.asarray, (found[0], expected[0])))


# --- the kernel ------------------------------------------------------------------------------------------------------

CASES = (
    Case("pixels", (1, 14, 14, 256), 136, kernel=(1, 1), bias=True, residual=True, activation="relu"),
    Case("taps", (2, 13, 15, 64), 72, bias=True, activation="relu"),
    Case("strided", (1, 28, 28, 128), 128, strides=2, activation="relu"),
    Case("groups", (1, 14, 14, 128), 128, groups=2, activation="relu"),
    Case("pooled", (1, 28, 30, 64), 72, bias=True, activation="relu", pool="max"),
    Case("pooled, high", (1, 66, 18, 64), 72, bias=True, activation="relu", pool="max"),
    Case("wide pool", (1, 28, 30, 64), 72, activation="relu", pool="max", window=(3, 3), window_strides=(2, 2)),
)
DEEP = Case("deep", (1, 7, 7, 520), 136, bias=True, residual=True, activation="relu")
MOST = 12  # tiles of a case, evenly among all that there are


def native_planner() -> Any:
    try:
        _native.device_properties(0)
    except RuntimeError as error:
        pytest.skip(f"the planner wants a GPU: {error}")
    return chain_tiles.candidates


def test_the_planner(gpu: jax.Device) -> None:
    require_kernel("float32")
    found = native_planner()(LAYER, "tf32", 0)
    ranks = [(each.tile[3] > chain_tiles.MODEL_SPLITS, each.cycles) for each in found]
    assert ranks == sorted(ranks)
    assert len({each.tile for each in found}) == len(found) > 10
    assert {each.tile[1] for each in native_planner()(LAYER, "highest", 0)} == {56, 112}
    assert all(each.tile[2] and each.tile[1] // 8 % 2 == 0 for each in native_planner()(POOLED, "16bit", 0))
    image = (1, 224, 224, 3, 7, 7, 64, 2, 2, 3, 3, 3, 3, 1, 1, 1)
    assert native_planner()(image, "tf32", 0) == []


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (LAYER[1:], "16 entries"),
        ((*LAYER, 2), "pool 8 or none"),
        ((0, *LAYER[1:]), "must be 1 or more"),
        ((1, 0, *LAYER[2:]), "must be 1 to 8192"),
        ((1, 1, 1, 256, 5, 5, *LAYER[6:]), "a window is larger than its map"),
        ((*LAYER[:15], 3), "groups must divide"),
        ((2**31 - 1, *LAYER[1:]), "at most 2\\^31 - 1 elements"),
        ((*LAYER, 2, 2, 0, 2, 0, 0, 0, 0), "a pool's windows"),
    ],
)
def test_the_planner_refuses_what_is_no_layer(key: chain_tiles.Key, reason: str) -> None:
    if not _native.registered_targets()["cuda"]:
        pytest.skip(_native.missing_reasons()["cuda"])
    with pytest.raises(ValueError, match=reason):
        chain_tiles.candidates(key, "tf32", 0)


def test_without_an_extension_there_is_no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_modules", {})
    monkeypatch.setattr(_native, "_reasons", {"cuda": "it was not built"})
    with pytest.raises(RuntimeError, match="it was not built"):
        chain_tiles.candidates(LAYER, "tf32", 0)


def as_equation(case: Case, inputs: cases.Inputs, precision: str, window: int = 1) -> tuple[Any, list[jax.Array]]:
    """The case's operation, then a convolution of its result by square windows, as a segment and its operands."""
    kernel = np.asarray(weights(7, window, window, case.features, 24)).astype(inputs.x.dtype)
    values = [None if v is None else jnp.asarray(v) for v in (*inputs, kernel)]
    (equation,) = equations(jsc.fuse(then_another(case, precision)), *values)
    present = [v for v in (inputs.x, inputs.kernel[None], inputs.bias, inputs.residual, kernel[None]) if v is not None]
    shapes = [v.aval.shape for v in equation.invars]
    return equation, [jnp.asarray(v).reshape(shape) for v, shape in zip(present, shapes, strict=True)]


def check_tiles(case: Case, inputs: cases.Inputs, precision: str, most: int, patches: bool = False) -> None:
    """The case as the first layer of a chain, by so many of its tiles, evenly among all that there are.

    patches: of those that are patches, before a layer of patches, for whose chains HIGHEST has other kernels.
    """
    dtype = inputs.x.dtype.name
    equation, operands = as_equation(case, inputs, precision, window=3 if patches else 1)
    first, second = equation.params["layers"]
    if patches:
        second = dataclasses.replace(second, tile=(64, 56, 1, 1))
    key = segments.keys([v.aval for v in equation.invars], (first, second))[0]
    kind = chain_tiles.kind_of(inputs.x.itemsize, precision == "highest")
    found = [each for each in chain_tiles.candidates(key, kind, 0) if each.tile[2] or not patches]
    assert found
    wanted = oracle.expected(case, inputs)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    for candidate in (*found[:: -(-len(found) // most)], chain_tiles.Candidate((64, 224, 1, 7), 0.0)):  # or the model's
        layers = (dataclasses.replace(first, tile=candidate.tile), second)
        bound = jax.jit(
            lambda *of, layers=layers: segments.segment_p.bind(*of, **{**equation.params, "layers": layers})
        )
        results = [bound(*operands) for _ in range(3)]
        for result in results[1:]:
            for one, other in zip(result, results[0], strict=True):
                np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))
        error = oracle.relative_error(results[0][0], wanted)
        assert error <= tolerance, f"{candidate.tile}: {error}"


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_given_tiles_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check_tiles(case, cases.inputs(case, jnp.dtype(dtype)), precision, MOST)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.name)
def test_given_tiles_at_highest_with_what_is_not_finite(case: Case, value: float, gpu: jax.Device) -> None:
    """Whether blocks hand on sums in registers, from shared memory or keep them: what parts cannot tell is found."""
    require_kernel("float32")
    inputs = cases.inputs(dataclasses.replace(case, zeros=0.3))
    inputs.x[0, 1, 2, 5], inputs.x[0, -1, -1, -1] = value, value
    inputs.kernel[0, 0, 3, 2] = value
    check_tiles(case, inputs, "highest", 2 * MOST)


@pytest.mark.parametrize("value", [None, np.inf, np.nan])
@pytest.mark.parametrize("case", [CASES[1], *CASES[4:6], DEEP], ids=lambda case: case.name)
def test_patches_alone_at_highest(case: Case, value: float | None, gpu: jax.Device) -> None:
    """Whose small parts warps of their own write, for one block of channels or more than there are stages."""
    require_kernel("float32")
    inputs = cases.inputs(dataclasses.replace(case, zeros=0.3))
    if value is not None:
        inputs.x[0, 1, 2, 5], inputs.x[0, -1, -1, -1] = value, value
        inputs.kernel[0, 0, 3, 2] = value
    check_tiles(case, inputs, "highest", 2 * MOST, patches=True)


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
    case = CASES[0]
    equation, operands = as_equation(case, cases.inputs(case), "highest")
    first, second = equation.params["layers"]
    layers = (first, dataclasses.replace(second, tile=tile))
    bound = jax.jit(functools.partial(segments.segment_p.bind, **{**equation.params, "layers": layers}))
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
    case = CASES[4]
    equation, operands = as_equation(case, cases.inputs(case), "highest")
    avals = [v.aval for v in equation.invars]
    schedule = Schedule(avals, equation.params["layers"], equation.params["results"])
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    given = {**schedule.attributes(), "tiles": np.asarray(tiles, np.int64)}
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_segment", shapes)(*of, **given))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(call(*operands))


def test_without_the_attribute_the_model_chooses(gpu: jax.Device) -> None:
    """As in programs that were exported before there was one."""
    require_kernel("float32")
    case = CASES[4]
    inputs = cases.inputs(case)
    equation, operands = as_equation(case, inputs, "highest")
    avals = [v.aval for v in equation.invars]
    schedule = Schedule(avals, equation.params["layers"], equation.params["results"])
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    shapes.append(jax.ShapeDtypeStruct((schedule.workspace_bytes,), jnp.uint8))
    given = {name: value for name, value in schedule.attributes().items() if name != "tiles"}
    call = jax.jit(lambda *of: jax.ffi.ffi_call("jsc_segment", shapes)(*of, **given))
    assert oracle.relative_error(call(*operands)[0], oracle.expected(case, inputs)) <= TOLERANCE["highest"]
