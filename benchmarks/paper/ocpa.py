"""Xu et al. 2023: Table 3, Figs. 9 and 11 to 14, and the sensitivity to size of the 2019 versions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_sparse_conv as jsc
from benchmarks.common.data import Map
from benchmarks.paper import layers, networks, plots, runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import ECR_LAYERS, PECR_LAYERS, TABLE3, TABLE3_MAPS, PaperLayer
from benchmarks.paper.runner import Case, Context, Row
from jax_sparse_conv._src.plans import timing

OCPA_NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_16gf")
_LEVELS = (0, 20, 40, 60, 70, 80, 90, 95, 100)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def _table3(context: Context) -> list[Row]:
    cases = [
        Case(
            layer,
            sources=(0, *layer.zeros, 100, "real"),
            inputs=networks.profile_map(context, layer, *TABLE3_MAPS[layer.name]) if layer.maps is None else {},
        )
        for layer in TABLE3
    ]
    return runner.own_zeros(runner.measure(context, cases))


def _fig9(context: Context) -> list[Row]:
    return runner.own_zeros(runner.measure(context, _layers_of_networks(context)))


def _layers_of_networks(context: Context) -> Iterator[Case]:
    """Every kind of layer of the networks; those beyond 1x1 on as many independent zeros as their maps have, too."""
    for name in networks.available(context, OCPA_NETWORKS):
        network = networks.prepared(context, name)
        for layer in network.layers:
            x, notes = network.inputs[layer.name], {"network": name}
            yield Case(layer, sources=(0, 100), inputs={"profile": x}, notes=notes)
            zeros = round(100 * np.mean(x == 0))
            if layer.kernel > 1 and 0 < zeros < 100:
                kernels = (sides.HIGHEST, layer.implementation, "coo")
                yield Case(layer, sources=(zeros,), sides=kernels, notes=notes)


def _fig11(context: Context) -> list[Row]:
    chosen = (*ECR_LAYERS, *PECR_LAYERS[1:])
    cases = [Case(layer, sources=(*_LEVELS, "real"), inputs=_vgg19_map(context, layer)) for layer in chosen]
    return runner.measure(context, cases)


def _fig12(context: Context) -> list[Row]:
    chosen = (ECR_LAYERS[1], PECR_LAYERS[2])
    batches = _BATCHES[:2] if context.quick else _BATCHES
    cases = [
        Case(layer, batch, (0, *layer.zeros, 100, "real"), inputs=_vgg19_map(context, layer, batch))
        for layer in chosen
        for batch in batches
    ]
    return runner.own_zeros(runner.measure(context, cases))


def _vgg19_map(context: Context, layer: PaperLayer, batch: int = 1) -> dict[str, Map]:
    """The map of a layer "VGG-19 ..." in VGG-19 on a photograph."""
    if layer.maps is not None:
        return {}
    return networks.profile_map(context, layer, "vgg19", layer.name.split()[1], batch)


def vgg19_layers(strides: int = 1) -> list[PaperLayer]:
    """VGG-19's convolutions of different shape, without their pools, with the zeros of its profile."""
    profile = jsc.models.PROFILES["vgg"]
    found: dict[tuple[int, ...], PaperLayer] = {}
    for layer in layers.of_network("vgg19"):
        zeros = round(100 * profile[layer.name.split()[-1]])
        plain = dataclasses.replace(layer, op="conv", strides=strides, zeros=(zeros,), implementation="ecr")
        found.setdefault((plain.channels, plain.out_channels, plain.size, zeros), plain)
    return list(found.values())


def _fig13(context: Context) -> list[Row]:
    side_names = (*sides.dense_sides(), "ecr", *sides.auto_sides())
    cases = [
        Case(layer, sources=(0, *layer.zeros, 100), inputs=_own_input(context, layer), sides=side_names)
        for strides in (1, 2, 3)
        for layer in _few(context, vgg19_layers(strides))
    ]
    return runner.own_zeros(runner.measure(context, cases))


def _size(context: Context) -> list[Row]:
    chosen = _few(context, vgg19_layers())
    cases = [Case(layer, sources=(0, *layer.zeros, 100), inputs=_own_input(context, layer)) for layer in chosen]
    rows = runner.measure(context, cases)
    for row in rows:
        row["theta"] = row["zeros_percent"] / row["x_shape"][1]
    return runner.own_zeros(rows)


def _own_input(context: Context, layer: PaperLayer) -> dict[str, Map]:
    """The layer's map in VGG-19 on a photograph, of those layers that stand for others too."""
    inputs = {} if context.quick else networks.prepared(context, "vgg19").inputs
    return {"profile": inputs[layer.name]} if layer.name in inputs else {}


def _few(context: Context, chosen: list[PaperLayer]) -> list[PaperLayer]:
    return chosen[:2] if context.quick else chosen


def _fig14(context: Context) -> list[Row]:
    """The kernels convert while they convolve, so two bounds are measured and not the conversion itself.

    A map of zeros leaves reading it and building empty lists; `jsc.ECR.fromdense` writes the lists to memory, which the
    kernels do not.
    """
    cases = [
        Case(
            layer,
            sources=(0, *layer.zeros, "real", 100),
            sides=(*sides.dense_sides(), layer.implementation),
            inputs=_vgg19_map(context, layer),
        )
        for layer in (*ECR_LAYERS, *PECR_LAYERS)
    ]
    rows = runner.measure(context, cases)
    floors = {row["layer"]: _ours(row) for row in rows if row["zeros_target"] == 100}
    for row in rows:
        row["empty_share"] = floors[row["layer"]] / _ours(row)
        row["format_us"] = _format_us(context, row)
    return rows


def _ours(row: Row) -> float:
    return next(time for side, time in row["us"].items() if not sides.is_dense(side))


def _format_us(context: Context, row: Row) -> float:
    """Microseconds of the format alone, written to memory."""
    uniform = jax.random.uniform(jax.random.key(0), row["x_shape"])
    x = jnp.where(uniform < row["zeros_percent"] / 100, 0, uniform)
    convert = _conversion(row["op"], row["kernel_shape"][0])
    return timing.per_call({"format": convert}, [(x,)], min(context.repeats, 3))["format"].microseconds


@functools.cache
def _conversion(op: str, kernel_size: int) -> timing.Function:
    made = jsc.PECR if op == "conv_pool" else jsc.ECR

    @jax.jit
    def convert(x: jax.Array) -> jax.Array:
        parts: list[jax.Array] = lax.optimization_barrier(jax.tree.leaves(made.fromdense(x, kernel_size)))
        return parts[0]

    return convert


EXPERIMENTS = (
    Experiment(
        "table3",
        "Xu et al. 2023, Table 3",
        "single layers of LeNet, AlexNet, GoogLeNet, VGG-19 and ResNet-50.",
        _table3,
        plots.bars(lambda row: f"{row['layer']} {row['source']} {row['zeros_percent']:.0f} %"),
    ),
    Experiment(
        "fig9",
        "Xu et al. 2023, Fig. 9",
        "the layers of VGG-19, ResNet-50, DenseNet-121 and RegNetX-16GF.",
        _fig9,
        plots.bars(lambda row: f"{row['layer']} {row['source']} {row['zeros_percent']:.0f} %"),
    ),
    Experiment(
        "fig11",
        "Xu et al. 2023, Fig. 11",
        "speed-up against the share of zeros.",
        _fig11,
        plots.lines("zeros_percent", "XLA time / time"),
    ),
    Experiment(
        "fig12",
        "Xu et al. 2023, Fig. 12",
        "speed-up against the batch, 1 to 128.",
        _fig12,
        plots.lines("batch", "XLA time / time"),
    ),
    Experiment(
        "fig13",
        "Xu et al. 2023, Fig. 13",
        "VGG-19's convolutions with strides 1, 2 and 3.",
        _fig13,
        plots.bars(lambda row: f"{row['layer']} /{row['strides']} {row['zeros_percent']:.0f} %"),
        ("layer", "strides", "source", "zeros_percent"),
    ),
    Experiment(
        "fig14",
        "Xu et al. 2023, Fig. 14",
        "what remains of a layer's time when its map is all zeros, and the format alone.",
        _fig14,
        plots.bars(lambda row: f"{row['layer']} {row['source']} {row['zeros_percent']:.0f} %"),
        ("layer", "source", "zeros_percent", "empty_share", "format_us"),
    ),
    Experiment(
        "size",
        "Xu et al. 2019, Fig. 11",
        "speed-up against zeros (in percent) / size of the map, over VGG-19.",
        _size,
        plots.bars(lambda row: f"{row['layer']} {row['theta']:.1f}"),
        ("layer", "source", "zeros_percent", "theta"),
    ),
)
