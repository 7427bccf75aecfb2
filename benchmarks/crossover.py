"""Plot of ratio against zeros, from the JSON files of `benchmarks.cpu`.

    python -m benchmarks.crossover results.json [more.json ...] --out plot.png

A line for each batch through the geometric means of the i.i.d. maps' 3x3 convolutions, with its crossover, the zeros at
which ours takes as long as XLA's, and a point for each real map.
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

from benchmarks.tables import Row
from jax_sparse_conv import timing
from jax_sparse_conv.comparison import UserError
from jax_sparse_conv.report import optional

_COLOURS = ("tab:blue", "tab:orange", "tab:green")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot; the result is the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crossover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        rows = [row for file in options.files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
        _draw([row for row in rows if row["op"] == "conv" and row["kernel_shape"][0] == 3], options.out)
    except (KeyError, OSError, UserError, ValueError) as error:
        print(f"benchmarks.crossover: {error}", file=sys.stderr)
        return 1
    return 0


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


def _draw(rows: Sequence[Row], path: Path) -> None:
    figure_module, ticker = optional("matplotlib.figure", "matplotlib"), optional("matplotlib.ticker", "matplotlib")
    figure = figure_module.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
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
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xlim(-2, 102)
    axes.set_xlabel("zeros in the input, %")
    axes.set_ylabel("XLA's time / ours")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
