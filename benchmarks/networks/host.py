"""What a call costs its host, by the way in which a network's weights get into the program.

    python -m benchmarks host --networks resnet50 densenet121 --json results.json

Sides, each called with an image: "nnx.jit" of the model, the same by `nnx.cached_partial`, "state" (`jax.jit` of the
state that `nnx.split` gives), "jit_inference" (`jax_sparse_conv.nnx.jit_inference`, which packs) and "constants"
(`jax.jit(lambda x: model(x))`), each in streaks of 20 calls. "host" is a program that reads one element of every
weight, so that handing them over is all there is; "network" is the network itself under `implementation=None`, with
the zeros of a trained one. Batch norms are folded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_sparse_conv as jsc
from benchmarks.common import command, suite, tables
from benchmarks.networks.packed import prepare
from jax_sparse_conv import models
from jax_sparse_conv._src.plans import timing

NETWORKS = ("vgg19", "resnet50", "densenet121", "regnetx_16gf")
SIDES = ("nnx.jit", "cached_partial", "state", "jit_inference", "constants")
_STREAK = 20  # calls
_Run = Callable[[Any, jax.Array], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Time every network, print a table and write a JSON file; the result is the exit status."""
    return suite.run("host", _parser(), argv, _cases, _table)


def _cases(options: argparse.Namespace) -> Iterator[list[tables.Row]]:
    return (measure(name, options.repeats, options.what) for name in options.networks)


def _table(rows: list[tables.Row]) -> str:
    columns = [(side, side, ">", "{:.0f}") for side in SIDES]
    named = (("network", "network", "<", "{}"), ("weights", "weights", ">", "{}"), ("what", "us", "<", "{}"))
    return tables.aligned([{**row, **row["us"]} for row in rows], (*named, *columns))


def measure(name: str, repeats: int, what: Sequence[str]) -> list[tables.Row]:
    """A row for each of what is measured: us of a call by side."""
    model, x = prepare(name)
    rows = []
    for each in what:
        times = {side: timed(function, x, repeats) for side, function in sides(model, RUNS[each]).items()}
        rows.append({
            "network": name, "weights": len(jax.tree.leaves(nnx.state(model))), "what": each,
            "us": {side: found.microseconds for side, found in times.items()},
            "best_us": {side: 1e6 * found.best for side, found in times.items()},
        })  # fmt: skip
    return rows


def timed(function: Callable[[jax.Array], Any], x: jax.Array, repeats: int) -> timing.Timing:
    """Time of a call among `_STREAK`, which are dispatched one after the other before the last result is waited for."""
    samples = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        for _ in range(_STREAK):
            result = function(x)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / _STREAK)
    return timing.Timing.of(samples[1:])  # the first compiles


def sides(model: nnx.Module, run: _Run) -> dict[str, Callable[[jax.Array], Any]]:
    """The ways to call `run(model, x)`, as functions of x."""
    graph, state = nnx.split(model)
    under_nnx, with_state = nnx.jit(run), jax.jit(lambda state, x: run(nnx.merge(graph, state), x))
    return {
        "nnx.jit": lambda x: under_nnx(model, x),
        "cached_partial": nnx.cached_partial(nnx.jit(run), model),
        "state": lambda x: with_state(state, x),
        "jit_inference": jsc.nnx.jit_inference(model, run),
        "constants": jax.jit(lambda x: run(model, x)),
    }


def _touch(model: Any, x: jax.Array) -> jax.Array:
    firsts = [jnp.ravel(leaf)[0] * jnp.ravel(x)[0] for leaf in jax.tree.leaves(nnx.state(model))]
    return sum(firsts, jnp.ravel(x)[0])  # which is one loop


def _call(model: Any, x: jax.Array) -> Any:
    return model(x)


RUNS: dict[str, _Run] = {"host": _touch, "network": _call}


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("host", __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--what", nargs="+", choices=RUNS, default=list(RUNS))
    add("--repeats", type=int, default=10)
    add("--json", type=Path)
    return parser
