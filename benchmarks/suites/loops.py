"""What the choice between the CPU's dense loops and that over pixels loses, by the share of zeros.

    python -m benchmarks loops
    python -m benchmarks loops --zeros 10 25 --repeats 30 --json results.json
    python -m benchmarks loops --layers few --zeros 0 50
    python -m benchmarks loops --dtype bfloat16  # of pairs, with AVX512-BF16

3x3 and 1x1 layers with independent zeros. Weights are constants of the program, which are packed once, or arguments,
which are packed in each call. Each layer runs by the loop that is chosen, by the dense one, by that over pixels and, if
it is 3x3, by Winograd's, in turns. Layers with few output channels run by dot products in Winograd's place, and by XLA.
Regret is the time of the choice over that of the best loop, by medians. The constants behind the choice are "cpu
direct", "cpu pixels", "cpu winograd" and "cpu dots" of `dispatch/model.json`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import command, results, tables
from jax_sparse_conv._src import _native, environment
from jax_sparse_conv._src.plans import timing

LOOPS = ("auto", "direct", "pixels", "winograd", "dots")  # of `_native.set_cpu_loop`, the first is the choice
PAIRS = {"direct": "direct of pairs", "pixels": "pixels of pairs"}  # what those of bfloat16 are called there
WEIGHTS = ("constant", "argument")


class Layer(NamedTuple):
    images: int
    size: int
    channels: int
    window: int
    out_channels: int

    def __str__(self) -> str:
        shape = f"{self.images}x{self.size}x{self.size}"
        return f"{shape}, {self.window}x{self.window} {self.channels}->{self.out_channels}"


LAYERS = (
    Layer(8, 28, 128, 3, 128),
    Layer(4, 14, 256, 3, 256),
    Layer(4, 56, 64, 3, 64),
    Layer(1, 112, 128, 3, 128),
    Layer(1, 56, 256, 3, 256),
    Layer(1, 28, 512, 3, 512),
    Layer(1, 14, 512, 3, 512),
    Layer(4, 28, 512, 1, 128),
    Layer(4, 14, 1024, 1, 256),
    Layer(4, 56, 256, 1, 64),
    Layer(1, 56, 64, 1, 16),
)
FEW = (
    Layer(1, 224, 64, 3, 1),
    Layer(1, 224, 64, 3, 3),
    Layer(8, 56, 64, 3, 1),
    Layer(1, 56, 128, 3, 2),
    Layer(1, 64, 256, 1, 4),
    Layer(1, 28, 519, 1, 1),
)
"""With few output channels: heads of segmentation, super-resolution and detection."""
CHOICES = {"many": LAYERS, "few": FEW}  # output channels
XLA = "xla"

_COLUMNS = (
    ("layer", "layer", "<", "{}"),
    ("dtype", "dtype", "<", "{}"),
    ("weights", "weights", "<", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.0f}"),
    *((f"{loop}_us", f"{loop} us", ">", "{}") for loop in (*LOOPS, XLA)),
    ("regret", "regret", ">", "{:.2f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the layers, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        cases = itertools.product(CHOICES[options.layers], WEIGHTS, options.zeros)
        rows = [_measure(layer, weights, zeros, options.dtype, options.repeats) for layer, weights, zeros in cases]
    except OSError as error:
        print(f"benchmarks loops: {error}", file=sys.stderr)
        return 1
    print(tables.aligned([_shown(row) for row in rows], _COLUMNS))
    for weights in WEIGHTS:
        regrets = [row["regret"] for row in rows if row["weights"] == weights]
        lost = f"regret {timing.geometric_mean(regrets):.3f}, at worst {max(regrets):.2f}"
        print(f"{_native.cpu_isa()}, weights as {weights}s: {lost}")
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("loops", arguments)}
        results.add(options.json, "loops", {**content, "rows": rows})
    return 0


def _shown(row: tables.Row) -> tables.Row:
    """The row with its times as text, nothing for a loop that did not run."""
    times = {f"{loop}_us": row.get(f"{loop}_us") for loop in (*LOOPS, XLA)}
    return row | {key: "" if found is None else f"{found:.0f}" for key, found in times.items()}


def _measure(layer: Layer, weights: str, zeros: float, dtype: str, repeats: int) -> tables.Row:
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(layer.window, layer.window, layer.channels, layer.out_channels)), dtype)
    maps = []
    for _ in range(timing.ROTATIONS):
        x = rng.normal(size=(layer.images, layer.size, layer.size, layer.channels)).astype(np.float32)
        maps.append((jnp.asarray(np.where(rng.random(x.shape) * 100 < zeros, np.float32(0), x), dtype), kernel))
    packed, plain = jax.jit(lambda x, _: jsc.conv(x, kernel)), jax.jit(lambda x, given: jsc.conv(x, given))
    run = packed if weights == "constant" else plain
    try:
        loops = _loops_of(layer, dtype)
        names = PAIRS if dtype == "bfloat16" else {}
        functions = {loop: _by(names.get(loop, loop), run) for loop in loops}
        if layer in FEW:
            functions[XLA] = _by("auto", _xla(kernel) if weights == "constant" else _xla())
        times = timing.streaks(functions, maps, repeats)
    finally:
        _native.set_cpu_loop("auto")
    row: tables.Row = {"layer": str(layer), "dtype": dtype, "weights": weights, "zeros_percent": zeros}
    row |= {f"{side}_us": found.microseconds for side, found in times.items()}
    row["regret"] = times["auto"].median / min(times[loop].median for loop in loops[1:])
    return row


def _loops_of(layer: Layer, dtype: str) -> tuple[str, ...]:
    """Those that the layer runs by, the choice first."""
    if layer in FEW:
        return tuple(loop for loop in LOOPS if loop != "winograd")
    return LOOPS[:4] if layer.window == 3 and dtype == "float32" else LOOPS[:3]


def _xla(constant: jax.Array | None = None) -> Any:
    """The layer by XLA, with a constant kernel or the one that is given."""
    return jax.jit(lambda x, given: jsc.conv(x, given if constant is None else constant, implementation="xla"))


def _by(loop: str, run: Any) -> timing.Function:
    """The layer by a loop; it is told before each call, and the call has ended when another is told."""

    def told(x: jax.Array, kernel: jax.Array) -> jax.Array:
        _native.set_cpu_loop(loop)
        found: jax.Array = run(x, kernel).block_until_ready()
        return found

    return told


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("loops", __doc__)
    add: Any = parser.add_argument
    add("--layers", choices=sorted(CHOICES), default="many", help="with many output channels, or with few")
    add("--zeros", type=float, nargs="+", default=(10, 20, 25, 30, 35, 40, 50), metavar="PERCENT")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--repeats", type=int, default=15)
    add("--json", type=Path)
    return parser
