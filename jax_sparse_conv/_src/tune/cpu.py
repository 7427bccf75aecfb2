"""`tune` on a CPU: times of XLA and of the native call by the density of x, and the table that they make.

The native call is what `implementation=None` may have: it reads packed weights and has its own dense kernel where there
is one. Zeros are independent of each other. XLA and the native call take turns at each density, so that other work on
the machine meets both.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import lowering, packing, primitives
from jax_sparse_conv._src.tune import measure, raw_times

DENSITIES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of x, at which calls are timed."""

_SAMPLES = 7
_LEAST_GAIN = math.log(1.05)  # of the native call, over all densities: what gains less is XLA's
_LEVEL = math.log(1.03)  # a branch that gains no more over all densities is left out
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
      run: date, command, versions, and the CPU.
    """

    key: Key
    samples: tuple[Sample, ...]
    run: Mapping[str, Any]


# --- times -----------------------------------------------------------------------------------------------------------


def key_of(call: Call) -> Key | None:
    """The row of a call; None of what tables do not hold, and of a 1x1 convolution whose pool None does first."""
    config, x, kernel, _ = measure.bound(call)
    if lowering.averages_first(x, kernel, config, "cpu"):
        return None
    return cpu_table.key_of(lowering.workload_of(x, kernel, config))


def samples_of(call: Call, seed: int = 0) -> tuple[Sample, ...]:
    """Time a call on the default device, a CPU.

    Args:
      call: of known sizes and of a dtype that tables hold.
      seed: of the values, which are the same at every density.

    Raises:
      ValueError: a call that the native kernels do not take.
    """
    *_, shapes = measure.bound(call)
    functions = {measure.XLA: call.function("xla"), "native": _native(call)}
    found: list[Sample] = []
    packed: Any = None
    for density in DENSITIES:
        operands = []
        for x, kernel, *rest in measure.operands_of(shapes, seed, density):
            packed = _packed(call, kernel) if packed is None else packed  # the same weights at every density
            operands.append((x, packed, *rest))
        times = timing.per_call(functions, operands, _SAMPLES)
        xla, native = times[measure.XLA], times["native"]
        found.append(Sample(density, *(1e6 * each for each in (xla.median, native.median, xla.best, native.best))))
    return tuple(found)


def _native(call: Call) -> timing.Function:
    """The call by the native kernels alone; of a dense layer as maps of one pixel."""
    config, x, kernel, _ = measure.bound(call)
    has_dense = cpu_choice.has_dense(lowering.workload_of(x, kernel, config))
    chosen = dataclasses.replace(config, fallback=False, may_be_dense=has_dense)

    def function(x: jax.Array, kernel: Any, *rest: jax.Array) -> jax.Array:
        plain, given = packing.plain(kernel), kernel if isinstance(kernel, packing.PackedKernel) else None
        if call.op == "dense":
            x, plain = x.reshape(-1, 1, 1, x.shape[-1]), plain[None, None]
        packed = packing.for_call(x, plain, given, call.geometry, config.method)
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
    clear = [row for row in rows if row is not None]
    used = sorted({row.run for row in clear})
    clear = [dataclasses.replace(row, run=used.index(row.run)) for row in clear]
    return Table(cpu, tuple(runs[run] for run in used), tuple(clear))


def _row(entry: Entry, run: int) -> Row | None:
    """None where medians and best times say different things: other work was on the machine."""
    below = _below([(each.density, each.xla / each.native) for each in entry.samples])
    of_best = _below([(each.density, each.xla_best / each.native_best) for each in entry.samples])
    if abs(min(below, 1) - min(of_best, 1)) > _APART:
        return None
    least, full = entry.samples[0], entry.samples[-1]
    gains = round(least.xla / least.native, 3), round(full.xla / full.native, 3)
    xla_us = statistics.median(each.xla for each in entry.samples)
    return Row(entry.key, round(below, 3) if below < ALWAYS else below, gains, round(xla_us, 3), run)


def _below(gains: Sequence[tuple[float, float]]) -> float:
    """The density up to which the native call is to run, from (density, XLA's time over its), the least first.

    Up to it the product of the gains is the greatest. So one density decides nothing alone, at which other work or a
    change of loops slowed a side. Between two densities logarithms of the gains are taken as a straight line.
    """
    logs = [math.log(gain) for _, gain in gains]
    products = [0.0, *itertools.accumulate(logs)]
    best = max(products)
    if best < _LEAST_GAIN:
        return 0.0
    if best - products[-1] <= _LEVEL:
        return ALWAYS
    last = products.index(best)
    (sparser, _), (denser, _) = gains[last - 1 : last + 1]
    return sparser + (denser - sparser) * logs[last - 1] / (logs[last - 1] - logs[last])


# --- files -----------------------------------------------------------------------------------------------------------


def described(cpu: Cpu) -> dict[str, Any]:
    """A run as raw times and tables have it."""
    return raw_times.run_of() | {"cpu": dataclasses.asdict(cpu)}


def line_of(key: Key, samples: Sequence[Sample]) -> dict[str, Any]:
    """An entry as a line of raw times, the numbers of `Sample` in a list for each density."""
    times = [[round(value, 3) for value in dataclasses.astuple(sample)] for sample in samples]
    return {"key": cpu_table.key_values(key), "times": times}


def read(raw: Path) -> list[Entry]:
    """The entries of a CPU's raw times; of a line that was cut off by stopping nothing is read.

    Raises:
      ValueError: another file.
    """
    return [
        Entry(cpu_table.key_from(line["key"]), tuple(Sample(*map(float, each)) for each in line["times"]), run)
        for line, run in raw_times.lines(raw)
        if "cpu" in run
    ]
