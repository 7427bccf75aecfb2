"""`tune` on a CPU: times of XLA and of the native call by the density of x, and the table that they make.

The native call is what `implementation=None` may have: it reads packed weights and has its own dense kernel where there
is one. Zeros are independent of each other. XLA and the native call take turns at each density, so that other work on
the machine meets both.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_sparse_conv._src.devices import Cpu
from jax_sparse_conv._src.dispatch import cpu_choice, cpu_table
from jax_sparse_conv._src.dispatch.cpu_table import ALWAYS, Row, Table
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans import thresholds, timing
from jax_sparse_conv._src.primitive import lowering, packing, primitives
from jax_sparse_conv._src.tune import measure, raw_times

DENSITIES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of x, at which calls are timed."""

_SAMPLES = 7
_LEAST_GAIN = math.log(1.05)  # of the native call, over all densities: what gains less is XLA's
_LEVEL = math.log(1.03)  # a branch that gains no more than that over none is left out
_ANY = 2.0  # a density that every x is below, so that a branch is always native
_APART = 0.15  # densities of medians and of best times that differ by more say nothing


@dataclasses.dataclass(frozen=True)
class Sample:
    """Times at one density, microseconds, medians and the best.

    Attributes:
      density: of x.
      xla: XLA's median.
      native: the native call's median.
      xla_best: XLA's best.
      native_best: the native call's best.
    """

    density: float
    xla: float
    native: float
    xla_best: float
    native_best: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was measured of a workload.

    Attributes:
      key: the workload.
      samples: by density, the least first.
      branch: microseconds that a branch by a sample of x adds.
      run: date, command, versions, and the CPU.
    """

    key: Key
    samples: tuple[Sample, ...]
    branch: float
    run: Mapping[str, Any]


# --- times -----------------------------------------------------------------------------------------------------------


def key_of(call: Call) -> Key | None:
    """The row of a call; None of what tables do not hold, and of a 1x1 convolution that None runs on fewer pixels."""
    config, x, kernel, _ = measure.bound(call)
    if lowering.averages_first(x, kernel, config, "cpu") or lowering.reads_few_pixels(x, kernel, config, "cpu"):
        return None
    return cpu_table.key_of(lowering.workload_of(x, kernel, config))


def times_of(call: Call, seed: int = 0) -> tuple[tuple[Sample, ...], float]:
    """Time a call on the default device, a CPU: `Entry.samples` and `Entry.branch`.

    Args:
      call: of known sizes and of a dtype that tables hold.
      seed: of the values, which are the same at every density.

    Raises:
      ValueError: a call that the native kernels do not take.
    """
    *_, shapes = measure.bound(call)
    functions = {measure.XLA: call.function("xla"), "native": _native(call), "branch": _native(call, _ANY)}
    branch = 0.0
    found: list[Sample] = []
    packed: Any = None
    for density in DENSITIES:
        operands = []
        for x, kernel, *rest in measure.operands_of(shapes, seed, density):
            packed = _packed(call, kernel) if packed is None else packed  # the same weights at every density
            operands.append((x, packed, *rest))
        times = timing.per_call(functions, operands, _SAMPLES)
        xla, native = times[measure.XLA], times["native"]
        if "branch" in functions:
            branch = 1e6 * max(0.0, times["branch"].best - native.best)
            del functions["branch"]  # it adds as much at any density
        found.append(Sample(density, *(1e6 * each for each in (xla.median, native.median, xla.best, native.best))))
    return tuple(found), branch


def _native(call: Call, below: float | None = None) -> timing.Function:
    """The call by the native kernels, alone or in a branch; of a dense layer as maps of one pixel."""
    config, x, kernel, _ = measure.bound(call)
    has_dense = cpu_choice.has_dense(lowering.workload_of(x, kernel, config))
    chosen = dataclasses.replace(config, fallback=False, may_be_dense=has_dense, below=below)

    def function(x: jax.Array, kernel: Any, *rest: jax.Array) -> jax.Array:
        plain, given = packing.plain(kernel), kernel if isinstance(kernel, packing.PackedKernel) else None
        if call.op == "dense":
            x, plain = x.reshape(-1, 1, 1, x.shape[-1]), plain[None, None]
        packed = packing.for_call(x, plain, given, call.geometry, config.method, may_be_dense=has_dense)
        bias = rest[0][None] if call.bias else None
        residual = rest[-1] if call.residual else None
        return primitives.bind(x, plain[None], bias, residual, chosen, None if packed is None else packed[None])

    return jax.jit(function)


def _packed(call: Call, kernel: jax.Array) -> Any:
    return kernel if call.op == "dense" else packing.pack(kernel, feature_group_count=call.geometry.groups)


# --- rows ------------------------------------------------------------------------------------------------------------


def table_of(cpu: Cpu, entries: Sequence[Entry]) -> Table:
    """The table of a CPU from raw times, of which the last of a workload count."""
    runs = list({json.dumps(entry.run, sort_keys=True): entry.run for entry in entries}.values())
    rows = [_row(entry, runs.index(entry.run)) for entry in {entry.key: entry for entry in entries}.values()]
    return Table(cpu, *raw_times.with_used_runs([row for row in rows if row is not None], runs))


def _row(entry: Entry, run: int) -> Row | None:
    """None where medians and best times say different things: other work was on the machine."""
    medians = [(each.density, each.xla, each.native) for each in entry.samples]
    best = [(each.density, each.xla_best, each.native_best) for each in entry.samples]
    below, of_best = _below(medians, entry.branch), _below(best, entry.branch)
    if abs(min(below, 1) - min(of_best, 1)) > _APART:
        return None
    least, full = entry.samples[0], entry.samples[-1]
    gains = round(least.xla / least.native, 3), round(full.xla / full.native, 3)
    xla_us = statistics.median(each.xla for each in entry.samples)
    return Row(entry.key, round(below, 3) if below < ALWAYS else below, gains, round(xla_us, 3), run)


def _below(times: Sequence[tuple[float, float, float]], branch: float) -> float:
    """The density up to which the native call is to run.

    Args:
      times: density, XLA's microseconds and the native call's, the least density first.
      branch: microseconds that both sides take longer in a branch.
    """
    always = sum(math.log(xla / native) for _, xla, native in times)
    sides = [math.log((xla + branch) / (native + branch)) for _, xla, native in times]
    density, most = thresholds.crossing([density for density, _, _ in times], sides)
    branched = most - sum(math.log((xla + branch) / xla) for _, xla, _ in times)
    if branched <= max(_LEAST_GAIN, always + _LEVEL) or density == math.inf:
        return ALWAYS if always > _LEAST_GAIN else 0.0
    return density


# --- files -----------------------------------------------------------------------------------------------------------


def described(cpu: Cpu) -> dict[str, Any]:
    """A run as raw times and tables have it."""
    return raw_times.run_of() | {"cpu": dataclasses.asdict(cpu)}


def line_of(key: Key, samples: Sequence[Sample], branch: float) -> dict[str, Any]:
    """An entry as a line of raw times, the numbers of `Sample` in a list for each density."""
    times = [[round(value, 3) for value in dataclasses.astuple(sample)] for sample in samples]
    return {"key": cpu_table.key_values(key), "times": times, "branch": round(branch, 3)}


def read(raw: Path, *, must_exist: bool = False) -> list[Entry]:
    """The entries of CPUs; those of GPUs are left out. Arguments and errors as of `raw_times.entries`."""

    def of(line: Mapping[str, Any], run: Mapping[str, Any]) -> Entry | None:
        if "cpu" not in run:
            return None
        Cpu(**run["cpu"])  # or an error
        samples = tuple(Sample(*map(float, each)) for each in line["times"])
        return Entry(cpu_table.key_from(line["key"]), samples, float(line["branch"]), run)

    return raw_times.entries(raw, of, must_exist=must_exist)
