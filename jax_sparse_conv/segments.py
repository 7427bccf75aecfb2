"""The primitive `jsc_segment`: convolutions that feed each other as one call. `fusion.py` finds them in a program.

On CUDA devices with clusters (Hopper and later) a segment is a chain of "direct" kernels that overlap
(`cuda/chain.cu`); everywhere else it is the separate operations again. The kernels are dense: they skip no zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv import (
    _native,
    chain_tiles,
    devices,
    lowering,
    partitioning,
    placement,
    primitives,
    segment_rules,
)
from jax_sparse_conv.placement import Span
from jax_sparse_conv.primitives import Config

_ALIGNMENT = 256  # bytes, of arrays in the workspace
_HIGHEST = 2  # of the custom call's precision

TakesPool: TypeAlias = Callable[[chain_tiles.Key, chain_tiles.Tile, int, bool], bool]
"""Whether a kernel takes the pool behind it: of a layer with this key and tile, of elements of so many bytes, and of
products as HIGHEST has them or others."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One convolution of a segment; operands by number, results of earlier layers as ~layer.

    Attributes:
      config: of the separate operation.
      x: operand or layer.
      kernel: operand [1, kh, kw, C, K].
      bias: operand [1, K] or None.
      residual: operand or layer, or None.
      packed: operand that the separate operation reads on a CPU beside the kernel, or None.
      tile: of its kernel in the chain, where the planner has a plan with it; None for what `chain_tiles` knows of it,
        `chain_tiles.BY_MODEL` for what the model chooses.
    """

    config: Config
    x: int
    kernel: int
    bias: int | None = None
    residual: int | None = None
    packed: int | None = None
    tile: chain_tiles.Tile | None = None

    @property
    def steps(self) -> int:
        """Layers of the kernel: one, and one for a pool."""
        return 2 if self.config.geometry.pool else 1


# Parameters: layers, which of them are results, and `chosen`: a chain only where `segment_rules.pays`.
segment_p = jex_core.Primitive("jsc_segment")
segment_p.multiple_results = True
partitioning.needs_devices(segment_p)


def separate(*operands: jax.Array, layers: Sequence[Layer], results: Sequence[int]) -> list[jax.Array]:
    """The segment's meaning: its layers one by one."""
    made: list[jax.Array] = []
    for layer in layers:

        def value(number: int | None) -> jax.Array | None:
            if number is None:
                return None
            return operands[number] if number >= 0 else made[~number]

        x = value(layer.x)
        assert x is not None
        bias, residual, packed = value(layer.bias), value(layer.residual), value(layer.packed)
        made.append(primitives.bind(x, operands[layer.kernel], bias, residual, layer.config, packed))
    return [made[index] for index in results]


def keys(operands: Sequence[Any], layers: Sequence[Layer]) -> list[chain_tiles.Key]:
    """What `chain_tiles` knows each layer by."""
    calls = calls_of(operands, layers)
    return [chain_tiles.key_of(x.shape, kernel.shape, config.geometry) for config, x, kernel in calls]


# --- shapes ----------------------------------------------------------------------------------------------------------


def results_of(operands: Sequence[Any], layers: Sequence[Layer]) -> list[Any]:
    """The result of every layer, as shape and dtype."""
    made: list[Any] = []
    for layer in layers:
        numbers = (layer.x, layer.kernel, layer.bias, layer.residual, layer.packed)
        present = [operands[n] if n >= 0 else made[~n] for n in numbers if n is not None]
        made.append(primitives.conv_p.abstract_eval(*present, config=layer.config)[0])
    return made


def calls_of(operands: Sequence[Any], layers: Sequence[Layer]) -> list[tuple[Config, Any, Any]]:
    """Of every layer its configuration, and what it reads as x and kernel."""
    made = results_of(operands, layers)
    xs = [operands[layer.x] if layer.x >= 0 else made[~layer.x] for layer in layers]
    return [(layer.config, x, operands[layer.kernel]) for layer, x in zip(layers, xs, strict=True)]


def _abstract_eval(*operands: Any, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool) -> list[Any]:
    del chosen
    made = results_of(operands, layers)
    return [made[index] for index in results]


segment_p.def_abstract_eval(_abstract_eval)


@functools.lru_cache(maxsize=256)
def _compiled(layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool) -> Any:
    return jax.jit(functools.partial(segment_p.bind, layers=layers, results=results, chosen=chosen))


def _impl(*operands: jax.Array, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool) -> Any:
    return _compiled(layers, results, chosen)(*operands)


segment_p.def_impl(_impl)


# --- lowering --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Value:
    """An array of the kernel: where it lies and when it is needed."""

    shape: tuple[int, ...]
    where: int  # 0 operand, 1 result, 2 workspace, 3 nowhere: a kernel hands it to the pool inside
    index: int  # operand, result or byte
    first: int = -1  # step that writes it
    last: int = -1  # and the last that reads it
    over: _Value | None = None  # the residual in whose place it is written, element by element


@dataclasses.dataclass
class _Step:
    kind: int  # 0 convolution, 1 max pool
    x: int
    out: int
    kernel: int = -1
    bias: int = -1
    residual: int = -1
    numbers: tuple[int, ...] = ()  # window, stride, padding, dilation, ReLU, groups
    tile: chain_tiles.Tile = chain_tiles.BY_MODEL


class Schedule:
    """Steps, places in the workspace and attributes of a segment's custom call; see `cuda/segment_args.h`.

    Args:
      operands: of the segment, as abstract values.
      layers: of the segment.
      results: which layers' results are the segment's.
      order: of the layers, each behind those that it reads; as they are given where it is None.
      takes_pool: what kernels do on the devices that the call is for. The map in front of a pool that they take has no
        place, so that the call is an error where they do not. None for a call that suits any device: every such map
        has a place, whether it is used or not.
    """

    def __init__(
        self,
        operands: Sequence[Any],
        layers: Sequence[Layer],
        results: Sequence[int],
        order: Sequence[int] | None = None,
        takes_pool: TakesPool | None = None,
    ) -> None:
        self._operands, self._results, self._takes_pool = operands, results, takes_pool
        self._made = results_of(operands, layers)
        self._itemsize = self._made[0].dtype.itemsize
        self.values: list[_Value] = []
        self.steps: list[_Step] = []
        self._of_number: dict[int, int] = {}  # operand or ~layer -> value
        is_precise = segment_rules.is_precise(layers[0].config, self._made[0].dtype)
        self._tiles = chain_tiles.known(chain_tiles.kind_of(self._itemsize, is_precise))
        self.precision = max(int(lowering.attributes(layer.config)["precision"]) for layer in layers)
        for index in range(len(layers)) if order is None else order:
            self._add(index, layers[index])
        self._share_places()
        self.workspace_bytes = self._place()

    @classmethod
    def in_least_memory(
        cls,
        operands: Sequence[Any],
        layers: Sequence[Layer],
        results: Sequence[int],
        takes_pool: TakesPool | None = None,
    ) -> Schedule:
        """Layers as they are given, but for those that cost memory so and not right before the first that reads them.

        A projection beside the first layer of its block lets kernels overlap, and its result waits beside larger maps.
        """
        order = list(range(len(layers)))
        best = cls(operands, layers, results, order, takes_pool)
        for index, first_reader in _early(layers):
            rest = [other for other in order if other != index]
            at = rest.index(first_reader)
            later = cls(operands, layers, results, [*rest[:at], index, *rest[at:]], takes_pool)
            if later.workspace_bytes < best.workspace_bytes:
                best, order = later, [*rest[:at], index, *rest[at:]]
        return best

    def attributes(self) -> dict[str, np.ndarray | np.int64]:
        """Of the custom call."""
        values = [[value.where, value.index, *value.shape] for value in self.values]
        layers = [[s.kind, s.x, s.kernel, s.bias, s.residual, s.out, *s.numbers] for s in self.steps]
        return {
            "values": np.asarray(values, np.int64).reshape(-1),
            "layers": np.asarray(layers, np.int64).reshape(-1),
            "tiles": np.asarray([step.tile for step in self.steps], np.int64).reshape(-1),
            "precision": np.int64(self.precision),
        }

    def _add(self, index: int, layer: Layer) -> None:
        geometry, pool = layer.config.geometry, layer.config.geometry.pool
        step = len(self.steps)
        x = self._value(layer.x, step)
        kernel = self._operands[layer.kernel]
        residual = -1 if layer.residual is None else self._value(layer.residual, step)
        size = geometry.conv_size(self.values[x].shape[1:3], kernel.shape[1:3])
        shape = (self.values[x].shape[0], *size, kernel.shape[4])
        out = self._out(shape, step, ~index if pool is None else None)
        window = kernel.shape[1:3]
        padding = (*geometry.padding[0], *geometry.padding[1])
        numbers = (*window, *geometry.strides, *padding, *geometry.dilation)
        relu = layer.config.activation == "relu"
        bias = -1 if layer.bias is None else layer.bias
        numbers = (*numbers, int(relu), geometry.groups)
        key = chain_tiles.key_of(self.values[x].shape, kernel.shape, geometry)
        tile = self._tiles.get(key, chain_tiles.BY_MODEL) if layer.tile is None else layer.tile
        self.steps.append(_Step(0, x, out, layer.kernel, bias, residual, numbers, tile))
        if pool is not None:
            pooled = self._out(self._made[index].shape, step, ~index)  # the convolution's kernel may write it
            self.values[out].last = self.values[pooled].last = step + 1
            if self._takes_pool is not None and self._takes_pool(key, tile, self._itemsize, self.precision == _HIGHEST):
                self.values[out].where = 3
            numbers = (*pool.window, *pool.strides, *pool.padding[0], *pool.padding[1], 1, 1)
            self.steps.append(_Step(1, out, pooled, numbers=(*numbers, 0, 1)))

    def _value(self, number: int, reader: int) -> int:
        if number not in self._of_number:
            self._of_number[number] = len(self.values)
            self.values.append(_Value(tuple(self._operands[number].shape), 0, number))
        value = self._of_number[number]
        self.values[value].last = max(self.values[value].last, reader)
        return value

    def _out(self, shape: tuple[int, ...], step: int, number: int | None) -> int:
        is_result = number is not None and ~number in self._results
        index = list(self._results).index(~number) if is_result and number is not None else 0
        self.values.append(_Value(shape, 1 if is_result else 2, index, step, step))
        if number is not None:
            self._of_number[number] = len(self.values) - 1
        return len(self.values) - 1

    def _share_places(self) -> None:
        """Results that may take the place of a residual: nothing else reads it then or later.

        Every kernel reads an element of the residual before it writes that of the result, in the same thread.
        """
        for number, step in enumerate(self.steps):
            out, residual = self.values[step.out], self.values[step.residual]
            if step.residual >= 0 and out.where == residual.where == 2:
                out.over = residual if residual.last == number and step.x != step.residual else None

    def _place(self) -> int:
        """Give every array of the workspace a place that is free while it is needed; the bytes of all."""
        shared: dict[int, list[_Value]] = {}  # by the first in a place: all that take it one after the other
        for value in self.values:
            if value.where == 2:
                shared.setdefault(id(_first_in_place(value)), []).append(value)
        spans = [Span(values[0].first, values[-1].last, self._bytes(values[0])) for values in shared.values()]
        places = placement.place(spans)
        for values, place in zip(shared.values(), places, strict=True):
            for value in values:
                value.index = place
        return max(_ALIGNMENT, placement.size_of(spans, places))  # never empty

    def _bytes(self, value: _Value) -> int:
        return -(-math.prod(value.shape) * self._itemsize // _ALIGNMENT) * _ALIGNMENT


def _first_in_place(value: _Value) -> _Value:
    return value if value.over is None else _first_in_place(value.over)


def _early(layers: Sequence[Layer]) -> Iterator[tuple[int, int]]:
    """(layer, the first that reads it) of layers that the one behind them does not read."""
    for index in range(len(layers)):
        readers = [i for i, layer in enumerate(layers) if ~index in (layer.x, layer.residual)]
        if readers and readers[0] > index + 1:
            yield index, readers[0]


@devices.for_lowering
def _lower(
    ctx: Any,
    *operands: Any,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    platform: str | None,
) -> Any:
    if platform != "cuda" or partitioning.is_partitioned(ctx) or not _is_chain(ctx.avals_in, layers, chosen):
        lower = functools.partial(separate, layers=layers, results=results)
        return mlir.lower_fun(lower, multiple_results=True)(ctx, *operands)
    schedule = Schedule.in_least_memory(ctx.avals_in, layers, results, _pools_of(devices.ordinals(ctx)))
    scratch = jax.core.ShapedArray((schedule.workspace_bytes,), np.uint8)
    ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    call = jax.ffi.ffi_lowering(_native.target_name("segment"))
    return call(ctx, *operands, **schedule.attributes())[:-1]


def _pools_of(ordinals: Sequence[int]) -> TakesPool | None:
    """What the kernels of all of these GPUs do; None where there is none, so that the call must suit any."""
    if not ordinals:
        return None

    def take(key: chain_tiles.Key, tile: chain_tiles.Tile, element_bytes: int, precise: bool) -> bool:
        return all(chain_tiles.takes_pool(key, tile, element_bytes, precise, each) for each in ordinals)

    return take


def _is_chain(operands: Sequence[Any], layers: Sequence[Layer], chosen: bool) -> bool:
    """Whether the segment becomes a chain on this GPU."""
    calls = calls_of(operands, layers)
    return _fits(operands[0].dtype, calls) and (not chosen or segment_rules.pays(calls))


def _fits(dtype: Any, calls: Sequence[tuple[Config, Any, Any]]) -> bool:
    """Whether the kernel is there for the device and takes every layer, with the images that `vmap` added."""
    if _native.why_missing("segment", "cuda", dtype) is not None or not _has_clusters():
        return False
    return all(segment_rules.why_not(*call) is None for call in calls)


def _has_clusters() -> bool:
    device = devices.known()
    return device is not None and device.has_clusters


for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(segment_p, functools.partial(_lower, platform=_platform), platform=_platform)


# --- vmap and derivatives --------------------------------------------------------------------------------------------


def _batch(
    values: Sequence[Any], axes: Sequence[Any], *, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool
) -> tuple[list[jax.Array], list[int]]:
    """Images are folded into N; with batched weights the layers go their separate ways."""
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    weights = {number for layer in layers for number in (layer.kernel, layer.bias, layer.packed)}
    if size == 0 or any(axes[number] is not None for number in weights if number is not None):
        out = jax.vmap(functools.partial(separate, layers=layers, results=results), in_axes=tuple(axes))(*values)
        return out, [0] * len(out)

    def fold(number: int, value: Any, axis: Any) -> Any:
        if number in weights:
            return value
        every = jnp.broadcast_to(value, (size, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)
        return every.reshape(size * every.shape[1], *every.shape[2:])

    folded = [fold(number, *each) for number, each in enumerate(zip(values, axes, strict=True))]
    out = segment_p.bind(*folded, layers=layers, results=results, chosen=chosen)
    return [y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in out], [0] * len(out)


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
) -> Any:
    del chosen  # the layers run one by one
    varying = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def moving(*values: Any) -> Any:
        operands = list(primals)
        for index, value in zip(varying, values, strict=True):
            operands[index] = value
        return separate(*operands, layers=layers, results=results)

    return jax.jvp(moving, [primals[i] for i in varying], [tangents[i] for i in varying])


batching.primitive_batchers[segment_p] = _batch
ad.primitive_jvps[segment_p] = _jvp
