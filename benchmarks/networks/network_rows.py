"""Rows of `benchmarks networks`: those of several files and of both of XLA's flag sets, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import results
from benchmarks.networks.network_cases import ARGUMENTS, XLA, Row
from benchmarks.paper.experiment import aligned

_HEADER = (
    *("case", "side", "flags", "zeros %", "us", "XLA/", "0 % us", "at 0 %", "roof %", "error"),
    *("native", "other calls", "fusions", "launches", "MB"),
)


def read(paths: Sequence[Path]) -> list[Row]:
    """Of every case in files of results, each side's faster time; of rows with the same flags the newest."""
    runs: dict[str, dict[tuple[str, str], Row]] = {}
    for path in paths:
        for row in results.read(path):
            if "us" not in row or "case" not in row:
                raise ValueError(f"{path}: not a file that benchmarks networks --json has written")
            if "label" not in row:
                runs.setdefault(row["flags"], {})[row["case"], row["weights"]] = row
    return best({label: list(rows.values()) for label, rows in runs.items()})


def best(runs: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Of every case each side's faster time, with the flags that it is from, and the ratios of those."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for label, rows in runs.items():
        for row in rows:
            cases.setdefault((row["case"], row.get("weights", ARGUMENTS)), {})[label] = row
    return [_best(by_label) for by_label in cases.values()]


def _best(by_label: Mapping[str, Row]) -> Row:
    rows = list(by_label.values())
    row: Row = {key: rows[0][key] for key in ("case", "network", "kind", "batch", "weights") if key in rows[0]}
    floors = [each["roofline"] for each in rows if "roofline" in each]
    sides = list(dict.fromkeys(side for each in rows for side in each["us"]))
    chosen = {
        side: min((label for label in by_label if side in by_label[label]["us"]),
                  key=lambda label, side=side: by_label[label]["us"][side])  # type: ignore[misc]
        for side in sides
    }  # fmt: skip
    row["flags"] = chosen
    for key in ("us", "no_zeros_us", "latency_us"):
        found = {side: [each[key][side] for each in rows if side in each.get(key, {})] for side in sides}
        row[key] = {side: min(us) for side, us in found.items() if us}
    for key in ("error", "program", "memory"):
        row[key] = {side: by_label[label][key][side] for side, label in chosen.items()}
    for key in ("zeros_percent", "no_zeros_percent"):
        row[key] = next((each[key] for each in rows if key in each), None)
    row["roofline"] = min(floors, key=lambda floor: floor["us"], default=None)
    row["ratio"], row["no_zeros_ratio"] = _ratios(row["us"]), _ratios(row["no_zeros_us"])
    row["roof_percent"] = {side: 100 * row["roofline"]["us"] / us for side, us in row["us"].items()}
    row["skipped"] = {label: each["skipped"] for label, each in by_label.items() if each["skipped"]}
    return row


def _ratios(us: Mapping[str, float]) -> dict[str, float]:
    return {side: us[XLA] / time for side, time in us.items() if side != XLA} if XLA in us else {}


def table(rows: Sequence[Row]) -> str:
    """A line for every case and side.

    "XLA/" is XLA's time over the side's, "at 0 %" the same without zeros: what stays of the gain there is not from
    zeros. "roof %" is the share of the side's time that moving the bytes or doing the dense operations must take.
    Custom calls are the package's ("native") and others, cuDNN's and cuBLAS's; launches are what the host starts, 1
    where all is one command buffer; MB are weights that are arguments, image, result and what the program needs.
    """
    lines = [list(_HEADER)]
    for row in rows:
        for side, us in row["us"].items():
            program = row["program"][side]
            calls = program["custom_calls"]
            native = sum(count for target, count in calls.items() if target.startswith("jsc_"))
            ratios = [f"{row[key][side]:.2f}" if side in row[key] else "-" for key in ("ratio", "no_zeros_ratio")]
            launches = "-" if program["thunks"] is None else str(program["thunks"]["launches"])
            lines.append([
                row["case"], side, row["flags"][side], f"{row['zeros_percent']:.0f}", f"{us:.1f}", ratios[0],
                f"{row['no_zeros_us'][side]:.1f}", ratios[1], f"{row['roof_percent'][side]:.0f}",
                f"{row['error'][side]:.1e}", str(native), str(sum(calls.values()) - native), str(program["fusions"]),
                launches, f"{sum(row['memory'][side].values()) / 1e6:.0f}",
            ])  # fmt: skip
    skipped = [
        f"{row['case']} {side}, {label} flags, skipped: {reason}"
        for row in rows
        for label, reasons in row["skipped"].items()
        for side, reason in reasons.items()
    ]
    return "\n".join([aligned(lines), *skipped])
