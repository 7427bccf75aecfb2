"""Whole networks: the ratios of Xu et al. 2023 (section 8.2) and of cuSNN (Figs. 12 and 13, energy)."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.common.prepared import Prepared
from benchmarks.paper import energy, networks, runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.networks import COO, OCPA
from benchmarks.paper.ocpa import OCPA_NETWORKS
from benchmarks.paper.runner import Context, Row
from jax_sparse_conv._src.plans import timing

CUSNN_NETWORKS = ("densenet169", "densenet201", "resnet50", "resnet152", "vgg16", "vgg19")
_ASYNC_CALLS = 16
_NO_ZEROS = "no zeros"  # the source of rows with biases so high that no ReLU clips anything
_ALL_ZEROS = "all zeros"  # and so low that every ReLU clips everything


def _networks(context: Context) -> list[Row]:
    return _measured(context, OCPA_NETWORKS, (OCPA, sides.AUTO, sides.AUTO_DEFAULT))


def _cusnn_networks(context: Context) -> list[Row]:
    return _measured(context, CUSNN_NETWORKS, (COO, OCPA, sides.AUTO))


def _measured(context: Context, names: Sequence[str], extra: Sequence[str]) -> list[Row]:
    """A row for every network, one with biases so high that no ReLU clips anything and one with such that all do."""
    chosen = [networks.prepared(context, name) for name in networks.available(context, names)]
    wanted = networks.network_sides(extra)
    reasons = dict(zip(*_compiled(chosen, wanted), strict=True))
    rows = []
    for network in chosen:
        rows.append(_row(context, network, network.weights, wanted, reasons))
        own = networks.beside(context, network.name)
        described = {"source": _NO_ZEROS, "zeros_target": 0, "zeros_percent": own.zeros_percent}
        rows.append(_row(context, network, own.weights, wanted, reasons) | described)
        described = {"source": _ALL_ZEROS, "zeros_target": 100, "zeros_percent": 100.0}
        rows.append(_row(context, network, network.empty_weights(), wanted, reasons) | described)
    return rows


def _compiled(chosen: Sequence[Prepared], wanted: Sequence[str]) -> tuple[list[tuple[str, str]], list[str | None]]:
    """(network, side) of everything compiled, and why it cannot run or None."""
    jobs = [(network, side) for network in chosen for side in wanted]
    # Every side has layers of XLA's, the fully connected ones, and is tuned.
    compiling = [functools.partial(_compile, network, side) for network, side in jobs]
    reasons = runner.compiled(compiling, [True] * len(jobs))
    return [(network.name, side) for network, side in jobs], reasons


def _compile(network: Prepared, side: str) -> str | None:
    try:
        _function(network, side).lower(*network.operands()[0]).compile()  # type: ignore[attr-defined]
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return " ".join(str(error).split())[:300]
    return None


_functions: dict[tuple[int, str], timing.Function] = {}


def _function(network: Prepared, side: str) -> timing.Function:
    """One function for a network and side, so that all experiments of a run compile it once."""
    return _functions.setdefault((id(network.graph), side), networks.function(network, side))


def _row(
    context: Context,
    network: Prepared,
    weights: list[jax.Array],
    wanted: Sequence[str],
    reasons: dict[tuple[str, str], str | None],
) -> Row:
    functions = {side: _function(network, side) for side in wanted if reasons[network.name, side] is None}
    row = timed(context, network, weights, functions)
    row["skipped"] |= {side: reasons[network.name, side] for side in wanted if side not in functions}
    return row


def timed(
    context: Context, network: Prepared, weights: list[jax.Array], functions: Mapping[str, timing.Function]
) -> Row:
    """The row of a network with some weights; functions that fail are in "skipped"."""
    operands = [(weights, x) for _, x in network.operands()]
    failed = timing.failures(functions, operands)
    functions = {side: function for side, function in functions.items() if side not in failed}
    calls = 1 if jax.default_backend() == "cpu" else _ASYNC_CALLS
    times = timing.blocked(functions, operands, context.repeats, calls)
    row = {
        "layer": network.name,
        "op": "network",
        "x_shape": list(network.x.shape),
        "network": network.name,
        "strides": None,
        "batch": network.x.shape[0],
        "source": "profile",
        "zeros_target": None,
        "zeros_percent": network.zeros_percent,
        "us": {side: timed.microseconds for side, timed in times.items()},
        "quartiles_us": {side: [1e6 * timed.low, 1e6 * timed.high] for side, timed in times.items()},
        "error": _errors(functions, operands[0]),
        "skipped": failed,
    }
    runner.progress(f"{network.name}: {row['us']}")
    return runner.add_ratios(row)


def _errors(functions: Mapping[str, timing.Function], operands: timing.Operands) -> dict[str, float]:
    if sides.HIGHEST not in functions:
        return {}
    expected = functions[sides.HIGHEST](*operands)
    return {
        side: float(jax.numpy.linalg.norm(function(*operands) - expected) / jax.numpy.linalg.norm(expected))
        for side, function in functions.items()
        if side != sides.HIGHEST
    }


def _energy(context: Context) -> list[Row]:
    """Energy of a network's call: medians over loops of some seconds, sides in turn, and the least and most of each."""
    rows = _cusnn_networks(context)
    with energy.meter() as meter:
        for row in rows:
            if row["source"] == _ALL_ZEROS:
                continue  # nobody runs that; the time says what converting takes
            network = networks.prepared(context, row["layer"])
            has_zeros = row["source"] != _NO_ZEROS
            weights = network.weights if has_zeros else networks.beside(context, network.name).weights
            row["energy_source"] = meter.source
            loops = _loops(context, network, weights, row["us"], meter)
            row["energy_seconds"] = context.seconds
            row["millijoules"] = {side: statistics.median(found) if found else None for side, found in loops.items()}
            row["millijoules_range"] = {side: [min(found), max(found)] for side, found in loops.items() if found}
            runner.add_saving(row)
    return rows


def _loops(
    context: Context, network: Prepared, weights: list[jax.Array], names: Iterable[str], meter: energy.Meter
) -> dict[str, list[float]]:
    """Of each side the millijoules of a call in each of its loops; none without a meter."""
    functions = {side: _function(network, side) for side in names}
    found: dict[str, list[float]] = {side: [] for side in functions}
    operands = [(weights, x) for _, x in network.operands()]
    for _ in range(context.energy_repeats if meter.works else 0):
        for side, function in functions.items():
            found[side].append(_millijoules(context.seconds, function, operands, meter))
    return found


def _millijoules(
    seconds: float, function: timing.Function, operands: Sequence[timing.Operands], meter: energy.Meter
) -> float:
    jax.block_until_ready(function(*operands[0]))
    calls, before, start = 0, meter.joules(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        results = [function(*operands[call % len(operands)]) for call in range(_ASYNC_CALLS)]
        jax.block_until_ready(results)
        calls += len(results)
    return 1e3 * (meter.joules() - before) / calls


def draw(figure: Any, rows: Sequence[Row], key: str = "us", label: str = "microseconds") -> None:
    axes = figure.subplots()
    rows = [row for row in rows if key in row]
    names = list(dict.fromkeys(side for row in rows for side in row[key]))
    for index, side in enumerate(names):
        places = [place - 0.4 + (index + 0.5) * 0.8 / len(names) for place in range(len(rows))]
        axes.bar(places, [row[key].get(side) or 0 for row in rows], 0.8 / len(names), label=side)
    labels = [row["layer"] if row["source"] == "profile" else f"{row['layer']}, {row['source']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=90 if len(rows) > 6 else 0)
    axes.set_ylabel(f"{label} of a call, batch 1")
    axes.legend(fontsize=8)


EXPERIMENTS = (
    Experiment(
        "networks",
        "Xu et al. 2023, section 8.2",
        "whole networks, batch 1.",
        _networks,
        draw,
    ),
    Experiment(
        "cusnn_fig12",
        "cuSNN, Fig. 12",
        "whole networks with COO* layers, batch 1.",
        _cusnn_networks,
        draw,
    ),
    Experiment(
        "cusnn_fig13",
        "cuSNN, Fig. 13",
        "energy of whole networks.",
        _energy,
        functools.partial(draw, key="millijoules", label="millijoules"),
        ("layer", "source", "zeros_percent", "energy_source", "millijoules", "millijoules_range", "energy_ratio"),
    ),
)
