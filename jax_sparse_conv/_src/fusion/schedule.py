"""The layers of a fused chain, the order in which its custom call runs them, and where its maps lie in memory."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import chain_rules, placement
from jax_sparse_conv._src.fusion.placement import Span
from jax_sparse_conv._src.primitive import custom_call, primitives
from jax_sparse_conv._src.primitive.primitives import Config

_ALIGNMENT = 256  # bytes, of arrays in the workspace
_HIGHEST = 2  # of the custom call's precision

TakesPool: TypeAlias = Callable[[chain_tiles.Key, chain_tiles.Tile, int, bool], bool]
"""Whether the kernel of a layer takes the pool behind it, by key, tile, bytes of an element and whether at HIGHEST."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One convolution or dense layer of a fused chain. Operands are numbers; the result of an earlier layer is ~layer.

    Dense layers come behind all convolutions. They read [N, H, W, C] as a row [N, 1, 1, H * W * C], or averaged as
    [N, 1, 1, C].

    Attributes:
      config: of the separate operation.
      x: operand or layer.
      kernel: operand [1, kh, kw, C, K].
      bias: operand [1, K] or None.
      residual: operand or layer, or None.
      packed: operand that the separate operation reads on a CPU beside the kernel, or None.
      tile: of its kernel in the chain, where the planner takes it. None is what `chain_tiles` knows of the layer, and
        `chain_tiles.BY_MODEL` what the model chooses. Where one kernel runs two 1x1 layers, neither tile counts.
      averages: whether a dense layer reads the mean of x over its pixels.
    """

    config: Config
    x: int
    kernel: int
    bias: int | None = None
    residual: int | None = None
    packed: int | None = None
    tile: chain_tiles.Tile | None = None
    averages: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether it is a matrix product."""
        return self.config.method == "dense"

    def weights(self) -> list[int]:
        """The operands that are no maps."""
        return [number for number in (self.kernel, self.bias, self.packed) if number is not None]

    def renumbered(self, numbers: Mapping[int, int]) -> Layer:
        """The layer with other numbers of its operands."""

        def new(number: int | None) -> int | None:
            return number if number is None or number < 0 else numbers[number]

        names = ("x", "kernel", "bias", "residual", "packed")
        changes: dict[str, Any] = {name: new(getattr(self, name)) for name in names}
        return dataclasses.replace(self, **changes)

    @property
    def steps(self) -> int:
        """Layers of the kernel: one, and one for a pool."""
        return 2 if self.config.geometry.pool else 1


def results_of(operands: Sequence[Any], layers: Sequence[Layer]) -> list[Any]:
    """The result of every layer, as shape and dtype."""
    made: list[Any] = []
    for layer in layers:
        numbers = (layer.kernel, layer.bias, layer.residual, layer.packed)
        present = [operands[n] if n >= 0 else made[~n] for n in numbers if n is not None]
        x = input_of(layer, operands[layer.x] if layer.x >= 0 else made[~layer.x])
        made.append(primitives.conv_p.abstract_eval(x, *present, config=layer.config)[0])
    return made


def input_of(layer: Layer, x: Any) -> Any:
    """What the separate operation of a layer that reads x has as its own x, as shape and dtype."""
    if not layer.is_dense:
        return x
    channels = x.shape[3] if layer.averages else math.prod(x.shape[1:])
    return jax.core.ShapedArray((x.shape[0], 1, 1, channels), x.dtype)


class Where(enum.IntEnum):
    """Where an array of a call lies; the custom call's numbers."""

    OPERAND = 0
    RESULT = 1
    WORKSPACE = 2
    NOWHERE = 3  # a kernel hands it to the pool inside


@dataclasses.dataclass
class _Value:
    """An array of the kernel: where it lies and when it is needed."""

    shape: tuple[int, ...]
    where: Where
    index: int  # operand, result or byte
    first: int = -1  # step that writes it
    last: int = -1  # and the last that reads it
    over: _Value | None = None  # the residual in whose place it is written, element by element
    is_split: bool = False  # it has room for its low part: convolutions at HIGHEST read both parts
    low_part: int = -1  # byte of that room


@dataclasses.dataclass
class _Step:
    kind: int  # 0 convolution, 1 max pool, 2 dense layer
    x: int
    out: int
    kernel: int = -1
    bias: int = -1
    residual: int = -1
    numbers: tuple[int, ...] = ()  # window, stride, padding, dilation, ReLU, groups
    tile: chain_tiles.Tile = chain_tiles.BY_MODEL


class Schedule:
    """Steps, places in the workspace and attributes of a chain's custom call (`cuda/chain/decode.h`).

    Args:
      operands: of the chain, as abstract values.
      layers: of the chain.
      results: which layers' results are the chain's.
      order: of the layers, each behind those that it reads; as they are given where it is None.
      takes_pool: what kernels do on the devices that the call is for. The map in front of a pool that they take has no
        place, so the call is an error where they do not take it. None makes a call for any device: every such map has a
        place, whether it is used or not.
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
        self._is_precise = chain_rules.is_precise(layers[0].config, self._made[0].dtype)
        self._tiles = chain_tiles.known(chain_tiles.kind_of(self._itemsize, self._is_precise))
        self.precision = max(int(custom_call.attributes(layer.config)["precision"]) for layer in layers)
        for index in range(len(layers)) if order is None else order:
            self._add(index, layers[index])
        self._share_places()
        self._keep_operands_of_pairs()
        self.workspace_bytes = self._place()

    @classmethod
    def in_least_memory(
        cls,
        operands: Sequence[Any],
        layers: Sequence[Layer],
        results: Sequence[int],
        takes_pool: TakesPool | None = None,
    ) -> Schedule:
        """The given order, changed where that saves memory; of one image with projections beside their blocks' first.

        A layer that is not read by the next one may move to right before its first reader. A projection beside the
        first layer of its block lets kernels overlap, which pays where they leave multiprocessors idle, but its result
        waits beside larger maps. Where it costs no memory, no layer stands between two that one kernel may run.
        """
        is_one_image = operands[layers[0].x].shape[0] == 1
        given = _with_projections_first(layers) if is_one_image else list(range(len(layers)))
        order = _with_pairs(operands, layers, given)
        best = cls(operands, layers, results, order, takes_pool)
        if order != given:
            plain = cls(operands, layers, results, given, takes_pool)
            if plain.workspace_bytes < best.workspace_bytes:
                best, order = plain, given
        for index, first_reader in _early(layers, given):
            rest = [other for other in order if other != index]
            at = rest.index(first_reader)
            later = cls(operands, layers, results, [*rest[:at], index, *rest[at:]], takes_pool)
            if later.workspace_bytes < best.workspace_bytes:
                best, order = later, [*rest[:at], index, *rest[at:]]
        return best

    def attributes(self) -> dict[str, np.ndarray | np.int64]:
        """Of the custom call."""
        values = [[value.where, value.index, *value.shape, value.low_part] for value in self.values]
        layers = [[s.kind, s.x, s.kernel, s.bias, s.residual, s.out, *s.numbers] for s in self.steps]
        return {
            "values": np.asarray(values, np.int64).reshape(-1),
            "layers": np.asarray(layers, np.int64).reshape(-1),
            "tiles": np.asarray([step.tile for step in self.steps], np.int64).reshape(-1),
            "precision": np.int64(self.precision),
        }

    def _add_dense(self, index: int, layer: Layer) -> None:
        x = self._value(layer.x, len(self.steps))
        out = self._out(self._made[index].shape, len(self.steps), ~index)
        window = self.values[x].shape[1:3] if layer.averages else (1, 1)
        bias = -1 if layer.bias is None else layer.bias
        numbers = (*window, 1, 1, 0, 0, 0, 0, 1, 1, int(layer.config.activation == "relu"), 1)
        self.steps.append(_Step(2, x, out, layer.kernel, bias, numbers=numbers))

    def _add(self, index: int, layer: Layer) -> None:
        if layer.is_dense:
            self._add_dense(index, layer)
            return
        geometry, pool = layer.config.geometry, layer.config.geometry.pool
        step = len(self.steps)
        x = self._value(layer.x, step)
        self.values[x].is_split = self._is_precise and self.values[x].where is not Where.OPERAND
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
                self.values[out].where = Where.NOWHERE
            numbers = (*pool.window, *pool.strides, *pool.padding[0], *pool.padding[1], 1, 1)
            self.steps.append(_Step(1, out, pooled, numbers=(*numbers, 0, 1)))

    def _value(self, number: int, reader: int) -> int:
        if number not in self._of_number:
            self._of_number[number] = len(self.values)
            self.values.append(_Value(tuple(self._operands[number].shape), Where.OPERAND, number))
        value = self._of_number[number]
        self.values[value].last = max(self.values[value].last, reader)
        return value

    def _out(self, shape: tuple[int, ...], step: int, number: int | None) -> int:
        is_result = number is not None and ~number in self._results
        index = list(self._results).index(~number) if is_result and number is not None else 0
        self.values.append(_Value(shape, Where.RESULT if is_result else Where.WORKSPACE, index, step, step))
        if number is not None:
            self._of_number[number] = len(self.values) - 1
        return len(self.values) - 1

    def _share_places(self) -> None:
        """Let a result take the place of its residual, where nothing else reads that then or later.

        In every kernel one thread reads an element of the residual, then writes that of the result.
        """
        for number, step in enumerate(self.steps):
            out, residual = self.values[step.out], self.values[step.residual]
            if step.residual >= 0 and out.where == residual.where == Where.WORKSPACE:
                out.over = residual if residual.last == number and step.x != step.residual else None

    def _keep_operands_of_pairs(self) -> None:
        """Keep what a pair reads: its kernel writes the second result while other blocks read the first layer's x."""
        for number, (step, following) in enumerate(itertools.pairwise(self.steps)):
            if following.x == step.out and following.residual < 0 and self._may_be_pair(step, following):
                shared = {step.residual} if self.values[step.out].over is not None else set()
                for read in {step.x, step.residual} - {-1} - shared:
                    self.values[read].last = max(self.values[read].last, number + 1)

    def _may_be_pair(self, step: _Step, following: _Step) -> bool:
        """Whether GPUs may run both in one kernel, which their handler decides."""
        x, middle, out = (self.values[number].shape for number in (step.x, step.out, following.out))
        return _suits_pair(x, middle, out) and _is_pointwise(step) and _is_pointwise(following)

    def _place(self) -> int:
        """Give every array of the workspace a place that is free while it is needed; the bytes of all."""
        shared: dict[int, list[_Value]] = {}  # by the first in a place: all that take it one after the other
        for value in self.values:
            if value.where == Where.WORKSPACE:
                shared.setdefault(id(_first_in_place(value)), []).append(value)
        split = [value for value in self.values if value.is_split]
        spans = [Span(values[0].first, values[-1].last, self._bytes(values[0])) for values in shared.values()]
        spans += [Span(value.first, value.last, self._bytes(value)) for value in split]
        places = placement.place(spans)
        for values, place in zip(shared.values(), places[: len(shared)], strict=True):
            for value in values:
                value.index = place
        for value, place in zip(split, places[len(shared) :], strict=True):
            value.low_part = place
        return max(_ALIGNMENT, placement.size_of(spans, places))  # never empty

    def _bytes(self, value: _Value) -> int:
        return -(-math.prod(value.shape) * self._itemsize // _ALIGNMENT) * _ALIGNMENT


def _suits_pair(x: Sequence[int], middle: Sequence[int], out: Sequence[int]) -> bool:
    """Whether one kernel may have two 1x1 layers from x over the middle to out, [N, H, W, C] each."""
    return bool(_native.planner().may_be_pair(math.prod(middle[:3]), x[3], middle[3], out[3]))


def _is_pointwise(step: _Step) -> bool:
    """Whether it is a 1x1 convolution without strides, padding and groups."""
    return step.kind == 0 and step.numbers[:8] == (1, 1, 1, 1, 0, 0, 0, 0) and step.numbers[-1] == 1


def _first_in_place(value: _Value) -> _Value:
    return value if value.over is None else _first_in_place(value.over)


def _with_projections_first(layers: Sequence[Layer]) -> list[int]:
    """The given order, with projections in front of the first layer that reads the same map.

    A projection is a layer whose result is nothing but a later one's residual. Who rewrites a model meets it where that
    one reads it.
    """
    order: list[int] = []
    for index, layer in enumerate(layers):
        readers = [other for other in layers if ~index in (other.x, other.residual)]
        is_projection = len(readers) == 1 and readers[0].x != ~index and layer.residual is None and not layer.is_dense
        beside = [at for at, other in enumerate(order) if layers[other].x == layer.x] if is_projection else []
        order.insert(beside[0] if beside else len(order), index)
    return order


def _with_pairs(operands: Sequence[Any], layers: Sequence[Layer], given: Sequence[int]) -> list[int]:
    """The given order, with a projection that parts two 1x1 layers behind them: one kernel takes both."""
    order, made = list(given), results_of(operands, layers)

    def shape(number: int) -> Sequence[int]:
        return operands[number].shape if number >= 0 else made[~number].shape

    def is_pointwise(layer: Layer) -> bool:
        geometry = layer.config.geometry
        alone = not layer.is_dense and geometry.pool is None and geometry.groups == 1 and geometry.strides == (1, 1)
        return alone and operands[layer.kernel].shape[1:3] == (1, 1) and not any(map(any, geometry.padding))

    for at in range(len(layers) - 2):
        first, between, second = given[at : at + 3]
        pair = layers[first], layers[second]
        is_behind = pair[1].x == layers[between].x == ~first and pair[1].residual is None
        if not is_behind or not all(map(is_pointwise, pair)):
            continue
        if _suits_pair(shape(pair[0].x), made[first].shape, made[second].shape):
            order[at + 1 : at + 3] = [second, between]
    return order


def _early(layers: Sequence[Layer], order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(layer, the first that reads it) of layers that the one behind them does not read."""
    for at, index in enumerate(order):
        readers = [other for other in order if ~index in (layers[other].x, layers[other].residual)]
        if readers and readers[0] != order[at + 1] and not layers[readers[0]].is_dense:  # dense layers stay last
            yield index, readers[0]
