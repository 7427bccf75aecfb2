"""How every experiment measures layers: all sides of a layer in turns, in one process, on the same rotated inputs.

Everything is compiled first, in threads but for what XLA tunes, and timed afterwards one after another. Times are
medians per call with the conversion to a sparse format included; on a GPU they are device times of many calls in one
jit (`jax_sparse_conv.timing`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import data
from benchmarks.paper import sides
from benchmarks.paper.layers import PaperLayer, shrunk
from jax_sparse_conv._src.plans import timing

Row: TypeAlias = dict[str, Any]
Source: TypeAlias = int | str  # percentage of i.i.d. zeros, or "real"

_ALIVE_BYTES = 2**27  # of rotated inputs, of which there are at least two
_QUICK_BATCH = 2
_QUICK_CASES = 3
_START = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Context:
    """What the command line asked for.

    Attributes:
      repeats: samples per time.
      quick: tiny layers and networks, to see that everything runs.
      maps: real maps by name, float32 [N, H, W, C].
      networks: names that replace an experiment's own, or empty.
      searched: file of `benchmarks cost_model` that serves its two figures, or empty.
      prepared: folder in which networks with their weights are kept between runs, or empty.
      seconds: length of a loop that energy is measured over.
      energy_repeats: such loops of each side.
      program: compiled kernels of `benchmarks.paper.cusnn.microkernel`, or empty.
    """

    repeats: int = 30
    quick: bool = False
    maps: Mapping[str, data.Map] = dataclasses.field(default_factory=dict)
    networks: tuple[str, ...] = ()
    prepared: str = ""
    searched: str = ""
    seconds: float = 10.0
    energy_repeats: int = 5
    program: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and what to time it on.

    Attributes:
      layer: the layer.
      batch: images.
      sources: percentages of i.i.d. zeros; "real" for the layer's real maps, left out where there are none.
      sides: what to time; None is everything the operation has.
      inputs: more maps [N, H, W, C], by the name of their source.
      notes: entries copied into the rows.
    """

    layer: PaperLayer
    batch: int = 1
    sources: tuple[Source, ...] = (0,)
    sides: tuple[str, ...] | None = None
    inputs: Mapping[str, data.Map] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def all_sides(self) -> tuple[str, ...]:
        return sides.all_sides(self.layer.op) if self.sides is None else self.sides


def measure(context: Context, cases: Iterable[Case]) -> list[Row]:
    """A row for every source of every case."""
    wanted = chosen(context, cases)
    skipped = _compile(wanted)
    rows = []
    for case in wanted:
        for source, rotated in inputs(context, case):
            rows.append(_row(context, case, source, rotated, skipped))
            progress(f"{rows[-1]['layer']}, {source}, batch {case.batch}: {_short(rows[-1]['us'])}")
    return rows


def chosen(context: Context, cases: Iterable[Case]) -> list[Case]:
    """The cases; a few tiny ones where the command line asked for that."""
    every = list(cases)
    if not context.quick:
        return every
    return [_quick(case) for case in (every if len(every) <= _QUICK_CASES else [*every[:2], *every[-1:]])]


def inputs(context: Context, case: Case) -> Iterable[tuple[Source, list[data.Map]]]:
    """Every source of a case with its rotated maps."""
    layer, rotations = case.layer, range(_rotations(case))
    for name, x in case.inputs.items():
        yield name, [np.roll(x, shift, axis=2) for shift in rotations]
    for source in dict.fromkeys(case.sources):
        if source != "real":
            yield source, [data.iid_map(layer, case.batch, int(source), seed) for seed in rotations]
        elif data.has_maps(context.maps, layer):
            yield source, [data.real_map(context.maps, layer, case.batch, first) for first in rotations]


def progress(text: str) -> None:
    """Say on stderr what is done, with the seconds since the start."""
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def own_zeros(rows: list[Row]) -> list[Row]:
    """The rows, those with a layer's own zeros marked, so that they are averaged together."""
    for row in rows:
        if row["zeros_target"] not in (None, 0, 100):
            row["zeros"] = "own"
    return rows


def add_ratios(row: Row) -> Row:
    """`row` with `ratio[precision][side]`: XLA's time at that precision over the side's."""
    us = row["us"]
    row["ratio"] = {
        dense.removeprefix("xla "): {side: us[dense] / time for side, time in us.items() if not sides.is_dense(side)}
        for dense in sides.DENSE
        if dense in us
    }
    return row


def add_saving(row: Row) -> Row:
    """`row` with `energy_ratio[side]`: XLA's energy at HIGHEST over the side's, medians, where it was measured."""
    used: dict[str, Any] = row["millijoules"]
    dense = used.get(sides.HIGHEST)
    row["energy_ratio"] = {side: dense / own for side, own in used.items() if dense and own}
    return row


def compiled(jobs: Iterable[Callable[[], Any]], tuned: Iterable[bool]) -> list[Any]:
    """What each of the jobs returns, in their order; those in which XLA tunes something run alone."""
    found = dict(timing.compile_each(list(zip(jobs, tuned, strict=True))))
    return [found[index] for index in range(len(found))]


def is_tuned(side: str) -> bool:
    """Whether XLA may run convolutions of its own on a layer's side."""
    return side in (sides.AUTO, sides.AUTO_DEFAULT) or sides.is_dense(side)


def _quick(case: Case) -> Case:
    numbers = [source for source in case.sources if source != "real"]
    few = tuple(dict.fromkeys((*numbers[:2], *numbers[-1:])))
    small = case.layer if case.inputs else shrunk(case.layer)
    return dataclasses.replace(case, layer=small, batch=min(case.batch, _QUICK_BATCH), sources=few)


def _key(case: Case, side: str) -> tuple[Any, ...]:
    layer = case.layer
    return sides.function(layer, side), layer.x_shape(case.batch), layer.kernel_shape


def _compile(cases: Sequence[Case]) -> dict[tuple[Any, ...], str]:
    """Compile every side of every case once; the result says why some cannot run."""
    jobs = {_key(case, side): (case, side) for case in cases for side in case.all_sides}
    compiling = [functools.partial(_compile_one, case, side) for case, side in jobs.values()]
    reasons = compiled(compiling, [is_tuned(side) for _, side in jobs.values()])
    return {key: reason for key, reason in zip(jobs, reasons, strict=True) if reason is not None}


def _compile_one(case: Case, side: str) -> str | None:
    layer = case.layer
    function = sides.function(layer, side)
    shapes = (layer.x_shape(case.batch), layer.kernel_shape, (layer.out_channels,))
    operands = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)]
    try:
        timing.compile_ahead(function, operands * _rotations(case))
        if jax.default_backend() != "cpu":
            function.lower(*operands[0]).compile()  # type: ignore[attr-defined]
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return " ".join(str(error).split())[:300]
    return None


def _rotations(case: Case) -> int:
    bytes_each = 4 * int(np.prod(case.layer.x_shape(case.batch)))
    return max(2, min(timing.ROTATIONS, _ALIVE_BYTES // bytes_each))


def _row(
    context: Context, case: Case, source: Source, rotated: list[data.Map], skipped: Mapping[tuple[Any, ...], str]
) -> Row:
    layer = case.layer
    functions = {s: sides.function(layer, s) for s in case.all_sides if _key(case, s) not in skipped}
    kernel, bias = map(jnp.asarray, data.weights(layer, 0))
    operands = [(jnp.asarray(x), kernel, bias) for x in rotated]
    failed = timing.failures(functions, operands, chained=True)
    functions = {side: function for side, function in functions.items() if side not in failed}
    times = timing.per_call(functions, operands, context.repeats)
    row = {
        "layer": layer.name,
        "op": layer.op,
        "x_shape": list(rotated[0].shape),
        "kernel_shape": list(kernel.shape),
        "strides": layer.strides,
        "groups": layer.groups,
        "count": layer.count,
        "batch": rotated[0].shape[0],
        "source": "iid" if isinstance(source, int) else source,
        "zeros_target": source if isinstance(source, int) else None,
        "zeros_percent": 100 * float(np.mean([np.mean(x == 0) for x in rotated])),
        "us": {side: timed.microseconds for side, timed in times.items()},
        "quartiles_us": {side: [1e6 * timed.low, 1e6 * timed.high] for side, timed in times.items()},
        "ran": {s: timing.what_ran(f, *operands[0]) for s, f in functions.items() if not sides.is_dense(s)},
        "error": _errors(functions, operands[0]),
        "skipped": {s: failed.get(s) or skipped[_key(case, s)] for s in case.all_sides if s not in functions},
        **case.notes,
    }
    return add_ratios(row)


def _errors(functions: Mapping[str, timing.Function], operands: timing.Operands) -> dict[str, float]:
    """Relative Frobenius error of each side to XLA's dense result at HIGHEST, where that was timed."""
    if sides.HIGHEST not in functions:
        return {}
    expected = functions[sides.HIGHEST](*operands)
    norm = jnp.linalg.norm(expected.ravel())
    return {
        side: float(jnp.linalg.norm((function(*operands) - expected).ravel()) / norm)
        for side, function in functions.items()
        if side != sides.HIGHEST
    }


def _short(us: Mapping[str, float]) -> str:
    return ", ".join(f"{re.sub('xla ', '', side)} {time:.1f}" for side, time in us.items()) + " us"
