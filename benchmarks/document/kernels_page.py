"""docs/results/kernels.md: for each GPU that `tune` has timed, what each kernel alone wins."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.results import RESULTS
from benchmarks.document.markdown import ratio, table
from benchmarks.document.measured import DEVICES
from benchmarks.tune import wins
from benchmarks.tune.wins import Wins

FILES = ("tune.times.jsonl", "xla.times.jsonl")
KINDS = {"highest": "`HIGHEST`", "tf32": "TF32", "16bit": "16 bits"}

_INTRODUCTION = """\
# What each kernel wins

Raw times of `python -m jax_sparse_conv tune`, by kernel. A kernel is an [engine](../design/architecture.md) and what it
is compiled for: a tile of `mma`, or a tile and a schedule of `wgmma`. How a call is cut does not count.

- timed: calls that the kernel was timed for. `tune` times the candidates that the models expect most of.
- best: those that it was the fastest for. "By 3 %" are those that it won by more, over the next kernel or XLA.
- lost: the time of the next over its time, in geometric mean over those that it won. That is what the calls would lose
  without it.

`python -m benchmarks wins FILES` prints this. A kernel that wins nothing on these GPUs may be the one that another GPU
has: those without Hopper's products run `mma` alone. [Tuning](../design/tuning.md) says how `None` chooses.
"""


def page(results: Path = RESULTS) -> str:
    """The page from the raw times of all devices."""
    sections = [_INTRODUCTION]
    for folder, device in DEVICES.items():
        files = [results / folder / name for name in FILES]
        if all(file.is_file() for file in files):
            cited = " and ".join(f"`{folder}/{file.name}`" for file in files)
            sections.append(f"## {device}\n\nFrom {cited}.\n\n{_table(wins.of_files(files))}\n")
    return "\n".join(sections)


def _table(found: list[Wins]) -> str:
    lines = (
        (
            KINDS[each.kind],
            f"`{each.kernel}`",
            f"{each.timed:,}",
            f"{each.best:,}",
            f"{each.clear:,}",
            ratio(each.lost) if each.best else "",
        )
        for kind in KINDS
        for each in found
        if each.kind == kind
    )
    return table(("products", "kernel", "timed", "best", "by 3 %", "lost"), lines)
