"""cuSNN, Fig. 12 with tiles by offline search: for each layer the configuration that is fastest on average.

Every kind of layer that COO* has is run in all its configurations on maps of the network, as `benchmarks cost_model`
does it; the network then takes the fastest of each. Beside it stands the network with the cost model's choices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import data
from benchmarks.common.prepared import SHIFT, Prepared
from benchmarks.paper import networks, runner, sides, whole
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import PaperLayer
from benchmarks.paper.networks import COO
from benchmarks.paper.runner import Context, Row
from benchmarks.suites import cost_model as suite
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch.coo import configurations, cost_model
from jax_sparse_conv._src.dispatch.coo.configurations import Configuration
from jax_sparse_conv._src.dispatch.coo.cost_model import Variants
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.problem import geometry as geo

SEARCHED = "coo searched"
_REPEATS = 3  # of a configuration, of which there are hundreds
_Table = dict[tuple[Any, ...], Configuration]


def _cusnn_search(context: Context) -> list[Row]:
    if jax.default_backend() != "gpu":
        raise ValueError("the search of tiles needs a GPU: COO* has one configuration on the CPU")
    rows = []
    for name in networks.available(context, whole.CUSNN_NETWORKS):
        network = networks.prepared(context, name)
        found = dict(_search(network, layer) for layer in _layers_of_coo(network))
        functions = {side: networks.function(network, side) for side in sides.dense_sides()}
        functions |= {COO: networks.function(network, COO), SEARCHED: _with_table(network, found)}
        rows.append(whole.timed(context, network, network.weights, functions))
        rows[-1]["searched"] = [{"key": str(key), "configuration": suite.name_of(c)} for key, c in found.items()]
    return rows


def _layers_of_coo(network: Prepared) -> Iterator[PaperLayer]:
    for layer in network.layers:
        if configurations.why_not(layer.kernel_shape, _geometry(layer)) is None:
            yield layer


def _search(network: Prepared, layer: PaperLayer) -> tuple[tuple[Any, ...], Configuration]:
    """The key of a layer's calls and the configuration with the least time on its map and shifted copies."""
    geometry, x = _geometry(layer), network.inputs[layer.name]
    call = cost_model.call_of(x.shape, _stacked(layer), geometry, 4)
    covering = [v for v in configurations.variants() if v.covers(layer.kernel_shape[:2], geometry)]
    every = list(configurations.configurations(covering, call, devices.current()))
    kernel, bias = map(jnp.asarray, data.weights(layer, 0))
    maps = [jnp.asarray(np.roll(x, SHIFT * shift, axis=2)) for shift in range(timing.ROTATIONS)]
    xs = tuple(itertools.islice(itertools.cycle(maps), suite.CALLS))
    chains = {c: suite.chained(geometry, c.attribute) for c in every}
    shapes = (tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for _ in xs), kernel, bias)
    runner.compiled([functools.partial(_compile, chain, shapes) for chain in chains.values()], [False] * len(every))
    us = {c: suite.microseconds(chain, (xs, kernel, bias), _REPEATS) for c, chain in chains.items()}
    best = min(us, key=us.__getitem__)
    runner.progress(f"{layer.name}: {len(us)} configurations, best {suite.name_of(best)} {us[best]:.1f} us")
    return _key(x.shape, _stacked(layer), geometry), best


def _compile(chain: Any, shapes: Sequence[Any]) -> None:
    chain.lower(*shapes).compile()


def _key(x_shape: Sequence[int], kernel_shape: Sequence[int], geometry: geo.Geometry) -> tuple[Any, ...]:
    """What calls have in common that `layers.kind` has one layer for: all but the input channels."""
    return (*x_shape[1:3], x_shape[3] > 3, *kernel_shape[1:3], kernel_shape[4], geometry.strides, geometry.groups > 1)


def _stacked(layer: PaperLayer) -> tuple[int, ...]:
    return (1, *layer.kernel_shape)


def _geometry(layer: PaperLayer) -> geo.Geometry:
    return geo.resolve(
        layer.x_shape(1),
        layer.kernel_shape,
        strides=layer.strides,
        padding=layer.padding,
        feature_group_count=layer.groups,
    )


def _with_table(network: Prepared, table: _Table) -> timing.Function:
    """The network with COO* layers whose configurations are those of a table, where it has them."""
    run: Any = networks.function(network, COO)
    with mock.patch.object(cost_model, "by_density", _lookup(table)):  # asked when the network is lowered
        compiled: timing.Function = run.lower(*network.operands()[0]).compile()
    return compiled


def _lookup(table: _Table) -> Any:
    """In the place of `cost_model.by_density`: the table's configuration alone, else the model's."""
    modelled = cost_model.by_density

    def by_density(x_shape: Any, kernel_shape: Any, geometry: geo.Geometry, *more: Any, **fields: Any) -> Variants:
        found = table.get(_key(x_shape, kernel_shape, geometry))
        return Variants((found,)) if found else modelled(x_shape, kernel_shape, geometry, *more, **fields)

    return by_density


EXPERIMENTS = (
    Experiment(
        "cusnn_search",
        "cuSNN, Fig. 12, offline search",
        "whole networks with COO* layers, the tiles of each by search.",
        _cusnn_search,
        whole.draw,
    ),
)
