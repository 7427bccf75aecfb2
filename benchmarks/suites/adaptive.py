"""What the choice between "ecr" and "direct" in the running program costs: a layer, and the one that makes its map.

    python -m benchmarks adaptive --maps feature_maps.npz --json results.json

Every program has two layers: a 1x1 convolution with the identity for a kernel, which hands on the map that it is given,
and the layer of the row. Sides, all in turns in one process:

- ecr, direct: the layer by name;
- counted_ecr: the same where the first layer counts non-zeros that nobody reads;
- sparse, dense: "adaptive" by the first layer's counts, with a threshold that forces the side;
- adaptive: with the threshold of the cost model.

Overheads are against ecr for sparse, direct for dense, and the faster of the two for adaptive, where they hold what
counting and choosing cost and what a wrong side does. The allowance is 3 % and 2 us: "within" says whether both forced
sides keep it, "adaptive_within" whether adaptive does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import command, data, results
from benchmarks.common.cases import GPU, MAPS, Layer
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import primitives
from jax_sparse_conv._src.problem import geometry as geo

_LEAST_CHANNELS = 32
LAYERS = tuple(
    layer
    for layer in {layer.name: layer for layer in (*GPU, *MAPS)}.values()
    if layer.op != "dense" and layer.channels >= _LEAST_CHANNELS
)
ZEROS = (0, 85, 90, 93, 95, 97, 99, 100)  # close together where the sides cross
SHARE, MICROSECONDS = 0.03, 2.0  # allowed
_PRODUCER = {"highest": "ecr", "default": "direct"}  # mostly the faster one there
_FORCED = {"sparse": math.inf, "dense": -1.0}  # thresholds
_THREADS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Time the layers, print a line for each map and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        maps = data.read_maps(options.maps) if options.maps else {}
        content = {**environment.describe_run(), "xla_flags": os.environ.get("XLA_FLAGS", "")}
        layers = [layer for layer in LAYERS if re.search(options.layers, layer.name)]
        content |= {"command": command.portable("adaptive", arguments), "repeats": options.repeats}
        rows: list[dict[str, Any]] = []
        for row in _rows(layers, options, maps):
            rows.append(row)
            print(_line(row), flush=True)
            results.add(options.json, "adaptive", {**content, "rows": rows})  # a run that is cut short keeps them
    except (OSError, ValueError) as error:
        print(f"benchmarks adaptive: {error}", file=sys.stderr)
        return 1
    for key, what in (("within", "forced sides"), ("adaptive_within", "adaptive")):
        print(f"{what}: {sum(row[key] for row in rows)} of {len(rows)} within {SHARE:.0%} and {MICROSECONDS} us")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("adaptive", __doc__)
    add = parser.add_argument
    add("--layers", default="", help="only layers whose name matches this regular expression")
    add("--maps", type=Path, help="real maps, as in the suite layers")
    add("--zeros", type=int, nargs="+", default=ZEROS, help="percentages of i.i.d. zeros")
    add("--precision", nargs="+", default=list(_PRODUCER), choices=_PRODUCER)
    add("--repeats", type=int, default=10)
    add("--json", type=Path)
    return parser


def _rows(layers: Sequence[Layer], options: argparse.Namespace, maps: Mapping[str, data.Map]) -> Iterator[Any]:
    jobs = [(layer, precision) for layer in layers for precision in options.precision]
    if jax.default_backend() != "cpu":
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda job: _compile(*job), [(*job, side) for job in jobs for side in _SIDES]))
    for layer, precision in jobs:
        for source, inputs in _inputs(layer, options.zeros, maps):
            yield {**_measure(layer, precision, inputs, options.repeats), "source": source}


def _inputs(layer: Layer, zeros: Sequence[int], maps: Mapping[str, data.Map]) -> Iterator[tuple[str, list[jax.Array]]]:
    if data.has_maps(maps, layer):
        yield "real", [jnp.asarray(data.real_map(maps, layer, 1, first)) for first in range(timing.ROTATIONS)]
    for percent in zeros:
        yield "iid", [jnp.asarray(data.iid_map(layer, 1, percent, seed)) for seed in range(timing.ROTATIONS)]


def _measure(layer: Layer, precision: str, inputs: list[jax.Array], repeats: int) -> dict[str, Any]:
    functions = {side: _side(layer, precision, side) for side in _SIDES}
    operands = [(x, *_weights(layer)) for x in inputs]
    results = {side: np.asarray(function(*operands[0])) for side, function in functions.items()}
    times = {side: timed.microseconds for side, timed in timing.per_call(functions, operands, repeats).items()}
    better = min(times["ecr"], times["direct"])
    against = {"sparse": times["ecr"], "dense": times["direct"], "adaptive": better, "counted_ecr": times["ecr"]}
    overheads = {side: times[side] - than for side, than in against.items()}
    within = {side: overheads[side] <= SHARE * than + MICROSECONDS for side, than in against.items()}
    return {
        "layer": layer.name,
        "precision": precision,
        "producer": _PRODUCER[precision],
        "zeros_percent": 100 * float(np.mean([np.mean(np.asarray(x) == 0) for x in inputs])),
        "us": times,
        "overhead_us": overheads,
        "within": within["sparse"] and within["dense"],
        "adaptive_over_better": times["adaptive"] / better,
        "adaptive_within": within["adaptive"],
        "adaptive_ran": timing.what_ran(functions["adaptive"], *operands[0]),
        "same_results": bool(
            (results["sparse"] == results["ecr"]).all() and np.allclose(results["dense"], results["direct"], 1e-5, 1e-5)
        ),
    }


def _line(row: Mapping[str, Any]) -> str:
    us, over = row["us"], row["overhead_us"]
    parts = [f"{row['layer']:27} {row['precision']:8} {row['source']:4} {row['zeros_percent']:5.1f} %"]
    parts += [f"{side} {us[side]:6.2f}" for side in ("ecr", "direct", "adaptive")]
    for side, base in (("sparse", us["ecr"]), ("dense", us["direct"]), ("adaptive", min(us["ecr"], us["direct"]))):
        parts.append(f"{side} {over[side]:+5.2f} us {over[side] / base:+4.0%}")
    parts.append(f"counting {over['counted_ecr']:+5.2f}")
    parts += ["within" if row[key] else "BEYOND" for key in ("within", "adaptive_within")]
    return " ".join([*parts, "" if row["same_results"] else "DIFFERENT"])


# --- the programs ----------------------------------------------------------------------------------------------------

_SIDES = ("ecr", "direct", "counted_ecr", "sparse", "dense", "adaptive")


@functools.cache
def _side(layer: Layer, precision: str, side: str) -> timing.Function:
    counts = side not in ("ecr", "direct")
    first = functools.partial(jsc.conv, precision=precision, implementation=_PRODUCER[precision], count_nonzeros=counts)

    @jax.jit
    def program(x: jax.Array, identity: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        y = first(x, identity)
        y, nonzeros = y if counts else (y, None)
        if side in _FORCED:
            return _forced(layer, precision, y, kernel, bias, nonzeros, _FORCED[side])
        arguments: dict[str, Any] = {"activation": "relu", "precision": precision}
        arguments |= {"implementation": side if side != "counted_ecr" else "ecr"}
        if side == "adaptive":
            arguments["nonzeros"] = nonzeros
        if layer.op == "conv":
            return jsc.conv(y, kernel, bias, **arguments)
        if arguments["implementation"] == "ecr":
            arguments["implementation"] = "pecr"
        return jsc.conv_pool(y, kernel, bias, **arguments)

    return program


def _forced(
    layer: Layer, precision: str, x: jax.Array, kernel: jax.Array, bias: jax.Array, nonzeros: Any, below: float
) -> jax.Array:
    """The layer by "adaptive" with a threshold."""
    geometry = geo.resolve(x.shape, kernel.shape)
    if layer.op == "conv_pool":
        size = geometry.conv_size(x.shape[1:3], kernel.shape[:2])
        geometry = geo.with_pool(
            geometry, size, kind="max", window_shape=2, window_strides=None, window_padding="VALID"
        )
    lax_precision = (jax.lax.Precision(precision),) * 2
    config = primitives.Config(geometry, "adaptive", "relu", precision=lax_precision, below=below)
    return primitives.bind(x, kernel[None], bias[None], None, config, nonzeros=nonzeros)


@functools.cache
def _weights(layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel, bias = data.weights(layer, 0)
    return jnp.eye(layer.channels)[None, None], jnp.asarray(kernel), jnp.asarray(bias)


def _compile(layer: Layer, precision: str, side: str) -> None:
    x = jnp.asarray(data.iid_map(layer, 1, 50, 0))
    timing.compile_ahead(_side(layer, precision, side), [(x, *_weights(layer))] * timing.ROTATIONS)
