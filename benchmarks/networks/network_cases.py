"""One network at a precision and batch, all sides in turns: what a process of `benchmarks networks` measures."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_conv as jsc
from benchmarks.common import program
from benchmarks.common.cases import KINDS
from benchmarks.common.prepared import REFERENCE_IMAGES, Beside, Prepared
from jax_sparse_conv import models
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.fusion import rewrite
from jax_sparse_conv._src.fusion.chain_rules import MAX_IMAGES
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv.models.units import PreActivation

Row: TypeAlias = dict[str, Any]
Say: TypeAlias = Callable[[dict[str, Any]], None]
Compiled: TypeAlias = dict[str, Any]  # side -> jax.stages.Compiled

XLA, AUTO, FUSED, PLANNED = "xla", "auto", "fused", "planned"
SIDES = (XLA, AUTO, FUSED, PLANNED)
ALL = "all"  # where the sides take turns
ARGUMENTS, PACKED, CONSTANTS = "arguments", "packed", "constants"
WEIGHTS = (ARGUMENTS, PACKED, CONSTANTS)
"""What a network's weights are to its program: `jax.jit(lambda weights, x: ...)`, where "packed" has what
`jax_sparse_conv.nnx.pack` makes of them for the sides that choose themselves, or `jax.jit(lambda x: model(x))`."""
DUMPED = "_jsc_network_"
"""In the names of programs whose thunks are counted."""

# Of calls dispatched before waiting: on an H200 the first dispatch and the wait cost 0.6 ms a sample, under 1 % so.
_SAMPLE_SECONDS = 0.06
_MAX_CALLS = 320
_TUNED = ("stablehlo.convolution", "stablehlo.dot_general")
_MESSAGE = 300  # characters


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: `name` is what --cases matches and what plans are called."""

    network: str
    kind: str
    batch: int
    weights: str = ARGUMENTS

    @property
    def name(self) -> str:
        return f"{self.network}/{self.kind}/{self.batch}"

    def sides(self, wanted: tuple[str, ...], plans: Path | None) -> Iterator[str]:
        """Those of the wanted sides that the case has."""
        for side in wanted:
            fits = self.batch <= MAX_IMAGES if side == FUSED else True
            if fits and (side != PLANNED or self.plan(plans) is not None):
                yield side

    def plan(self, plans: Path | None) -> Path | None:
        """The file of the case's plan in a folder, if there is one: resnet50_default_1.json."""
        path = None if plans is None else plans / f"{self.network}_{self.kind}_{self.batch}.json"
        return path if path is not None and path.is_file() else None


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of the device: bytes a second copied, measured, and operations a second by kind of `KINDS`, None if unknown."""

    bytes_per_second: float
    flops: Mapping[str, float | None]

    @classmethod
    def measured(cls, quick: bool) -> Limits:
        on_cpu = jax.default_backend() == "cpu"
        values = jnp.zeros(2**20 if quick else 2**24 if on_cpu else 2**28, jnp.float32)
        seconds = timing.blocked({"copy": jax.jit(lambda x: x + 1)}, [(values,)], 5, 4)["copy"].median
        return cls(2 * values.nbytes / seconds, {kind: _peak(*of) for kind, of in KINDS.items()})


def _peak(dtype: str, precision: str | None) -> float | None:
    if jax.default_backend() == "cpu":
        return _native.cpu_limits()["flops"] if _native.cpu_isas() and dtype == "float32" else None
    return devices.current().dense_flops(dtype, precision == "highest")


def measure(
    case: Case, network: Prepared, beside: Beside, wanted: tuple[str, ...], skipped: Mapping[str, str], say: Say,
    *, limits: Limits, repeats: int, plans: Path | None, dumps: Path,
) -> Row:  # fmt: skip
    """The row of a case. `skipped` are sides that failed before, and why; `say` hears which side is compiled or run."""
    reasons = dict(skipped)
    sides = [side for side in case.sides(wanted, plans) if side not in reasons]
    given = {"profile": network.weights, "none": beside.weights}
    held = {zeros: _held(case, network, weights, sides, reasons) for zeros, weights in given.items()}
    images = _images(case, network)
    functions, seconds = _programs(case, held["profile"], plans, images[0], reasons, say)
    results = _results(case, _calling(case, functions, held["profile"]), images[0], reasons, say)
    functions = {side: functions[side] for side in results}
    without = functions
    if case.weights == CONSTANTS:  # other weights, another program
        others = {side: held["none"][side] for side in results}
        without, _ = _programs(case, others, plans, images[0], reasons, say)
        functions = {side: functions[side] for side in without}
        results = {side: results[side] for side in without}
    say({"begin": case.name, "side": ALL})
    called = _calling(case, functions, held["profile"])
    times = {
        "profile": _times(called, images, repeats),
        "none": _times(_calling(case, without, held["none"]), images, repeats),
    }
    single = timing.blocked(called, images, repeats)
    say({"end": case.name, "side": ALL})
    floor = roofline(network, case, limits)
    us = {side: timed.microseconds for side, timed in times["profile"].items()}
    return {
        **dataclasses.asdict(case),
        "case": case.name,
        "dtype": KINDS[case.kind][0],
        "zeros_percent": network.zeros_percent,
        "us": us,
        "best_us": {side: 1e6 * timed.best for side, timed in times["profile"].items()},
        "quartiles_us": {side: [1e6 * timed.low, 1e6 * timed.high] for side, timed in times["profile"].items()},
        "latency_us": {side: timed.microseconds for side, timed in single.items()},
        "no_zeros_percent": beside.zeros_percent,
        "no_zeros_us": {side: timed.microseconds for side, timed in times["none"].items()},
        "error": {side: _error(result, beside.logits) for side, result in results.items()},
        "roofline": floor,
        "program": {side: _program(function, _name(case, side), dumps) for side, function in functions.items()},
        "memory": {side: _memory(function) for side, function in functions.items()},
        "compile_seconds": seconds,
        "skipped": reasons,
    }


def _name(case: Case, side: str) -> str:
    return f"{case.kind}_{side}_{case.batch}{DUMPED}{case.network}"


def _function(case: Case, network: Prepared, side: str, plan: Path | None) -> Any:
    """The whole network as a jitted function of `_weights` and images."""
    chosen = None if plan is None else jsc.Plan.load(plan)

    def run(weights: list[jax.Array], x: jax.Array) -> Any:
        model = network.model(weights)
        with jax.default_matmul_precision(KINDS[case.kind][1]):  # which a plan is for, too
            if chosen is None:
                models.set_network_implementation(model, "xla" if side == XLA else None)
            else:
                jsc.apply_plan(model, chosen)
            return model(x)

    run.__name__ = run.__qualname__ = _name(case, side)
    function = rewrite.fuse(run) if side == FUSED else run
    if case.weights == CONSTANTS:
        function = functools.wraps(run)(functools.partial(function, network.weights))
    return jax.jit(function)


def _images(case: Case, network: Prepared) -> list[timing.Operands]:
    """Batches, rotated so that no call finds its own in a cache."""
    dtype = KINDS[case.kind][0]
    return [(network.batch(case.batch, shift).astype(dtype),) for shift in range(timing.ROTATIONS)]


def _held(
    case: Case, network: Prepared, weights: list[jax.Array], sides: list[str], reasons: dict[str, str]
) -> dict[str, Prepared]:
    """The network with these weights as each side has it; why a side has none goes into `reasons`."""
    plain = dataclasses.replace(network, weights=_cast(case, weights))
    held = dict.fromkeys(sides, plain)
    packing = [side for side in sides if case.weights == PACKED and side in (AUTO, FUSED)]
    try:
        return held | dict.fromkeys(packing, plain.packed()) if packing else held
    except ValueError as error:
        reasons |= dict.fromkeys(packing, _short(error))
        return {side: plain for side in sides if side not in packing}


def _weights(case: Case, network: Prepared) -> tuple[list[jax.Array], ...]:
    """What a call is given in front of its images."""
    return () if case.weights == CONSTANTS else (network.weights,)


def _calling(case: Case, functions: Compiled, held: Mapping[str, Prepared]) -> dict[str, timing.Function]:
    """The programs as functions of images."""
    return {side: functools.partial(function, *_weights(case, held[side])) for side, function in functions.items()}


def _cast(case: Case, weights: list[jax.Array]) -> list[jax.Array]:
    dtype = KINDS[case.kind][0]
    return weights if dtype == "float32" else _converted(weights, dtype)


@functools.partial(jax.jit, static_argnums=1)  # one program: hundreds of small ones take seconds to compile
def _converted(weights: list[jax.Array], dtype: str) -> list[jax.Array]:
    return [leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in weights]


def _programs(
    case: Case, held: Mapping[str, Prepared], plans: Path | None, images: timing.Operands, reasons: dict[str, str],
    say: Say,
) -> tuple[Compiled, dict[str, float]]:  # fmt: skip
    """The sides' programs for what they hold, compiled; why others have none goes into `reasons`."""
    lowered = {}
    for side, network in held.items():
        path = case.plan(plans) if side == PLANNED else None
        try:
            lowered[side] = _function(case, network, side, path).lower(*_weights(case, network), *images)
        except ValueError as error:
            reasons[side] = _short(error)
    return _compiled(case, lowered, reasons, say)


def _results(
    case: Case, functions: Mapping[str, timing.Function], images: timing.Operands, reasons: dict[str, str], say: Say
) -> dict[str, np.ndarray]:
    """What the programs compute; why others do not run goes into `reasons`."""
    results = {}
    for side, function in functions.items():
        say({"begin": case.name, "side": side})
        try:
            results[side] = np.asarray(function(*images), np.float32)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            reasons[side] = _short(error)
        say({"end": case.name, "side": side})
    return results


def _compiled(
    case: Case, lowered: Mapping[str, Any], reasons: dict[str, str], say: Say
) -> tuple[Compiled, dict[str, float]]:
    """The programs, and the seconds that each took; why others did not compile goes into `reasons`."""

    def job(side: str) -> tuple[Any, float]:
        say({"begin": case.name, "side": side})
        start = time.perf_counter()
        try:
            found = lowered[side].compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            found = _short(error)
        say({"end": case.name, "side": side})
        return found, time.perf_counter() - start

    names = list(lowered)
    texts = [lowered[side].as_text() for side in names]
    jobs = [
        (functools.partial(job, side), any(operation in text for operation in _TUNED))
        for side, text in zip(names, texts, strict=True)
    ]
    done = {names[index]: result for index, result in timing.compile_each(jobs)}
    reasons |= {side: found for side, (found, _) in done.items() if isinstance(found, str)}
    return (
        {side: done[side][0] for side in names if side not in reasons},
        {side: round(done[side][1], 2) for side in names},
    )


def _times(
    functions: Mapping[str, timing.Function], operands: list[timing.Operands], repeats: int
) -> dict[str, timing.Timing]:
    if not functions:
        return {}
    calls = {side: _calls(function, operands) for side, function in functions.items()}
    return timing.blocked(functions, operands, repeats, calls)


def _calls(function: timing.Function, operands: list[timing.Operands]) -> int:
    """How many to dispatch before waiting."""
    if jax.default_backend() == "cpu":
        return 1
    seconds = timing.blocked({"": function}, operands, 1, 4)[""].median
    return min(_MAX_CALLS, max(2, math.ceil(_SAMPLE_SECONDS / seconds)))


def _error(result: np.ndarray, expected: np.ndarray) -> float:
    """Relative (Frobenius) to float32 convolutions, dense and on the host, of the images that those were made for."""
    images = min(len(result), REFERENCE_IMAGES)
    difference = np.linalg.norm(result[:images].astype(np.float64) - expected[:images])
    return float(difference / np.linalg.norm(expected[:images]))


def _program(function: Any, name: str, dumps: Path) -> dict[str, Any]:
    return program.counts(function.as_text() or "") | {"thunks": program.thunks(dumps, name)}


def _memory(function: Any) -> dict[str, int]:
    """Bytes on the device: the weights and the image, the result, and what the program needs beside them."""
    found = function.memory_analysis()
    named = ("argument", "output", "temp")
    return {name: int(getattr(found, f"{name}_size_in_bytes")) for name in named}


def roofline(network: Prepared, case: Case, limits: Limits) -> dict[str, Any]:
    """The fewest bytes and the dense operations of a call, and the microseconds that the slower of them takes.

    Bytes: every weight once, every layer's input, residual and result once.
    """
    itemsize = jnp.dtype(KINDS[case.kind][0]).itemsize
    flops, elements = _work(network, case.batch)
    peak = limits.flops[case.kind]
    floors = {
        "bytes_us": 1e6 * elements * itemsize / limits.bytes_per_second,
        "flops_us": None if peak is None else 1e6 * flops / peak,
    }
    return {"bytes": elements * itemsize, "flops": flops, **floors, "us": max(filter(None, floors.values()))}


def _work(network: Prepared, batch: int) -> tuple[float, float]:
    """Operations of the dense network, and elements of weights and maps."""
    found = [0.0, float(sum(leaf.size for leaf in network.weights))]

    def add(name: str, layer: Any, x: jax.Array, residual: jax.Array | None) -> None:
        if isinstance(layer, PreActivation):
            return  # of the next layer's input
        kernel = layer.kernel if hasattr(layer, "kernel") else layer.conv.kernel
        before = jax.eval_shape(getattr(layer, "convolved", layer), x)
        result = jax.eval_shape(layer, x) if residual is None else before
        found[0] += 2.0 * before.size * math.prod(kernel.shape[:-1])
        found[1] += x.size + result.size + (0 if residual is None else residual.size)

    def run(weights: list[jax.Array], x: jax.Array) -> Any:
        model = network.model(weights)
        models.set_network_implementation(model, "xla")
        return model(x, before_layer=add)

    jax.eval_shape(run, network.weights, jax.ShapeDtypeStruct((batch, *network.x.shape[1:]), jnp.float32))
    return found[0], found[1]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_MESSAGE]


def flags_label() -> str:
    """Of this process's XLA flags."""
    return "command buffers" if "command_buffer" in os.environ.get("XLA_FLAGS", "") else "default"
