"""What an experiment is, and the table and the better of two runs that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from benchmarks.common import paper_rows
from benchmarks.paper import runner, sides
from benchmarks.paper.runner import Context, Row
from jax_sparse_conv._src.plans.timing import geometric_mean

Content: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[Any, Sequence[Row]], None]  # (matplotlib figure, rows)

_OF_A_TIME = ("us", "quartiles_us", "ran", "error", "millijoules", "millijoules_range")  # what goes with it


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
      name: what the command line calls it.
      source: where the papers have it.
      summary: what is measured, in a sentence.
      run: measures its rows.
      draw: draws them into a matplotlib figure.
      columns: keys of rows that the table shows before the times.
    """

    name: str
    source: str
    summary: str
    run: Callable[[Context], list[Row]]
    draw: Draw
    columns: tuple[str, ...] = ("layer", "source", "zeros_percent", "batch")


def means(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Geometric means of the ratios over the layers, each layer counted as often as its network has it.

    One for each network, source and percentage of zeros ("own" is each layer's), batch, stride and precision of XLA.
    """
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    keys = ("network", "source", "zeros", "batch", "strides", "op")
    for row in rows:
        for precision, ratios in row.get("ratio", {}).items():
            described = {**row, "zeros": row.get("zeros", row["zeros_target"])}
            group = groups.setdefault((*(described.get(key) for key in keys), precision), {})
            for side, ratio in ratios.items():
                group.setdefault(side, []).extend([ratio] * row.get("count", 1))
    return [
        {**dict(zip((*keys, "precision"), group, strict=True)), "layers": len(next(iter(by_side.values())))}
        | {"ratio": {side: geometric_mean(ratios) for side, ratios in by_side.items()}}
        for group, by_side in groups.items()
        if by_side
    ]


def better_of(one: Sequence[Row], other: Sequence[Row], labels: tuple[str, str]) -> list[Row]:
    """Row by row each side's faster time, with the run that it is from, and the ratios of those.

    What only one of the runs has, a row or a side, stays as it is there.
    """
    runs = [({_identity(row): row for row in rows}, label) for rows, label in zip((one, other), labels, strict=True)]
    first, second = (rows for rows, _ in runs)
    if not first.keys() & second.keys():
        raise ValueError("the two runs have different rows")
    return [_better([(rows[key], label) for rows, label in runs if key in rows]) for key in {**first, **second}]


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("layer", "source", "zeros_target", "batch", "strides"))


def _better(runs: Sequence[tuple[Row, str]]) -> Row:
    """Of a row in one run or in both, with their labels."""
    row = dict(runs[0][0])
    if "us" not in row:
        return row
    faster: dict[str, tuple[Row, str]] = {}
    for run, label in runs:
        for side in run["us"]:
            if side not in faster or _prefers(side, faster[side][0], run):
                faster[side] = (run, label)
    row["flags"] = {side: label for side, (_, label) in faster.items()}
    row |= paper_rows.earlier(*(run for run, _ in faster.values()))
    for key in _OF_A_TIME:
        if any(key in run for run, _ in runs):
            row[key] = {side: run[key][side] for side, (run, _) in faster.items() if side in run.get(key, {})}
    if "skipped" in row:
        row["skipped"] = {s: why for run, _ in runs for s, why in run.get("skipped", {}).items() if s not in faster}
    if "millijoules" in row:
        runner.add_saving(row)
    return runner.add_ratios(row)


def _prefers(side: str, one: Row, other: Row) -> bool:
    """Whether the second run counts: it was faster, or `None` has come to choose otherwise since the first."""
    ran = [run.get("ran", {}).get(side) for run in (one, other)]
    return ran[0] != ran[1] or one["us"][side] > other["us"][side]


def table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """The rows as text: the columns, the microseconds of every side, and XLA's times over each of ours."""
    if not rows:
        return "no rows"
    names = list(dict.fromkeys(side for row in rows for side in row.get("us", {})))
    ours = [name for name in names if not sides.is_dense(name)]
    precisions = list(dict.fromkeys(precision for row in rows for precision in row.get("ratio", {})))
    header = [*columns, *(f"{name} us" for name in names), *(f"{p}/{name}" for p in precisions for name in ours)]
    lines = [header]
    for row in rows:
        ratios = [_cell(row.get("ratio", {}).get(p, {}).get(name), "{:.2f}") for p in precisions for name in ours]
        times = [_cell(row.get("us", {}).get(name), "{:.1f}") for name in names]
        lines.append([*(_cell(row.get(column)) for column in columns), *times, *ratios])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def means_table(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for mean in found:
        zeros = "" if mean["zeros"] is None else f", {mean['zeros']} % zeros"
        where = f"{mean['network']}, " if mean["network"] else ""
        ratios = ", ".join(f"{side} {ratio:.2f}" for side, ratio in mean["ratio"].items())
        lines.append(
            f"{where}{mean['layers']} {mean['op']}, {mean['source']}{zeros}, batch {mean['batch']}, stride "
            f"{mean['strides']}: XLA {mean['precision']} over {ratios}"
        )
    return "\n".join(lines)


def _cell(value: Any, pattern: str = "{:.1f}") -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(_cell(entry, pattern) for entry in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(entry, pattern)}" for key, entry in value.items())
    return pattern.format(value) if isinstance(value, float) else str(value)
