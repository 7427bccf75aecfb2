"""Xu et al. 2023, Fig. 3: what moving maps between host and GPU takes beside computing VGG-19's layers.

A layer's map goes to the GPU and the convolution's result comes back, as where a pool waits on the host. Host memory is
NumPy's, so it is not pinned. Filters stay on the GPU; what they take is noted beside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import data
from benchmarks.paper import networks, runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import PaperLayer
from benchmarks.paper.runner import Case, Context, Row

_WARM_UP = 2


def _fig3(context: Context) -> list[Row]:
    if jax.default_backend() == "cpu" and not context.quick:
        raise ValueError("fig3 needs a GPU: a CPU moves no maps")
    network = networks.prepared(context, "vgg19")
    cases = runner.chosen(
        context,
        (
            Case(
                layer,
                sources=(),
                inputs={"profile": network.inputs[layer.name]},
                sides=sides.dense_sides(),
                notes={"network": "vgg19"},
            )
            for layer in network.layers
        ),
    )
    rows = runner.measure(context, cases)
    for row, case in zip(rows, cases, strict=True):
        row["transfer_us"] = _transfers(case.layer, case.inputs["profile"], context.repeats)
        moved = row["transfer_us"]["map to GPU"] + row["transfer_us"]["result to host"]
        dense = {side: us for side, us in row["us"].items() if sides.is_dense(side)}
        row["transfer_percent"] = {side: 100 * moved / (moved + us) for side, us in dense.items()}
        runner.progress(f"{row['layer']}: {row['transfer_us']}")
    return rows


def _transfers(layer: PaperLayer, x: data.Map, repeats: int) -> dict[str, float]:
    kernel = data.weights(layer, 0)[0]
    result = jnp.zeros((x.shape[0], layer.conv_size, layer.conv_size, layer.out_channels), jnp.float32)
    return {
        "map to GPU": _microseconds(lambda: jax.device_put(x), repeats),
        "filters to GPU": _microseconds(lambda: jax.device_put(kernel), repeats),
        "result to host": _microseconds(np.asarray, repeats, lambda: jax.block_until_ready(result + 0)),
    }


def _microseconds(move: Callable[..., Any], repeats: int, fresh: Callable[[], Any] | None = None) -> float:
    """Median of a move; with `fresh`, of something new every time, because JAX keeps copies on the host."""
    samples = []
    for _ in range(_WARM_UP + repeats):
        given = () if fresh is None else (fresh(),)
        start = time.perf_counter()
        jax.block_until_ready(move(*given))
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples[_WARM_UP:])


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    computed = [row["us"][sides.HIGHEST] for row in rows]
    moved = [row["transfer_us"]["map to GPU"] + row["transfer_us"]["result to host"] for row in rows]
    axes.bar(range(len(rows)), computed, label="computing, XLA highest")
    axes.bar(range(len(rows)), moved, bottom=computed, label="moving map and result")
    axes.set_ylabel("microseconds")
    axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=90, fontsize=7)
    axes.legend(fontsize=8)


EXPERIMENTS = (
    Experiment(
        "fig3",
        "Xu et al. 2023, Fig. 3",
        "moving VGG-19's maps between host and GPU beside computing its layers.",
        _fig3,
        _draw,
        ("layer", "transfer_us", "transfer_percent"),
    ),
)
