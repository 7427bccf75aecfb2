"""Rows of a benchmark: table, geometric means, and the better of two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax_sparse_conv._src.plans.timing import geometric_mean

Row = dict[str, Any]

_IDENTITY = ("layer", "source", "zeros_target", "batch", "dtype", "precision", "requested")
_TIMES = ("xla_us", "ours_us", "xla_best_us", "ours_best_us", "xla_latency_us", "ours_latency_us")
_RATIOS = ("ratio", "best_ratio", "latency_ratio")
Column = tuple[str, str, str, str]  # key, title, alignment, format

_COLUMNS: tuple[Column, ...] = (
    ("layer", "layer", "<", "{}"),
    ("source", "maps", "<", "{}"),
    ("zeros_percent", "zeros %", ">", "{:.1f}"),
    ("batch", "batch", ">", "{}"),
    ("dtype", "dtype", "<", "{}"),
    ("precision", "precision", "<", "{}"),
    ("implementation", "ran", "<", "{}"),
    ("xla_us", "XLA us", ">", "{:.1f}"),
    ("ours_us", "ours us", ">", "{:.1f}"),
    ("ratio", "ratio", ">", "{:.2f}"),
    ("best_ratio", "of best", ">", "{:.2f}"),
    ("latency_ratio", "latency", ">", "{:.2f}"),
    ("ours_tflops", "TFLOP/s", ">", "{:.2f}"),
    ("error", "error", ">", "{:.1e}"),
    ("xla_error", "XLA error", ">", "{:.1e}"),
)


def table(rows: Sequence[Row], more: Sequence[Column] = ()) -> str:
    """The rows of `layers` as text.

    "of best" is the ratio of the shortest times instead of the medians, "latency" that of single calls; TFLOP/s are
    dense-equivalent; errors are relative (Frobenius) to float64. `more` columns come last.
    """
    return aligned(rows, (*_COLUMNS, *more))


def aligned(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Rows as text, a line each below the titles."""
    cells = [[title for _, title, _, _ in columns]]
    cells += [[pattern.format(row[key]) for key, _, _, pattern in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, width, (_, _, side, _) in zip(line, widths, columns, strict=True))
        for line in cells
    )


def geometric_means(rows: Iterable[Row]) -> list[Row]:
    """Geometric means of the ratios for each operation, source of maps, density, batch, dtype and precision."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    keys = ("op", "source", "zeros_target", "batch", "dtype", "precision")
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {**dict(zip(keys, group, strict=True)), "layers": len(members)}
        | {name: geometric_mean(row[name] for row in members) for name in _RATIOS}
        for group, members in groups.items()
    ]


def means_table(means: Sequence[Row]) -> str:
    lines = []
    for mean in means:
        zeros = "" if mean["zeros_target"] is None else f" {mean['zeros_target']} % zeros,"
        lines.append(
            f"geometric mean of {mean['layers']} {mean['op']}, {mean['source']},{zeros} batch {mean['batch']}, "
            f"{mean['dtype']}, precision {mean['precision']}: {mean['ratio']:.2f} (of best "
            f"times {mean['best_ratio']:.2f}, of single calls {mean['latency_ratio']:.2f})"
        )
    return "\n".join(lines)


def better_of(first: Sequence[Row], second: Sequence[Row], labels: tuple[str, str]) -> list[Row]:
    """Row by row XLA's faster time and ours, each with the run it comes from; ratios of those."""
    others = {_identity(row): row for row in second}
    return [_better(row, others[_identity(row)], labels) for row in first]


def _better(one: Row, other: Row, labels: tuple[str, str]) -> Row:
    row = dict(one)
    for key in _TIMES:
        if one.get(key) is not None and other.get(key) is not None:
            row[key] = min(one[key], other[key])
            row[key.replace("_us", "_flags")] = labels[0] if one[key] <= other[key] else labels[1]
    row["ratio"] = row["xla_us"] / row["ours_us"]
    row["best_ratio"] = row["xla_best_us"] / row["ours_best_us"]
    row["latency_ratio"] = row["xla_latency_us"] / row["ours_latency_us"]
    row["ours_tflops"] = one["ours_tflops"] * one["ours_us"] / row["ours_us"]
    row["error"], row["xla_error"] = max(one["error"], other["error"]), max(one["xla_error"], other["xla_error"])
    return row


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in _IDENTITY)
