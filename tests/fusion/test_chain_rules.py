"""Why a layer is no part of a chain: the sentences of the planner and of the rules around it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.fusion import chain_rules
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry, Pool

SAME = Geometry(padding=((1, 1), (1, 1)))
TWO, OVER_ROWS = ((2, 2), (2, 2), ((0, 0), (0, 0))), ((9000, 1), (1, 1), ((0, 0), (0, 0)))


@pytest.fixture(autouse=True)
def on_h200(h200: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: h200)


def why(x: tuple[int, ...], kernel: tuple[int, ...], dtype: Any = jnp.float32, **given: Any) -> str | None:
    """Of a convolution, or of a dense layer of x [N, C] and kernel [S, C, K]."""
    shared_memory = given.pop("shared_memory", None)
    if len(x) == 2:
        given["method"], x, kernel = "dense", (x[0], 1, 1, x[1]), (kernel[0], 1, 1, *kernel[1:])
    config = Config(**({"geometry": SAME, "method": "ecr", "precision": lax.Precision.HIGHEST} | given))
    return chain_rules.why_not(
        config, jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(kernel, dtype), shared_memory
    )


def test_what_can_be_a_layer() -> None:
    assert why((1, 9, 9, 8), (1, 3, 3, 8, 8)) is None
    assert why((1, 9, 9, 8), (1, 3, 3, 8, 8), geometry=dataclasses.replace(SAME, pool=Pool("max", *TWO))) is None
    assert why((1, 9, 9, 3), (1, 3, 3, 3, 8)) is None  # an image
    assert why((1, 64), (1, 64, 12), geometry=Geometry()) is None


@pytest.mark.parametrize(
    ("x", "kernel", "given", "reason"),
    [
        ((9, 9, 9, 8), (1, 3, 3, 8, 8), {}, "x has 9 images, not 1 to 8"),
        ((1, 9, 9, 8), (2, 3, 3, 8, 8), {}, "it has 2 kernels, not one"),
        ((1, 9, 9, 8), (1, 3, 3, 8, 8), {"dtype": jnp.int8}, "dtype int8 is not one of float32, bfloat16, float16"),
        ((1, 9, 9, 8), (1, 3, 3, 8, 10), {}, "K=10 does not come in whole 16 bytes"),
        ((1, 9, 9, 8), (1, 3, 3, 8, 8), {"geometry": dataclasses.replace(SAME, pool=Pool("avg", *TWO))}, "its pool is"),
        ((1, 9, 0, 8), (1, 3, 3, 8, 8), {}, "it has nothing to compute"),
        ((1, 1, 9, 8), (1, 5, 3, 8, 8), {}, "a window is larger than its map"),
        ((1, 9000, 1, 8), (1, 3, 3, 8, 8), {}, "sizes and strides must be 1 to 8192"),
        ((1, 8, 8, 8), (1, 3, 3, 8, 8), {"geometry": Geometry(padding=((9000, 0), (1, 1)))}, "padding is at most 8192"),
        (
            (1, 9, 9, 8),
            (1, 3, 3, 8, 8),
            {"geometry": dataclasses.replace(SAME, pool=Pool("max", *OVER_ROWS))},
            "a pool's windows and strides must be 1 to 8192",
        ),
        (
            (1, 8192, 2, 8),
            (1, 4200, 1, 8, 8),
            {"geometry": Geometry(padding=((4096, 4096), (0, 0)), dilation=(2, 1))},
            "its window is too large",
        ),
        ((8, 8192, 8192, 8), (1, 3, 3, 8, 8), {}, "at most 2^31 - 1 elements"),
        ((1, 9, 9, 6), (1, 3, 3, 6, 8), {}, "are copied one by one"),
        ((1, 9, 9, 512), (1, 3, 3, 8, 512), {"geometry": dataclasses.replace(SAME, groups=64)}, None),
        ((1, 9, 9, 8), (1, 3, 3, 4, 8), {"geometry": dataclasses.replace(SAME, groups=2)}, "no dense kernel takes"),
        (
            (1, 9, 9, 1024),
            (1, 3, 3, 512, 32),
            {"geometry": dataclasses.replace(SAME, groups=2)},
            "its 2 groups are too narrow",
        ),
        ((8, 224, 224, 512), (1, 3, 3, 512, 512), {}, "it has so much work that its start does not matter"),
        ((2, 64), (1, 64, 12), {}, "it is a product of 2 rows and 1 kernels, not of one"),
        ((1, 64), (1, 64, 12), {"has_residual": True}, "it has a residual, or nothing to compute"),
        ((1, 64), (1, 64, 10), {}, "C=64 or K=10 does not come in whole 16 bytes"),
        ((1, 50000), (1, 50000, 8), {"shared_memory": 232448}, "its C=50000 inputs do not fit shared memory"),
        ((1, 50000), (1, 50000, 8), {}, None),
        ((1, 2**20), (1, 2**20, 2**12), {}, "its kernel is too large"),
    ],
)
def test_what_cannot_be_one(x: tuple[int, ...], kernel: tuple[int, ...], given: Any, reason: str | None) -> None:
    found = why(x, kernel, **given)
    assert found is None if reason is None else reason in str(found), found


def test_averages_are_shared_by_blocks_where_clusters_run_at_once(
    h200: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has 64 pixels and 256 channels at a time, or as many of a cluster of eight."""
    wide = 512 // 4 * h200.clusters[8]  # results of the widest tiles of all clusters
    assert chain_rules.why_not_average((1, 8, 8, 2048 * 8), wide, 4) is None
    assert chain_rules.why_not_average((1, 8, 9, 2048 * 8), wide, 4) is not None
    assert chain_rules.why_not_average((1, 8, 8, 256 * 8), wide + 4, 4) is None
    assert chain_rules.why_not_average((1, 8, 8, 256 * 8 + 4), wide + 4, 4) is not None
    fewer = dataclasses.replace(h200, clusters=(0, *(1,) * 16))
    monkeypatch.setattr(devices, "current", lambda: fewer)
    assert chain_rules.why_not_average((1, 8, 8, 2048 * 8), wide, 4) is not None
