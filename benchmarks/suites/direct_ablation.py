"""What each technique and parameter of Cheng et al. 2018 is worth in the direct convolution today.

    python -m benchmarks direct_ablation --json results.json

Compiles `direct_ablation.cu`, variants of the extension's kernel that the extension leaves out, with `nvcc` (a minute;
`--build-only PROGRAM` and `--program PROGRAM` do it apart), and times each on two layers: the paper's (its Table 1: 128
images of 5x6 with 3 features, 32 filters) and one of ResNet-50. Techniques go in with the paper's own parameters, in
the order of its figures; every variant is checked against float64. Table 1 as printed has filters of 32x32, which would
be more multiplications than the cycles it reports could hold; 5x5 is used, and 32x32 beside it. Today's GPU has no
inner product unit apart from the tensor cores, so figure 20 is the order of its loops without one. `direct_parts.cu`
has the paper's kernel as it prints it, for the shares of loading and computing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command, results

Row = dict[str, Any]

_HERE = Path(__file__).parent
_SOURCES = (
    "benchmarks/suites/direct_ablation.cu",
    "benchmarks/suites/direct_parts.cu",
    "cuda/core/device_info.cu",
    "cuda/core/tensor_map.cc",
    "cuda/sparse/ecr/kernel_map.cc",
)
_TF32, _FLOAT32 = 5e-4, 2e-6

# Figure, its row and the row it is compared with, and the paper's own finding.
FIGURES = (
    ("14", "sums in registers by unrolling", "figure 14", "baseline", "-71 % cycles"),
    ("20", "inner products; the paper's unit for them is not there", "figure 20", "figure 14", "-66 %, with the unit"),
    ("24", "outer products by tensor cores, TF32", "figure 24", "figure 24, without", "a bar, no number"),
    ("28", "strength-reduced addresses", "figure 28", "figure 14", "-25.9 %"),
    ("31", "bounds checks hoisted", "figure 31", "figure 28", "-2.6 %"),
    ("34", "table of indices for the index converter", "figure 34", "figure 31", "-5 %, with the unit"),
    ("0", "all that software does: registers, addresses, checks", "figure 31", "baseline", "4.4x, with the units"),
    ("0t", "all that software does, and tensor cores", "figure 24", "baseline", "4.4x, with the units"),
)
TOTALS = ("0", "0t")
"""Figures that are none: all techniques together."""
LAYERS_OF_TABLE_1 = ("the paper's", "Table 1 as printed, filters of 32x32")


def main(argv: Sequence[str] | None = None) -> int:
    """Build, run, print the tables and write a JSON file; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        command.check_folder("--json", options.json)
        if options.build_only:
            build(options.build_only, options.arch)
            return 0
        rows = _rows(options)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"benchmarks direct_ablation: {error}", file=sys.stderr)
        return 1
    content = {"figures": figures(rows), "rows": rows}
    print(report(content["figures"], rows))
    if options.json:
        from jax_sparse_conv._src import environment

        header = environment.describe_run() | {"command": command.portable("direct_ablation", arguments)}
        results.add(options.json, "direct_ablation", header | content)
    return 1 if wrong(rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("direct_ablation", __doc__)
    parser.add_argument("--arch", default="native", help="nvcc's -arch, e.g. sm_90 (default: this machine's GPU)")
    parser.add_argument("--build-only", type=Path, metavar="PROGRAM", help="compile to this file and stop")
    parser.add_argument("--program", type=Path, help="run this file instead of compiling")
    parser.add_argument("--json", type=Path)
    return parser


def build(program: Path, arch: str, sources: Sequence[str] = _SOURCES) -> None:
    """Compile the variants to `program`; needs nvcc on the path and this repository's sources.

    Raises:
      ValueError: there is no nvcc, or no jaxlib.
    """
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    jaxlib = importlib.util.find_spec("jaxlib")
    if nvcc is None or jaxlib is None or jaxlib.origin is None:
        raise ValueError("this needs nvcc on PATH and jaxlib's headers")
    root = _HERE.parents[1]
    includes = [f"-I{root}", "-isystem", str(Path(jaxlib.origin).parent / "include")]
    flags = ["-std=c++17", "-O3", f"-arch={arch}", "--expt-relaxed-constexpr", "-cudart", "static"]
    files = [str(root / name) for name in sources]
    subprocess.run([nvcc, *flags, *includes, *files, "-o", str(program)], check=True)


def _rows(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        program = options.program
        if program is None:
            program = Path(folder) / "direct_ablation"
            build(program, options.arch)
        lines = subprocess.run([str(program.absolute())], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in lines.splitlines()]


def figures(rows: Sequence[Row]) -> list[Row]:
    """For each figure and layer the times without and with its technique."""
    found = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        times = {row["step"]: row["us"] for row in rows if row["layer"] == layer}
        for figure, technique, step, before, theirs in FIGURES:
            if step not in times or before not in times:  # a table of 32x32 taps is not built
                continue
            found.append(
                {
                    "figure": figure,
                    "technique": technique,
                    "layer": layer,
                    "without_us": times[before],
                    "with_us": times[step],
                    "change_percent": 100 * (times[step] / times[before] - 1),
                    "paper": theirs,
                }
            )
    return found


def wrong(rows: Sequence[Row]) -> list[Row]:
    """Variants whose result is not the convolution."""
    return [row for row in rows if row["error"] > (_TF32 if row["engine"] == "tensor cores" else _FLOAT32)]


def report(found: Sequence[Row], rows: Sequence[Row]) -> str:
    """Both tables as text."""
    lines = [f"{'figure':6} {'technique':54} {'layer':29} {'without':>9} {'with us':>9} {'change':>7}  paper"]
    lines += [
        f"{f['figure']:6} {f['technique']:54} {f['layer']:29} {f['without_us']:9.2f} {f['with_us']:9.2f} "
        f"{f['change_percent']:+6.1f}%  {f['paper']}"
        for f in found
    ]
    lines += ["", "per thread  threads  cached  stages  copy  engine          addresses   hoisted        us  error"]
    for row in rows:
        lines.append(
            f"{row['images_per_thread']:4}x{row['filters_per_thread']:<5} {row['threads_x']:4}x{row['threads_y']:<3} "
            f"{row['cached_pixels']:6} {row['stages']:7} {row['copy_bytes']:5}  {row['engine']:15} "
            f"{row['addresses']:11} {row['hoisted_checks']!s:8} {row['us']:9.2f}  {row['error']:.1e}  {row['layer']}"
            + (f"  computing {row['compute_percent']:.0f} %" if "compute_percent" in row else "")
            + ("  WRONG" if wrong([row]) else "")
        )
    return "\n".join(lines)
