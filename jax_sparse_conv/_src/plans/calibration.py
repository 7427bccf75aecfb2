"""Calibration: run a model on batches, record what each layer is given, and time every implementation on that.

The candidates alternate, so that what else happens on the machine meets all of them alike. An implementation other
than dense convolution must win beyond the spread of its samples. The time of "direct" does not depend on values, so it
is judged by the samples of all layers with equal calls.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax import nnx

from jax_sparse_conv._src.api.arguments import check_flag, check_positive, default_precision
from jax_sparse_conv._src.layers import layer_calls, packed_params
from jax_sparse_conv._src.layers.calls import Call, Operands
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.plans.machine import device_label, versions
from jax_sparse_conv._src.plans.plan import (
    Candidate,
    LayerPlan,
    Plan,
    Threshold,
    check_model,
    layers_by_name,
)
from jax_sparse_conv._src.plans.thresholds import of_layer
from jax_sparse_conv._src.primitive import packing, reference

# Told before each step what it is, with the number of steps, None before that is known.
Progress: TypeAlias = Callable[[str, int | None], None]

_DENSE = "xla"
_WHATEVER_ZEROS = "direct"  # takes as long on any map, as dense convolution does
_GAIN = 1.03  # an implementation must win by this much over dense convolution ...
_QUANTILE = 4  # ... in three of four samples
_KEPT_BYTES = 2**30  # of inputs, beyond the first batch's
_COMPILE_THREADS = 8


@dataclasses.dataclass
class _Recorded:
    """What one layer was given in one kind of call."""

    path: str
    layer: Any
    call: Call
    densities: list[jax.Array] = dataclasses.field(default_factory=list)
    operands: list[tuple[jax.Array, ...]] = dataclasses.field(default_factory=list)
    candidates: list[str] = dataclasses.field(default_factory=list)
    left_out: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    repeats: int = 10,
    thresholds: bool = False,
    progress: Progress = lambda step, steps: None,
) -> Plan:
    """Time the implementations of every layer of `model` on the inputs that it has when the model runs on `batches`.

    Layers are this package's: of its networks, of your own models, or put there by `jax_sparse_conv.nnx.replace`. The
    model runs as it is, without `jit`, once per batch. Set it to inference first (`model.eval()`). Fold batch norms
    (`jax_sparse_conv.models.fold_batch_norm`) before calibration, not after. Times are those of the default backend,
    under this process's XLA flags. Layers with equal calls are compiled once.

    Args:
      model: an nnx module, called as `model(batch)`.
      batches: the batches, or one array that is the only batch. A tuple is the model's positional arguments.
      repeats: samples of each candidate; the median counts.
      thresholds: also time maps of other densities, made of the recorded ones. Where a sparse kernel is faster up to
        some density and a dense one beyond, the plan has that density, and the running program goes by it
        (`LayerPlan.thresholds`). This takes about seven times as long.
      progress: called before each step with what it is and the number of steps, None before that is known.

    Returns:
      A `Plan` for `apply_plan`.

    Raises:
      TypeError: a model that is not an nnx module, batches that are neither an array nor iterable, or thresholds that
        is no bool.
      ValueError: repeats below 1, no batches, no call of a layer of this package, or two layers of one name. Or a layer
        whose input has no values when it is called, as under `jit`, `vmap` or `scan` inside the model.
    """
    check_model(model)
    check_positive("repeats", repeats)
    check_flag("thresholds", thresholds)
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches is a {type(batches).__name__}, not an array or an iterable of batches")
    start = time.perf_counter()
    layers = layers_by_name(model)
    recorder = _Recorder({id(layer): path for path, layer in layers.items()})
    _record(model, batches, recorder, progress)
    steps = len({recorded.call for recorded in recorder.found}) + len(recorder.found)
    _compile(recorder.found, lambda step: progress(step, steps))
    timed: list[dict[str, timing.Timing]] = []
    changes: list[tuple[str, Threshold] | None] = []
    for recorded in recorder.found:
        progress(f"timing {recorded.path or type(model).__name__}", steps)
        timed.append(_time(recorded, repeats))
        names = recorded.candidates if thresholds else []
        changes.append(of_layer(recorded.call, recorded.operands[0], names, repeats))
        recorded.operands.clear()  # the maps are freed once they are timed
    chosen = choose([recorded.call for recorded in recorder.found], timed)
    planned = [_planned(*layer) for layer in zip(recorder.found, timed, chosen, changes, strict=True)]
    called = {layer.path for layer in planned}
    return Plan(
        device=device_label(),
        versions=versions(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - start, 1),
        model=type(model).__name__,
        layers=tuple(planned),
        uncalled=tuple(path for path in layers if path not in called),
    )


def wins(dense: timing.Timing, other: timing.Timing) -> bool:
    """Whether `other` beats `dense` beyond the spread of their samples: by 3 % in at least three of four."""
    ratios = [d / o for d, o in zip(dense.samples, other.samples, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > _GAIN
    return statistics.quantiles(ratios, n=_QUANTILE, method="inclusive")[0] > _GAIN


def choose(calls: Sequence[Call], timed: Sequence[Mapping[str, timing.Timing]]) -> list[str]:
    """Of each layer, by its call and the times of its candidates, the fastest that wins, or dense convolution."""
    alike: dict[Call, list[Mapping[str, timing.Timing]]] = {}
    for call, times in zip(calls, timed, strict=True):
        alike.setdefault(call, []).append(times)

    def wins_in(name: str, layers: Sequence[Mapping[str, timing.Timing]]) -> bool:
        dense, other = ([s for times in layers for s in times[side].samples] for side in (_DENSE, name))
        return wins(timing.Timing.of(dense), timing.Timing.of(other))

    def fastest(call: Call, times: Mapping[str, timing.Timing]) -> str:
        better = [
            name
            for name in times
            if name != _DENSE and wins_in(name, alike[call] if name == _WHATEVER_ZEROS else [times])
        ]
        return min(better, key=lambda name: times[name].median, default=_DENSE)

    return [fastest(call, times) for call, times in zip(calls, timed, strict=True)]


class _Recorder:
    """Runs the layers' operations in their place and keeps what they were given."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.found: list[_Recorded] = []
        self._paths = paths
        self._by_call: dict[tuple[int, Call], _Recorded] = {}
        self._runs: dict[Call, str] = {}
        self._kept = 0

    def __call__(self, layer: Any, call: Call, operands: Operands, arguments: Mapping[str, Any]) -> jax.Array:
        del arguments
        present = call.present(operands)
        path = self._paths.get(id(layer), type(layer).__name__)
        if any(isinstance(value, jax.core.Tracer) for value in present):
            raise ValueError(
                f"layer {path!r} is called under jit, vmap, scan or another transformation inside the model, where its "
                "input has no values; calibrate a model that calls its layers directly"
            )
        if id(layer) not in self._paths:
            raise ValueError(
                f"a {path} is called that is not one of the model's modules, so no plan could be applied to it"
            )
        recorded = self._by_call.get((id(layer), call))
        if recorded is None:
            recorded = self._by_call[id(layer), call] = _Recorded(path, layer, call)
            self.found.append(recorded)
        present = _packed(recorded, present)
        recorded.densities.append(_density(present[0]))
        self._keep(recorded, present)
        return self._run(call, present)

    def _keep(self, recorded: _Recorded, present: tuple[jax.Array, ...]) -> None:
        size = sum(value.nbytes for value in (present[0], *present[3 if recorded.call.bias else 2 :]))
        if not recorded.operands or (len(recorded.operands) < timing.ROTATIONS and self._kept + size <= _KEPT_BYTES):
            recorded.operands.append(present)
            self._kept += size

    def _run(self, call: Call, present: tuple[jax.Array, ...]) -> jax.Array:
        """The result, by a native kernel where there is one: those compile in no time."""
        if call in self._runs:
            return call.function(self._runs[call])(*present)
        for name in (name for name in call.implementations if name != _DENSE):
            try:
                result = call.function(name)(*present)
            except ValueError:  # "implementation=... cannot run here: ..."; the plan will say so
                continue
            self._runs[call] = name
            return result
        self._runs[call] = _DENSE
        return call.function(_DENSE)(*present)


def _packed(recorded: _Recorded, present: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands with the kernel as `apply_plan` would have it: packed once, where sparse kernels read that."""
    if recorded.call.op == "dense" or packed_params.why_not_packed(recorded.layer) is not None:
        return present
    if recorded.operands:
        return (present[0], recorded.operands[0][1], *present[2:])
    return (present[0], packing.pack(present[1], feature_group_count=recorded.call.geometry.groups), *present[2:])


def _record(model: nnx.Module, batches: Iterable[Any], recorder: _Recorder, progress: Progress) -> None:
    if hasattr(batches, "shape"):
        batches = [batches]
    count = 0
    for count, batch in enumerate(batches, 1):
        progress(f"recording batch {count}", None)
        with layer_calls.observed(recorder):
            model(*batch) if isinstance(batch, tuple) else model(batch)
    if count == 0:
        raise ValueError("batches is empty; calibrate needs at least one")
    if not recorder.found:
        raise ValueError(
            f"{type(model).__name__} calls no layer of this package; jax_sparse_conv.nnx.replace(model) puts some in"
        )


def _compile(found: list[_Recorded], progress: Callable[[str], None]) -> None:
    """Find each call's candidates by compiling them, equal calls once and those that XLA does not tune side by side."""
    firsts = {recorded.call: recorded for recorded in reversed(found)}
    jobs = [(recorded, name) for recorded in firsts.values() for name in recorded.call.implementations]
    precision = default_precision()
    reasons: dict[Call, dict[str, str | None]] = {call: {} for call in firsts}
    compiling = [(functools.partial(_why_left_out, *job, precision), job[1] == _DENSE) for job in jobs]
    for index, reason in timing.compile_each(compiling, _COMPILE_THREADS):
        recorded, name = jobs[index]
        reasons[recorded.call][name] = reason
        if len(reasons[recorded.call]) == len(recorded.call.implementations):
            progress(f"compiled {recorded.path}")
    for recorded in found:
        for name in recorded.call.implementations:
            reason = reasons[recorded.call][name]
            if reason is None:
                recorded.candidates.append(name)
            else:
                recorded.left_out.append((name, reason))


def _why_left_out(recorded: _Recorded, name: str, precision: Any) -> str | None:
    try:
        with jax.default_matmul_precision(precision):  # another thread's default is not this one's
            timing.compile_ahead(recorded.call.function(name), recorded.operands)
    except ValueError as error:
        if name == _DENSE:
            raise
        return " ".join(str(error).split())
    return None


def _time(recorded: _Recorded, repeats: int) -> dict[str, timing.Timing]:
    functions = {name: recorded.call.function(name) for name in recorded.candidates}
    return timing.per_call(functions, _rotations(recorded.operands), repeats)


def _planned(
    recorded: _Recorded, times: Mapping[str, timing.Timing], implementation: str, step: tuple[str, Threshold] | None
) -> LayerPlan:
    return LayerPlan(
        path=recorded.path,
        call=recorded.call,
        kernel_dtype=str(recorded.layer.kernel.dtype),
        densities=tuple(float(value) for value in recorded.densities),
        candidates=tuple(_candidate(name, found) for name, found in times.items()),
        left_out=tuple(recorded.left_out),
        implementation=implementation if step is None else step[0],
        thresholds=() if step is None else (step[1],),
    )


def _candidate(name: str, found: timing.Timing) -> Candidate:
    return Candidate(name, *(round(1e6 * seconds, 3) for seconds in (found.median, found.low, found.high)))


def _rotations(operands: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
    """What was recorded and, where that is little, shifted copies."""
    x, *rest = operands[0]
    shifted = ((variant, *rest) for variant in timing.rotations(x)[1:])
    return list(itertools.islice(itertools.chain(operands, shifted), timing.ROTATIONS))


_density = jax.jit(reference.density)
