"""The two kinds of figure that the experiments draw: lines over a quantity, and bars for layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.runner import Row
from jax_sparse_conv._src.cli.errors import optional

_STYLES = {"highest": "-", "default": "--"}
_DPI = 80  # a figure is a few tens of kilobytes


def save(draw: Callable[[Any, Sequence[Row]], None], rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw rows into a PNG.

    Raises:
      UserError: matplotlib is not installed.
    """
    figure = optional("matplotlib.figure", "matplotlib").Figure(figsize=(11, 5.5), layout="constrained")
    draw(figure, rows)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=_DPI)


def lines(x: str, label: str, panel: str = "layer") -> Callable[[Any, Sequence[Row]], None]:
    """A panel for each value of `panel`; in it XLA's time over each side's, against the rows' `x`.

    Where that is not the zeros: those of the layer, and faintly none.
    """

    def draw(figure: Any, rows: Sequence[Row]) -> None:
        panels = list(dict.fromkeys(row[panel] for row in rows))
        columns = min(3, len(panels))
        axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).ravel()
        for chosen, name in zip(axes, panels, strict=False):
            _curves(chosen, [row for row in rows if row[panel] == name], x)
            _finish(chosen, name, label)
        axes[0].legend(fontsize=7)

    return draw


def bars(label: Callable[[Row], str]) -> Callable[[Any, Sequence[Row]], None]:
    """One panel for each of XLA's precisions: a bar for every row and side, XLA's time over the side's.

    Maps of zeros are left out: beside their ratios nothing else would be seen.
    """

    def draw(figure: Any, rows: Sequence[Row]) -> None:
        timed = [row for row in rows if row.get("ratio") and row["zeros_target"] != 100]
        precisions = list(dict.fromkeys(p for row in timed for p in row["ratio"]))
        axes = figure.subplots(max(1, len(precisions)), 1, sharex=True, squeeze=False).ravel()
        for chosen, precision in zip(axes, precisions, strict=False):
            _bars(chosen, timed, precision)
            _finish(chosen, "", f"XLA {precision} / side")
        axes[-1].set_xticks(range(len(timed)), [label(row) for row in timed], rotation=90, fontsize=6)
        axes[0].legend(fontsize=7)

    return draw


def _curves(axes: Any, rows: Sequence[Row], x: str) -> None:
    iid = sorted((row for row in rows if row["source"] == "iid"), key=lambda row: row[x])
    others = [row for row in rows if row["source"] != "iid"]
    by_zeros = x == "zeros_percent"
    main = [row for row in iid if by_zeros or row["zeros_target"] not in (0, 100)]
    without = [] if by_zeros else [row for row in iid if row["zeros_target"] == 0]
    for precision, style in _STYLES.items():
        names = dict.fromkeys(side for row in main for side in row["ratio"].get(precision, {}))
        for index, side in enumerate(names):
            curve = {"linestyle": style, "marker": ".", "color": f"C{index}"}
            _plot(axes, main, x, precision, side, label=f"{precision} / {side}", **curve)
            _plot(axes, without, x, precision, side, alpha=0.3, **curve)
            mark = "*" if precision == "highest" else "x"
            _plot(axes, others, x, precision, side, linestyle="", marker=mark, color=f"C{index}")


def _plot(axes: Any, rows: Sequence[Row], x: str, precision: str, side: str, **style: Any) -> None:
    points = [(row[x], row["ratio"][precision][side]) for row in rows if side in row["ratio"].get(precision, {})]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _bars(axes: Any, rows: Sequence[Row], precision: str) -> None:
    names = list(dict.fromkeys(side for row in rows for side in row["ratio"].get(precision, {})))
    width = 0.8 / max(1, len(names))
    for index, side in enumerate(names):
        heights = [row["ratio"].get(precision, {}).get(side, 0) for row in rows]
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(rows))]
        axes.bar(places, heights, width, label=side)


def _finish(axes: Any, title: str, label: str) -> None:
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_title(title, fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
