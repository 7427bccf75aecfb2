"""The pictures beside docs/results/measured.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.results import RESULTS, read
from benchmarks.suites import crossover
from jax_sparse_conv._src.cli import report
from jax_sparse_conv._src.cli.comparison import LayerResult


def write(folder: Path, results: Path = RESULTS) -> None:
    """Write them into a folder.

    Raises:
      UserError: matplotlib is not installed.
    """
    fig11 = results / "h200" / "paper" / "fig11.json"
    of_sides = ["--sides", "ecr", "coo", "xla default"]
    crossover.main([str(fig11), *of_sides, "--out", str(folder / "h200_crossover.png")])
    crossover.main([str(results / "cpu_amd_epyc" / "cpu.json"), "--out", str(folder / "cpu_crossover.png")])
    _write_run(results / "cpu_amd_epyc" / "run.json", folder / "cpu_run_vgg19.png")


def _write_run(source: Path, target: Path) -> None:
    row = next(row for row in read(source) if (row["network"], row["batch"]) == ("vgg19", 1))
    layers = [LayerResult(**{key: value for key, value in each.items() if key != "ratio"}) for each in row["layers"]]
    report.plot(layers, target, f"vgg19, {row['device']}, {row['date'][:10]}, {source.parent.name}/{source.name}")
