"""The table of README.md: what models that others wrote gain at batch 1."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.common.results import RESULTS, Row, read
from benchmarks.document.markdown import KINDS, MODELS, table

_LISTED = ("keras_vgg16", "nnx_resnet50", "equinox_resnet50", "keras_densenet121")
_GPU, _CPU = "h100", "cpu_amd_epyc"
_GPU_KINDS = ("highest", "default", "bfloat16")
_TABLE = re.compile(r"^\| model \| zeros \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)


def page(text: str, results: Path = RESULTS) -> str:
    """README.md with the table that the results give in the place of its own.

    Raises:
      ValueError: there is no table.
    """
    found, count = _TABLE.subn(lambda _: models_table(results) + "\n", text)
    if count != 1:
        raise ValueError(f"README.md has {count} tables of models, not one")
    return found


def models_table(results: Path = RESULTS) -> str:
    """The table: a GPU's precisions, and a CPU. In brackets the same without zeros."""
    gpu, cpu = (_ratios(read(results / device / "models.json")) for device in (_GPU, _CPU))
    titles = ("model", "zeros", *(f"{_GPU.upper()}, {KINDS[kind]}" for kind in _GPU_KINDS), "two CPU cores, float32")
    lines = []
    for name in _LISTED:
        cells = [_cell(gpu, name, kind) for kind in _GPU_KINDS] + [_cell(cpu, name, "default")]
        zeros = next(row["zeros_percent"] for row in (*gpu.values(), *cpu.values()) if _is(row, name, "trained"))
        lines.append((MODELS[name], f"{zeros:.0f} %", *cells))
    return table(titles, lines)


def _ratios(rows: list[Row]) -> dict[tuple[str, str, str], Row]:
    return {(row["model"], row["kind"], row["weights"]): row for row in rows if row["batch"] == 1}


def _is(row: Row, name: str, weights: str) -> bool:
    return (row["model"], row["weights"]) == (name, weights)


def _cell(rows: dict[tuple[str, str, str], Row], name: str, kind: str) -> str:
    ratios = [rows.get((name, kind, weights), {}).get("jit_inference_ratio") for weights in ("trained", "dense")]
    first, second = ("" if each is None else f"{each:.1f}" for each in ratios)
    return f"{first} ({second})" if second else first
