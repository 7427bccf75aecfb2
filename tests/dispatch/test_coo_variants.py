"""Variants of COO* for several densities, of which the running program takes one."""

from __future__ import annotations

import itertools

import pytest
from coo_star_checks import assume_costs

from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.dispatch.coo import configurations, cost_model
from jax_sparse_conv._src.problem.geometry import Geometry

pytestmark = pytest.mark.usefixtures("h200")
LAYERS = [
    (1, 14, 256, 256),
    (1, 224, 64, 64),
    (8, 28, 128, 128),
    (8, 56, 64, 64),
    (32, 14, 256, 256),
    (32, 7, 512, 512),
]


def found(images: int, size: int, channels: int, out_channels: int, *, is_counted: bool) -> cost_model.Variants:
    shapes = (images, size, size, channels), (1, 3, 3, channels, out_channels)
    return cost_model.by_density(*shapes, Geometry(padding=((1, 1), (1, 1))), 4, is_counted=is_counted)


def usual(images: int, size: int, channels: int, out_channels: int) -> configurations.Configuration:
    shapes = (images, size, size, channels), (1, 3, 3, channels, out_channels)
    return cost_model.for_operands(*shapes, Geometry(padding=((1, 1), (1, 1))), 4)


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_variant_wins_by_more_than_it_costs(layer: tuple[int, int, int, int], is_counted: bool) -> None:
    images, size, channels, out_channels = layer
    variants, of_all = found(*layer, is_counted=is_counted), usual(*layer)
    assert 1 <= len(variants.configurations) <= cost_model.most_variants()
    assert len(variants.densities) == len(variants.configurations) - 1
    assert all(a != b for a, b in itertools.pairwise(variants.configurations))
    assert sorted(variants.densities) == list(variants.densities)
    costs = model.shipped("coo variants")
    cost = costs["seconds, closed kernel"] + (0 if is_counted else costs["seconds, sample"])
    gained = dict.fromkeys(variants.configurations, 0.0)
    for density in cost_model.DENSITIES:
        call = configurations.CooCall(images, size, size, channels, out_channels, density=density)
        index = sum(density > end for end in variants.densities)
        chosen = variants.configurations[index]
        times = [cost_model.estimated_time(each, call, Device()) for each in (of_all, chosen)]
        assert times[1] <= times[0]
        gained[chosen] = max(gained[chosen], times[0] - times[1])
    assert all(gain > cost for each, gain in gained.items() if each != of_all)


def test_some_layers_have_one_tile_and_some_have_two() -> None:
    assert found(1, 14, 256, 256, is_counted=True).configurations == (usual(1, 14, 256, 256),)
    sparse, dense = found(32, 14, 256, 256, is_counted=False).configurations
    assert (sparse.variant.height, dense.variant.height) == (7, 4)
    assert 0.25 < found(32, 14, 256, 256, is_counted=False).densities[0] < 0.5


def test_a_sample_that_costs_much_leaves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assume_costs(monkeypatch, {"seconds, sample": 1.0})
    assert len(found(32, 14, 256, 256, is_counted=False).configurations) == 1
    assert len(found(32, 14, 256, 256, is_counted=True).configurations) == 2


def test_no_more_variants_than_the_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gains least is left out where the model would like more than there is room for."""
    assume_costs(monkeypatch, {"gain, least": 1.0})
    every = {layer: found(*layer, is_counted=True) for layer in LAYERS}
    monkeypatch.setattr(cost_model, "most_variants", lambda: 2)
    cost_model._by_density.cache_clear()
    for layer in LAYERS:
        few = found(*layer, is_counted=True)
        assert len(few.configurations) <= 2
        assert len(few.configurations) <= len(every[layer].configurations)
    cost_model._by_density.cache_clear()


def test_the_workspace_serves_every_variant() -> None:
    geometry = Geometry(padding=((1, 1), (1, 1)))
    x, kernel = (2, 8, 8, 64), (1, 3, 3, 64, 32)
    assert cost_model.workspace_bytes(x, kernel, geometry, [(2, 1, 1, 1), (3, 1, 1, 1)]) == 0
    assert cost_model.workspace_bytes(x, kernel, geometry, [(2, 1, 1, 1), (3, 1, 1, 4)]) == 4 * 4 * 2 * 8 * 8 * 32


def test_the_densities_are_those_of_the_paper() -> None:
    assert cost_model.DENSITIES[0] == pytest.approx(1 - 0.9)
    assert cost_model.DENSITIES[-1] == pytest.approx(1 - 0.4)
    assert all(b - a == pytest.approx(0.05) for a, b in itertools.pairwise(cost_model.DENSITIES))
