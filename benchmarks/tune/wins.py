"""What each kernel alone wins, from raw times of `tune`; it needs no GPU.

    python -m benchmarks wins benchmarks/results/h100/{tune,xla}.times.jsonl

A kernel is a family and what it is compiled for, without how a call is cut. For each kind of products: in how many
workloads it was timed, in how many it was the fastest, in how many of these by more than 3 % over the next kernel or
XLA, and the geometric mean of what would be lost there without it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.common import command
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import measure, raw_times

_CLEAR = 1.03
_COMPILED = {"wgmma": 3, "mma": 1, "splitk_channels": 3, "few_channels": 1}  # numbers of a tile

Times: TypeAlias = Mapping[str, float]
"""The least microseconds of a workload by kernel, and XLA's."""


@dataclasses.dataclass(frozen=True)
class Wins:
    """What a kernel wins among the workloads of a kind of products.

    Attributes:
      kind: of products, as in tables.
      kernel: its name.
      timed: workloads that it was timed for.
      best: those that it was the fastest for.
      clear: those of them that it won by more than 3 %.
      lost: the time of the next over its, in geometric mean over `best`; NaN where it won none.
    """

    kind: str
    kernel: str
    timed: int
    best: int
    clear: int
    lost: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the result is the exit status."""
    parser = command.parser("wins FILE ...", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="raw times, .times.jsonl")
    options = parser.parse_args(argv)
    print(f"{'kind':8} {'kernel':24} {'timed':>6} {'best':>6} {'> 3 %':>6} {'lost':>6}")
    for each in of_files(options.files):
        print(f"{each.kind:8} {each.kernel:24} {each.timed:6} {each.best:6} {each.clear:6} {each.lost:6.3f}")
    return 0


def of_files(files: Sequence[Path]) -> list[Wins]:
    """Those of every kernel in raw times, which are of one device."""
    of_key, found = _of_keys(files), list[Wins]()
    for kind in sorted({key.kind for key in of_key}):
        every = [times for key, times in of_key.items() if key.kind == kind]
        for kernel in sorted({name for times in every for name in times} - {measure.XLA}):
            timed, lost = sum(kernel in times for times in every), list(gains(kernel, every))
            clear = sum(gain > _CLEAR for gain in lost)
            found.append(Wins(kind, kernel, timed, len(lost), clear, geometric_mean(lost)))
    return found


def gains(kernel: str, every: Sequence[Times]) -> Iterator[float]:
    """Of workloads that a kernel is the fastest for: the time of the next over its; of none that it alone has."""
    for times in every:
        others = [us for name, us in times.items() if name != kernel]
        if others and kernel in times and times[kernel] < min(others):
            yield min(others) / times[kernel]


def _of_keys(files: Sequence[Path]) -> Mapping[Key, Times]:
    found: dict[Key, dict[str, float]] = collections.defaultdict(dict)
    for time in raw_times.times_of([entry for file in files for entry in raw_times.read(file)]):
        name = measure.XLA
        if time.candidate is not None:
            numbers = time.candidate.tile[: _COMPILED.get(time.candidate.family, 0)]
            name = f"{time.candidate.family} {','.join(map(str, numbers))}".strip()
        found[time.key][name] = min(time.us, found[time.key].get(name, time.us))
    return {key: times for key, times in found.items() if times.keys() != {measure.XLA}}
