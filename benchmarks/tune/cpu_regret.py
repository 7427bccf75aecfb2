"""What choices on a CPU lose against the faster of XLA and the native call, from raw times of `tune --device cpu`.

    python -m benchmarks cpu_regret FILES

Three ways to choose: "row" by a workload's own row, "near" as for a workload that the table has not seen, "rules"
without a table. The first two take the rules where there is no row. Every density that was timed counts. Regret is the
time of what runs at that density, with its branch, over that of the faster side. A loss is a choice that takes longer
than XLA's time over 0.97. With `--best` best times count in place of medians, as other work on the machine disturbs
them least; rows are still made of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.common import command
from benchmarks.common.losing import is_loss
from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch import cpu_choice, table
from jax_sparse_conv._src.dispatch.cpu_table import Row
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.tune import cpu
from jax_sparse_conv._src.tune.cpu import Entry, Sample

WAYS = ("row", "near", "rules")

Outcome: TypeAlias = tuple[float, float]
"""Regret, and XLA's time over the choice's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the result is the exit status."""
    parser = command.parser("cpu_regret FILE ...", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="raw times of one CPU, .times.jsonl")
    parser.add_argument("--best", action="store_true", help="by best times, not by medians")
    options = parser.parse_args(argv)
    entries = list({entry.key: entry for file in options.files for entry in cpu.read(file)}.values())
    if not entries:
        parser.error(f"no times of a CPU in {', '.join(map(str, options.files))}")
    rows = {row.key: row for row in cpu.table_of(Cpu(**entries[0].run["cpu"]), entries).rows}
    print(f"{len(entries)} workloads, {len(rows)} of them with a row")
    print(f"{'kind':8} {'op':5} {'choice':6} {'cases':>6} {'regret':>7} {'worst':>6} {'losses':>7} {'least':>6}")
    for kind, is_dense in sorted({(entry.key.kind, entry.key.is_dense) for entry in entries}):
        for way in WAYS:
            of_kind = [entry for entry in entries if (entry.key.kind, entry.key.is_dense) == (kind, is_dense)]
            outcomes = [each for entry in of_kind for each in outcomes_of(entry, way, rows, options.best)]
            regrets, ratios = zip(*outcomes, strict=True)
            losses = sum(map(is_loss, ratios))
            numbers = f"{geometric_mean(regrets):7.3f} {max(regrets):6.2f} {losses:7} {min(ratios):6.2f}"
            print(f"{kind:8} {'dense' if is_dense else 'conv':5} {way:6} {len(outcomes):6} {numbers}")
    return 0


def outcomes_of(entry: Entry, way: str, rows: Mapping[Key, Row], best: bool = False) -> Iterator[Outcome]:
    """What a way of `WAYS` makes of a workload, at each density that was timed."""
    below = _below(entry.key, way, rows)
    branch = entry.branch if 0 < below < 1 else 0.0
    for sample in entry.samples:
        xla, native = _times(sample, best)
        us = branch + (native if sample.density <= below else xla)
        yield us / min(xla, native), xla / us


def _below(key: Key, way: str, rows: Mapping[Key, Row]) -> float:
    """The density up to which the native call is chosen."""
    row = rows.get(key) if way == "row" else None
    if way == "near" or (way == "row" and row is None):
        row = table.nearest(key, [row for row in rows.values() if row.key.class_ == key.class_])
    return cpu_choice.by_rules(key.workload).below if row is None else row.below


def _times(sample: Sample, best: bool) -> tuple[float, float]:
    return (sample.xla_best, sample.native_best) if best else (sample.xla, sample.native)
