"""Tiles of chains: the package's table, and how a layer's tile comes to its custom call."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_keys import LAYER, POOLED, chain, chain_parameters, on
from chains import block, block_parameters, equations, weights
from platforms import PLATFORM

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.dispatch.chain_tiles import BY_MODEL, Searched, Tile
from jax_sparse_conv._src.fusion import chains, rewrite
from jax_sparse_conv._src.fusion.schedule import Schedule
from jax_sparse_conv._src.problem import geometry

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


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_packages_table_is_one() -> None:
    for table in chain_tiles.load(chain_tiles.TABLE):
        assert table.capability >= (9, 0)
        for kind, tiles in table.tiles.items():
            for key, (out_channels, pixels, _, splits) in tiles.items():
                assert out_channels in (64, 128)
                assert pixels in ((56, 64, 112) if kind == "highest" else (56, 96, 112, 192, 224))
                assert splits <= 16
                assert kind != "highest" or pixels == 112 or out_channels == 64
                images, height, width, channels, *_, groups = key[:16]
                assert min(images, height, width) > 0
                assert channels % groups == key[6] % groups == 0


def test_the_planner_has_every_tile_of_the_table(h200: Device) -> None:
    for table in chain_tiles.load(chain_tiles.TABLE):
        device = dataclasses.replace(h200, capability=table.capability, multiprocessors=table.multiprocessors)
        for kind, tiles in table.tiles.items():
            for key, tile in tiles.items():
                assert tile in [found.tile for found in chain_tiles.candidates(key, kind, device)], (kind, key)


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


def attributes(function: Any, *arguments: Any) -> np.ndarray:
    """The attribute `tiles` of a function's one fused chain, a row a step."""
    (equation,) = (e for e in equations(function, *arguments) if e.primitive is chains.fused_chain_p)
    operands = [v.aval for v in equation.invars]
    found = Schedule(operands, equation.params["layers"], equation.params["results"]).attributes()
    return np.asarray(found["tiles"]).reshape(-1, len(BY_MODEL))


def test_a_chain_has_the_tiles_that_are_known(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    x, parameters = weights(0, 1, 28, 28, 64), chain_parameters()
    expected: list[Tile] = [(64, 112, 1, 1), BY_MODEL, BY_MODEL, (64, 56, 1, 4), (64, 56, 1, 4)]
    function = rewrite.fuse(chain)
    assert attributes(function, x, parameters).tolist() == list(map(list, expected))
    assert not attributes(rewrite.fuse(lambda *of: chain(*of, precision="highest")), x, parameters).any()
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
    (equation,) = equations(rewrite.fuse(chain), x, parameters)

    def tiles(*named: Tile | None) -> list[int]:
        pairs = zip(equation.params["layers"], named, strict=True)
        layers = tuple(dataclasses.replace(layer, tile=tile) for layer, tile in pairs)
        bound = jax.jit(functools.partial(chains.fused_chain_p.bind, **{**equation.params, "layers": layers}))
        operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        text = str(bound.trace(*operands).lower(lowering_platforms=("cuda",)).as_text())
        (found,) = re.findall(r"tiles = dense<\[([-0-9, ]*)\]>", text)
        return [int(each) for each in found.split(",")]

    assert tiles(None, None, None, None) == [64, 112, 1, 1, *[0] * 8, *[64, 56, 1, 4] * 2]
    assert tiles(BY_MODEL, (128, 56, 0, 2), None, BY_MODEL) == [*[0] * 8, 128, 56, 0, 2, 64, 56, 1, 4, *[0] * 4]


def test_tiles_mean_nothing_elsewhere() -> None:
    x, parameters = weights(0, 1, 9, 9, 8), block_parameters()
    (equation,) = equations(rewrite.fuse(block), x, parameters)
    layers = tuple(dataclasses.replace(layer, tile=(64, 56, 0, 1)) for layer in equation.params["layers"])
    operands = [weights(i, *v.aval.shape) for i, v in enumerate(equation.invars)]
    found = chains.fused_chain_p.bind(*operands, **{**equation.params, "layers": layers})
    expected = chains.fused_chain_p.bind(*operands, **equation.params)
    if PLATFORM == "cpu":
        np.testing.assert_array_equal(*map(np.asarray, (found[0], expected[0])))
