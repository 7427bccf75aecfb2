"""Xu et al. 2019, Fig. 9 of the first version: memory beside operands and result, for im2col, XLA (cuDNN) and here.

Nothing is timed. XLA's and the kernels' workspace is what `compiled.memory_analysis()` says; im2col's matrix and the
papers' formats with worst-case capacity, which the kernels never write, are computed from the shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_sparse_conv as jsc
from benchmarks.paper import runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import ECR_LAYERS, PECR_LAYERS, PaperLayer
from benchmarks.paper.ocpa import vgg19_layers
from benchmarks.paper.runner import Case, Context, Row

_FLOAT = 4


def _memory(context: Context) -> list[Row]:
    layers = (*vgg19_layers(), *ECR_LAYERS[:2], *PECR_LAYERS)
    cases = runner.chosen(context, [Case(layer) for layer in (layers[-4:] if context.quick else layers)])
    return runner.compiled([functools.partial(_row, case.layer) for case in cases], [True] * len(cases))


def _row(layer: PaperLayer) -> Row:
    workspace, skipped = {}, {}
    for side in sides.all_sides(layer.op):
        try:
            workspace[side] = _workspace(layer, side)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            skipped[side] = " ".join(str(error).split())[:300]
    x, out = layer.x_shape(1), layer.conv_size
    return {
        "layer": layer.name,
        "op": layer.op,
        "x_shape": list(x),
        "kernel_shape": list(layer.kernel_shape),
        "strides": layer.strides,
        "batch": 1,
        "source": None,
        "zeros_target": None,
        "input_bytes": _FLOAT * layer.size**2 * layer.channels,
        "im2col_bytes": _FLOAT * out**2 * layer.kernel**2 * layer.channels,
        "format_bytes": format_bytes(layer),
        "workspace_bytes": workspace,
        "skipped": skipped,
    }


def _workspace(layer: PaperLayer, side: str) -> int:
    """Bytes that the compiled layer takes beside its operands and its result."""
    shapes = (layer.x_shape(1), layer.kernel_shape, (layer.out_channels,))
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = sides.function(layer, side).lower(*operands).compile()  # type: ignore[attr-defined]
    return int(compiled.memory_analysis().temp_size_in_bytes)


def format_bytes(layer: PaperLayer) -> int:
    """ECR's or PECR's arrays with a slot for every element of every window."""
    x = jax.ShapeDtypeStruct(layer.x_shape(1), jnp.float32)
    made = jsc.PECR if layer.op == "conv_pool" else jsc.ECR
    found = jax.eval_shape(lambda x: made.fromdense(x, layer.kernel, strides=layer.strides, padding=layer.padding), x)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(found))


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    names = list(dict.fromkeys(side for row in rows for side in row["workspace_bytes"]))
    values = {"im2col": [row["im2col_bytes"] for row in rows]}
    values |= {side: [row["workspace_bytes"].get(side, 0) for row in rows] for side in names}
    for index, (name, heights) in enumerate(values.items()):
        places = [place - 0.4 + (index + 0.5) * 0.8 / len(values) for place in range(len(rows))]
        axes.bar(places, [max(height, 1) for height in heights], 0.8 / len(values), label=name)
    axes.set_yscale("log")
    axes.set_ylabel("bytes beside operands and result")
    axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=90, fontsize=7)
    axes.legend(fontsize=7)


EXPERIMENTS = (
    Experiment(
        "memory",
        "Xu et al. 2019, memory comparison",
        "workspace of im2col, XLA and every implementation.",
        _memory,
        _draw,
        ("layer", "input_bytes", "im2col_bytes", "format_bytes", "workspace_bytes"),
    ),
)
