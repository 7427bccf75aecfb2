"""`tune --gradients`: times of the gradients of convolutions, by XLA and by this package, and the table that they make.

A time is of one gradient, from a cotangent with as many zeros as x (`measure.ZEROS`). Sides take turns. On a GPU only
HIGHEST has gradients of this package; of a kernel's the plans that the planner expects to be fastest are timed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import gradient_table
from jax_sparse_conv._src.dispatch.gradient_table import Row, Table
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import cpu_gradient, differentiation, gpu_gradient, lowering, primitives
from jax_sparse_conv._src.problem.workload import Workload
from jax_sparse_conv._src.tune import measure, raw_times

OURS = "ours"
"""In names of times; of a kernel's gradient on a GPU its plan is behind it, as in "ours 3,1,32,44"."""

_PLANS = 3  # that are timed
_AGAIN = 2  # of them, once more beside XLA
_SAMPLES, _SAMPLES_AGAIN = 5, 15
_VALUES = 999_983  # that are drawn, and repeated: a map of 2e8 takes the host seconds
_SECONDS = 4.0  # for a gradient: XLA's of a kernel in groups takes seconds on a CPU


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient of one convolution.

    Attributes:
      call: without bias, residual, ReLU and pool.
      by_kernel: whether it is of the kernel, not of x.
    """

    call: Call
    by_kernel: bool


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a line of raw times says.

    Attributes:
      key: the convolution.
      by_kernel: whether it is the kernel's gradient.
      times: microseconds by name: "xla", and what begins with `OURS`.
      run: date, commit, command, versions, and the machine.
    """

    key: Key
    by_kernel: bool
    times: Mapping[str, float]
    run: Mapping[str, Any]


def gradients_of(calls: Iterable[Call]) -> list[Gradient]:
    """The distinct gradients of the convolutions among calls; of an image only that of the kernel is ever asked for."""
    plain = [
        dataclasses.replace(
            call, op="conv", geometry=call.geometry.without_pool(), bias=False, residual=False, activation=None
        )
        for call in calls
        if call.op != "dense"
    ]
    pairs = [(call, by_kernel) for call in dict.fromkeys(plain) for by_kernel in (False, True)]
    return [Gradient(*pair) for pair in pairs if pair[1] or not bound(pair[0]).workload.is_image]


def key_of(gradient: Gradient) -> tuple[Key, bool] | None:
    """The row of a gradient on the default device; None of what is XLA's in any case."""
    found, platform = bound(gradient.call), "cuda" if devices.default_platform() == "gpu" else "cpu"
    rules = gpu_gradient if platform == "cuda" else cpu_gradient
    if not rules.supports(found.other(gradient.by_kernel), found.cotangent, **found.arguments(gradient.by_kernel)):
        return None
    key = gradient_table.key_of(found.workload, platform)
    return None if key is None else (key, gradient.by_kernel)


def times_of(gradient: Gradient, seed: int = 0) -> dict[str, float]:
    """Microseconds by name on the default device, a CPU or a GPU.

    Args:
      gradient: one that has a key.
      seed: of the values.
    """
    sides = {name: jax.jit(function) for name, function in _sides(gradient).items()}
    operands = list(_values(gradient, seed))
    here = next(iter(operands[0][0].devices()))  # JAX's default device, which other threads are not told
    jobs = [(functools.partial(_compile, side, operands, here), name == measure.XLA) for name, side in sides.items()]
    collections.deque(timing.compile_each(jobs), maxlen=0)
    first = timing.per_call(sides, operands, _SAMPLES, _SECONDS)
    ours = sorted((name for name in sides if name != measure.XLA), key=lambda name: first[name].median)[:_AGAIN]
    again = {name: sides[name] for name in (measure.XLA, *ours)}
    second = timing.per_call(again, operands, _SAMPLES_AGAIN, _SECONDS)
    return {name: each.microseconds for name, each in {**first, **second}.items()}


def _compile(side: timing.Function, operands: list[timing.Operands], here: Any) -> None:
    with jax.default_device(here):
        timing.compile_ahead(side, operands)


class Bound(NamedTuple):
    """A convolution as the primitive of gradients has it: types of its operands.

    Attributes:
      config: without bias, residual, ReLU and pool.
      x: [N, H, W, C].
      kernel: [1, kh, kw, C / groups, K].
      cotangent: [N, Ho, Wo, K].
    """

    config: primitives.Config
    x: Any
    kernel: Any
    cotangent: Any

    @property
    def workload(self) -> Workload:
        return lowering.workload_of(self.x, self.kernel, self.config)

    def other(self, by_kernel: bool) -> Any:
        """What a gradient is computed of beside the cotangent."""
        return self.x if by_kernel else self.kernel

    def arguments(self, by_kernel: bool) -> dict[str, Any]:
        """The keywords of `differentiation.gradient`, and of the rules of a CPU and a GPU."""
        return {"config": self.config, "like": self.kernel if by_kernel else self.x, "by_kernel": by_kernel}

    def of_images(self, images: int) -> Bound:
        """The same of so many images."""
        x, cotangent = (each.update(shape=(images, *each.shape[1:])) for each in (self.x, self.cotangent))
        return self._replace(x=x, cotangent=cotangent)


@functools.lru_cache(maxsize=256)
def bound(call: Call) -> Bound:
    """As the primitive has a call, alone."""
    config, x, kernel, _ = measure.bound(call)
    config = dataclasses.replace(config.bare(), by_lax=False, tile=None)
    return Bound(config, x, kernel, primitives.result_aval(x, kernel, config=config))


def _sides(gradient: Gradient) -> dict[str, timing.Function]:
    found = bound(gradient.call)
    arguments = found.arguments(gradient.by_kernel)
    sides: dict[str, timing.Function] = {measure.XLA: functools.partial(differentiation.gradient, **arguments)}
    if devices.default_platform() == "cpu":
        return sides | {OURS: functools.partial(cpu_gradient.gradient, **arguments)}
    if not gradient.by_kernel:
        return sides | {OURS: functools.partial(gpu_gradient.gradient, **arguments)}
    of_kernel = functools.partial(gpu_gradient.of_kernel, geometry=found.config.geometry, like=found.kernel)
    plans = Layer.of(found.workload).kernel_gradients(devices.current(), _PLANS)
    return sides | {name_of(plan.tile): functools.partial(of_kernel, plan=plan) for plan in plans}


def _values(gradient: Gradient, seed: int) -> Iterable[timing.Operands]:
    """x, or the kernel, and the cotangent that successive calls rotate through."""
    found = bound(gradient.call)
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal(_VALUES, np.float32)
    sparse = np.where(rng.random(_VALUES, np.float32) < measure.ZEROS, np.float32(0), dense)

    def repeated(values: np.ndarray, like: Any) -> jax.Array:
        return jnp.asarray(np.resize(values, like.shape), like.dtype)

    first = repeated(sparse, found.x) if gradient.by_kernel else repeated(dense, found.kernel)
    for cotangent in timing.rotations(repeated(sparse, found.cotangent)):
        yield first, cotangent


# --- rows ------------------------------------------------------------------------------------------------------------


def name_of(tile: Sequence[int]) -> str:
    """Of a plan's time."""
    return f"{OURS} {','.join(map(str, tile))}"


def tile_of(name: str) -> tuple[int, ...]:
    """The inverse of `name_of`; nothing of `OURS` alone.

    Raises:
      ValueError: another name.
    """
    first, _, numbers = name.partition(" ")
    if first != OURS:
        raise ValueError(f"{name!r} does not begin with {OURS!r}")
    return tuple(int(number) for number in numbers.split(",") if number)


def table_of(machine: gradient_table.Machine, entries: Sequence[Entry]) -> Table:
    """The table of a machine from raw times, of which the last of a gradient count."""
    runs = list({json.dumps(entry.run, sort_keys=True): entry.run for entry in entries}.values())
    latest = {(entry.key, entry.by_kernel): entry for entry in entries}
    rows = [_row(entry, runs.index(entry.run)) for entry in latest.values()]
    return Table(gradient_table.machine_of(machine), *raw_times.with_used_runs(rows, runs))


def _row(entry: Entry, run: int) -> Row:
    best = min((name for name in entry.times if name != measure.XLA), key=lambda name: entry.times[name])
    us, xla_us = entry.times[best], entry.times[measure.XLA]
    return Row(entry.key, entry.by_kernel, tile_of(best), us, xla_us, run)


def summary(made: Table) -> str:
    """A table's rows by kind and gradient: how many there are, how many are ours, and XLA's time over ours in those."""
    lines = [f"{'kind':8} {'by':7} {'rows':>5} {'ours':>5} {'ratio':>6} {'least':>6}"]
    for kind, by_kernel in sorted({(row.key.kind, row.by_kernel) for row in made.rows}):
        rows = [row for row in made.rows if (row.key.kind, row.by_kernel) == (kind, by_kernel)]
        ratios = [row.xla_us / row.us for row in rows if row.is_ours] or [1.0]
        counts = f"{len(rows):5} {sum(row.is_ours for row in rows):5}"
        by = "kernel" if by_kernel else "x"
        lines.append(f"{kind:8} {by:7} {counts} {timing.geometric_mean(ratios):6.2f} {min(ratios):6.2f}")
    return "\n".join(lines)


def machine_of(run: Mapping[str, Any]) -> gradient_table.Machine:
    """What a run of raw times was on."""
    return devices.Cpu(**run["cpu"]) if "cpu" in run else raw_times.gpu_of(run)


# --- files -----------------------------------------------------------------------------------------------------------


def line_of(key: Key, by_kernel: bool, times: Mapping[str, float]) -> dict[str, Any]:
    """An entry as a line of raw times."""
    named = {name: round(us, 3) for name, us in times.items()}
    return {"gradient": gradient_table.key_values(key, by_kernel), "times": named}


def read(raw: Path, *, must_exist: bool = False) -> list[Entry]:
    """The entries of raw times of gradients. Arguments and errors as of `raw_times.entries`."""

    def of(line: Mapping[str, Any], run: Mapping[str, Any]) -> Entry:
        machine_of(run)  # or an error
        times = raw_times.times_from(line["times"])
        if measure.XLA not in times or len(times) < 2:
            raise ValueError(f"times={times} are not XLA's and this package's")
        for name in times.keys() - {measure.XLA}:
            tile_of(name)  # or an error
        return Entry(*gradient_table.key_from(line["gradient"]), times, run)

    return raw_times.entries(raw, of, must_exist=must_exist)
