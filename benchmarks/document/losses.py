"""Losses in files of results, by the one rule for all of them (`benchmarks/common/losing.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.losing import LEAST, is_loss
from benchmarks.common.results import RESULTS, Row, read
from benchmarks.document.markdown import MODELS, network
from benchmarks.document.network_tables import by_faster_flags
from benchmarks.suites import zoo_rows

Ratios = list[tuple[float, str]]  # with what they are of

__all__ = ["LEAST", "Losses", "of_file", "of_files"]


@dataclass(frozen=True)
class Losses:
    """Of a file: its rows, those of them that lose, and the row of the least ratio."""

    file: str
    rows: int
    lost: int
    least: float
    case: str


def of_files(results: Path = RESULTS) -> list[Losses]:
    """Those of every device's files of layers, gradients, networks and models."""
    return [
        of_file(path, results)
        for folder in sorted(results.iterdir())
        for path in (folder / f"{suite}.json" for suite in _RATIOS)
        if path.is_file()
    ]


def of_file(path: Path, results: Path = RESULTS) -> Losses:
    """Those of one file, of what is today's package as it comes."""
    ratios = sorted(_RATIOS[path.stem]([row for row in read(path) if "label" not in row]))
    least, case = ratios[0]
    lost = sum(is_loss(ratio) for ratio, _ in ratios)
    return Losses(path.relative_to(results).as_posix(), len(ratios), lost, least, case)


def _layers(rows: Sequence[Row]) -> Ratios:
    """Of each call the newest row, without what `None` leaves to XLA."""
    return [
        (row["ratio"], f"{row['call']}, {zoo_rows.kind(row)}, {row['zeros_target']} % zeros, {row['implementation']}")
        for row in zoo_rows.timed(zoo_rows.newest(rows))
    ]


def _random(rows: Sequence[Row]) -> Ratios:
    return [
        (row["ratio"], f"{row['layer']}, {row['dtype']} {row['precision']}, {row['implementation']}")
        for row in rows
        if row["implementation"] != "xla"
    ]


def _networks(rows: Sequence[Row]) -> Ratios:
    """Of `None`, with a trained network's zeros or without any, whichever is less."""
    return [
        (min(row[key]["auto"] for key in ("ratio", "no_zeros_ratio") if "auto" in row[key]), _network(row))
        for row in by_faster_flags(rows)
        if "auto" in row["ratio"]
    ]


def _network(row: Mapping[str, object]) -> str:
    return f"{network(str(row['network']))}, {row['kind']}, batch {row['batch']}"


def _models(rows: Sequence[Row]) -> Ratios:
    return [
        (
            row["jit_inference_ratio"],
            f"{MODELS.get(row['model'], row['model'])}, {row['kind']}, batch {row['batch']}, {row['weights']} weights",
        )
        for row in rows
    ]


def _gradients(rows: Sequence[Row]) -> Ratios:
    return [(row["ratio"], f"{row['layer']}, by {row['by']}") for row in rows]


_RATIOS: dict[str, Callable[[Sequence[Row]], Ratios]] = {
    "zoo": _layers,
    "sweep": _random,
    "gradients": _gradients,
    "networks": _networks,
    "models": _models,
}
"""By suite: the ratios of its rows."""
