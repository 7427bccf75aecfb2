"""Which engine serves a layer of "direct" on an H200, by the native planners alone, without a GPU.

What is chosen is measured elsewhere; these are layers that lost when another kernel had them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tile_cases
from cases import Case

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch.chain_tiles import key_of
from jax_sparse_conv._src.problem import geometry

_SPLIT_TILES = {(16, 4, 4), (32, 2, 4), (32, 2, 8), (32, 4, 4), (32, 4, 8), (32, 7, 4)}
_SMALL_MAPS = 6  # the first tile of mma.sync whose warps share the channels of a small map
_Chosen = tuple[str, tuple[int, ...]]
_Choose = Callable[..., _Chosen]


@pytest.fixture
def choose(h200: Device) -> _Choose:
    """The engine that serves a case, and its tile.

    Of "splitk_channels" the filters, the blocks that share a tile, its columns of eight pixels and the warps of a
    block; of "wgmma" the filters and the blocks; of others nothing.
    """

    def chosen(case: Case, kind: str = "highest") -> _Chosen:
        layer, pool = _described(case)
        asked = layer, pool, 2 if kind == "16 bits" else 4, kind == "highest", False
        engine, tile, *_ = _native.planner().direct(*asked, h200.description())
        if engine == "splitk_channels":
            filters, columns, warps, _, _, splits = tile[:6]
            return engine, (filters, splits, columns, warps)
        if engine == "wgmma":
            filters, _, _, splits = tile[:4]
            return engine, (filters, splits)
        return "small_map" if engine == "mma" and tile[0] >= _SMALL_MAPS else engine, ()

    return chosen


def _described(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A case as the planners read it: a layer, and the pool behind it."""
    kernel_shape = (*case.kernel, case.x[3] // case.groups, case.out_channels)
    arguments = dict(case.arguments)
    pool = {name: arguments.pop(name) for name in [*arguments] if name == "pool" or name.startswith("window")}
    arguments.pop("activation")
    found = geometry.resolve(case.x, kernel_shape, **arguments)
    if case.pool is not None:
        found = geometry.with_pool(found, found.conv_size(case.x[1:3], case.kernel), kind=pool.pop("pool"), **pool)
    key = key_of(case.x, (1, *kernel_shape), found)
    return key[:16], (*key[16:], 1 if case.pool == "max" else 2) if case.pool else ()


def _layer(x: tuple[int, int, int, int], kernel: tuple[int, int], stride: int = 1, groups: int = 1) -> Case:
    """With (side, K)."""
    side, out_channels = kernel
    return Case("a layer", x, out_channels, kernel=(side, side), strides=stride, groups=groups)


@pytest.mark.parametrize(
    ("x", "kernel", "stride"),
    [
        ((1, 112, 112, 32), (1, 256), 1),
        ((32, 28, 28, 128), (3, 32), 1),
        ((128, 14, 14, 128), (3, 32), 1),
        ((128, 28, 28, 128), (3, 32), 1),
        ((32, 112, 112, 32), (1, 256), 2),
    ],
)
def test_splits_of_channels_are_for_blocks_that_run_at_once(
    choose: _Choose, x: tuple[int, int, int, int], kernel: tuple[int, int], stride: int
) -> None:
    assert choose(_layer(x, kernel, stride))[0] != "splitk_channels"


@pytest.mark.parametrize("kind", ["highest", "default"])
def test_cases_of_splits_have_every_tile(choose: _Choose, kind: str) -> None:
    """What `test_slices.py` runs on a GPU: tiles by filters, columns and warps, alone and shared by many."""
    found = (choose(case, kind) for case in tile_cases.SLICE_CASES)
    chosen = [tile for engine, tile in found if engine == "splitk_channels"]
    assert {(filters, *of_tile) for filters, _, *of_tile in chosen} == _SPLIT_TILES
    assert any(blocks == 1 for _, blocks, *_ in chosen)
    assert any(blocks > 8 and columns == 2 for _, blocks, columns, _ in chosen)  # more blocks than results to share
    assert any(blocks > 8 and columns > 2 for _, blocks, columns, _ in chosen)


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "kind", "tile"),
    [
        ((8, 5, 5, 1024), (3, 32), 2, "highest", (32, 16, 2, 8)),
        ((1, 7, 7, 832), (1, 128), 1, "highest", (16, 13, 4, 4)),
        ((1, 14, 14, 832), (3, 48), 2, "highest", (32, 13, 4, 8)),  # all of shared memory, with its mail
        ((1, 28, 28, 128), (3, 128), 1, "highest", (32, 4, 7, 4)),
        ((8, 7, 7, 512), (1, 128), 1, "highest", (32, 8, 7, 4)),  # as one row of pixels
        ((1, 28, 28, 192), (1, 64), 1, "highest", (32, 1, 2, 8)),
        ((1, 14, 14, 288), (1, 128), 1, "default", (32, 3, 4, 4)),
    ],
)
def test_tiles_of_splits(
    choose: _Choose,
    x: tuple[int, int, int, int],
    kernel: tuple[int, int],
    stride: int,
    kind: str,
    tile: tuple[int, ...],
) -> None:
    """By filters, the blocks that share a tile, its columns of eight pixels and the warps of a block."""
    assert choose(_layer(x, kernel, stride), kind) == ("splitk_channels", tile)


@pytest.mark.parametrize(
    ("x", "kernel", "kind", "name"),
    [
        ((1, 14, 14, 288), (1, 128), "highest", "small_map"),
        ((1, 14, 14, 256), (1, 128), "default", "small_map"),
        ((1, 14, 14, 256), (1, 1024), "highest", "wgmma"),
        ((1, 56, 56, 64), (3, 64), "default", "wgmma"),
        ((1, 7, 7, 2048), (1, 512), "highest", "wgmma"),  # its operands and slots of the cluster would not fit
        ((1, 7, 7, 512), (1, 2048), "highest", "wgmma"),  # nor a copy of its channels
    ],
)
def test_splits_leave_layers_to_others(
    choose: _Choose, x: tuple[int, int, int, int], kernel: tuple[int, int], kind: str, name: str
) -> None:
    assert choose(_layer(x, kernel), kind)[0] == name


@pytest.mark.parametrize("kind", ["highest", "default"])
def test_small_maps_have_their_channels_split(choose: _Choose, kind: str) -> None:
    assert choose(_layer((1, 5, 5, 384), (3, 256)), kind)[0] == "splitk_channels"
    assert choose(_layer((1, 28, 28, 128), (3, 32)), kind)[0] == "splitk_channels"
    assert choose(_layer((1, 56, 56, 32), (1, 64)), kind)[0] == "splitk_channels"


@pytest.mark.parametrize(
    ("x", "kernel"),
    [((8, 56, 56, 64), (1, 256)), ((32, 56, 56, 64), (1, 64)), ((32, 112, 112, 32), (1, 256))],
)
def test_large_layers_in_float32_go_by_wgmma(
    choose: _Choose, x: tuple[int, int, int, int], kernel: tuple[int, int]
) -> None:
    """Blocks of 128 x 112 have a multiprocessor each, and nothing overlaps what is before and behind their steps."""
    engine, (filters, _) = choose(_layer(x, kernel))
    assert (engine, filters) == ("wgmma", 64)


@pytest.mark.parametrize(
    ("x", "kernel", "groups", "kind", "name"),
    [
        ((1, 224, 224, 3), (3, 64), 1, "highest", "few_channels"),
        ((1, 14, 14, 256), (3, 256), 1, "highest", "wgmma"),
        ((32, 28, 28, 512), (3, 512), 1, "highest", "wgmma"),
        ((1, 14, 14, 128), (3, 32), 1, "16 bits", "small_map"),
        ((1, 14, 14, 896), (3, 896), 7, "default", "wgmma"),
        ((1, 7, 7, 6), (3, 5), 1, "highest", "small_map"),
        ((8, 28, 28, 128), (3, 128), 8, "16 bits", "grouped"),
        ((1, 28, 28, 168), (3, 168), 7, "default", "grouped"),
        ((1, 14, 14, 160), (3, 160), 10, "highest", "small_map"),
        ((1, 14, 14, 432), (3, 432), 9, "default", "mma"),
    ],
)
def test_each_kernel_has_layers(
    choose: _Choose, x: tuple[int, int, int, int], kernel: tuple[int, int], groups: int, kind: str, name: str
) -> None:
    assert choose(_layer(x, kernel, groups=groups), kind)[0] == name


@pytest.mark.parametrize("case", tile_cases.TF32_TEAM_CASES, ids=lambda case: case.name)
def test_cases_of_teams_have_so_many_blocks(choose: _Choose, case: Case) -> None:
    """What `test_direct.py` compares is what it is for."""
    engine, (_, blocks) = choose(case, "default")
    words = {"one": 1, "two": 2, "four": 4, "eight": 8, "sixteen": 16}
    assert (engine, blocks) == ("wgmma", words[case.name.split()[0]])


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "kind", "tile"),
    [
        ((8, 56, 56, 192), (1, 128), 1, "default", (128, 1)),  # 13.2 us by 64 x 112, 10.0 so
        ((8, 56, 56, 96), (1, 96), 1, "default", (128, 1)),  # 10.3, 8.1
        ((1, 28, 28, 512), (3, 512), 1, "default", (64, 2)),  # 17.7 by 128 x 112 in four, 15.9
        ((4, 112, 112, 32), (1, 32), 1, "16 bits", (64, 1)),  # 10.2 by 64 x 56, 7.6
        ((8, 56, 56, 128), (1, 128), 1, "16 bits", (128, 1)),
        ((1, 7, 7, 512), (3, 512), 1, "default", (64, 8)),  # 8.2 by 16 blocks, of which not all run at once; 6.2
    ],
)
def test_tiles_that_were_the_fastest(
    choose: _Choose,
    x: tuple[int, int, int, int],
    kernel: tuple[int, int],
    stride: int,
    kind: str,
    tile: tuple[int, int],
) -> None:
    """Filters, and blocks that share a tile: layers that lost up to a third by the model of before."""
    assert choose(_layer(x, kernel, stride), kind) == ("wgmma", tile)


@pytest.mark.parametrize("kind", ["highest", "default", "16 bits"])
@pytest.mark.parametrize("case", tile_cases.GROUP_CASES, ids=lambda case: case.name)
def test_cases_of_groups_are_for_their_kernel(choose: _Choose, case: Case, kind: str) -> None:
    """What `test_groups.py` compares is what it is for."""
    assert choose(case, kind)[0] == "grouped"


@pytest.mark.parametrize(
    "case",
    [
        Case("far apart in a row", (1, 1, 64, 1048560), 2097120, (1, 2), 1, ((0, 0), (2048, 0)), (1, 2048), 262140),
        Case("far apart", (1, 28, 28, 16), 16, (2, 2), 1, ((2**12, 2**12),) * 2, (2**13, 2**13), 2),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("kind", ["highest", "default"])
def test_windows_that_reach_too_far_are_not_for_the_kernel_of_groups(choose: _Choose, case: Case, kind: str) -> None:
    """Its copies count elements of a row, and bytes of a tile, in 32 bits."""
    assert choose(case, kind)[0] not in ("grouped", "wgmma", "splitk_channels")
