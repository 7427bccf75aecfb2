"""Which kernels of "direct" a layer cannot have on an H200, by the native planners alone, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import Case

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import planner
from jax_sparse_conv._src.dispatch.chain_tiles import key_of
from jax_sparse_conv._src.problem import geometry

_Choose = Callable[..., str]


@pytest.fixture
def choose(h200: Device) -> _Choose:
    """The family that serves a case."""

    def chosen(case: Case, kind: str = "highest") -> str:
        family, *_ = _native.planner().direct(*_described(case), 4, kind == "highest", False, planner.described(h200))
        return str(family)

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


def _layer(x: tuple[int, int, int, int], kernel: tuple[int, int], stride: int) -> Case:
    """With (side, K)."""
    side, out_channels = kernel
    return Case("a layer", x, out_channels, kernel=(side, side), strides=stride)


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
    assert choose(_layer(x, kernel, stride)) != "splitk_channels"


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
    assert choose(case, kind) not in ("grouped", "wgmma", "splitk_channels")
