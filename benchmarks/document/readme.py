"""The table of README.md: XLA's time over ours of whole networks at batch 1."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.common.results import RESULTS, Row, read
from benchmarks.document.markdown import network, table
from benchmarks.document.network_tables import by_faster_flags

_WEIGHTS = {  # of the rows on a GPU, by network in the order of the table; None has no such row
    "vgg19": "arguments",
    "resnet50": "arguments",
    "densenet121": "packed",
    "densenet169": None,
    "regnetx_16gf": "arguments",
}
_GPU_KINDS = {"highest": "float32 `HIGHEST`", "default": "TF32", "bfloat16": "bfloat16"}
_TABLE = re.compile(r"^\| network \| zeros \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)


def page(text: str, results: Path = RESULTS) -> str:
    """README.md with the table that the results give in the place of its own.

    Raises:
      ValueError: there is no table.
    """
    found, count = _TABLE.subn(lambda _: networks_table(results) + "\n", text)
    if count != 1:
        raise ValueError(f"README.md has {count} tables of networks, not one")
    return found


def networks_table(results: Path = RESULTS) -> str:
    """The table: a GPU's precisions, and a CPU."""
    rows = [row for row in read(results / "h200" / "networks.json") if "label" not in row]
    gpu = {(row["network"], row["weights"], row["kind"], row["batch"]): row for row in by_faster_flags(rows)}
    runs = read(results / "cpu_amd_epyc" / "run.json")
    cpu = {row["network"]: row["totals"]["network"]["ratio"] for row in runs if row["batch"] == 1}
    titles = (*("network", "zeros"), *(f"H200, {title}" for title in _GPU_KINDS.values()), "two CPU cores, float32")
    lines = []
    for name, weights in _WEIGHTS.items():
        of_kinds = [gpu.get((name, weights or "", kind, 1)) for kind in _GPU_KINDS]
        zeros = f"{of_kinds[0]['zeros_percent']:.0f} %" if of_kinds[0] else ""
        lines.append((network(name), zeros, *map(_cell, of_kinds), f"{cpu[name]:.1f}" if name in cpu else ""))
    return table(titles, lines)


def _cell(row: Row | None) -> str:
    return f"{row['ratio']['auto']:.1f} ({row['no_zeros_ratio']['auto']:.1f})" if row else ""
