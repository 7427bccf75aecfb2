"""cuSNN, section 3.4: the micro-kernel against a direct translation of the paper's loops (its 2x to 4x).

`benchmarks/suites/coo_ablation.cu` holds both and is compiled here, which takes nvcc and half a minute. Elsewhere:

    python -m benchmarks.paper.cusnn.microkernel PROGRAM [ARCH]                # on a machine with nvcc
    python -m benchmarks paper cusnn_microkernel --program PROGRAM
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.experiment import Experiment
from benchmarks.paper.runner import Context, Row
from benchmarks.suites import direct_ablation

MICRO, PLAIN = "micro-kernel", "plain"
_SOURCES = (
    "benchmarks/suites/coo_ablation.cu",
    "cuda/sparse/coo/plan.cc",
    "cuda/core/device_info.cu",
    "cuda/core/tensor_map.cc",
    "cuda/sparse/ecr/kernel_map.cc",
)
_WRONG = 2e-6  # relative Frobenius error of float32


def build(program: Path, arch: str = "native") -> None:
    """Compile both kernels to `program`."""
    direct_ablation.build(program, arch, _SOURCES)


def _microkernel(context: Context) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(context.program or Path(folder) / "coo_ablation")
        try:
            if not context.program:
                build(program)
            ran = subprocess.run([str(program.absolute())], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise ValueError(f"{error}: {(error.stderr or '').strip()}") from error
    return rows_of([json.loads(line) for line in ran.stdout.splitlines()])


def rows_of(measured: Sequence[Row]) -> list[Row]:
    """A row for each layer: the fastest configuration of either kernel, and the ratios within each configuration."""
    wrong = [row for row in measured if row["error"] > _WRONG]
    if wrong:
        raise ValueError(f"{wrong[0]['layer']}, {wrong[0]['kernel']}: the result differs by {wrong[0]['error']:.1e}")
    return [_row(layer, measured) for layer in dict.fromkeys(row["layer"] for row in measured)]


def _row(layer: str, measured: Sequence[Row]) -> Row:
    own = [row for row in measured if row["layer"] == layer]
    by_kernel = {kernel: {_configuration(r): r for r in own if r["kernel"] == kernel} for kernel in (MICRO, PLAIN)}
    best = {kernel: min(found.values(), key=lambda row: row["us"]) for kernel, found in by_kernel.items()}
    return {
        "layer": layer,
        "op": "conv",
        "batch": 1,
        "source": "iid",
        "zeros_target": own[0]["zeros_percent"],
        "zeros_percent": own[0]["zeros_percent"],
        "kernels_us": {kernel: row["us"] for kernel, row in best.items()},
        "local_bytes": {kernel: row["local_bytes"] for kernel, row in best.items()},
        "gain": best[PLAIN]["us"] / best[MICRO]["us"],
        "gains": {
            str(key): by_kernel[PLAIN][key]["us"] / row["us"]
            for key, row in by_kernel[MICRO].items()
            if key in by_kernel[PLAIN]
        },
        "configurations": own,
    }


def _configuration(row: Row) -> tuple[Any, ...]:
    return row["tile"], row["out_channel_warps"], row["slices"]


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    axes.bar(range(len(rows)), [row["gain"] for row in rows])
    for place, row in enumerate(rows):
        axes.plot([place] * len(row["gains"]), list(row["gains"].values()), "k.", markersize=3)
    axes.set_ylabel("time of plain loops / time of the micro-kernel")
    axes.set_xticks(range(len(rows)), [f"{row['layer']} {row['zeros_percent']} %" for row in rows], rotation=30)


EXPERIMENTS = (
    Experiment(
        "cusnn_microkernel",
        "cuSNN, section 3.4",
        "the micro-kernel against plain loops whose sums are in local memory.",
        _microkernel,
        _draw,
        ("layer", "zeros_percent", "kernels_us", "local_bytes", "gain"),
    ),
)


if __name__ == "__main__":
    build(Path(sys.argv[1]), *sys.argv[2:3])
