"""The cost model's choice of a COO* variant against exhaustive search, layer by layer: Figs. 8 and 9 of cuSNN.

    python -m benchmarks cost_model --maps feature_maps.npz --json results.json

For every layer and input, every configuration that the model may choose from is timed, and its choice compared with the
best of all. "online" is the loss against the best for that very input (Fig. 9), "offline" against the one
configuration that is best on average over the layer's inputs (Fig. 8); "blind" is the choice that does not know the
density, which is what a call without a plan gets, and "published" what eqs. (4) to (9) choose alone. Times are device
times of several calls in one jit, rotated over inputs, and include the conversion. Needs a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import command, data, results
from benchmarks.common.cases import SETS, Layer
from jax_sparse_conv._src import devices, environment
from jax_sparse_conv._src.dispatch.coo import configurations, cost_model
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import primitives
from jax_sparse_conv._src.problem import geometry as geo

Row = dict[str, Any]
CALLS = 8  # in one jit
_CHAINS = 8  # before waiting


def main(argv: Sequence[str] | None = None) -> int:
    """Time every configuration, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if jax.default_backend() != "gpu":
        print("benchmarks cost_model: needs a GPU; COO* has one configuration on the CPU", file=sys.stderr)
        return 1
    maps = data.read_maps(options.maps) if options.maps else {}
    rows = []
    for layer in _layers(options):
        for row in _search(layer, maps, options):
            rows.append(row)
            print(_line(row), flush=True)
    _add_offline(rows)
    names = ("model", "offline", "blind", "published")
    losses = {name: statistics.median(row[f"{name}_loss"] for row in rows) for name in names}
    print(f"median loss over {len(rows)} layers and inputs: {losses['model']:.1%} against the best for each (Fig. 9),")
    print(f"{losses['offline']:.1%} against the best on average (Fig. 8), {losses['blind']:.1%} without the density,")
    print(f"{losses['published']:.1%} by eqs. (4) to (9) alone")
    if options.json:
        content = {
            **environment.describe_run(),
            "command": command.portable("cost_model", arguments),
            "device_properties": vars(devices.current()),
            "median_loss": losses,
            "rows": rows,
        }
        results.add(options.json, "cost_model", content)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("cost_model", __doc__)
    add = parser.add_argument
    add("--set", choices=SETS, default="maps", help="layers (benchmarks/common/cases.py); those that COO* has")
    add("--layers", default="", help="only layers whose name contains this")
    add("--zeros", type=int, nargs="+", default=[0, 50, 85], help="percentages of i.i.d. zeros")
    add("--maps", type=Path, help="real maps, an npz file or the folder of the command maps")
    add("--batch", type=int, default=1)
    add("--repeats", type=int, default=5)
    add("--json", type=Path)
    return parser


def _layers(options: argparse.Namespace) -> list[Layer]:
    return [layer for layer in SETS[options.set] if layer.op == "conv" and options.layers in layer.name]


def _search(layer: Layer, maps: dict[str, data.Map], options: argparse.Namespace) -> Iterator[Row]:
    geometry = geo.resolve(layer.x_shape(options.batch), layer.kernel_shape, strides=layer.strides)
    kernel, bias = (jnp.asarray(value) for value in data.weights(layer, 0))
    covering = [v for v in configurations.variants() if v.covers(kernel.shape[:2], geometry)]
    device = devices.current()
    x_shape = layer.x_shape(options.batch)
    blind_call = cost_model.call_of(x_shape, (1, *kernel.shape), geometry, 4)
    every = list(configurations.configurations(covering, blind_call, device))
    chains = {c.attribute: chained(geometry, c.attribute) for c in every}
    operands = ((jax.ShapeDtypeStruct(x_shape, jnp.float32),) * CALLS, kernel, bias)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda chain: chain.lower(*operands).compile(), chains.values()))
    for source, inputs in _inputs(layer, maps, options):
        density = float(np.mean([np.mean(x != 0) for x in inputs]))
        call = dataclasses.replace(blind_call, density=density)
        xs = tuple(itertools.islice(itertools.cycle([jnp.asarray(x) for x in inputs]), CALLS))
        us = {c: microseconds(chains[c.attribute], (xs, kernel, bias), options.repeats) for c in every}
        best = min(us, key=us.__getitem__)
        choices = {
            "model": cost_model.choose(covering, call, device),
            "blind": cost_model.choose(covering, blind_call, device),
            "published": cost_model.choose_as_published(covering, call, device),
        }
        yield {
            "layer": layer.name,
            "x_shape": list(x_shape),
            "kernel_shape": list(kernel.shape),
            "source": source,
            "density": density,
            "best": name_of(best),
            "best_us": us[best],
            **{name: name_of(choice) for name, choice in choices.items()},
            **{f"{name}_us": us[choice] for name, choice in choices.items()},
            **{f"{name}_loss": us[choice] / us[best] - 1 for name, choice in choices.items()},
            "estimated_us": 1e6 * cost_model.estimated_time(choices["model"], call, device),
            "us": {name_of(c): round(t, 2) for c, t in us.items()},
        }


def name_of(configuration: configurations.Configuration) -> str:
    variant = configuration.variant
    return (
        f"{variant.height}x{variant.width}x{variant.out_channels} "
        f"{configuration.out_channel_warps}/{configuration.slices}/{configuration.splits}"
    )


def _inputs(
    layer: Layer, maps: dict[str, data.Map], options: argparse.Namespace
) -> Iterator[tuple[str, list[data.Map]]]:
    if data.has_maps(maps, layer):
        yield "real", [data.real_map(maps, layer, options.batch, first) for first in range(timing.ROTATIONS)]
    for zeros in options.zeros:
        yield f"{zeros} % i.i.d.", [data.iid_map(layer, options.batch, zeros, seed) for seed in range(timing.ROTATIONS)]


@functools.lru_cache(maxsize=4096)
def chained(geometry: geo.Geometry, attribute: configurations.Attribute) -> Any:
    """Several calls with one configuration in one jit."""
    config = primitives.Config(geometry, "coo", "relu", coo=attribute)

    @jax.jit
    def run(xs: tuple[jax.Array, ...], kernel: jax.Array, bias: jax.Array) -> jax.Array:
        results = [primitives.bind(x, kernel[None], bias[None], None, config) for x in xs]
        return jnp.stack([jax.lax.optimization_barrier(result).reshape(-1)[0] for result in results])

    return run


def microseconds(chain: Any, operands: Any, repeats: int) -> float:
    """Median device time of one call."""
    jax.block_until_ready(chain(*operands))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([chain(*operands) for _ in range(_CHAINS)])
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples) / (_CHAINS * CALLS)


def _add_offline(rows: list[Row]) -> None:
    """The loss against the configuration with the least average time over all inputs of a layer (Fig. 8)."""
    for layer in {row["layer"] for row in rows}:
        same = [row for row in rows if row["layer"] == layer]
        best = min(same[0]["us"], key=lambda name: statistics.mean(row["us"][name] for row in same))
        for row in same:
            row["offline_best"] = best
            row["offline_loss"] = row["model_us"] / row["us"][best] - 1


def _line(row: Row) -> str:
    losses = "  ".join(f"{name} {row[f'{name}_loss']:6.1%}" for name in ("model", "blind", "published"))
    return (f"{row['layer']:34} {row['source']:12} density {row['density']:.2f}  best {row['best_us']:7.1f} us "
            f"{row['best']:14}  model {row['model_us']:7.1f} us {row['model']:14} losses: {losses}")  # fmt: skip
