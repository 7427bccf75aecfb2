"""What choices of gradients lose against the faster of XLA and this package, from raw times of `tune --gradients`.

    python -m benchmarks gradient_regret benchmarks/results/h200/gradients.times.jsonl

Three ways to choose: "row" by a gradient's own row, "near" as for one that the table has not seen, "rules" without a
table. What has no near row that is clear takes the rules. Regret is the time of what runs over that of the fastest side
or plan. Where the plan that runs was not timed, the fastest one stands for it. A loss is a choice that takes longer
than XLA's time over 0.97. It needs no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax import lax

from benchmarks.common import command
from benchmarks.common.as_on import as_on
from benchmarks.common.losing import is_loss
from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch import gradient_table, table
from jax_sparse_conv._src.dispatch.gradient_table import Machine, Row
from jax_sparse_conv._src.plans.timing import geometric_mean
from jax_sparse_conv._src.primitive import cpu_gradient, gpu_gradient, primitives
from jax_sparse_conv._src.tune import gradients, measure
from jax_sparse_conv._src.tune.gradients import Entry

WAYS = ("row", "near", "rules")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the result is the exit status."""
    parser = command.parser("gradient_regret FILE ...", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="raw times of one machine, .times.jsonl")
    options = parser.parse_args(argv)
    entries = {(entry.key, entry.by_kernel): entry for file in options.files for entry in gradients.read(file)}
    if not entries:
        parser.error(f"no times of gradients in {', '.join(map(str, options.files))}")
    print(f"{'kind':8} {'by':6} {'choice':6} {'cases':>6} {'regret':>7} {'worst':>6} {'losses':>7} {'least':>6}")
    for kind, by_kernel in sorted({(entry.key.kind, entry.by_kernel) for entry in entries.values()}):
        chosen = [entry for entry in entries.values() if (entry.key.kind, entry.by_kernel) == (kind, by_kernel)]
        for way in WAYS:
            regrets, ratios = zip(*outcomes_of(chosen, way), strict=True)
            numbers = f"{geometric_mean(regrets):7.3f} {max(regrets):6.2f} {sum(map(is_loss, ratios)):7}"
            by = "kernel" if by_kernel else "x"
            print(f"{kind:8} {by:6} {way:6} {len(chosen):6} {numbers} {min(ratios):6.2f}")
    return 0


def outcomes_of(entries: Sequence[Entry], way: str) -> Iterator[tuple[float, float]]:
    """Of each entry the regret of a way of `WAYS`, and XLA's time over the choice's.

    Args:
      entries: all of a kind, those by x or those by the kernel.
      way: of `WAYS`.
    """
    rows: dict[Machine, Sequence[Row]] = {}
    for entry in entries:
        machine = gradients.machine_of(entry.run)
        if machine not in rows:
            rows[machine] = gradients.table_of(machine, entries).rows
        us = entry.times[_chosen(entry, way, rows[machine], machine)]
        yield us / min(entry.times.values()), entry.times[measure.XLA] / us


def _chosen(entry: Entry, way: str, rows: Sequence[Row], machine: Machine) -> str:
    """The name of the time that a way takes."""
    if way == "row":
        row: Row | None = next(row for row in rows if row.key == entry.key)
    else:
        of_class = [row for row in rows if row.key.class_ == entry.key.class_]
        row = table.nearest(entry.key, of_class) if way == "near" else None
        row = row if row is not None and row.is_clear else None
    ours = [name for name in entry.times if name != measure.XLA]
    fastest = min(ours, key=lambda name: entry.times[name])
    with contextlib.nullcontext() if isinstance(machine, Cpu) else as_on(machine):
        if not (_rules_take(entry, machine) if row is None else row.is_ours):
            return measure.XLA
        if isinstance(machine, Cpu) or not entry.by_kernel:
            return fastest
        plan = gradient_table.plan_of(row, entry.key.layer, machine)
    return gradients.name_of(plan.tile) if plan is not None and gradients.name_of(plan.tile) in ours else fastest


def _rules_take(entry: Entry, machine: Machine) -> bool:
    workload = entry.key.workload
    precision = lax.Precision.HIGHEST if workload.exact else None
    config = primitives.Config(workload.geometry, "ecr", fallback=True, precision=precision)
    x, kernel = (jax.core.ShapedArray(each, workload.dtype) for each in (workload.x_shape, workload.kernel_shape))
    other, like = (x, kernel) if entry.by_kernel else (kernel, x)
    cotangent = primitives.result_aval(x, kernel, config=config)
    rules: Any = cpu_gradient if isinstance(machine, Cpu) else gpu_gradient
    with mock.patch.multiple(gradient_table, on_cpu=lambda *_: None, on_gpu=lambda *_: None):
        return bool(rules.takes(other, cotangent, config, like, entry.by_kernel))
