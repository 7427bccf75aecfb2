"""Tiles of the kernels in chains, by measurement: which tile each layer takes on the GPUs that have been searched.

A chain's kernels are cut by a model of one layer (`cuda/dense_conv/plan/wgmma_model.cc`). What a tile leaves to the
kernels in front and behind is not in it, so `python -m benchmarks chain_tiles` times whole chains with every tile that
the planner finds for a layer, and keeps those of the fastest chain in `chain_tiles.json` beside this file: by GPU, kind
of products and the layer's geometry. Layers that are not in it have the model's tile, as have those on other GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import planner
from jax_sparse_conv._src.problem.geometry import Geometry

Tile: TypeAlias = tuple[int, int, int, int]
"""Output channels (K), pixels, 1 where they are a patch of the map (0: in order), and blocks that share its steps."""
Key: TypeAlias = tuple[int, ...]
"""A layer: N, H, W, C, kh, kw, K, then rows and columns of strides, padding (low, high of H, then of W) and dilation,
and groups; with a max pool behind it rows and columns of its window, strides and padding."""
Tiles: TypeAlias = dict[Key, Tile]

BY_MODEL: Tile = (0, 0, 0, 0)
"""What the custom call takes for a tile that the model is to choose."""
KINDS = ("highest", "tf32", "16bit")
"""Of products; bfloat16 and float16 take the same time."""
TABLE = Path(__file__).with_name("chain_tiles.json")

_FORMAT = 1
_LAYER, _POOL = 16, 8  # entries of a key


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tile that the native planner has a plan with.

    Attributes:
      tile: how it cuts the layer.
      cycles: what the planner's model expects.
      by_model: whether the model may choose it. Others, of more blocks that share a tile's steps, can be given.
    """

    tile: Tile
    cycles: float
    by_model: bool = True


@dataclasses.dataclass(frozen=True)
class Searched:
    """Tiles that were kept for one GPU.

    Attributes:
      device: its kind, "NVIDIA H200", for information.
      capability: compute capability.
      multiprocessors: how many it has; tables are found by these two.
      tiles: by kind of `KINDS`.
    """

    device: str
    capability: tuple[int, int]
    multiprocessors: int
    tiles: Mapping[str, Tiles]


def key_of(x_shape: Sequence[int], kernel_shape: Sequence[int], geometry: Geometry) -> Key:
    """The key of a layer of x [N, H, W, C] and kernel [1, kh, kw, C / groups, K]."""
    sizes, pool = planner.numbers(x_shape, kernel_shape, geometry)
    return sizes + pool[:_POOL]


def kind_of(itemsize: int, precise: bool) -> str:
    """The kind of products of elements of so many bytes; precise: float32 as float32."""
    return "16bit" if itemsize == 2 else "highest" if precise else "tf32"


def candidates(key: Key, kind: str, device: devices.Device) -> list[Candidate]:
    """Every tile that the planner has a plan with for a layer of a chain on a GPU, the model's best first.

    Those that the model may not choose come behind all others.

    None for layers that another kernel takes, such as images, and on devices without warpgroup products.

    Raises:
      RuntimeError: this copy of the package is not built.
      ValueError: a key that is no layer.
    """
    element_bytes = 2 if kind == "16bit" else 4
    found = _native.planner().chain_tiles(
        key[:_LAYER], key[_LAYER:], element_bytes, kind == "highest", planner.described(device)
    )
    return [Candidate((channels, pixels, patch, splits), *rated) for channels, pixels, patch, splits, *rated in found]


def takes_pool(key: Key, tile: Tile, element_bytes: int, precise: bool, device: devices.Device) -> bool:
    """Whether the kernel of a layer of a chain takes the pool behind it on a GPU: what the custom call will do.

    Args:
      key: of a layer with a pool.
      tile: that the custom call is given for it.
      element_bytes: of x, kernel and result.
      precise: whether the custom call's precision is HIGHEST.
      device: the GPU.

    Raises:
      RuntimeError: this copy of the package is not built.
      ValueError: a key that is no layer with a pool.
    """
    found = _native.planner().chain_takes_pool(
        key[:_LAYER], key[_LAYER:], tile, element_bytes, precise, planner.described(device)
    )
    return bool(found)


def pairs(key: Key, out_channels: int, kind: str, device: devices.Device) -> bool:
    """Whether one kernel runs a 1x1 layer of a chain with the 1x1 layer behind it, whatever tiles they are given.

    Args:
      key: of the first layer, without a pool.
      out_channels: K of the second one, which reads nothing but the first one's result.
      kind: "highest", "tf32" or "16bit".
      device: the GPU.

    Raises:
      RuntimeError: this copy of the package is not built.
      ValueError: sizes below 1.
    """
    images, height, width, channels, *_ = key
    element_bytes = 2 if kind == "16bit" else 4
    pixels = images * height * width
    found = _native.planner().chain_pairs(
        pixels, channels, key[6], out_channels, element_bytes, kind == "highest", planner.described(device)
    )
    return bool(found)


def known(kind: str) -> Mapping[Key, Tile]:
    """The tiles kept for the GPU that is lowered for; none where there is no GPU, or another one."""
    device = devices.known()
    return {} if device is None else _tiles(device.capability, device.multiprocessors, kind)


@functools.lru_cache(maxsize=16)
def _tiles(capability: tuple[int, int], multiprocessors: int, kind: str) -> Mapping[Key, Tile]:
    tables = load(TABLE)
    here = (table for table in tables if (table.capability, table.multiprocessors) == (capability, multiprocessors))
    return {key: tile for table in here for key, tile in table.tiles.get(kind, {}).items()}


def load(path: str | os.PathLike[str]) -> list[Searched]:
    """Read a table.

    Raises:
      ValueError: a file that is no table; names the first thing that is wrong.
      OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        return [_searched(gpu) for gpu in content["gpus"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} holds no tiles: {type(error).__name__}: {error}") from error


def save(path: str | os.PathLike[str], tables: Iterable[Searched]) -> None:
    """Write a table, a layer a line and all in order, so that changes can be read."""
    gpus = []
    for table in sorted(tables, key=lambda table: (table.capability, table.multiprocessors)):
        kinds = []
        for kind in KINDS:
            layers = [f"     {json.dumps([key, tile])}" for key, tile in sorted(table.tiles.get(kind, {}).items())]
            kinds.append(f'    "{kind}": [' + ("\n" + ",\n".join(layers) + "\n    ]" if layers else "]"))
        named = {"device": table.device, "capability": table.capability, "multiprocessors": table.multiprocessors}
        fields = [f'   "{name}": {json.dumps(value)}' for name, value in named.items()]
        gpus.append("  {\n" + ",\n".join([*fields, '   "tiles": {\n' + ",\n".join(kinds) + "\n   }"]) + "\n  }")
    listed = "[\n" + ",\n".join(gpus) + "\n ]" if gpus else "[]"
    Path(path).write_text(f'{{\n "format": {_FORMAT},\n "gpus": {listed}\n}}\n', encoding="utf-8")


def _searched(content: Mapping[str, Any]) -> Searched:
    major, minor = content["capability"]
    tiles: dict[str, Tiles] = {}
    for kind, layers in content["tiles"].items():
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(map(repr, KINDS))}")
        tiles[kind] = {checked_key(key): checked_tile(tile) for key, tile in layers}
    return Searched(str(content["device"]), (int(major), int(minor)), int(content["multiprocessors"]), tiles)


def checked_key(values: Sequence[Any]) -> Key:
    """A key as JSON has it, or a ValueError."""
    key = tuple(values)
    if len(key) not in (_LAYER, _LAYER + _POOL) or not all(type(value) is int for value in key):
        raise ValueError(f"{list(key)} is no layer: {_LAYER} ints, or {_LAYER + _POOL} with a pool")
    return key


def checked_tile(values: Sequence[Any]) -> Tile:
    """A tile as JSON has it, or a ValueError; whether there is such a kernel the custom call checks."""
    if len(values) != len(BY_MODEL) or not all(type(value) is int for value in values):
        raise ValueError(f"{list(values)} is no tile: K, pixels, 1 for a patch, splits")
    channels, pixels, patch, splits = values
    if min(channels, pixels, splits) < 1 or patch not in (0, 1):
        raise ValueError(f"{list(values)} is no tile: K, pixels and splits are at least 1, patch is 0 or 1")
    return channels, pixels, patch, splits


def merged(tables: Iterable[Searched], device: Searched) -> list[Searched]:
    """The tables with `device`'s tiles added to those of the same GPU, in the place of others of the same layers."""
    same: list[Searched] = []
    others: list[Searched] = []
    for table in tables:
        is_same = (table.capability, table.multiprocessors) == (device.capability, device.multiprocessors)
        (same if is_same else others).append(table)
    tiles = {
        kind: dict(itertools.chain.from_iterable(table.tiles.get(kind, {}).items() for table in (*same, device)))
        for kind in KINDS
    }
    return [*others, dataclasses.replace(device, tiles=tiles)]
