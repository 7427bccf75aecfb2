"""Whether sorting input channels by how often they fire helps the CPU kernels.

    python -m benchmarks sorting --maps feature_maps.npz --json results.json

Permuting the output channels of one layer and the input channels of the next is lossless up to the order of sums, and
costs nothing when weights are loaded. Here x and kernel of single layers with real maps are permuted beforehand: by the
rates of the very images that are timed, most frequent first, which is more than a calibration could know; in random
order; and not at all. All run in turns, with the weights as constants of the programs.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import cases, command, data, results, tables
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.plans import timing

ORDERS = ("given", "sorted", "random")
_COLUMNS = (
    ("layer", "layer", "<", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.1f}"),
    ("rates", "rates", "<", "{}"),
    *((f"{order}_us", f"{order} us", ">", "{:.1f}") for order in ORDERS),
    *((f"{order}_gain", f"{order} gain", ">", "{:.3f}") for order in ORDERS[1:]),
    *((f"{order}_best_gain", "of best", ">", "{:.3f}") for order in ORDERS[1:]),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time every layer that has maps, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        maps = data.read_maps(options.maps)
        chosen = [layer for layer in cases.MAPS if re.search(options.layers, layer.name) and data.has_maps(maps, layer)]
        if not chosen:
            raise ValueError(f"--maps {options.maps} and --layers {options.layers!r} leave no layer")
        rows = [_measure(layer, maps, options) for layer in chosen]
    except (OSError, ValueError) as error:
        print(f"benchmarks sorting: {error}", file=sys.stderr)
        return 1
    means = {
        f"{order}{kind}_gain": timing.geometric_mean(row[f"{order}{kind}_gain"] for row in rows)
        for order in ORDERS[1:]
        for kind in ("", "_best")
    }
    print(tables.aligned(rows, _COLUMNS))
    print("geometric means: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("sorting", arguments)}
        content |= {"repeats": options.repeats, "rows": rows, "geometric_means": means}
        results.add(options.json, "sorting", content)
    return 0


def orders(images: data.Map, seed: int) -> dict[str, np.ndarray]:
    """Permutations of the channels of maps [N, H, W, C] by name."""
    rates = np.mean(images != 0, axis=(0, 1, 2))
    shuffled = np.random.default_rng(seed).permutation(images.shape[3])
    return {"given": np.arange(images.shape[3]), "sorted": np.argsort(-rates, kind="stable"), "random": shuffled}


def _measure(layer: cases.Layer, maps: Mapping[str, data.Map], options: argparse.Namespace) -> tables.Row:
    images = data.real_map(maps, layer, timing.ROTATIONS, 0)
    kernel, bias = data.weights(layer, 0)
    functions, operands = {}, []
    chosen = orders(images, 0)
    for index, (name, order) in enumerate(chosen.items()):
        functions[name] = _function(index, jnp.asarray(kernel[:, :, order]), jnp.asarray(bias), options.implementation)
    for image in images:
        operands.append(tuple(jnp.asarray(image[None][..., order]) for order in chosen.values()))
    times = timing.streaks(functions, operands, options.repeats)
    rates = np.quantile(np.mean(images != 0, axis=(0, 1, 2)), (0.1, 0.5, 0.9))
    row: tables.Row = {"layer": layer.name, "zeros_percent": 100 * float(np.mean(images == 0))}
    row["rates"] = " ".join(f"{rate:.2f}" for rate in rates)
    for name, found in times.items():
        row |= {f"{name}_us": found.microseconds, f"{name}_best_us": 1e6 * found.best}
        row |= {f"{name}_gain": times["given"].median / found.median}
        row |= {f"{name}_best_gain": times["given"].best / found.best}
    return row


def _function(index: int, kernel: jax.Array, bias: jax.Array, implementation: str | None) -> timing.Function:
    """The layer on the map of its own order, of the maps in every order that it is called with."""
    run = functools.partial(jsc.conv, activation="relu", implementation=implementation)
    layer = jax.jit(lambda x: run(x, kernel, bias))
    return lambda *xs: layer(xs[index])


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("sorting", __doc__)
    add: Any = parser.add_argument
    add("--maps", type=Path, required=True, help="real maps, an npz file or the folder of the command maps")
    add("--layers", default="", help="only layers whose name matches this regular expression")
    add("--implementation", default="ecr")
    add("--repeats", type=int, default=30)
    add("--json", type=Path)
    return parser
