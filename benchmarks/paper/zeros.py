"""Counts that need no GPU: the zeros of maps and of their im2col matrices, and what ECR's arrays take for them.

Fig. 2 of Xu et al. 2023 (and 2019) and Fig. 2 of cuSNN. Networks have seeded weights and a trained network's zeros;
`--maps` adds maps of trained ones. Nothing is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import data
from benchmarks.common.data import Map
from benchmarks.paper import layers, memory, networks
from benchmarks.paper.cusparse import patch_non_zeros
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import CUSNN, PaperLayer
from benchmarks.paper.runner import Context, Row
from jax_sparse_conv import models

CUSNN_FIG2_NETWORKS = ("densenet201", "resnet152", "vgg19")
_SLOT, _WINDOW = 8, 4  # bytes of a non-zero with its index, and of a window's count
_TILES = ((7, 7, 1), (4, 4, 1))
_MOST_LABELS = 40
_NO_PADDING = ((0, 0), (0, 0))


def layer_maps(context: Context, name: str) -> Iterator[tuple[PaperLayer, Map]]:
    """Every convolution of a network with its input, in the order they run."""
    network = networks.prepared(context, name)
    model = network.model()
    inputs = models.layer_inputs(model, network.x)
    for layer in layers.of_model(model, network.x.shape[1], name):
        yield layer, np.asarray(inputs[layer.name.removeprefix(f"{name} ")][0])


def _fig2(context: Context) -> list[Row]:
    return [
        _row(layer, x) | _matrix(layer, x)
        for name in networks.available(context, ("vgg19",))
        for layer, x in layer_maps(context, name)
    ]


def _cusnn_fig2(context: Context) -> list[Row]:
    rows = [
        _row(layer, x) | _coo_star(x)
        for name in networks.available(context, CUSNN_FIG2_NETWORKS)
        for layer, x in layer_maps(context, name)
        if layer.kernel > 1
    ]
    for layer in CUSNN:
        if data.has_maps(context.maps, layer):
            rows.append(_row(layer, data.real_map(context.maps, layer, 4, 0), "real"))
    return rows


def _row(layer: PaperLayer, x: Map, source: str = "profile") -> Row:
    return {
        "layer": layer.name,
        "op": layer.op,
        "x_shape": list(x.shape),
        "kernel_shape": list(layer.kernel_shape),
        "strides": layer.strides,
        "batch": x.shape[0],
        "network": layer.network,
        "source": source,
        "zeros_target": None,
        "zeros_percent": 100 * float(np.mean(x == 0)),
    }


def _matrix(layer: PaperLayer, x: Map) -> Row:
    """The im2col matrix's zeros, with the layer's padding and without any, and bytes beside those of ECR's arrays."""
    plain = dataclasses.replace(layer, op="conv")
    windows, taps = layer.conv_size**2, layer.kernel**2 * layer.channels
    filled = patch_non_zeros(layer, x)
    return {
        "im2col_zeros_percent": 100 * (1 - filled / (windows * taps)),
        "unpadded_zeros_percent": _unpadded(layer, x),
        "im2col_bytes": 4 * windows * taps,
        "format_bytes": memory.format_bytes(plain),
        "filled_bytes": _SLOT * filled + _WINDOW * windows,
    }


def _coo_star(x: Map) -> Row:
    """Bytes of a map, and of COO* in the tiles of the kernels; neither depends on zeros."""
    found = {}
    for tile in _TILES:
        made = jax.eval_shape(functools.partial(jsc.CooStar.fromdense, tile=tile), x)
        found["x".join(map(str, tile))] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    return {"input_bytes": x.nbytes, "coo_star_bytes": found}


def _unpadded(layer: PaperLayer, x: Map) -> float | None:
    """None where no window fits into the map."""
    valid = dataclasses.replace(layer, padding=_NO_PADDING)
    if layer.size < layer.kernel:
        return None
    return 100 * (1 - patch_non_zeros(valid, x) / (valid.conv_size**2 * layer.kernel**2 * layer.channels))


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    keys = ("zeros_percent", "im2col_zeros_percent", "unpadded_zeros_percent")
    shown = [key for key in keys if any(key in row for row in rows)]
    for index, key in enumerate(shown):
        places = [place - 0.4 + (index + 0.5) * 0.8 / len(shown) for place in range(len(rows))]
        axes.bar(places, [row.get(key) or 0 for row in rows], 0.8 / len(shown), label=key)
    axes.set_ylabel("zeros, %")
    labelled = range(0, len(rows), 1 + len(rows) // _MOST_LABELS)
    axes.set_xticks(labelled, [rows[place]["layer"] for place in labelled], rotation=90, fontsize=6)
    axes.legend(fontsize=7)


# --- answers ----------------------------------------------------------------------------------------------------------


def zeros_of_matrices(content: dict[str, Any]) -> str:
    """Mean zeros of maps and of their im2col matrices, but for the image, and those of the last layer."""
    rows = [row for row in content["rows"] if row["zeros_percent"] > 0]
    keys = ("zeros_percent", "im2col_zeros_percent", "unpadded_zeros_percent")
    means = [statistics.mean(row[key] for row in rows) for key in keys]
    more = sum(row["im2col_zeros_percent"] > row["zeros_percent"] for row in rows)
    last = rows[-1]
    return (
        f"{means[0]:.1f} % of maps, {means[1]:.1f} % of matrices (more in {more} of {len(rows)} layers), "
        f"{means[2]:.1f} % without padding; {last['layer']} {last['zeros_percent']:.1f} % and "
        f"{last['im2col_zeros_percent']:.1f} %"
    )


def format_bytes(content: dict[str, Any]) -> str:
    """ECR's arrays in im2col's bytes: with room for every element, and filled."""
    rows = content["rows"]
    whole = sum(row["im2col_bytes"] for row in rows)
    room, filled = (sum(row[key] for row in rows) / whole for key in ("format_bytes", "filled_bytes"))
    shares = [row["filled_bytes"] / row["im2col_bytes"] for row in rows]
    return (
        f"{room:.2f}x im2col's bytes with room for every element, {filled:.2f}x filled "
        f"({min(shares):.2f}x to {max(shares):.2f}x)"
    )


def layers_by_zeros(content: dict[str, Any]) -> str:
    """How many of a network's layers have more than half and more than three quarters of zeros."""
    parts = []
    for name in dict.fromkeys(row["network"] for row in content["rows"] if row["network"]):
        zeros = [row["zeros_percent"] for row in content["rows"] if row["network"] == name]
        half, most = (sum(value > limit for value in zeros) for limit in (50, 75))
        parts.append(f"{name} {half} and {most} of {len(zeros)}")
    real = [row["zeros_percent"] for row in content["rows"] if row["source"] == "real"]
    trained = f"; maps of trained networks {min(real):.0f} to {max(real):.0f} %" if real else ""
    return f"over 50 % and over 75 %: {', '.join(parts)}{trained}"


def coo_star_bytes(content: dict[str, Any]) -> str:
    """COO*'s arrays in bytes of the maps, by tile."""
    rows = [row for row in content["rows"] if "coo_star_bytes" in row]
    whole = sum(row["input_bytes"] for row in rows)
    tiles = dict.fromkeys(tile for row in rows for tile in row["coo_star_bytes"])
    return ", ".join(f"{sum(row['coo_star_bytes'][tile] for row in rows) / whole:.2f}x ({tile})" for tile in tiles)


EXPERIMENTS = (
    Experiment(
        "fig2",
        "Xu et al. 2023, Fig. 2",
        "zeros of VGG-19's maps and of their im2col matrices, and what ECR's arrays take.",
        _fig2,
        _draw,
        (
            *("layer", "zeros_percent", "im2col_zeros_percent", "unpadded_zeros_percent"),
            *("im2col_bytes", "format_bytes", "filled_bytes"),
        ),
    ),
    Experiment(
        "cusnn_fig2",
        "cuSNN, Fig. 2",
        "zeros of the maps that DenseNet-201, ResNet-152 and VGG-19 convolve with more than 1x1.",
        _cusnn_fig2,
        _draw,
        ("layer", "source", "zeros_percent"),
    ),
)
