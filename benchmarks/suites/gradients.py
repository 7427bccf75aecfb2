"""Gradients of single layers: by x and by the kernel, of this package against lax's.

    python -m benchmarks gradients --json gradients.json
    python -m benchmarks gradients --layers 3 --repeats 5
    python -m benchmarks gradients --set large --precision highest

A time is of one gradient, from a fixed cotangent. Half of x and of the cotangent is zero. Of a layer with a pool the
convolution in front is part of it, on both sides. "of each image" is `vmap` of the gradient over several inputs.
Sides take turns, and times are medians. A difference is ours from lax's. Errors, of layers without a pool, are against
sums in float64 (`gradient_errors`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_sparse_conv as jsc
from benchmarks.common import command, suite, tables
from benchmarks.suites import gradient_errors
from jax_sparse_conv._src.plans import timing

_SECONDS = 4.0  # for a gradient: lax's of a kernel in groups takes seconds on a CPU
_COLUMNS = (
    ("layer", "layer", "<", "{}"),
    ("by", "by", "<", "{}"),
    ("xla_us", "lax us", ">", "{:.0f}"),
    ("ours_us", "ours us", ">", "{:.0f}"),
    ("ratio", "ratio", ">", "{:.2f}"),
    ("difference", "difference", ">", "{:.0e}"),
)


class Layer(NamedTuple):
    """A convolution with SAME padding, x [images, size, size, channels] and a square window.

    Attributes:
      pool: window of a max pool behind it, 0 without one.
      pool_stride: of that pool; 0: its window.
      each: images that have a gradient of their own, by vmap; 0 without it.
    """

    images: int
    size: int
    channels: int
    outputs: int
    window: int = 3
    stride: int = 1
    groups: int = 1
    pool: int = 0
    each: int = 0
    pool_stride: int = 0

    @property
    def name(self) -> str:
        text = f"{self.images}x{self.size}x{self.size}, {self.window}x{self.window} {self.channels}->{self.outputs}"
        text += f", stride {self.stride}" * (self.stride > 1) + f", {self.groups} groups" * (self.groups > 1)
        text += f", {self.pool}x{self.pool} pool" * (self.pool > 0)
        text += f" of stride {self.pool_stride}" * (self.pool_stride > 0)
        return text + f", of each of {self.each}" * (self.each > 0)

    def ours(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        arguments: dict[str, Any] = {"strides": (self.stride,) * 2, "feature_group_count": self.groups}
        if self.pool:
            windows: dict[str, Any] = {"window_shape": (self.pool,) * 2, "window_strides": (self._pool_stride,) * 2}
            return jsc.conv_pool(x, kernel, pool="max", activation=None, **windows, **arguments)
        return jsc.conv(x, kernel, **arguments)

    def xlas(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, kernel, (self.stride,) * 2, "SAME", dimension_numbers=numbers, feature_group_count=self.groups
        )
        window, strides = ((1, each, each, 1) for each in (self.pool, self._pool_stride))
        return lax.reduce_window(y, -jnp.inf, lax.max, window, strides, "VALID") if self.pool else y

    @property
    def _pool_stride(self) -> int:
        return self.pool_stride or self.pool


LAYERS = (
    Layer(4, 56, 64, 64),
    Layer(4, 14, 256, 256),
    Layer(4, 56, 64, 256, 1),
    Layer(4, 28, 128, 128, stride=2),
    Layer(4, 28, 256, 256, stride=2),
    Layer(4, 224, 8, 64),
    Layer(4, 112, 128, 128, pool=2),
    Layer(4, 56, 256, 256, pool=2),
    Layer(8, 224, 3, 64, 7, stride=2, pool=3, pool_stride=2),
    Layer(4, 56, 64, 64, 1, pool=3, pool_stride=2),
    Layer(4, 28, 192, 192, 1, pool=3, pool_stride=1),
    Layer(1, 14, 32, 32, 1, pool=3, pool_stride=1),
    Layer(2, 28, 128, 128, groups=32),
    Layer(2, 28, 256, 256, groups=32),
    Layer(4, 28, 128, 128, groups=4),
    Layer(2, 27, 96, 256, 5, groups=2),
    Layer(1, 28, 256, 256, stride=2, groups=32),
    Layer(4, 56, 128, 128, groups=128),
    Layer(4, 14, 512, 512, groups=512),
    Layer(2, 14, 128, 256, groups=128),
    Layer(16, 1, 4096, 4096, 1),  # a dense layer
    Layer(64, 1, 2048, 1000, 1),
    Layer(1, 28, 32, 32, each=8),
    Layer(2, 14, 128, 128, each=8),
    Layer(2, 28, 64, 64, groups=8, each=4),
)
"""Windows, pools, groups, depthwise layers and gradients of each image."""

LARGE = (
    Layer(32, 224, 64, 64),
    Layer(32, 112, 128, 128),
    Layer(32, 56, 256, 256),
    Layer(32, 28, 512, 512),
    Layer(32, 14, 512, 512),
    Layer(32, 56, 64, 64),
    Layer(32, 28, 128, 128),
    Layer(32, 14, 256, 256),
    Layer(32, 7, 512, 512),
    Layer(32, 56, 64, 256, 1),
    Layer(32, 56, 256, 64, 1),
    Layer(32, 28, 512, 128, 1),
    Layer(32, 14, 1024, 256, 1),
    Layer(32, 7, 512, 2048, 1),
    Layer(32, 56, 128, 128, stride=2),
    Layer(32, 28, 256, 256, stride=2),
    Layer(32, 56, 256, 512, 1, stride=2),
    Layer(32, 14, 1024, 2048, 1, stride=2),
    Layer(32, 56, 128, 32),
    Layer(32, 28, 256, 128, 1),
    Layer(8, 28, 128, 128),
    Layer(8, 14, 256, 256),
    Layer(8, 56, 64, 256, 1),
    Layer(32, 28, 256, 256, groups=32),
    Layer(32, 28, 256, 512),
    Layer(32, 56, 24, 24),
    Layer(32, 14, 32, 32, 1),
    Layer(1, 56, 64, 64),
    Layer(1, 14, 256, 256),
    Layer(4, 7, 512, 512),
    Layer(2, 28, 32, 128, 1),
)
"""Layers of VGG-16, ResNet-50 and DenseNet-121 in batches of a GPU, and smaller ones."""

SETS = {"kinds": LAYERS, "large": LARGE}


def main(argv: Sequence[str] | None = None) -> int:
    """Time every layer, print a table and write a JSON file; the result is the exit status."""
    return suite.run("gradients", _parser(), argv, _rows, lambda rows: tables.aligned(rows, _COLUMNS))


def _rows(options: argparse.Namespace) -> Iterator[list[tables.Row]]:
    with jax.default_matmul_precision(options.precision):
        for layer in SETS[options.set][: options.layers]:
            yield [{**_row(layer, by, options.repeats), "precision": options.precision} for by in ("x", "kernel")]


def _row(layer: Layer, by: str, repeats: int) -> tables.Row:
    given = operands(layer)
    sides = {name: jax.jit(_gradient(layer, which, by)) for name, which in (("xla", layer.xlas), ("ours", layer.ours))}
    found = {name: np.asarray(side(*given), np.float64) for name, side in sides.items()}
    times = timing.per_call(sides, [given], repeats, _SECONDS)
    row: tables.Row = {"layer": layer.name, "by": by, **layer._asdict()}
    row |= {f"{side}_us": each.microseconds for side, each in times.items()}
    row |= {f"{side}_best_us": 1e6 * each.best for side, each in times.items()}
    row |= {"ratio": row["xla_us"] / row["ours_us"], "best_ratio": row["xla_best_us"] / row["ours_best_us"]}
    row["difference"] = float(np.linalg.norm(found["ours"] - found["xla"]) / np.linalg.norm(found["xla"]))
    if not layer.pool:
        errors = gradient_errors.relative(layer, by, given, found)
        row |= {f"{side}_error": error for side, error in errors.items()}
    return row


def _gradient(layer: Layer, function: Callable[..., jax.Array], by: str) -> Callable[..., jax.Array]:
    def gradient(x: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> jax.Array:
        of_one = (lambda v: function(v, kernel)) if by == "x" else (lambda v: function(x, v))
        (found,) = jax.vjp(of_one, x if by == "x" else kernel)[1](cotangent)
        return found

    return jax.vmap(gradient, in_axes=(0, None, 0)) if layer.each else gradient


def operands(layer: Layer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, kernel and cotangent."""
    rng = np.random.default_rng(0)
    several = (layer.each,) if layer.each else ()
    shape = (layer.images, layer.size, layer.size, layer.channels)
    kernel = rng.standard_normal((layer.window, layer.window, layer.channels // layer.groups, layer.outputs))
    results = jax.eval_shape(layer.xlas, jax.ShapeDtypeStruct(shape, jnp.float32), kernel.astype(np.float32)).shape
    x, cotangent = (np.maximum(rng.standard_normal((*several, *each)), 0) for each in (shape, results))
    first, second, third = (jnp.asarray(values, jnp.float32) for values in (x, kernel, cotangent))
    return first, second, third


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("gradients", __doc__)
    add: Any = parser.add_argument
    add("--set", choices=sorted(SETS), default="kinds", help="of layers: all kinds, or large ones for a GPU")
    add("--layers", type=int, help="only so many of the layers")
    add("--precision", choices=("default", "highest"), default="default")
    add("--repeats", type=int, default=11)
    add("--json", type=Path)
    return parser
