"""Models that others wrote, as they are, and by `accelerate` and `jit_inference`.

    python -m benchmarks models --models nnx_resnet50 keras_vgg16 --kinds default bfloat16 --json results.json

Sides: "jit" (`jax.jit` with the weights as constants), "accelerate" (`jax.jit(jsc.accelerate(...))` of the same) and
"jit_inference"; on a GPU also "graphs", which is "jit" with the flags under which XLA makes CUDA graphs of everything.
Ratios are to the faster of "jit" and "graphs". `us` is the time of a call: on a GPU of one among many that are
dispatched without waiting, on a CPU until the result is there. `waited_us` is the time of one call that is waited for,
sides in turns. `compile_s` is the time of tracing and compiling.

The images are a photograph, mirrored and shifted. Weights are as each framework initialises them, with a trained
network's zeros: kernels are scaled, and biases moved until each ReLU makes as many, on the first image in float32.
"dense" ones have biases so high that no ReLU clips anything: a gain that stays there is not from zeros. "initial" ones
stay as built, and so do those of a model of which no zeros are known. `zeros_percent` is the mean share of zeros of the
convolutions' inputs on that image.

`jit_error` and `error` (the largest of ours) are relative to plain `jit` at HIGHEST in float32, by the Frobenius norm.

`bytes` is what a compiled program needs: `temp_bytes` while it runs, and `weight_bytes` of constants in it and of what
`jit_inference` has computed. The weights that the caller holds come on top of every side.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import command, data, suite, tables
from benchmarks.common.cases import KINDS
from benchmarks.networks.frameworks import MODELS, Built, shares_of
from benchmarks.networks.trained_zeros import with_zeros
from jax_sparse_conv import models
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.cli import photograph
from jax_sparse_conv._src.plans import timing

WEIGHTS = ("trained", "dense", "initial")
OURS = ("accelerate", "jit_inference")
SIDES = ("jit", "graphs", *OURS)
_DISPATCHED = 50  # calls in a row
_CONSTANT = re.compile(r"= [a-z]+(\d*)\w*\[([\d,]*)\]\S* constant\(")  # in XLA's text: its bits and its shape
_COLUMNS = (
    ("model", "model", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    ("kind", "kind", "<", "{}"),
    ("weights", "weights", "<", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.1f}"),
    *((f"{side}_us", f"{side} us", ">", "{:.0f}") for side in SIDES),
    *((f"{side}_ratio", f"{side} x", ">", "{:.2f}") for side in OURS),
    *((f"{side}_waited_us", f"{side} waited us", ">", "{:.0f}") for side in SIDES),
    *((f"{side}_compile_s", f"{side} compile s", ">", "{:.1f}") for side in SIDES),
    *((f"{side}_bytes", f"{side} bytes", ">", "{:,}") for side in SIDES),
    ("layers", "layers", ">", "{}"),
    ("jit_error", "jit's error", ">", "{:.1e}"),
    ("error", "error", ">", "{:.1e}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time every model, print a table and write a JSON file; the result is the exit status."""
    return suite.run("models", _parser(), argv, _cases, _table)


def _cases(options: argparse.Namespace) -> Iterator[list[tables.Row]]:
    for name, weights, batch, kind in itertools.product(
        options.models, options.weights, options.batches, options.kinds
    ):
        yield [measure(name, weights, kind, batch, options)]


def _table(rows: list[tables.Row]) -> str:
    return tables.aligned(rows, [column for column in _COLUMNS if column[0] in rows[0]])


def measure(name: str, weights_kind: str, kind: str, batch: int, options: argparse.Namespace) -> tables.Row:
    """Times and memory of all sides of a model, their ratios to plain `jit`, and how far the results are apart."""
    dtype, precision = KINDS[kind]
    x, repeats = _images(options.size, batch).astype(dtype), options.repeats
    found, zeros = _weights(name, options.size, weights_kind)
    wanted = _exact(name, options.size, weights_kind, batch)  # in front of the model: Keras has one dtype at a time
    with jax.default_matmul_precision(precision):
        function, weights = _built(name, x, found)
        predict = jsc.jit_inference(function, weights)
        sides = _sides(lambda x: function(weights, x)) | {"jit_inference": predict}
        compiled = {side: _first_call(each, x) for side, each in sides.items()}
        errors = {side: data.frobenius(np.asarray(each(x), np.float64), wanted) for side, each in sides.items()}
        operands = [(each,) for each in timing.rotations(x)]
        if devices.default_platform() == "gpu":
            times = timing.blocked(sides, operands, repeats, _DISPATCHED)
        else:
            times = timing.streaks(sides, operands, repeats)
        waited = timing.blocked(sides, operands, repeats)
        layers = sum(row.reason is None for row in predict.report(x).rows)
        memory = _memory(sides, x, {"jit_inference": predict.prepared(x)})
    row: tables.Row = {"model": name, "batch": batch, "kind": kind, "dtype": dtype, "size": options.size}
    row |= {"weights": weights_kind if shares_of(name) else "initial", "zeros_percent": 100 * zeros}
    row |= {f"{side}_us": each.microseconds for side, each in times.items()}
    row |= {f"{side}_best_us": 1e6 * each.best for side, each in times.items()}
    row |= {f"{side}_waited_us": each.microseconds for side, each in waited.items()}
    row |= {f"{side}_compile_s": each for side, each in compiled.items()}
    dense = min(times[side].median for side in sides if side not in OURS)
    row |= {f"{side}_ratio": dense / times[side].median for side in OURS}
    dense_error = max(error for side, error in errors.items() if side not in OURS)
    row |= {"jit_error": dense_error, "error": max(errors[side] for side in OURS)}
    return row | memory | {"layers": layers}


def _images(size: int, batch: int) -> jax.Array:
    return models.preprocess(photograph.batch_of(photograph.load(None, size), batch))


@functools.lru_cache(maxsize=1)
def _weights(name: str, size: int, kind: str) -> tuple[Any, float]:
    """Weights of a kind, found on one float32 image, and the mean share of zeros of the convolutions' inputs."""
    image = _images(size, 1)
    shares = {"trained": shares_of(name), "dense": [0.0], "initial": []}[kind] if shares_of(name) else []
    with jax.default_device(jax.devices("cpu")[0]):
        function, weights = MODELS[name](image)
    return with_zeros(function, weights, image, shares)


@functools.lru_cache(maxsize=1)
def _exact(name: str, size: int, weights_kind: str, batch: int) -> np.ndarray:
    """The results of plain `jit` at HIGHEST in float32."""
    x = _images(size, batch)
    function, weights = _built(name, x, _weights(name, size, weights_kind)[0])
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(function)(weights, x), np.float64)


def _built(name: str, x: jax.Array, found: Any) -> Built:
    """A model for images `x`, with weights that were found, in its own dtypes."""
    function, weights = MODELS[name](x)
    leaves, tree = jax.tree.flatten(weights)
    moved = [
        jnp.asarray(np.asarray(new), old.dtype) if jnp.issubdtype(jnp.result_type(old), jnp.floating) else old
        for old, new in zip(leaves, jax.tree.leaves(found), strict=True)
    ]
    return function, jax.tree.unflatten(tree, moved)


def _memory(sides: Mapping[str, Any], x: jax.Array, computed: Mapping[str, Sequence[jax.Array]]) -> dict[str, int]:
    """Bytes that each side's program needs, as far as XLA says so. JAX has what was compiled, so nothing is anew."""
    row: dict[str, int] = {}
    for side, function in sides.items():
        program = function.lower(x).compile()
        stats = program.memory_analysis()
        if stats is not None:
            temp = stats.temp_size_in_bytes
            weights = _constant_bytes(program.as_text()) + sum(each.nbytes for each in computed.get(side, ()))
            row |= {f"{side}_temp_bytes": temp, f"{side}_weight_bytes": weights, f"{side}_bytes": temp + weights}
    return row


def _constant_bytes(text: str) -> int:
    """Of all constants of a compiled program, from XLA's text of it."""
    found = _CONSTANT.findall(text)
    return sum(
        max(1, int(bits or 8) // 8) * math.prod(map(int, filter(None, shape.split(",")))) for bits, shape in found
    )


def _sides(of_images: Callable[[jax.Array], jax.Array]) -> dict[str, Callable[[jax.Array], Any]]:
    """A function of images by XLA, under each set of flags, and by `accelerate`."""
    sides = {"jit": jax.jit(of_images)}
    if devices.default_platform() == "gpu":
        sides["graphs"] = jax.jit(lambda x: of_images(x), compiler_options=command.GRAPHS)
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
    add("--kinds", nargs="+", choices=tuple(KINDS), default=["default"], help="precision of float32, or dtype")
    add("--weights", nargs="+", choices=WEIGHTS, default=["trained"], help="a trained network's zeros, none, as built")
    add("--size", type=int, default=224, help="height and width of the images")
    add("--repeats", type=int, default=11)
    add("--json", type=Path)
    return parser
