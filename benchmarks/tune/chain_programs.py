"""Chains of networks as programs of their own, with any tiles: what `benchmarks chain_tiles` times."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import data, prepared
from benchmarks.common.cases import KINDS
from jax_sparse_conv import models
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.dispatch.chain_tiles import Key, Tiles
from jax_sparse_conv._src.fusion import chains, rewrite, schedule
from jax_sparse_conv._src.fusion.schedule import Layer

COPIES, CALLS, SAMPLE_SECONDS = 4, 5, 0.03
"""Chains of a program, each after the other; of a sample the fewest calls that are dispatched before one waits, and how
long it takes at least: the host's part of a sample is 0.1 ms more or less."""
TOLERANCE = {"highest": 2e-6, "tf32": 5e-4, "16bit": 5e-3}
"""Relative (Frobenius), of one layer; a chain, whose layers hand on what they round, may have `_OF_CHAIN` times it."""

_OF_CHAIN = 20
_WARM_UP = 3
_RESIDUAL = 0.3  # scale of kernels in front of a sum, so that maps do not grow from block to block
_BIAS = 0.1


@dataclasses.dataclass(frozen=True)
class FusedChain:
    """A fused chain of a program: its equation's parameters, and its operands' shapes."""

    layers: tuple[Layer, ...]
    results: tuple[int, ...]
    operands: tuple[jax.core.ShapedArray, ...]

    @property
    def keys(self) -> list[Key]:
        """Of every layer."""
        return chains.keys(self.operands, self.layers)

    @property
    def calls(self) -> list[tuple[Any, Any, Any]]:
        """Of every layer configuration, x and kernel, as `chain_rules` takes them."""
        return chains.calls_of(self.operands, self.layers)

    def with_tiles(self, tiles: Mapping[Key, chain_tiles.Tile]) -> tuple[Layer, ...]:
        """The layers with these tiles, and what the model chooses for the others."""
        pairs = zip(self.layers, self.keys, strict=True)
        return tuple(dataclasses.replace(layer, tile=tiles.get(key, chain_tiles.BY_MODEL)) for layer, key in pairs)

    def alone(self, index: int) -> FusedChain:
        """One layer as a fused chain; operands and results of others become operands."""
        layer = self.layers[index]
        made = schedule.results_of(self.operands, self.layers)
        shapes: list[jax.core.ShapedArray] = []

        def number(of: int | None) -> int | None:
            if of is None:
                return None
            shapes.append(self.operands[of] if of >= 0 else made[~of])
            return len(shapes) - 1

        x, kernel = number(layer.x), number(layer.kernel)
        assert x is not None
        assert kernel is not None
        bias, residual, packed = number(layer.bias), number(layer.residual), number(layer.packed)
        return FusedChain((Layer(layer.config, x, kernel, bias, residual, packed),), (0,), tuple(shapes))


def chains_of(name: str, kind: str, batch: int, quick: bool = False) -> list[FusedChain]:
    """The fused chains that `rewrite.fuse` makes of a network of the registry at a kind of `KINDS`."""
    dtype, precision = KINDS[kind]
    graph, state = prepared.shapes(name, quick)
    leaves, structure = jax.tree.flatten(state)
    size = prepared.input_size(name, quick)
    pixels = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8)
    x = _converted(jax.eval_shape(models.NETWORKS[name].preprocess, pixels), dtype)

    def run(weights: list[jax.Array], x: jax.Array) -> Any:
        with jax.default_matmul_precision(precision):
            return nnx.merge(graph, jax.tree.unflatten(structure, weights))(x)

    found = jax.make_jaxpr(rewrite.fuse(run))([_converted(leaf, dtype) for leaf in leaves], x)
    return list(_chains(found.jaxpr))


def _converted(shape: Any, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, dtype if jnp.issubdtype(shape.dtype, jnp.floating) else shape.dtype)


def _chains(jaxpr: Any) -> Iterator[FusedChain]:
    for equation in jaxpr.eqns:
        if equation.primitive is chains.fused_chain_p:
            shapes = tuple(variable.aval for variable in equation.invars)
            yield FusedChain(equation.params["layers"], equation.params["results"], shapes)
        elif "jaxpr" in equation.params:
            yield from _chains(getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"]))


def random_operands(fused: FusedChain, seed: int = 0) -> list[jax.Array]:
    """Normal maps, kernels after which maps are as large as before, and small biases."""
    rng = np.random.default_rng(seed)
    scales = dict.fromkeys(range(len(fused.operands)), 1.0)
    for layer in fused.layers:
        _, height, width, channels, _ = fused.operands[layer.kernel].shape
        scales[layer.kernel] = float(np.sqrt(2 / (height * width * channels)))
        scales[layer.kernel] *= 1.0 if layer.residual is None else _RESIDUAL
        if layer.bias is not None:
            scales[layer.bias] = _BIAS
    shapes = enumerate(fused.operands)
    values = (rng.standard_normal(each.shape, np.float32) * np.float32(scales[index]) for index, each in shapes)
    return [jax.device_put(value.astype(each.dtype)) for value, each in zip(values, fused.operands, strict=True)]


class Programs:
    """A fused chain with any tiles, compiled and timed: the `Chain` of `chain_search`.

    A program is `COPIES` custom calls, of which each has the result of the one before as one more operand, which it
    does not read: so they run one after the other, and nothing else does. So many share what a call costs the host.
    """

    def __init__(self, fused: FusedChain, kind: str) -> None:
        self._fused, self._kind = fused, kind
        self._operands = random_operands(fused)
        made = schedule.results_of(fused.operands, fused.layers)[fused.results[0]]
        self._first = jnp.zeros(made.shape, made.dtype)
        self._compiled: dict[frozenset[Any], Any] = {}
        self._calls = 0  # of a sample; not known yet
        self._expected: list[np.ndarray] | None = None

    def prepare(self, sides: Sequence[Tiles]) -> list[str | None]:
        """As in `Chain`. Custom calls need no tuning, so that programs compile side by side; nothing is timed then."""
        missing = [side for side in sides if _name(side) not in self._compiled]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(self._compile, missing))
        for side, program in zip(missing, found, strict=True):
            self._compiled[_name(side)] = program if isinstance(program, str) else _why_not(program, self._arguments)
        reasons = [self._compiled[_name(side)] for side in sides]
        return [reason if isinstance(reason, str) else None for reason in reasons]

    def seconds(self, tiles: Tiles) -> float:
        """As in `Chain`."""
        program = self._compiled[_name(tiles)]
        jax.block_until_ready(program(*self._arguments))  # finds what another program left
        if self._calls == 0:
            self._calls = max(CALLS, math.ceil(SAMPLE_SECONDS * CALLS / self._run_calls(program, CALLS)))
        return self._run_calls(program, self._calls) / (self._calls * COPIES)

    def _run_calls(self, program: Any, calls: int) -> float:
        """Seconds of so many calls, all dispatched before they are waited for."""
        start = time.perf_counter()
        for _ in range(calls):
            result = None  # given back first: at other addresses the next call's would have the graph told of it
            result = program(*self._arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    def why_wrong(self, key: Key, tiles: Tiles) -> str | None:
        """As in `Chain`: the layer by itself, then the whole chain, beside what the model chooses."""
        alone = self._fused.alone(self._fused.keys.index(key))
        operands = random_operands(alone)
        by_model, found = _run(alone, {}, operands), _run(alone, tiles, operands)
        reason = _difference(by_model, found, TOLERANCE[self._kind])
        if reason is not None:
            return f"the layer by itself: {reason}"
        if self._expected is None:
            self._expected = _run(self._fused, {}, self._operands)
        found = [np.asarray(each, np.float64) for each in self._compiled[_name(tiles)](*self._arguments)]
        reason = _difference(self._expected, found, _OF_CHAIN * TOLERANCE[self._kind])
        return None if reason is None else f"the chain: {reason}"

    def forget(self, kept: Tiles) -> None:
        """As in `Chain`."""
        names = {_name(kept), _name({})}
        self._compiled = {name: program for name, program in self._compiled.items() if name in names}

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self._operands, self._first

    def _compile(self, tiles: Tiles) -> Any:
        """A compiled program, or why there is none."""
        one = _function(self._fused, tiles)

        def run(operands: list[jax.Array], before: jax.Array) -> list[jax.Array]:
            results = []
            for _ in range(COPIES):
                results = one(*operands, before)
                before = results[0]
            return results

        try:
            return jax.jit(run).lower(*self._arguments).compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return _short(error)


def _name(tiles: Tiles) -> frozenset[Any]:
    return frozenset(tiles.items())


def _function(fused: FusedChain, tiles: Tiles) -> Any:
    layers = fused.with_tiles(tiles)
    return jax.jit(
        functools.partial(chains.fused_chain_p.bind, layers=layers, results=fused.results, chosen=False, packed=None)
    )


def _run(fused: FusedChain, tiles: Tiles, operands: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(each, np.float64) for each in _function(fused, tiles)(*operands)]


def _why_not(program: Any, arguments: tuple[Any, ...]) -> Any:
    """The program, which has run until its graph is made; or why it does not run."""
    try:
        for _ in range(_WARM_UP):
            jax.block_until_ready(program(*arguments))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return _short(error)
    return program


def _difference(expected: Sequence[np.ndarray], found: Sequence[np.ndarray], tolerance: float) -> str | None:
    """Why results are not as expected, or None."""
    for one, other in zip(expected, found, strict=True):
        error = data.frobenius(other, one)
        if not error <= tolerance:  # a NaN is not
            return f"relative error {error:.2g}, more than {tolerance:.2g}"
    return None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
