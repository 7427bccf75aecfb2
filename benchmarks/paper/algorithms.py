"""Xu et al. 2023, Fig. 9: OCPA against cuDNN's algorithms that the figure names beside the fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import data
from benchmarks.common.cudnn import ALGORITHMS, Convolution, Library
from benchmarks.paper import answers, networks, runner, sides
from benchmarks.paper.experiment import Experiment
from benchmarks.paper.ocpa import OCPA_NETWORKS
from benchmarks.paper.runner import Case, Context, Row

_WRONG = 1e-3  # FFT_TILING's own error in float32 is below it


def _fig9_algorithms(context: Context) -> list[Row]:
    library = Library()
    cases = runner.chosen(context, _cases(context))
    rows = runner.measure(context, cases)
    of_case = {case.layer.name: _algorithms(context, library, case) for case in cases}
    return [row | of_case[row["layer"]] for row in rows]


def _cases(context: Context) -> Iterator[Case]:
    """Every kind of layer of the networks on the map that it has, and without zeros."""
    for name in networks.available(context, OCPA_NETWORKS):
        network = networks.prepared(context, name)
        for layer in network.layers:
            inputs, notes = {"profile": network.inputs[layer.name]}, {"network": name}
            wanted = (sides.HIGHEST, layer.implementation)
            yield Case(layer, sources=(0,), inputs=inputs, sides=wanted, notes=notes)


def _algorithms(context: Context, library: Library, case: Case) -> Row:
    """Times, errors and workspaces by algorithm, or why there are none; cuDNN's time does not depend on zeros."""
    xs = [jnp.asarray(x) for x in next(iter(runner.inputs(context, case)))[1]]
    plain = dataclasses.replace(case.layer, op="conv", activation=None)
    kernel = jnp.asarray(data.weights(plain, 0)[0])
    expected = sides.function(plain, sides.HIGHEST)(xs[0], kernel, jnp.zeros(plain.out_channels))
    norm = jnp.linalg.norm(expected.ravel())
    keys = ("cudnn_us", "cudnn_error", "cudnn_workspace_bytes", "cudnn_skipped")
    found: dict[str, Any] = {"cudnn_version": library.version()} | {key: {} for key in keys}
    for name, number in ALGORITHMS.items():
        try:
            convolution = Convolution(library, plain, number, xs, kernel)
            error = float(jnp.linalg.norm((convolution.result() - expected).ravel()) / norm)
            if not error < _WRONG:
                raise ValueError(f"its result differs by {error:.1e}")
            microseconds = convolution.microseconds(context.repeats)
        except (ValueError, jax.errors.JaxRuntimeError) as reason:
            found["cudnn_skipped"][name] = " ".join(str(reason).split())[:300]
            continue
        found["cudnn_us"][name] = microseconds
        found["cudnn_error"][name] = error
        found["cudnn_workspace_bytes"][name] = convolution.workspace_bytes
    runner.progress(f"{case.layer.name}: {found['cudnn_us']}, {found['cudnn_skipped']}")
    return found


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["source"] == "profile"]
    axes = figure.subplots()
    for index, name in enumerate(ALGORITHMS):
        places = [place - 0.4 + (index + 0.5) * 0.8 / len(ALGORITHMS) for place in range(len(rows))]
        ratios = [answers.over_algorithm(row, name) or 0 for row in rows]
        axes.bar(places, ratios, 0.8 / len(ALGORITHMS), label=f"cuDNN {name}")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_ylabel("cuDNN's time / OCPA's")
    axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=90, fontsize=5)
    axes.legend(fontsize=7)


EXPERIMENTS = (
    Experiment(
        "fig9_algorithms",
        "Xu et al. 2023, Fig. 9",
        "the layers of the networks against cuDNN's GEMM, IMPLICIT_GEMM and FFT_TILING.",
        _fig9_algorithms,
        _draw,
        ("layer", "source", "zeros_percent", "cudnn_us"),
    ),
)
