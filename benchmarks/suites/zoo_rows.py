"""Rows of the files of `benchmarks zoo`: what they are of, which of them lose, and what all of them come to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import losing, results, tables
from jax_sparse_conv._src.plans import timing

_COLUMNS = (
    ("call", "call", "<", "{}"),
    ("op", "op", "<", "{}"),
    ("batch", "batch", ">", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.0f}"),
    ("implementation", "ran", "<", "{}"),
    ("xla_us", "XLA us", ">", "{:.1f}"),
    ("ours_us", "ours us", ">", "{:.1f}"),
    ("ratio", "ratio", ">", "{:.2f}"),
    ("best_ratio", "of best", ">", "{:.2f}"),
    ("first", "a layer", "<", "{}"),
)


def losses(rows: Sequence[tables.Row], least: float | None = None) -> list[tables.Row]:
    """Rows that lose, as they were timed last."""
    return [row for row in timed(rows) if losing.is_loss(row["ratio"], least)]


def summary(rows: Sequence[tables.Row]) -> str:
    """What loses, and the distribution of the ratios by kind and batch."""
    found, lost = timed(rows), losses(rows)
    lines = [tables.aligned([row | {"first": row["users"][0]} for row in lost], _COLUMNS)] if lost else []
    grouped: dict[tuple[Any, ...], list[tables.Row]] = {}
    for row in found:
        zeros = "other zeros" if row["zeros_target"] else "0 % zeros"
        grouped.setdefault((kind(row), row["batch"], zeros), []).append(row)
    for (kind_, batch, zeros), chosen in grouped.items():
        ratios = [row["ratio"] for row in chosen]
        lines.append(
            f"{kind_}, batch {batch}, {len(ratios)} at {zeros}: least {min(ratios):.2f}, "
            f"geometric mean {timing.geometric_mean(ratios):.2f}, {len(losses(chosen))} below {losing.LEAST}"
        )
    lines.append(f"{len(lost)} of {len(found)} below {losing.LEAST}")
    lines += [f"{row['call']} failed: {row['failed']}" for row in rows if "failed" in row]
    xlas = Counter(f"{kind(row)} batch {row['batch']}" for row in rows if row["implementation"] == "xla")
    if xlas:
        of_kinds = ", ".join(f"{count} {name}" for name, count in xlas.items())
        lines.append(f"{xlas.total()} more are XLA's own operation: {of_kinds}")
    return "\n".join(lines)


def kind(row: tables.Row) -> str:
    """Of `zoo.LAYER_KINDS`."""
    dtype, precision = (_field(row["details"], name) for name in ("dtype", "precision"))
    return precision if dtype == "float32" else dtype


def _field(details: str, name: str) -> str:
    found = re.search(rf"\b{name}='(\w+)'", details)
    assert found, details
    return found[1]


def read(paths: Sequence[Path]) -> list[tables.Row]:
    """The rows of files, of those of a call and zeros the newest; one that failed does not replace a timed one."""
    return newest(sorted((row for path in paths for row in of_file(path)), key=lambda row: row["date"]))


def newest(rows: Sequence[tables.Row]) -> list[tables.Row]:
    """Of rows, the oldest first, the newest of each call and zeros, but for failures where there is a time."""
    found: dict[tuple[Any, ...], tables.Row] = {}
    for row in rows:
        if "ratio" in row or row["implementation"] == "xla" or "ratio" not in found.get(key(row), {}):
            found[key(row)] = row
    return list(found.values())


def of_file(path: Path) -> list[tables.Row]:
    """The rows of one file without a label, timed or not, oldest first."""
    return [row for row in results.read(path) if "label" not in row]


def timed(rows: Sequence[tables.Row]) -> list[tables.Row]:
    """Rows with a time of a kernel of ours."""
    return [row for row in rows if "ratio" in row and row["implementation"] != "xla"]


def key(row: tables.Row) -> tuple[Any, ...]:
    """What two rows of the same call, zeros and weights have in common."""
    return tuple(row[name] for name in ("details", "zeros_target", "weights"))
