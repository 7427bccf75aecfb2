"""cuSNN (Xiang et al. 2022): the cost model (Figs. 8 and 9), layers against the zeros and the batch (Figs. 10 and 11).

The cost model's search is `suites/cost_model.py`'s; whole networks and energy (Figs. 12 and 13) are in `whole`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import results
from benchmarks.paper import plots, runner
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import CUSNN
from benchmarks.paper.runner import Case, Context, Row
from benchmarks.suites import cost_model

SEARCHES = ("cusnn_fig8", "cusnn_fig9")  # what `benchmarks cost_model` finds
_LEVELS = (0, 50, 60, 70, 80, 90, 100)
_BATCHES = (1, 4, 16, 64)


_searched: dict[bool, list[Row]] = {}


def _search(context: Context) -> list[Row]:
    """What `python -m benchmarks cost_model` measures or has measured, once for both figures."""
    if context.searched:
        rows = results.content_of(Path(context.searched))["rows"]
        return [
            _as_row(row) | {"configurations_us": row["us"], "us": {}, "searched": Path(context.searched).name}
            for row in rows
        ]
    if jax.default_backend() != "gpu":
        raise ValueError("the cost model's figures need a GPU: COO* has one configuration on the CPU")
    if context.quick not in _searched:
        options = cost_model._parser().parse_args(["--repeats", str(context.repeats)])
        chosen = cost_model._layers(options)
        found = [
            _as_row(row)
            for layer in (chosen[:1] if context.quick else chosen)
            for row in cost_model._search(layer, dict(context.maps), options)
        ]
        cost_model._add_offline(found)
        _searched[context.quick] = [row | {"configurations_us": row["us"], "us": {}} for row in found]
    return _searched[context.quick]


def _as_row(row: Row) -> Row:
    return row | {"zeros_percent": 100 * (1 - row["density"]), "zeros_target": None, "batch": row["x_shape"][0]}


def _draw_losses(figure: Any, rows: Sequence[Row], key: str) -> None:
    axes = figure.subplots()
    axes.bar(range(len(rows)), [100 * row[key] for row in rows])
    axes.set_ylabel("loss of the model's choice, %")
    labels = [f"{row['layer']} {row['source']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=90, fontsize=6)


def _fig10(context: Context) -> list[Row]:
    return runner.measure(context, [Case(layer, sources=("real", *_LEVELS)) for layer in CUSNN])


def _fig11(context: Context) -> list[Row]:
    batches = _BATCHES[:2] if context.quick else _BATCHES
    cases = [Case(layer, batch, ("real", 0, *layer.zeros, 100)) for layer in CUSNN for batch in batches]
    return runner.own_zeros(runner.measure(context, cases))


_COLUMNS = ("layer", "source", "zeros_percent", "best_us", "model_us")

EXPERIMENTS = (
    Experiment(
        SEARCHES[0],
        "cuSNN, Fig. 8",
        "the cost model's choice against the configuration that is best on average.",
        _search,
        functools.partial(_draw_losses, key="offline_loss"),
        (*_COLUMNS, "offline_loss"),
    ),
    Experiment(
        SEARCHES[1],
        "cuSNN, Fig. 9",
        "the cost model's choice against the best configuration for each map.",
        _search,
        functools.partial(_draw_losses, key="model_loss"),
        (*_COLUMNS, "model_loss"),
    ),
    Experiment(
        "cusnn_fig10",
        "cuSNN, Fig. 10",
        "the 3x3 layers of DenseNet and ResNet against their zeros.",
        _fig10,
        plots.lines("zeros_percent", "XLA time / time"),
    ),
    Experiment(
        "cusnn_fig11",
        "cuSNN, Fig. 11",
        "the same layers against the batch.",
        _fig11,
        plots.lines("batch", "XLA time / time"),
    ),
)
