"""What `run` shows: a table (rich), a plot (matplotlib) and a JSON file of one `Comparison`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jax_sparse_conv._src.cli.comparison import Comparison, LayerResult, Totals, top_classes
from jax_sparse_conv._src.cli.photograph import optional
from jax_sparse_conv._src.plans.calibration import Progress

if TYPE_CHECKING:
    from rich.console import Console

_ZEROS_COLOUR = "#9fb8cf"
_RATIO_COLOUR = "#c8452f"


def console(file: IO[str] | None = None) -> Console:
    """A rich console; 120 columns where the output is no terminal, so that a piped table stays whole.

    Raises:
      UserError: rich is not installed.
    """
    rich_console = optional("rich.console", "rich")
    made: Console = rich_console.Console(file=file)
    if not made.is_terminal:
        made = rich_console.Console(file=file, width=120)
    return made


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr; yields `advance(step, steps)`, to be called before each step.

    A step without a number of `steps` is not counted.
    """
    rich_progress = optional("rich.progress", "rich")
    stderr = optional("rich.console", "rich").Console(stderr=True)
    with rich_progress.Progress(console=stderr, transient=True) as bar:
        task = bar.add_task("", total=None)
        done = 0

        def advance(step: str, steps: int | None) -> None:
            nonlocal done
            bar.update(task, total=steps, completed=done, description=step)
            done += steps is not None

        yield advance


def print_comparison(
    found: Comparison, out: Console, title: str, names: Sequence[str] | None = None, notes: Sequence[str] = ()
) -> None:
    """Print the layers, the totals, the outputs' difference and the top-5 classes of the first image.

    Args:
      found: of `compare`.
      out: where to print.
      title: the table's title.
      names: the classes' names, by index; without them the indices are printed.
      notes: sentences printed last.
    """
    out.print(_table(found, title))
    out.print(
        f"largest relative difference of the outputs: {found.max_relative:.2e} (Frobenius: {found.frobenius:.2e})"
    )
    for side, scores in (("dense", found.dense_scores), ("sparse", found.sparse_scores)):
        best = ", ".join(f"{_class_name(c, names)} {100 * p:.1f} %" for c, p in top_classes(scores)[0])
        out.print(f"top 5 {side}: {best}", highlight=False)
    for note in notes:
        out.print(note, highlight=False)


def as_json(found: Comparison, names: Sequence[str] | None = None) -> dict[str, Any]:
    """A `Comparison` as JSON values; times in microseconds, every image's top 5."""
    return {
        "layers": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in found.layers],
        "totals": {"layers": _totals(found.layer_sum), "network": _totals(found.network)},
        "difference": {"max_relative": found.max_relative, "frobenius": found.frobenius},
        "top5": {
            side: [
                [{"class": c, "name": _class_name(c, names), "probability": p} for c, p in image]
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


def _table(found: Comparison, title: str) -> Any:
    rich_table = optional("rich.table", "rich")
    unit, pattern, scale = (
        ("ms", ",.3f", 1e-3) if max(row.dense_us for row in found.layers) > 1000 else ("us", ",.1f", 1)
    )

    def times(row: LayerResult | Totals) -> tuple[str, str, str]:
        return format(row.dense_us * scale, pattern), format(row.sparse_us * scale, pattern), f"{row.ratio:.2f}"

    table = rich_table.Table(title=title, title_justify="left", box=optional("rich.box", "rich").SIMPLE_HEAD)
    for name in ("layer", "input", "output"):
        table.add_column(name, no_wrap=True)
    for name in ("zeros %", "ran", f"dense {unit}", f"sparse {unit}", "ratio"):
        table.add_column(name, justify="left" if name == "ran" else "right", no_wrap=True)
    for row in found.layers:
        shapes = (_shape(row.input_shape), _shape(row.output_shape))
        table.add_row(row.path, *shapes, f"{row.zeros_percent:.1f}", row.implementation, *times(row))
    table.add_section()
    table.add_row("sum of the layers", "", "", "", "", *times(found.layer_sum))
    table.add_row("whole network, one jit", "", "", "", "", *times(found.network))
    return table


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _totals(totals: Totals) -> dict[str, float]:
    return {**dataclasses.asdict(totals), "ratio": totals.ratio}


def _class_name(index: int, names: Sequence[str] | None) -> str:
    return names[index] if names is not None and index < len(names) else f"class {index}"
