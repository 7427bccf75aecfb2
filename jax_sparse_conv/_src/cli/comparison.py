"""A network dense and sparse on the same images: zeros, times and results, layer by layer and as a whole."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from jax_sparse_conv import nnx
from jax_sparse_conv._src import devices
from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.cli.errors import UserError
from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.plans import plan, timing
from jax_sparse_conv._src.plans.calibration import Progress
from jax_sparse_conv.models.layers import layer_names

_ASYNC_CALLS = 16  # of a whole network before waiting, on an accelerator
_MOST_SAMPLES = 30
_SECONDS = 20  # for all samples of a comparison that is not told their number

IMPLEMENTATIONS_OF = ops.IMPLEMENTATIONS
IMPLEMENTATIONS = ("auto", *dict.fromkeys(name for names in IMPLEMENTATIONS_OF.values() for name in names))


class _Samples(NamedTuple):
    """How often to time a function: at most so many samples, in so many seconds."""

    most: int
    seconds: float


class _Timed:
    dense_us: float
    sparse_us: float

    @property
    def ratio(self) -> float:
        return self.dense_us / self.sparse_us


@dataclasses.dataclass(frozen=True)
class LayerResult(_Timed):
    """One call of one layer.

    Attributes:
      path: the layer's place in the model, e.g. "conv5_4".
      kind: the layer's class.
      zeros_percent: share of zeros in the layer's input.
      implementation: what ran in the sparse network, read from its compiled text.
      dense_us: microseconds per call with `implementation="xla"`.
      sparse_us: microseconds per call with the chosen implementation.
    """

    path: str
    kind: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    zeros_percent: float
    implementation: str
    dense_us: float
    sparse_us: float


@dataclasses.dataclass(frozen=True)
class Totals(_Timed):
    """Microseconds per call, dense and sparse."""

    dense_us: float
    sparse_us: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      layers: in the order of the calls.
      network: the whole jitted network.
      max_relative: max |sparse - dense| / max |dense| over the outputs.
      frobenius: |sparse - dense| / |dense|, both in the Frobenius norm.
      dense_scores: outputs of the dense network as probabilities, float32 [N, classes].
      sparse_scores: likewise of the sparse one.
    """

    layers: tuple[LayerResult, ...]
    network: Totals
    max_relative: float
    frobenius: float
    dense_scores: np.ndarray
    sparse_scores: np.ndarray

    @property
    def layer_sum(self) -> Totals:
        return Totals(sum(row.dense_us for row in self.layers), sum(row.sparse_us for row in self.layers))


def choose(model: flax_nnx.Module, implementation: str | plan.Plan) -> None:
    """Set every layer of `model` to `implementation`; layers of a kind that lacks it, and "auto", choose themselves.

    Raises:
      UserError: no kind of layer has that implementation, or the plan is not for this model and device.
    """
    if isinstance(implementation, plan.Plan):
        try:
            # Not packed here: `_functional` does it for what it times.
            return plan.apply_plan(model, implementation, pack=False)
        except ValueError as error:
            raise UserError(f"--plan: {error}") from error
    check_implementation(implementation)
    chosen: dict[str, Any] = {
        kind: implementation if implementation in names else None for kind, names in IMPLEMENTATIONS_OF.items()
    }
    nnx.set_implementation(model, **chosen)


def check_implementation(implementation: str) -> None:
    """Raise a `UserError` for a name that is not in `IMPLEMENTATIONS`."""
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"--implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")


def compare(
    model: flax_nnx.Module,
    x: jax.Array,
    implementation: str | plan.Plan = "auto",
    repeats: int | None = None,
    advance: Progress = lambda step, steps: None,
) -> Comparison:
    """Run `model` with dense layers and with sparse ones, and time both.

    Args:
      model: a network of this package's layers; it is left with `implementation`.
      x: its input, [N, H, W, C].
      implementation: "auto", a name or a plan, as in `choose`.
      repeats: samples per time; times are medians. None is up to 30, and fewer where that would take long.
      advance: called before every step with what it is and with the number of steps, None before that is known.

    Raises:
      UserError: the implementation does not exist or cannot run here.
    """
    advance("recording the layers", None)
    calls = _record(model, x)
    steps = len(calls) + 2
    timed = _Samples(repeats or _MOST_SAMPLES, math.inf if repeats else _SECONDS / (len(calls) + 1))
    advance("compiling the whole network", steps)
    dense, sparse = _whole(model, "xla"), _whole(model, implementation)
    chosen = {id(layer): layer.implementation for _, layer in plan.sparse_layers(model)}
    expected, found = dense(x), _first_run(sparse, x)
    advance("timing the whole network", steps)
    network = _time_network(dense, sparse, x, timed)
    paths = layer_names(model)
    rows = []
    while calls:
        call = calls.pop(0)  # its maps are freed once it is timed
        path = paths.get(id(call.layer), type(call.layer).__name__)
        advance(f"compiling and timing {path}", steps)
        rows.append(_time_layer(call, path, chosen.get(id(call.layer)), timed))
    return Comparison(
        tuple(rows),
        network,
        *differences(found, expected),
        dense_scores=_scores(expected),
        sparse_scores=_scores(found),
    )


def differences(found: Any, expected: Any) -> tuple[float, float]:
    """max |found - expected| / max |expected|, and the same with Frobenius norms; in float64, on the host."""
    found, expected = (np.asarray(value, np.float64) for value in (found, expected))
    error = found - expected
    largest, norm = np.max(np.abs(expected), initial=0.0), np.linalg.norm(expected)
    if largest == 0:
        return (0.0, 0.0) if not error.any() else (float("inf"), float("inf"))
    return float(np.max(np.abs(error)) / largest), float(np.linalg.norm(error) / norm)


def top_classes(scores: np.ndarray, count: int = 5) -> list[list[tuple[int, float]]]:
    """For each row of scores [N, classes], the `count` best (class, score) pairs, best first."""
    best = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    return [[(int(c), float(row[c])) for c in classes] for row, classes in zip(scores, best, strict=True)]


def _record(model: flax_nnx.Module, x: jax.Array) -> list[Any]:
    choose(model, "xla")
    with nnx.record_calls() as calls:
        model(x)
    if not calls:
        raise UserError(f"{type(model).__name__} calls no layer of this package, so there is nothing to compare")
    return calls


def _whole(model: flax_nnx.Module, implementation: str | plan.Plan) -> timing.Function:
    choose(model, implementation)
    function, weights = _functional(model)
    return lambda x: function(weights, x)


def _functional(module: flax_nnx.Module) -> tuple[timing.Function, list[jax.Array]]:
    """`module` as a jitted function of its weights, as a flat list, and its arguments.

    On a CPU the kernels of sparse layers are packed: once, as in a program that runs often.
    """
    is_packed = devices.default_platform() == "cpu" and nnx.pack(module) > 0
    graph, state = flax_nnx.split(module)
    if is_packed:
        nnx.unpack(module)
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def function(weights: list[jax.Array], *arguments: jax.Array) -> Any:
        return flax_nnx.merge(graph, jax.tree.unflatten(structure, weights))(*arguments)

    return function, leaves


def _first_run(function: timing.Function, *arguments: Any) -> Any:
    try:
        return jax.block_until_ready(function(*arguments))
    except ValueError as error:  # "implementation=... cannot run here: ..."
        raise UserError(" ".join(str(error).split())) from error


def _time_network(dense: timing.Function, sparse: timing.Function, x: jax.Array, timed: _Samples) -> Totals:
    operands = [(variant,) for variant in timing.rotations(x)]
    calls = 1 if devices.default_platform() == "cpu" else _ASYNC_CALLS
    times = timing.blocked({"dense": dense, "sparse": sparse}, operands, timed.most, calls, timed.seconds)
    return Totals(times["dense"].microseconds, times["sparse"].microseconds)


def _time_layer(call: Any, path: str, implementation: layers.Implementation, timed: _Samples) -> LayerResult:
    functions: dict[str, Any] = {}
    weights: dict[str, list[jax.Array]] = {}
    for side, name in (("dense", "xla"), ("sparse", implementation)):
        call.layer.implementation = name
        functions[side], weights[side] = _functional(call.layer)
    residual = () if call.residual is None else (call.residual,)
    operands: list[Any] = [(variant, *residual) for variant in timing.rotations(call.inputs)]
    if devices.default_platform() == "cpu":  # packed or not, each side has weights of its own
        sides = {side: functools.partial(function, weights[side]) for side, function in functions.items()}
        times = timing.per_call(sides, operands, timed.most, timed.seconds)
    else:  # where functions are timed inside of a `jit`, of which weights that are no arguments would be constants
        given = [(weights["dense"], *each) for each in operands]
        times = timing.per_call(functions, given, timed.most, timed.seconds)
    return LayerResult(
        path=path,
        kind=type(call.layer).__name__,
        input_shape=tuple(call.inputs.shape),
        output_shape=tuple(call.output.shape),
        zeros_percent=100 * float(np.mean(np.asarray(call.inputs) == 0)),
        implementation=timing.what_ran(functions["sparse"], weights["sparse"], *operands[0]),
        dense_us=times["dense"].microseconds,
        sparse_us=times["sparse"].microseconds,
    )


def _scores(outputs: Any) -> np.ndarray:
    logits = jnp.asarray(outputs, jnp.float32).reshape(outputs.shape[0], -1)
    return np.asarray(jax.nn.softmax(logits))
