"""cuSNN, Fig. 3: how much of a network's dense time is spent in layers with few zeros, with many, and elsewhere.

Each kind of layer is timed by itself; a layer counts with the time of its kind and with its own zeros. The rest of the
whole network's time is what is no convolution, as far as XLA does not hide it in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks.paper import layers, networks, runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.runner import Case, Context, Row
from benchmarks.paper.zeros import CUSNN_FIG2_NETWORKS, layer_maps
from jax_sparse_conv._src.plans import timing

BUCKETS = {"under 50 %": 50.0, "50 to 75 %": 75.0, "over 75 %": 100.1}
OTHER = "no convolution"
_ASYNC_CALLS = 16


def _cusnn_fig3(context: Context) -> list[Row]:
    return [_row(context, name) for name in networks.available(context, CUSNN_FIG2_NETWORKS)]


def _row(context: Context, name: str) -> Row:
    network = networks.prepared(context, name)
    wanted = sides.dense_sides()
    cases = [
        Case(layer, sources=(), inputs={"profile": network.inputs[layer.name]}, sides=wanted)
        for layer in network.layers
    ]
    measured = runner.measure(context, cases[:2] if context.quick else cases)
    kinds = {layers.kind(case.layer): row["us"] for case, row in zip(cases, measured, strict=False)}
    timed = [
        (kinds[layers.kind(layer)], 100 * float((x == 0).mean()), layer.kernel)
        for layer, x in layer_maps(context, name)
        if layers.kind(layer) in kinds
    ]
    whole = {side: _whole(context, name, side) for side in wanted}
    return {
        "layer": name,
        "op": "network",
        "x_shape": list(network.x.shape),
        "network": name,
        "strides": None,
        "batch": 1,
        "source": "profile",
        "zeros_target": None,
        "zeros_percent": network.zeros_percent,
        "us": whole,
        "convolutions_us": {side: sum(us[side] for us, _, _ in timed) for side in wanted},
        "percent": {side: shares([(us[side], zeros) for us, zeros, _ in timed], whole[side]) for side in wanted},
        "beyond_1x1_percent": {
            side: shares([(us[side], zeros) for us, zeros, kernel in timed if kernel > 1]) for side in wanted
        },
        "kinds": [{"layer": row["layer"], "us": row["us"]} for row in measured],
    }


def shares(timed: Sequence[tuple[float, float]], whole: float | None = None) -> dict[str, float]:
    """Percent of the time by zeros, of (microseconds, percent of zeros) of each layer.

    The rest is the whole network's, where its time is given.
    """
    sums = dict.fromkeys(BUCKETS, 0.0)
    for us, zeros in timed:
        sums[next(name for name, limit in BUCKETS.items() if zeros < limit)] += us
    total = max(whole or 0.0, sum(sums.values()))
    percents = {name: 100 * us / total for name, us in sums.items()}
    return percents if whole is None else percents | {OTHER: 100 * (1 - sum(sums.values()) / total)}


def _whole(context: Context, name: str, side: str) -> float:
    network = networks.prepared(context, name)
    calls = 1 if jax.default_backend() == "cpu" else _ASYNC_CALLS
    functions = {side: networks.function(network, side)}
    microseconds = timing.blocked(functions, network.operands(), context.repeats, calls)[side].microseconds
    runner.progress(f"{name}, {side}: {microseconds:.0f} us")
    return microseconds


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    names = (*BUCKETS, OTHER)
    bars: Mapping[str, dict[str, float]] = {
        f"{row['layer']}, {side}": percent for row in rows for side, percent in row["percent"].items()
    }
    for index, name in enumerate(names):
        places = [place - 0.4 + (index + 0.5) * 0.8 / len(names) for place in range(len(bars))]
        axes.bar(places, [percent[name] for percent in bars.values()], 0.8 / len(names), label=name)
    axes.set_ylabel("share of the time, %")
    axes.set_xticks(range(len(bars)), list(bars))
    axes.legend(fontsize=8)


EXPERIMENTS = (
    Experiment(
        "cusnn_fig3",
        "cuSNN, Fig. 3",
        "the share of the dense time by the zeros of the layers.",
        _cusnn_fig3,
        _draw,
        ("layer", "zeros_percent", "percent"),
    ),
)
