"""cuSNN (Xiang et al. 2022): layers against the share of zeros and the batch (Figs. 10 and 11).

The cost model's figures (8 and 9) are `benchmarks/cost_model.py`'s, whole networks and energy (12 and 13) in `whole`.
"""

from __future__ import annotations

from benchmarks.paper import plots, runner
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.layers import CUSNN
from benchmarks.paper.runner import Case, Context, Row

_LEVELS = (0, 50, 60, 70, 80, 90, 100)
_BATCHES = (1, 4, 16, 64)


def _fig10(context: Context) -> list[Row]:
    return runner.measure(context, [Case(layer, sources=("real", *_LEVELS)) for layer in CUSNN])


def _fig11(context: Context) -> list[Row]:
    batches = _BATCHES[:2] if context.quick else _BATCHES
    cases = [Case(layer, batch, ("real", 0, *layer.zeros)) for layer in CUSNN for batch in batches]
    return runner.own_zeros(runner.measure(context, cases))


EXPERIMENTS = (
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
