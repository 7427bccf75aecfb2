"""Plot of ratio against zeros, from the JSON files of `benchmarks cpu`, or from that of the papers' Fig. 11.

    python -m benchmarks crossover results.json [more.json ...] --out plot.png
    python -m benchmarks crossover fig11.json --sides ecr coo 'xla default' --out plot.png

Of `benchmarks cpu`: a line for each batch through the geometric means of the i.i.d. maps' 3x3 convolutions, with its
crossover, the zeros at which ours takes as long as XLA's, and a point for each real map. Of Fig. 11: a line for each
side through the geometric means of the convolutions without a pool, XLA's time at HIGHEST over the side's, with the
zeros at which the sparse kernel takes as long as each dense one.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command
from benchmarks.common.tables import Row
from jax_sparse_conv._src.cli.errors import UserError
from jax_sparse_conv._src.cli.report import optional
from jax_sparse_conv._src.plans import timing

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
_BASELINE = "xla highest"
_SPARSE = ("ecr", "coo")  # the first is what dense sides are compared with
_CHOOSING = ("auto", "auto default")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot; the result is the exit status."""
    parser = command.parser("crossover FILE ...", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="of the suite cpu, or fig11.json")
    parser.add_argument("--weights", default="constant", help="of the suite cpu, rows with these")
    parser.add_argument("--implementation", default="ecr", help="of the suite cpu, rows of this one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sides", nargs="+", help="of Fig. 11, only these; all by default")
    options = parser.parse_args(argv)
    try:
        rows = [row for file in options.files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
        rows = [row for row in rows if "us" in row or _is_of(row, options)]
        chosen = [row for row in rows if row["op"] == "conv" and row["kernel_shape"][0] == 3]
        figure = optional("matplotlib.figure", "matplotlib").Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        if any("us" in row for row in chosen):
            _draw_sides(axes, chosen, options.sides)
        else:
            _draw(axes, chosen)
        _finish(axes, any("us" in row for row in chosen))
        figure.savefig(options.out, dpi=150)
    except (KeyError, OSError, UserError, ValueError) as error:
        print(f"benchmarks crossover: {error}", file=sys.stderr)
        return 1
    return 0


def _is_of(row: Row, options: argparse.Namespace) -> bool:
    return (row.get("weights"), row["requested"]) == (options.weights, options.implementation)


def curve(rows: Sequence[Row], batch: int) -> list[tuple[float, float]]:
    """(zeros in percent, geometric mean of the ratios) of the i.i.d. maps of one batch, by zeros.

    Of those layers that were timed at the most percentages, so that every point has the same layers.
    """
    iid = [row for row in rows if row["source"] == "iid" and row["batch"] == batch]
    times = collections.Counter(row["layer"] for row in iid)
    chosen = [row for row in iid if times[row["layer"]] == max(times.values())]
    targets = sorted({row["zeros_target"] for row in chosen})
    return [
        (target, timing.geometric_mean(row["ratio"] for row in chosen if row["zeros_target"] == target))
        for target in targets
    ]


def crossover(points: Sequence[tuple[float, float]]) -> float | None:
    """Zeros at which the ratio, its logarithm taken as linear between points, comes to 1; None if it never does."""
    if points and points[0][1] >= 1:
        return points[0][0]
    for (low, before), (high, after) in itertools.pairwise(points):
        if before < 1 <= after:
            return low + (high - low) * math.log(before) / (math.log(before) - math.log(after))
    return None


def gains(rows: Sequence[Row], side: str, over: str) -> list[tuple[float, float]]:
    """(zeros in percent, geometric mean of `over`'s time over `side`'s) of the i.i.d. maps, by zeros."""
    iid = [row for row in rows if row["source"] == "iid" and {side, over} <= row["us"].keys()]
    return [
        (
            target,
            timing.geometric_mean(row["us"][over] / row["us"][side] for row in iid if row["zeros_target"] == target),
        )
        for target in sorted({row["zeros_target"] for row in iid})
    ]


def _draw_sides(axes: Any, rows: Sequence[Row], wanted: Sequence[str] | None) -> None:
    """Sides of the papers' experiments: XLA's time at HIGHEST over theirs."""
    axes.axhline(1, color="0.3", linewidth=1, linestyle="--")
    measured = dict.fromkeys(side for row in rows for side in row["us"] if side not in (_BASELINE, *_CHOOSING))
    names = [side for side in measured if wanted is None or side in wanted]
    for side, colour in zip(names, _COLOURS, strict=False):
        where = ""
        if side not in _SPARSE:
            found = crossover(gains(rows, _SPARSE[0], side))
            where = f": {_SPARSE[0]} is " + (
                "never as fast" if found is None else f"as fast from {found:.0f} % zeros on"
            )
        axes.plot(*zip(*gains(rows, side, _BASELINE), strict=True), "o-", color=colour, label=side + where)
        real = [row for row in rows if row["source"] == "real" and {side, _BASELINE} <= row["us"].keys()]
        values = [row["zeros_percent"] for row in real], [row["us"][_BASELINE] / row["us"][side] for row in real]
        axes.plot(*values, "x", color=colour)


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    axes.axhline(1, color="0.3", linewidth=1, linestyle="--")
    for batch, colour in zip(sorted({row["batch"] for row in rows}), _COLOURS, strict=False):
        points = curve(rows, batch)
        if points:
            found = crossover(points)
            where = "never as fast" if found is None else f"as fast from {found:.0f} % zeros on"
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"i.i.d. zeros, batch {batch}: {where}")
        real = [row for row in rows if row["source"] == "real" and row["batch"] == batch]
        if real:
            values = [row["zeros_percent"] for row in real], [row["ratio"] for row in real]
            axes.plot(*values, "x", color=colour, label=f"real maps, batch {batch}")


def _finish(axes: Any, of_sides: bool) -> None:
    ticker = optional("matplotlib.ticker", "matplotlib")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xlim(-2, 102)
    axes.set_xlabel("zeros in the input, %" + (" (crosses: real maps)" if of_sides else ""))
    axes.set_ylabel("XLA's time at HIGHEST / theirs" if of_sides else "XLA's time / ours")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
