"""Feature maps for COO*, and what their lists have to be by numpy loops."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.primitive.coo_star import CooStar

SHAPES_AND_TILES = [
    ((1, 8, 8, 4), (4, 4, 1)),
    ((2, 7, 9, 5), (3, 2, 4)),
    ((1, 5, 6, 33), (9, 9, 3)),
    ((3, 1, 1, 70), (1, 1, 70)),
    ((1, 17, 18, 4), (16, 16, 1)),  # 256 elements: one byte
    ((1, 17, 18, 4), (16, 17, 2)),  # 544: two
]


def assume_costs(monkeypatch: pytest.MonkeyPatch, given: Mapping[str, float]) -> None:
    """As if a variant cost that, by the names of "coo variants"."""
    costs, shipped = {**model.shipped("coo variants"), **given}, model.shipped
    monkeypatch.setattr(model, "shipped", lambda group: costs if group == "coo variants" else shipped(group))


def feature_map(shape: tuple[int, ...], density: float = 0.4, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    zeros = np.where(rng.random(shape) < 0.2, -0.0, 0.0)
    return np.where(rng.random(shape) < density, values, zeros).astype(np.dtype(dtype))


def expected_lists(x: np.ndarray, tile: tuple[int, int, int]) -> Any:
    """Values and positions of every tile, in order, by loops."""
    for n in range(x.shape[0]):
        for corner in itertools.product(*(range(0, s, t) for s, t in zip(x.shape[1:], tile, strict=True))):
            values, positions = [], []
            for position, offset in enumerate(np.ndindex(*tile)):
                at = tuple(c + o for c, o in zip(corner, offset, strict=True))
                if all(i < s for i, s in zip(at, x.shape[1:], strict=True)) and x[(n, *at)] != 0:
                    values.append(x[(n, *at)])
                    positions.append(position)
            yield values, positions


def check(made: CooStar, x: np.ndarray, tile: tuple[int, int, int]) -> None:
    slots = int(np.prod(tile))
    values, positions = (np.asarray(a).reshape(-1, slots) for a in (made.values, made.positions))
    counts = np.asarray(made.counts).reshape(-1)
    wanted = list(expected_lists(x, tile))
    assert len(wanted) == len(counts)
    for i, (kept, places) in enumerate(wanted):
        assert counts[i] == len(kept)
        np.testing.assert_array_equal(values[i, : counts[i]], kept)
        np.testing.assert_array_equal(positions[i, : counts[i]], places)
        assert not values[i, counts[i] :].any()
        assert not positions[i, counts[i] :].any()
