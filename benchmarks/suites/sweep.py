"""Random layers under `implementation=None` against the same in lax: where does None lose, and what is it worth?

    python -m benchmarks sweep --layers 200 --json sweep.json
    python -m benchmarks sweep --seed 3 --minutes 10 --weights constant --json sweep.json

Layers are drawn from a seed over the whole space of shapes: images, sizes, channels, windows, strides, dilation,
groups, pools, dense layers and zeros. Sides take turns, and times are medians (`jax_sparse_conv.timing.per_call`). A
layer that None leaves to XLA is counted and not timed, because both sides are the same.

With JSC_CAPABILITY or JSC_TABLES rows have a label: what a GPU without a table gets, or an older one.

What comes out below 0.97 is timed again, longer. So are as many others, drawn at random, and the second times count:
other work on the machine may lead either way. The geometric mean is that of the first times of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_sparse_conv as jsc
from benchmarks.common import command, losing, suite, tables
from benchmarks.common.losing import LEAST, is_loss
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import folders
from jax_sparse_conv._src.plans import timing

_LONGER = 3  # times as many repeats where a layer is timed again
_MOST_BYTES = 2**28  # of a layer's arrays
_WINDOWS = ((1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (2, 2), (9, 9), (11, 11), (1, 7), (3, 1))
_COLUMNS = (
    ("layer", "layer", "<", "{}"),
    ("implementation", "ran", "<", "{}"),
    ("xla_us", "XLA us", ">", "{:.1f}"),
    ("ours_us", "ours us", ">", "{:.1f}"),
    ("ratio", "ratio", ">", "{:.2f}"),
    ("best_ratio", "of best", ">", "{:.2f}"),
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with bias and ReLU.

    Attributes:
      op: "conv", "conv_pool" (a 2x2 max pool) or "dense".
      x: [N, H, W, C], or [N, C] of a dense layer.
      kernel: [kh, kw, C / groups, K], or [C, K].
      stride, dilation, groups: of the convolution, with SAME padding.
      zeros: percentage of zeros of x.
    """

    op: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    zeros: int = 0

    @property
    def name(self) -> str:
        rows = "x".join(map(str, self.x[:-1]))
        about = "" if self.op == "dense" else f" {self.kernel[0]}x{self.kernel[1]}"
        for name in ("stride", "dilation", "groups"):
            about += f" {name} {getattr(self, name)}" if getattr(self, name) > 1 else ""
        return f"{self.op}{about} {self.x[-1]}->{self.kernel[-1]} {rows}, {self.zeros} % zeros"

    @property
    def flops(self) -> int:
        pixels = self.x[0] * math.prod(-(-n // self.stride) for n in self.x[1:-1])
        return 2 * pixels * math.prod(self.kernel)

    @property
    def nbytes(self) -> int:
        pixels = self.x[0] * math.prod(-(-n // self.stride) for n in self.x[1:-1])
        return 4 * (math.prod(self.x) + math.prod(self.kernel) + pixels * self.kernel[-1])

    def ours(self, dtype: str, precision: str) -> Callable[..., Any]:
        """The layer under None, of (x, kernel, bias)."""
        common: dict[str, Any] = {"activation": "relu", "precision": precision}
        if self.op == "dense":
            return lambda *operands: jsc.dense(*operands, **common)
        common |= {"strides": self.stride, "kernel_dilation": self.dilation, "feature_group_count": self.groups}
        operation = jsc.conv if self.op == "conv" else jsc.conv_pool
        return lambda *operands: operation(*operands, **common)

    def xlas(self, dtype: str, precision: str) -> Callable[..., Any]:
        """The same in lax."""

        def layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
            if self.op == "dense":
                return jax.nn.relu(jnp.matmul(x, kernel, precision=precision) + bias)
            y = lax.conv_general_dilated(
                x,
                kernel,
                (self.stride,) * 2,
                "SAME",
                rhs_dilation=(self.dilation,) * 2,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=self.groups,
                precision=precision,
            )
            y = jax.nn.relu(y + bias)
            if self.op == "conv":
                return y
            window = (1, 2, 2, 1)
            return lax.reduce_window(y, np.asarray(-np.inf, dtype), lax.max, window, window, "VALID")

        return layer


def draw(seed: int, number: int, most_flops: float) -> Layer:
    """Layer `number` of a seed."""
    rng = np.random.default_rng([seed, number])
    while True:
        layer = _drawn(rng)
        if 1e4 <= layer.flops <= most_flops and layer.nbytes <= _MOST_BYTES:
            return layer


def _drawn(rng: np.random.Generator) -> Layer:
    def sized(low: int, high: int) -> int:
        """An int with a uniform logarithm; every second one a multiple of 8, as networks have them."""
        found = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        return max(8, found // 8 * 8) if found > 8 and rng.random() < 0.5 else found

    images = sized(1, 64) if rng.random() < 0.5 else 1
    channels, out_channels = sized(1, 1024), sized(1, 1024)
    zeros = int(rng.choice((0, 0, 30, 50, 70, 85, 95)))
    op = str(rng.choice(("conv", "conv_pool", "dense"), p=(0.7, 0.15, 0.15)))
    if op == "dense":
        return Layer(op, (images, 4 * channels), (4 * channels, 4 * out_channels), zeros=zeros)
    window = _WINDOWS[rng.integers(len(_WINDOWS))]
    size = sized(2, 224)
    stride = int(rng.choice((1, 2, 3, 4, 8), p=(0.6, 0.25, 0.05, 0.05, 0.05)))
    groups, dilation = 1, int(rng.choice((1, 2), p=(0.95, 0.05)))
    if rng.random() < 0.1:
        groups, out_channels = channels, channels
    kernel = (*window, channels // groups, out_channels)
    return Layer(
        op, (images, size, max(2, size + int(rng.integers(-2, 3))), channels), kernel, stride, dilation, groups, zeros
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Time layers, print each and what all come to, write a JSON file; the result is the exit status."""
    return suite.run("sweep", _parser(), argv, _rows, lambda rows: tables.aligned(rows, _COLUMNS).split("\n")[1])


def _rows(options: argparse.Namespace) -> Iterator[list[tables.Row]]:
    """Rows of every layer, then those of layers that are timed again."""
    end = time.monotonic() + 60 * options.minutes
    first: dict[Layer, tables.Row] = {}
    left = 0
    print(tables.aligned([], _COLUMNS))
    for number in range(options.layers):
        if time.monotonic() > end:
            break
        layer = draw(options.seed, number, options.most_flops)
        row = _timed(layer, options, options.repeats)
        left += row is None
        if row is not None and layer not in first:
            first[layer] = row
            yield [row]
    again = {}
    for layer in losing.again({layer: row["ratio"] for layer, row in first.items()}, options.seed):
        row = _timed(layer, options, _LONGER * options.repeats)
        assert row is not None
        again[layer] = row | {f"first_{name}": first[layer][name] for name in ("ratio", "best_ratio")}
        yield [again[layer]]
    print(summary(list(first.values()), list(again.values()), left))


def summary(first: Sequence[tables.Row], again: Sequence[tables.Row], left: int) -> str:
    """The geometric mean, and what loses both times."""
    lost = sorted((row for row in again if is_loss(row["ratio"])), key=lambda row: float(row["ratio"]))
    twice = [row for row in lost if is_loss(row["first_ratio"])]
    of_others = len(lost) - len(twice)
    lines = [tables.aligned(twice, _COLUMNS)] if twice else []
    lines.append(f"{len(first)} layers timed, {left} left to XLA")
    if first:
        lines.append(f"geometric mean {timing.geometric_mean(row['ratio'] for row in first):.2f}")
    lines.append(f"{len(twice)} below {LEAST} twice; of {len(again)} timed again {of_others} more came out below it")
    return "\n".join(lines)


def _timed(layer: Layer, options: argparse.Namespace, repeats: int) -> tables.Row | None:
    """A row of times, or None where both sides are XLA's."""
    rng = np.random.default_rng(options.seed)
    x = np.abs(rng.standard_normal(layer.x, np.float32)) + np.float32(1e-3)
    x[rng.random(layer.x, np.float32) < layer.zeros / 100] = 0
    kernel = rng.standard_normal(layer.kernel, np.float32) / np.float32(math.sqrt(math.prod(layer.kernel[:-1])))
    xs = timing.rotations(jax.device_put(x.astype(jnp.dtype(options.dtype))))
    weights = [
        jax.device_put(v.astype(jnp.dtype(options.dtype))) for v in (kernel, kernel.reshape(-1)[: layer.kernel[-1]])
    ]
    sides = {"xla": layer.xlas(options.dtype, options.precision), "ours": layer.ours(options.dtype, options.precision)}
    if options.weights == "constant":
        functions = {name: jax.jit(lambda x, side=side: side(x, *weights)) for name, side in sides.items()}
        operands: list[timing.Operands] = [(each,) for each in xs]
    else:
        functions = {name: jax.jit(side) for name, side in sides.items()}
        operands = [(each, *weights) for each in xs]
    ran = timing.what_ran(functions["ours"], *operands[0])
    if ran == "xla":
        return None
    times = timing.per_call(functions, operands, repeats)
    row: tables.Row = {"layer": layer.name, **dataclasses.asdict(layer), "dtype": options.dtype}
    row |= {"weights": options.weights, "precision": options.precision, "implementation": ran, **_label()}
    for side, found in times.items():
        row |= {f"{side}_us": found.microseconds, f"{side}_best_us": 1e6 * found.best}
    row["ratio"] = times["xla"].median / times["ours"].median
    row["best_ratio"] = times["xla"].best / times["ours"].best
    return row


def _label() -> tables.Row:
    """What switches say that have the device look like another."""
    capability, switch = os.environ.get(devices.CAPABILITY, ""), folders.switch()
    words = [f"as capability {capability}"] if capability else []
    words += {"": [], "off": ["without tables"], "shipped": ["shipped tables"]}[switch]
    return {"label": ", ".join(words)} if words else {}


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("sweep", __doc__)
    add = parser.add_argument
    add("--layers", type=int, default=100)
    add("--minutes", type=float, default=math.inf, help="draw no more layers after so long")
    add("--seed", type=int, default=0)
    add("--most-flops", type=float, default=2e9, help="operations of the largest layer")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--precision", choices=("default", "high", "highest"), default="highest")
    add("--weights", choices=("arguments", "constant"), default="arguments", help="constants of the programs, or not")
    add("--repeats", type=int, default=7)
    add("--json", type=Path)
    return parser
