"""Models that others wrote, as they are, and by `accelerate` and `jit_inference`.

    python -m benchmarks models --models nnx_resnet50 keras_vgg16 --batches 1 8 --json results.json

Sides: "jit" (`jax.jit` with the weights as constants), "accelerate" (`jax.jit(jsc.accelerate(...))` of the same) and
"jit_inference"; on a GPU also "graphs", which is "jit" with the flags under which XLA makes CUDA graphs of everything.
Ratios are to the faster of "jit" and "graphs". `us` is the time of a call: on a GPU of one among many that are
dispatched without waiting, on a CPU until the result is there. `waited_us` is the time of one call that is waited for,
sides in turns. `compile_s` is the time of tracing and compiling. Weights are as each framework initialises them, so the
zeros are those of random weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import command, results, tables
from benchmarks.common.frameworks import MODELS
from jax_sparse_conv._src import devices, environment
from jax_sparse_conv._src.plans import timing

OURS = ("accelerate", "jit_inference")
SIDES = ("jit", "graphs", *OURS)
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONVOLUTION",
    "xla_gpu_graph_min_graph_size": 1,
}
_DISPATCHED = 50  # calls in a row
_COLUMNS = (
    ("model", "model", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    ("dtype", "dtype", "<", "{}"),
    ("precision", "precision", "<", "{}"),
    *((f"{side}_us", f"{side} us", ">", "{:.0f}") for side in SIDES),
    *((f"{side}_ratio", f"{side} x", ">", "{:.2f}") for side in OURS),
    *((f"{side}_waited_us", f"{side} waited us", ">", "{:.0f}") for side in SIDES),
    *((f"{side}_compile_s", f"{side} compile s", ">", "{:.1f}") for side in SIDES),
    ("layers", "layers", ">", "{}"),
    ("error", "error", ">", "{:.1e}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time every model, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
    except ValueError as error:
        print(f"benchmarks models: {error}", file=sys.stderr)
        return 1
    rows = []
    for name in options.models:
        for batch in options.batches:
            for dtype in options.dtypes:
                rows.append(measure(name, batch, dtype, options.precision, options.size, options.repeats))
                columns = [column for column in _COLUMNS if column[0] in rows[-1]]
                print(tables.aligned(rows[-1:], columns), flush=True)
    line = command.portable("models", arguments)
    content = {**environment.describe_run(), "command": line, "repeats": options.repeats}
    results.add(options.json, "models", {**content, "rows": rows})
    return 0


def measure(name: str, batch: int, dtype: str, precision: str, size: int, repeats: int) -> tables.Row:
    """Times of all sides of a model, their ratios to plain `jit`, and how far the results are apart."""
    x = jax.random.normal(jax.random.key(0), (batch, size, size, 3), dtype)
    with jax.default_matmul_precision(precision):
        function, weights = MODELS[name](x)
        predict = jsc.jit_inference(function, weights)
        sides = _sides(lambda x: function(weights, x)) | {"jit_inference": predict}
        compiled = {side: _first_call(each, x) for side, each in sides.items()}
        wanted = np.asarray(sides["jit"](x), np.float64)
        found = [np.asarray(each(x), np.float64) for each in sides.values()]
        operands = [(each,) for each in timing.rotations(x)]
        if devices.default_platform() == "gpu":
            times = timing.blocked(sides, operands, repeats, _DISPATCHED)
        else:
            times = timing.streaks(sides, operands, repeats)
        waited = timing.blocked(sides, operands, repeats)
        layers = sum(row.reason is None for row in predict.report(x).rows)
    row: tables.Row = {"model": name, "batch": batch, "dtype": dtype, "precision": precision, "size": size}
    row |= {f"{side}_us": each.microseconds for side, each in times.items()}
    row |= {f"{side}_best_us": 1e6 * each.best for side, each in times.items()}
    row |= {f"{side}_waited_us": each.microseconds for side, each in waited.items()}
    row |= {f"{side}_compile_s": each for side, each in compiled.items()}
    dense = min(times[side].median for side in sides if side not in OURS)
    row |= {f"{side}_ratio": dense / times[side].median for side in OURS}
    error = max(float(np.linalg.norm(each - wanted) / np.linalg.norm(wanted)) for each in found)
    return row | {"layers": layers, "error": error}


def _sides(of_images: Callable[[jax.Array], jax.Array]) -> dict[str, Callable[[jax.Array], Any]]:
    """A function of images by XLA, under each set of flags, and by `accelerate`."""
    sides = {"jit": jax.jit(of_images)}
    if devices.default_platform() == "gpu":
        sides["graphs"] = jax.jit(lambda x: of_images(x), compiler_options=GRAPHS)
    sides["accelerate"] = jax.jit(jsc.accelerate(of_images), compiler_options=jsc.compiler_options() or None)
    return sides


def _first_call(function: Callable[[jax.Array], Any], x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(x))
    return time.perf_counter() - start


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("models", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS), metavar="NAME")
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"])
    add("--precision", choices=("default", "highest"), default="default", help="of float32 products")
    add("--size", type=int, default=224, help="height and width of the images")
    add("--repeats", type=int, default=11)
    add("--json", type=Path)
    return parser
