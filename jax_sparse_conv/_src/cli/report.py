"""What `run` shows: a table (rich), a plot (matplotlib) and a JSON file of one `Comparison`."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jax_sparse_conv._src.cli.comparison import Comparison, LayerResult, Totals, top_classes
from jax_sparse_conv._src.cli.errors import optional

if TYPE_CHECKING:
    from rich.console import Console

_ZEROS_COLOUR = "#9fb8cf"
_RATIO_COLOUR = "#c8452f"
_ANY_WIDTH = 1000
_DISPENSABLE = ("output", "input", "ran", "zeros %")  # columns of the table, the first that go where it is too wide


def console(file: IO[str] | None = None) -> Console:
    """A rich console; 80 columns where the output is no terminal, and COLUMNS does not say otherwise.

    Raises:
      UserError: rich is not installed.
    """
    made: Console = optional("rich.console", "rich").Console(file=file)
    return made


def print_comparison(
    found: Comparison,
    out: Console,
    title: str,
    labels: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    photographs: Sequence[str] = ("",),
) -> None:
    """Print the layers, the totals, the outputs' difference and the top-5 classes of each photograph.

    Args:
      found: of `compare`.
      out: where to print.
      title: the table's title.
      labels: the classes' names, by index; without them the indices are printed.
      notes: sentences printed last.
      photographs: names; each has as many of the images as the others, its first the photograph itself.
    """
    table, left_out = _fitting(found, title, out)
    out.print(table)
    if left_out:
        out.print(f"Left out for the width: {', '.join(left_out)}; --json and --html have all.", highlight=False)
    if any(sum_ > whole for sum_, whole in zip(_both(found.layer_sum), _both(found.network), strict=True)):
        out.print("Each layer is a call of its own here, with a call's cost; the whole network is one call.")
    out.print(
        f"largest relative difference of the outputs: {found.max_relative:.2e} (Frobenius: {found.frobenius:.2e})"
    )
    sides = {"dense": top_classes(found.dense_scores), "sparse": top_classes(found.sparse_scores)}
    for index, photograph in enumerate(photographs):
        of = f" of {photograph}" if len(photographs) > 1 else ""
        for side, best in sides.items():
            classes = best[index * (len(best) // len(photographs))]
            entries = [f"{_class_name(c, labels)} {100 * p:.1f} %" for c, p in classes]
            out.print(_wrapped(f"top 5 {side}{of}: ", entries, out.width), highlight=False, markup=False)
    for note in notes:
        out.print(note, highlight=False, markup=False)


def as_json(found: Comparison, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """A `Comparison` as JSON values; times in microseconds, every image's top 5."""
    return {
        "layers": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in found.layers],
        "totals": {"layers": _totals(found.layer_sum), "network": _totals(found.network)},
        "difference": {"max_relative": found.max_relative, "frobenius": found.frobenius},
        "top5": {
            side: [
                [{"class": c, "name": _class_name(c, labels), "probability": p} for c, p in image]
                for image in top_classes(scores)
            ]
            for side, scores in (("dense", found.dense_scores), ("sparse", found.sparse_scores))
        },
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot(layers: Sequence[LayerResult], path: Path, title: str) -> None:
    """Write a PNG: dense over sparse time of each layer (log scale), and below it the zeros of the layer's input.

    Raises:
      UserError: matplotlib is not installed.
    """
    figure_module, ticker = optional("matplotlib.figure", "matplotlib"), optional("matplotlib.ticker", "matplotlib")
    figure = figure_module.Figure(figsize=(max(7.0, 2 + 0.23 * len(layers)), 6), layout="constrained")
    ratio, zeros = figure.subplots(2, 1, sharex=True)
    positions = range(len(layers))
    ratio.axhline(1, color="0.3", linewidth=1, linestyle="--")
    ratio.plot(positions, [row.ratio for row in layers], "o-", color=_RATIO_COLOUR, markersize=4, linewidth=1)
    ratio.set_yscale("log", base=2)
    ratio.set_ylim(min(0.5, *(0.9 * row.ratio for row in layers)), max(2.0, *(1.1 * row.ratio for row in layers)))
    ratio.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    ratio.set_ylabel("dense time / sparse time")
    zeros.bar(positions, [row.zeros_percent for row in layers], color=_ZEROS_COLOUR, width=0.7)
    zeros.set_ylim(0, 100)
    zeros.set_ylabel("zeros in the input, %")
    zeros.set_xlim(-0.7, len(layers) - 0.3)
    zeros.set_xticks(positions, [row.path for row in layers], rotation=90, fontsize=8)
    for axes in (ratio, zeros):
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=150)


def _fitting(found: Comparison, title: str, out: Console) -> tuple[Any, list[str]]:
    """A table no wider than `out`, and the columns that were left out for it."""
    for count in range(len(_DISPENSABLE) + 1):
        left_out = list(_DISPENSABLE[:count])
        table = _table(found, title, left_out)
        width = table.__rich_measure__(out, out.options.update(max_width=_ANY_WIDTH)).maximum
        if width <= out.width:
            return table, left_out
    out.width = width  # of a terminal that has no room for the times; it breaks the lines, where rich would cut digits
    return table, left_out


def _table(found: Comparison, title: str, left_out: Sequence[str]) -> Any:
    rich_table = optional("rich.table", "rich")
    unit, pattern, scale = (
        ("ms", ",.3f", 1e-3) if max(row.dense_us for row in found.layers) > 1000 else ("us", ",.1f", 1)
    )

    def times(row: LayerResult | Totals) -> tuple[str, str, str]:
        return format(row.dense_us * scale, pattern), format(row.sparse_us * scale, pattern), f"{row.ratio:.2f}"

    columns = ("layer", "input", "output", "zeros %", "ran", f"dense {unit}", f"sparse {unit}", "ratio")
    kept = [index for index, name in enumerate(columns) if name not in left_out]
    table = rich_table.Table(
        title=title, title_justify="left", box=optional("rich.box", "rich").SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for index in kept:
        justify = "left" if columns[index] in ("layer", "input", "output", "ran") else "right"
        table.add_column(columns[index], justify=justify, no_wrap=True)

    def add(*cells: str) -> None:
        table.add_row(*(cells[index] for index in kept))

    for row in found.layers:
        shapes = (_shape(row.input_shape), _shape(row.output_shape))
        add(row.path, *shapes, f"{row.zeros_percent:.1f}", row.implementation, *times(row))
    table.add_section()
    add("sum of the layers", "", "", "", "", *times(found.layer_sum))
    add("whole network", "", "", "", "", *times(found.network))
    return table


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _both(totals: Totals) -> tuple[float, float]:
    return totals.dense_us, totals.sparse_us


def _totals(totals: Totals) -> dict[str, float]:
    return {**dataclasses.asdict(totals), "ratio": totals.ratio}


def _wrapped(head: str, entries: Sequence[str], width: int) -> str:
    """Entries behind each other, in lines that end between them."""
    whole = head + ", ".join(entry.replace(" ", "\0") for entry in entries)
    return textwrap.fill(whole, width, break_on_hyphens=False).replace("\0", " ")


def _class_name(index: int, labels: Sequence[str] | None) -> str:
    return labels[index] if labels is not None and index < len(labels) else f"class {index}"
