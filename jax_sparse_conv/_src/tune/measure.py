"""Times of one call: XLA and what kernels can take, the best of them once more beside XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch.planner import Candidate
from jax_sparse_conv._src.dispatch.table import Key
from jax_sparse_conv._src.layers.calls import Call
from jax_sparse_conv._src.plans import timing
from jax_sparse_conv._src.primitive import lowering
from jax_sparse_conv._src.primitive.primitives import Config, conv_p

XLA = "xla"
ZEROS = 0.25
"""Of x, independent of each other: as few as early layers have, so that a kernel that skips them is not overrated."""

_OF_FAMILY = 3  # candidates of each family that are timed
_AGAIN = 3  # of all, that are timed once more beside XLA
_SAMPLES, _SAMPLES_AGAIN = 5, 15


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times of one call.

    Attributes:
      key: the row's.
      times: microseconds by name, "xla" or family and tile as `name_of` has them; of those timed twice the second.
      again: the names that were timed twice, XLA among them.
      failed: why others do not run, by name.
    """

    key: Key
    times: Mapping[str, float]
    again: tuple[str, ...]
    failed: Mapping[str, str]


def name_of(candidate: Candidate) -> str:
    """Such as "wgmma 64,112,1,2"."""
    return f"{candidate.family} {','.join(map(str, candidate.tile))}".strip()


def candidate_of(name: str) -> Candidate | None:
    """The inverse of `name_of`; None for XLA.

    Raises:
      ValueError: a name of no candidate.
    """
    if name == XLA:
        return None
    family, _, numbers = name.partition(" ")
    return Candidate.of(family, [int(number) for number in numbers.split(",") if number])


def key_of(call: Call) -> Key | None:
    """The row of a call; None of what tables do not hold."""
    config, x, kernel, _ = bound(call)
    return Key.of(lowering.workload_of(x, kernel, config))


def measure(call: Call, device: Device, seed: int = 0, xla: bool = True) -> Measured:
    """Time a convolution on the default device.

    Args:
      call: a convolution without a pool, of known sizes.
      device: the same, as planners see it.
      seed: of the values.
      xla: whether XLA is timed too.

    Raises:
      ValueError: a call that tables do not hold.
    """
    key = key_of(call)
    if key is None:
        raise ValueError(f"{call.describe()} is no row of a table: it has a pool, or no known sizes")
    config, _, _, shapes = bound(call)
    functions: dict[str, timing.Function] = {XLA: _xla(call)} if xla else {}
    for candidate in _candidates(key, device):
        functions[name_of(candidate)] = told(config, candidate)
    operands = list(operands_of(shapes, seed, 1 - ZEROS))
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    here = next(iter(operands[0][0].devices()))  # JAX's default device, which other threads are not told
    jobs = [
        (functools.partial(_failures, {name: each}, operands, here), name == XLA) for name, each in compiled.items()
    ]
    failed = {name: reason for _, reasons in timing.compile_each(jobs) for name, reason in reasons.items()}
    first = timing.per_call(_without(compiled, failed), operands, _SAMPLES)
    ours = sorted((name for name in first if name != XLA), key=lambda name: first[name].median)[:_AGAIN]
    again = {name: compiled[name] for name in (XLA, *ours) if name in first}
    second = timing.per_call(again, operands, _SAMPLES_AGAIN)
    times = {name: timed.microseconds for name, timed in {**first, **second}.items()}
    return Measured(key, times, tuple(again), failed)


def _candidates(key: Key, device: Device) -> list[Candidate]:
    """The dense kernel that the models choose, and the best of each family by its model."""
    found = [rated.candidate for rated in key.layer.candidates(device, _OF_FAMILY)]
    return list(dict.fromkeys([key.layer.dense(device).candidate, *found]))


def _failures(
    functions: Mapping[str, timing.Function], operands: list[timing.Operands], here: Any
) -> Mapping[str, str]:
    """Compile and run functions once, which takes longer than to time them; why those that do not run do not."""
    with jax.default_device(here):
        return timing.failures(functions, operands, chained=True)


def _without(functions: Mapping[str, timing.Function], names: Mapping[str, str]) -> dict[str, timing.Function]:
    return {name: function for name, function in functions.items() if name not in names}


def _xla(call: Call) -> timing.Function:
    return call.function("xla")


def told(config: Config, candidate: Candidate) -> timing.Function:
    """The convolution of a configuration by a candidate, of x, kernel and what else it has."""
    method = "ecr" if candidate.family == "ecr" else "direct"
    chosen = dataclasses.replace(config, method=method, fallback=False, candidate=candidate)

    def function(x: jax.Array, kernel: jax.Array, *rest: jax.Array) -> jax.Array:
        bias = [rest[0][None]] if config.has_bias else []
        others = rest[1:] if config.has_bias else rest
        return conv_p.bind(x, kernel[None], *bias, *others, config=chosen)

    return function


def bound(call: Call) -> tuple[Config, Any, Any, list[Any]]:
    """The configuration of the call, its x and kernel as the primitive has them, and the shapes of its operands."""
    shapes = [jax.ShapeDtypeStruct(shape, call.dtype) for shape in (call.x_shape, call.kernel_shape)]
    if call.bias:
        shapes.append(jax.ShapeDtypeStruct(call.kernel_shape[-1:], call.dtype))
    if call.residual:
        size = call.geometry.conv_size(call.x_shape[1:3], call.kernel_shape[:2])
        shapes.append(jax.ShapeDtypeStruct((call.x_shape[0], *size, call.kernel_shape[-1]), call.dtype))
    [equation] = _convolutions(jax.make_jaxpr(call.function(None))(*shapes).jaxpr)
    x, kernel = (variable.aval for variable in equation.invars[:2])
    return equation.params["config"], x, kernel, shapes


def _convolutions(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive is conv_p:
            yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _convolutions(value.jaxpr)


def operands_of(shapes: list[Any], seed: int, density: float) -> Iterator[timing.Operands]:
    """Operands that successive calls rotate through, x of a density with independent zeros."""
    rng = np.random.default_rng(seed)
    x, kernel, *rest = shapes
    scale = math.sqrt(2 / math.prod(kernel.shape[:-1]))
    values = np.abs(rng.standard_normal(x.shape, np.float32)) + np.float32(1e-3)
    values[rng.random(x.shape, np.float32) >= density] = 0
    weights = jnp.asarray(scale * rng.standard_normal(kernel.shape, np.float32), kernel.dtype)
    others = [jnp.asarray(rng.standard_normal(each.shape, np.float32), each.dtype) for each in rest]
    for rotated in timing.rotations(jnp.asarray(values, x.dtype)):
        yield rotated, weights, *others
