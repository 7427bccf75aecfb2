"""What one call costs before it computes anything.

    python -m benchmarks calls --json calls.json

The smallest layer that an implementation takes, on one pixel, in chains of calls that feed each other inside one jit,
as a network's layers do. The time of a call is the difference between two lengths of chain over the difference in
calls, so that starting the program and waiting for it cancel out. It holds everything: the custom call, its launch,
and a kernel that loads, multiplies and stores next to nothing. "xla" is XLA's own kernel for an addition to as many
elements: what any operation costs there. Run it under command buffers too: calls are then nodes of a CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_sparse_conv as jsc
from benchmarks.common import command, results, tables
from jax_sparse_conv._src import environment
from jax_sparse_conv._src.plans import timing

SIDES = ("xla", "ecr", "coo", "direct", "dense")
LENGTHS = (8, 64)  # calls of a chain
_CHANNELS = 64
_COLUMNS = (
    ("side", "side", "<", "{}"),
    ("us", "us a call", ">", "{:.2f}"),
    ("over_xla_us", "over XLA's", ">", "{:+.2f}"),
    ("first_us", "outside a chain", ">", "{:.1f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the chains, print a table and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        rows = measure(options.repeats)
    except (OSError, ValueError) as error:
        print(f"benchmarks calls: {error}", file=sys.stderr)
        return 1
    print(tables.aligned(rows, _COLUMNS))
    if options.json:
        content = {**environment.describe_run(), "command": command.portable("calls", arguments)}
        content |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "repeats": options.repeats}
        content |= {"lengths": LENGTHS, "rows": rows}
        results.add(options.json, "calls", content)
    return 0


def measure(repeats: int) -> list[tables.Row]:
    """A row for each side. `first_us`: the time of a program of one call until its result is there."""
    x = jnp.ones((1, 1, 1, _CHANNELS), jnp.float32)
    kernel = jnp.eye(_CHANNELS, dtype=jnp.float32).reshape(1, 1, _CHANNELS, _CHANNELS)
    chains = {f"{side} {length}": _chain(side, length) for side in SIDES for length in (1, *LENGTHS)}
    times = timing.blocked(chains, [(x, kernel)], repeats, 8)
    short, long = LENGTHS
    rows: list[tables.Row] = []
    for side in SIDES:
        seconds = (times[f"{side} {long}"].median - times[f"{side} {short}"].median) / (long - short)
        rows.append({"side": side, "us": 1e6 * seconds, "first_us": times[f"{side} 1"].microseconds})
    return [row | {"over_xla_us": row["us"] - rows[0]["us"]} for row in rows]


def _chain(side: str, length: int) -> timing.Function:
    @jax.jit
    def chain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        for _ in range(length):
            x = lax.optimization_barrier(_call(side, x, kernel))  # a call each: nothing merges them
        return x

    return chain


def _call(side: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    if side == "xla":
        return x + 1
    if side == "dense":
        return jsc.dense(x.reshape(1, -1), kernel[0, 0], implementation="ecr").reshape(x.shape)
    return jsc.conv(x, kernel, implementation=side)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("calls", __doc__)
    add: Any = parser.add_argument
    add("--repeats", type=int, default=30)
    add("--json", type=Path)
    return parser
