"""What is compared: XLA's dense convolution at two precisions, and every implementation the package has."""

from __future__ import annotations

import functools
from typing import Any

import jax

import jax_sparse_conv as jsc
from benchmarks.paper.layers import PaperLayer
from jax_sparse_conv._src.cli.comparison import IMPLEMENTATIONS_OF
from jax_sparse_conv._src.plans import timing

HIGHEST = "xla highest"
DEFAULT = "xla default"
DENSE = (HIGHEST, DEFAULT)
AUTO = "auto"
AUTO_DEFAULT = "auto default"


def dense_sides() -> tuple[str, ...]:
    """XLA's precisions that differ here: a CPU has one."""
    return DENSE[:1] if jax.default_backend() == "cpu" else DENSE


def all_sides(op: str) -> tuple[str, ...]:
    """XLA's, every kernel that `op` has, and `implementation=None` at HIGHEST and at the default precision."""
    kernels = (name for name in IMPLEMENTATIONS_OF[op] if name not in ("xla", "adaptive"))
    return (*dense_sides(), *kernels, *auto_sides())


def auto_sides() -> tuple[str, ...]:
    """`implementation=None` at each of `dense_sides`' precisions."""
    return (AUTO, AUTO_DEFAULT)[: len(dense_sides())]


def is_dense(side: str) -> bool:
    return side in DENSE


@functools.cache
def function(layer: PaperLayer, side: str) -> timing.Function:
    """The jitted layer (x, kernel, bias) -> y; one object for all layers that only differ in shapes and names."""
    if layer.op == "dense":
        return _function(layer.op, side, layer.activation, (), ())
    pool = layer.window if layer.op == "conv_pool" else ()
    return _function(layer.op, side, layer.activation, (layer.strides, layer.padding, layer.groups), pool)


@functools.cache
def _function(
    op: str, side: str, activation: str | None, conv: tuple[Any, ...], pool: tuple[Any, ...]
) -> timing.Function:
    arguments: dict[str, Any] = {"activation": activation, **_of_side(side)}
    if op == "dense":
        return jax.jit(functools.partial(jsc.dense, **arguments))
    strides, padding, groups = conv
    arguments |= {"strides": strides, "padding": padding, "feature_group_count": groups}
    if op == "conv":
        return jax.jit(functools.partial(jsc.conv, **arguments))
    size, window_strides, low_high, kind = pool
    arguments |= {"window_shape": size, "window_strides": window_strides, "window_padding": (low_high, low_high)}
    return jax.jit(functools.partial(jsc.conv_pool, pool=kind, **arguments))


def _of_side(side: str) -> dict[str, Any]:
    if is_dense(side):
        return {"implementation": "xla", "precision": side.removeprefix("xla ")}
    if side == AUTO_DEFAULT:
        return {"implementation": None, "precision": "default"}
    return {"implementation": None if side == AUTO else side, "precision": "highest"}
