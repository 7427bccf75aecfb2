"""Blocks of a DenseNet in a rewritten function: layers that append to a map, as one call of `dense_block`.

A layer is a batch norm and ReLU of the map, a 1x1 convolution with bias and ReLU, a 3x3 convolution, and a
concatenation of the map and its result. A function may concatenate map and result, or all results so far. So a map is
known by its parts: what is concatenated to make it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.accelerate import equations, maps
from jax_sparse_conv._src.accelerate.rows import Row
from jax_sparse_conv._src.accelerate.values import Values
from jax_sparse_conv._src.fusion import block_limits, dense_blocks
from jax_sparse_conv._src.fusion.block_parameters import DenseBlockLayer, DenseTransition, for_cpu, pack_dense_block
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr
from jax_sparse_conv._src.primitive import primitives
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem.geometry import Geometry, Pool

_POINT = Geometry((1, 1), ((0, 0), (0, 0)))
_WINDOW = Geometry((1, 1), ((1, 1), (1, 1)))
_POOLED = dataclasses.replace(_POINT, pool=Pool("avg", (2, 2), (2, 2), ((0, 0), (0, 0))))
_AFFINE = ("add", "sub", "mul", "div")
_CONVERSION = "convert_element_type"


def rewritten(closed: Any, fixed: Sequence[bool], rows: Sequence[Row]) -> Any:
    """A closed jaxpr of calls of this package with its dense blocks as one call each, where the device has that.

    Args:
      closed: the jaxpr.
      fixed: of its arguments, which depend on weights alone.
      rows: of its calls, which are told their block and their new numbers.
    """
    if devices.default_platform() not in ("gpu", "cpu"):
        return closed

    def function(*arguments: Any) -> list[Any]:
        flat = equations.flattened(closed, arguments)
        search = _Search(flat, {number for number, each in zip(flat.arguments, fixed, strict=True) if each})
        blocks = search.blocks()
        _tell(rows, flat, blocks)
        return search.evaluated(blocks)

    return jax.make_jaxpr(function)(*closed.in_avals)


@dataclasses.dataclass(eq=False)
class _Scaled:
    """relu(scale * x + shift) of a map: the equations, the first of which reads it."""

    source: int
    path: list[Equation]


@dataclasses.dataclass(eq=False)
class _Layer:
    """One layer: how it starts, its convolutions, and what appends its result."""

    scaled: _Scaled
    convs: tuple[Equation, Equation]
    appended: Equation

    def equations(self) -> list[Equation]:
        return [*self.scaled.path, *self.convs, self.appended]


@dataclasses.dataclass(eq=False)
class _Block:
    """Layers that follow each other, the transition behind them if there is one, and the dtype of the one call."""

    layers: list[_Layer]
    transition: tuple[_Scaled, Equation] | None = None
    dtype: Any = None

    def equations(self) -> list[Equation]:
        behind = [] if self.transition is None else [*self.transition[0].path, self.transition[1]]
        return [*(each for layer in self.layers for each in layer.equations()), *behind]

    @property
    def last(self) -> Equation:
        """The equation whose result is the block's."""
        return self.layers[-1].appended if self.transition is None else self.transition[1]


class _Search:
    """Finds the blocks of a function, and evaluates it with them.

    Args:
      flat: the function.
      fixed: which of its arguments depend on weights alone.
    """

    def __init__(self, flat: FlatJaxpr, fixed: set[int]) -> None:
        self._flat, self._values = flat, Values(flat, fixed)
        self._makers: dict[int, Equation] = {}
        self._readers: dict[int, list[Equation]] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        for each in flat.equations:
            self._values.note(each)
            self._makers.update(dict.fromkeys(each.outputs, each))
            for number in each.inputs:
                self._readers.setdefault(number, []).append(each)
            if each.equation.primitive.name == "concatenate" and each.equation.params["dimension"] == maps.CHANNELS:
                self._parts[each.outputs[0]] = tuple(part for number in each.inputs for part in self._of(number))

    def _of(self, number: int) -> tuple[int, ...]:
        return self._parts.get(number, (number,))

    # --- what is there -----------------------------------------------------------------------------------------------

    def blocks(self) -> list[_Block]:
        """All blocks that the device has one call for."""
        layers = [layer for number in self._parts if (layer := self._layer(number)) is not None]
        behind = {self._of(layer.scaled.source): layer for layer in layers}
        made = {self._parts[layer.appended.outputs[0]] for layer in layers}
        found = []
        for parts in (each for each in behind if each not in made):  # in the order of the function
            row: list[_Layer] = []
            while parts in behind:
                row.append(behind[parts])
                parts = self._parts[row[-1].appended.outputs[0]]
            found += self._cut(row)
        whole = [self._with_transition(block) for block in found]
        return [block for block in whole if block is not None]

    def _layer(self, result: int) -> _Layer | None:
        """The layer whose result a map ends with."""
        parts, appended = self._parts[result], self._makers[result]
        second = self._call(appended.inputs[-1], (3, 3), _WINDOW, None, has_bias=False)
        first = None if second is None else self._call(second.inputs[0], (1, 1), _POINT, "relu", has_bias=True)
        if second is None or first is None or self._of(appended.inputs[-1]) != parts[-1:]:
            return None
        scaled = self._scaled(first.inputs[0], parts[:-1])
        return None if scaled is None else _Layer(scaled, (first, second), appended)

    def _call(
        self, number: int, size: tuple[int, int], geometry: Geometry, activation: ActivationName | None, has_bias: bool
    ) -> Equation | None:
        """The call of this package that a value is the result of, if it is like this."""
        equation = self._makers.get(number)
        if equation is None or equation.equation.primitive is not primitives.conv_p:
            return None
        config = equation.equation.params["config"]
        method = primitives.sparse_method(geometry)
        wanted = Config(geometry, method, activation, has_bias, fallback=True, precision=config.precision)
        is_alike = dataclasses.replace(config, has_packed=False) == wanted
        return equation if is_alike and equation.equation.invars[1].aval.shape[:3] == (1, *size) else None

    def _scaled(self, number: int, parts: tuple[int, ...]) -> _Scaled | None:
        """How a value comes from the map of these parts by a scale, a shift and a ReLU."""
        path: list[Equation] = []
        has_relu = False
        while self._of(number) != parts:
            equation = self._makers.get(number)
            if equation is None or len(self._readers[number]) != 1:
                return None
            name, moving = equation.equation.primitive.name, self._moving(equation)
            is_relu = equations.is_relu(equation.equation) or (name == "max" and moving is not None)
            if moving is None or (name != _CONVERSION and is_relu == has_relu):  # once, behind all else
                return None
            has_relu |= is_relu
            path.insert(0, equation)
            number = moving
        return _Scaled(number, path) if has_relu else None

    def _moving(self, equation: Equation) -> int | None:
        """The map among the operands of an equation of a batch norm or ReLU, whose others go by channels."""
        name = equation.equation.primitive.name
        if equations.is_relu(equation.equation) or (name == _CONVERSION and _is_kept(equation.equation)):
            return equation.inputs[0]
        others = [number for number in equation.inputs if self._values.channel_source(number, maps.STORED) is not None]
        left = [number for number in equation.inputs if number not in others]
        if name not in (*_AFFINE, "max") or len(left) != 1:
            return None
        is_other = name == "max" and not all(map(self._values.is_zero, others))
        return None if is_other or (name == "div" and left[0] != equation.inputs[0]) else left[0]

    def _parameters_of(self, scaled: _Scaled, convs: Sequence[Equation]) -> list[int]:
        """What a batch norm and convolutions read beside the map."""
        found = [number for each in scaled.path for number in each.inputs if number != self._moving(each)]
        return [*found, *(number for each in convs for number in each.inputs[1:])]

    def _cut(self, layers: list[_Layer]) -> list[_Block]:
        """Layers in a row as blocks, each as long as nothing outside reads what is in it."""
        blocks, start = [], 0
        while start < len(layers):
            ends = range(len(layers), start, -1)
            end = next((end for end in ends if self._is_closed(_Block(layers[start:end]))), None)
            if end is not None:
                blocks.append(_Block(layers[start:end]))
            start = start + 1 if end is None else end
        return blocks

    def _is_closed(self, block: _Block) -> bool:
        """Whether nothing outside of a block reads what is in it, but for its result."""
        inside = block.equations()
        known = set(map(id, inside))
        made = {number for each in inside for number in each.outputs} - set(block.last.outputs)
        if not made.isdisjoint(self._flat.outputs):
            return False
        return all(id(reader) in known for number in made for reader in self._readers.get(number, ()))

    def _with_transition(self, block: _Block) -> _Block | None:
        """A block with the transition behind it, without it, or None, by what the device has."""
        result = block.layers[-1].appended.outputs[0]
        configs = {conv.equation.params["config"].precision for layer in block.layers for conv in layer.convs}
        if len(configs) != 1:
            return None
        (precision,) = configs
        given = self._values.type_of(block.layers[0].scaled.source)
        behind = self._transition(result)
        for dtype in _computed_in(given.dtype):
            x = jax.ShapeDtypeStruct(given.shape, dtype)
            layers = [_described(layer, dtype) for layer in block.layers]
            if behind is not None and behind[1].equation.params["config"].precision == precision:
                kernel = behind[1].equation.invars[1].aval
                channels = jax.ShapeDtypeStruct((kernel.shape[3],), dtype)
                transition = DenseTransition(channels, channels, jax.ShapeDtypeStruct(kernel.shape[1:], dtype))
                whole = _Block(block.layers, behind, dtype)
                if self._is_closed(whole) and self._is_one_call(whole, x, layers, precision, transition):
                    return whole
            if self._is_one_call(block, x, layers, precision):
                return _Block(block.layers, dtype=dtype)
        return None

    def _is_one_call(
        self, block: _Block, x: Any, layers: Sequence[Any], precision: Any, transition: Any = None
    ) -> bool:
        """Whether a block of such parameters is one call where the function runs."""
        if devices.default_platform() == "gpu":
            return block_limits.is_one_call(x, layers, precision, transition)
        is_known = all(map(self._values.is_fixed, self._read_by(block)))
        return is_known and block_limits.is_one_call_on_cpu(x, layers, transition)

    def _read_by(self, block: _Block) -> list[int]:
        """All parameters of a block."""
        read = [number for layer in block.layers for number in self._parameters_of(layer.scaled, layer.convs)]
        if block.transition is not None:
            read += self._parameters_of(block.transition[0], [block.transition[1]])
        return read

    def _transition(self, result: int) -> tuple[_Scaled, Equation] | None:
        """The transition that is all that reads a map."""
        readers = self._readers.get(result, [])
        if len(readers) != 1 or result in self._flat.outputs:
            return None
        number = readers[0].outputs[0]
        while len(self._readers.get(number, ())) == 1:
            (reader,) = self._readers[number]
            if reader.equation.primitive is primitives.conv_p:
                call = self._call(reader.outputs[0], (1, 1), _POOLED, None, has_bias=False)
                scaled = None if call is None or reader.inputs[0] != number else self._scaled(number, self._of(result))
                return None if call is None or scaled is None else (scaled, call)
            if self._moving(reader) != number:
                return None
            number = reader.outputs[0]
        return None

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluated(self, blocks: Sequence[_Block]) -> list[Any]:
        """The results of the function, these blocks as one call each."""
        ends = {id(block.last): block for block in blocks}
        gone = {id(each) for block in blocks for each in block.equations()}
        for each in self._flat.equations:
            if id(each) in ends:
                self._values.set(each, [self._run(ends[id(each)])])
            elif id(each) not in gone:
                operands = [self._values[number] for number in each.inputs]
                self._values.set(each, equations.bind(each.equation, operands))
        return [jnp.asarray(self._values[number]) for number in self._flat.outputs]

    def _run(self, block: _Block) -> jax.Array:
        given = self._values[block.layers[0].scaled.source]
        x = given.astype(block.dtype)
        # Those of 16 bits on a CPU are of float32 until they are packed: scales and shifts stay so.
        dtype = jnp.dtype(jnp.float32) if devices.default_platform() == "cpu" else block.dtype
        layers, transition = [self._parameters(layer, dtype) for layer in block.layers], None
        precision = block.layers[0].convs[0].equation.params["config"].precision
        if block.transition is not None:
            scaled, conv = block.transition
            transition = DenseTransition(*self._affine(scaled, dtype), self._values[conv.inputs[1]][0].astype(dtype))
        if devices.default_platform() == "cpu":
            packed = for_cpu(pack_dense_block(layers, transition), block.dtype)
            return dense_blocks.dense_block(x, packed, precision=precision).astype(given.dtype)
        if all(map(self._values.is_fixed, self._read_by(block))):
            return dense_blocks.dense_block(x, pack_dense_block(layers, transition), precision=precision)
        return dense_blocks.dense_block(x, layers, transition=transition, precision=precision)

    def _parameters(self, layer: _Layer, dtype: Any) -> DenseBlockLayer:
        first, second = layer.convs
        kernel1, bias, kernel2 = (
            self._values[number][0].astype(dtype) for number in (first.inputs[1], first.inputs[2], second.inputs[1])
        )
        return DenseBlockLayer(*self._affine(layer.scaled, dtype), kernel1, bias, kernel2)

    def _affine(self, scaled: _Scaled, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Scale and shift [C] of the map."""
        x = self._values.type_of(scaled.source)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale = shift = None  # 1 and 0, which are not computed with: XLA keeps a product with 0
        number = scaled.source
        for each in scaled.path:
            name = each.equation.primitive.name
            if name in _AFFINE:
                is_first = each.inputs[0] == number
                value = self._values.per_channel(each.inputs[is_first], maps.STORED)
                assert value is not None
                scale, shift = _moved(name, scale, shift, value.astype(wide), is_first)
            number = each.outputs[0]
        channels = x.shape[maps.CHANNELS]
        both = (np.ones((), wide) if scale is None else scale, np.zeros((), wide) if shift is None else shift)
        return tuple(jnp.broadcast_to(each, (channels,)).astype(dtype) for each in both)  # type: ignore[return-value]


def _computed_in(dtype: Any) -> list[Any]:
    """The dtypes that a block of such a map may be computed in, best first.

    Where a CPU has no call of 16 bits for a block, one of float32 is faster than its layers one by one. No map within
    the block is rounded then.
    """
    is_half = dtype in (jnp.bfloat16, jnp.float16)
    return [dtype, jnp.dtype(jnp.float32)] if is_half and devices.default_platform() == "cpu" else [dtype]


def _is_kept(conversion: Any) -> bool:
    """Whether a batch norm of 16 bits is computed in float32 by such a conversion: to it, or back."""
    dtypes = [each.aval.dtype for each in (*conversion.invars, *conversion.outvars)]
    return jnp.float32 in dtypes and all(jnp.issubdtype(each, jnp.floating) and each.itemsize <= 4 for each in dtypes)


def _moved(name: str, scale: Any, shift: Any, value: Any, is_first: bool) -> tuple[Any, Any]:
    """Scale (None: 1) and shift (None: 0) after one more equation; `is_first` where the map is on the left."""
    if name == "mul":
        return value if scale is None else scale * value, None if shift is None else shift * value
    if name == "div":
        return (1 if scale is None else scale) / value, None if shift is None else shift / value
    if name == "add":
        return scale, value if shift is None else shift + value
    if is_first:
        return scale, -value if shift is None else shift - value
    return np.full((), -1, value.dtype) if scale is None else -scale, value if shift is None else value - shift


def _described(layer: _Layer, dtype: Any) -> DenseBlockLayer:
    """A layer's parameters as shapes."""
    kernel1, kernel2 = (each.equation.invars[1].aval.shape[1:] for each in layer.convs)
    shapes = ((kernel1[2],), (kernel1[2],), kernel1, (kernel1[3],), kernel2)
    return DenseBlockLayer(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def _tell(rows: Sequence[Row], flat: FlatJaxpr, blocks: Sequence[_Block]) -> None:
    """Tell the calls of blocks so, and all others their new numbers."""
    calls = [each for each in flat.equations if each.equation.primitive is primitives.conv_p]
    block_of = {id(each): number for number, block in enumerate(blocks, 1) for each in block.equations()}
    left = iter(range(len(calls)))
    numbers = {call: None if id(each) in block_of else next(left) for call, each in enumerate(calls)}
    for row in rows:
        if row.call is not None:
            row.block = block_of.get(id(calls[row.call]))
            row.call = numbers[row.call]
