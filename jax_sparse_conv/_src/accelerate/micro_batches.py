"""A batch on a CPU in micro-batches, a few images at a time: their maps stay in the caches from layer to layer.

Maps of a whole batch do not, and every layer writes them to memory for the next one. But weights are read again for
each micro-batch. So only the first layers do it, which have large maps and few weights. Where it ends says a model:
what maps cost that no longer go through memory, less what weights cost that are read more often
("cpu micro batches" of `dispatch/model.json`).

A primitive holds both programs: the batch as one, which transformations see, and in micro-batches, which one CPU runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.accelerate import equations
from jax_sparse_conv._src.accelerate.batch_axes import Batch, opened
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.fusion import dense_blocks, rewrite
from jax_sparse_conv._src.fusion.jaxprs import MICRO_BATCHES, Equation, FlatJaxpr, last_uses
from jax_sparse_conv._src.primitive import differentiation, explicit, jax_internals, partitioning, primitives

micro_batches_p = jex_core.Primitive(MICRO_BATCHES)
micro_batches_p.multiple_results = True
jax_internals.needs_devices(micro_batches_p)


def with_micro_batches(every: Any, weights: int) -> Any:
    """A closed jaxpr of so many weights and the arguments of a call, whose first layers a CPU runs in micro-batches.

    The same jaxpr where that is not expected to be faster, or no axis of images is known.
    """
    if every.effects:  # which have an order
        return every
    programs = (_Program(every, weights, batch) for batch in _batches(every.in_avals[weights:]))
    program = next((each for each in programs if each.first > 0), None)
    if program is None:
        return every
    parts = jax.make_jaxpr(program.evaluate)(*every.in_avals)
    return jax.make_jaxpr(functools.partial(micro_batches_p.bind, jaxpr=every, parts=parts))(*every.in_avals)


# --- the primitive ----------------------------------------------------------------------------------------------------


def _abstract(*operands: Any, jaxpr: Any, parts: Any) -> Sequence[Any]:
    del operands, parts
    return jaxpr.out_avals


def _as_one(*operands: Any, jaxpr: Any, parts: Any) -> list[Any]:
    """What the primitive computes; in chains, where those are faster."""
    del parts
    out, _ = rewrite.evaluate(jaxpr, operands)
    return out


def _lower(ctx: Any, *operands: Any, jaxpr: Any, parts: Any, platform: str | None) -> Any:
    # A program that is exported runs on machines with other numbers of threads. Over several devices a batch is split.
    axes = ctx.module_context.axis_context
    is_of_one = isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1
    is_of_one &= platform == "cpu" and not partitioning.is_exported(ctx)
    one = functools.partial(_as_one, jaxpr=jaxpr, parts=parts)
    function = jex_core.jaxpr_as_fun(parts) if is_of_one else one
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return differentiation.jvp_of(functools.partial(_as_one, **params), primals, tangents)


def _transpose(cotangents: Sequence[Any], *values: Any, **params: Any) -> list[Any]:
    return differentiation.transposed(functools.partial(_as_one, **params), cotangents, values)


def _batched(values: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    out = jax.vmap(functools.partial(_as_one, **params), in_axes=tuple(axes))(*values)
    return out, [0] * len(out)


def _taylor(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
    return differentiation.taylor_of(functools.partial(_as_one, **params), primals, series)


micro_batches_p.def_abstract_eval(_abstract)
micro_batches_p.def_impl(_as_one)
for _platform in (None, "cpu"):
    mlir.register_lowering(micro_batches_p, functools.partial(_lower, platform=_platform), platform=_platform)
ad.primitive_jvps[micro_batches_p] = _jvp
ad.primitive_transposes[micro_batches_p] = _transpose
batching.primitive_batchers[micro_batches_p] = _batched
jax_internals.checks_inside(micro_batches_p, "jaxpr")
jax_internals.has_taylor(micro_batches_p, _taylor)


# --- which layers -----------------------------------------------------------------------------------------------------


def _batches(types: Sequence[Any]) -> Iterator[Batch]:
    """The images that a call may have, and of a micro-batch: at most one for each thread, and at least half as many.

    Arguments of four axes may be kernels, whose first axis no convolution has for that of its images.
    """
    if devices.default_platform() != "cpu" or devices.cpu().isa == "none" or explicit.is_split(*types):
        return
    if not all(isinstance(size, int) for aval in types for size in aval.shape):
        return
    threads = devices.cpu().threads
    for images in dict.fromkeys(aval.shape[0] for aval in types if aval.ndim == 4):
        micro = max((n for n in range(1, min(threads, images - 1) + 1) if images % n == 0), default=0)
        if micro and micro * 2 >= threads:
            yield Batch(images, micro)


class _Program:
    """The equations of a program.

    Attributes:
      first: how many equations, of those that take each image by itself, come before the rest.
    """

    def __init__(self, every: Any, weights: int, batch: Batch) -> None:
        self._batch = batch
        self._flat = FlatJaxpr(every, every.in_avals, opened)
        of_layers = _arguments_of_layers(self._flat)
        self._axes: dict[int, int] = {
            number: 0
            for number, aval in zip(self._flat.arguments[weights:], every.in_avals[weights:], strict=True)
            if aval.shape[:1] == (batch.images,) and number not in of_layers
        }
        self._mixed: set[int] = set()  # what depends on images, and has no axis of them
        self._types = dict(zip(self._flat.arguments, every.in_avals, strict=True))
        self._chosen = [each for each in self._flat.equations if self._takes(each)]
        self.first = self._end()

    def _takes(self, each: Equation) -> bool:
        """Whether an equation takes each image by itself; its results' axes are known then."""
        self._types.update(zip(each.outputs, (variable.aval for variable in each.equation.outvars), strict=True))
        axes = [self._axes.get(number) for number in each.inputs]
        is_mixed = not self._mixed.isdisjoint(each.inputs)
        if not is_mixed and all(axis is None for axis in axes):
            return False
        found = None if is_mixed else self._batch.axes_of(each.equation, axes)
        if found is None or None in found:
            self._mixed.update(each.outputs)
            return False
        self._axes.update((number, axis) for number, axis in zip(each.outputs, found, strict=True) if axis is not None)
        return True

    def _end(self) -> int:
        """How many of the chosen equations are worth it."""
        of = model.shipped("cpu micro batches")
        rounds = self._batch.images // self._batch.micro
        uses = last_uses(self._flat)
        places = {id(each): place for place, each in enumerate(self._flat.equations)}
        best, end, saved = 0.0, 0, 0.0
        alive: dict[int, int] = {}
        has_layer = False
        for count, each in enumerate(self._chosen, 1):
            has_layer |= _is_layer(each)
            maps = [number for number in {*each.inputs, *each.outputs} if number in self._axes]
            sizes = {number: equations.bytes_of(self._types[number]) for number in maps}
            inside = _bytes_inside(each)
            written = [*sizes.values(), *inside]
            saved += sum(size for size in written if size > of["bytes, cached"]) / of["bytes a microsecond"]
            # Of a kernel and its packed copy one is read.
            is_apart = each.equation.primitive is dense_blocks.dense_block_p and not inside  # its layers are not known
            weights = [n for n in each.inputs if n in self._types and n not in self._axes and not is_apart]
            read = max((equations.bytes_of(self._types[n]) for n in weights), default=0)
            call = of["call"] if each.equation.primitive is primitives.conv_p else 0.0
            saved -= (rounds - 1) * (read / of["bytes a microsecond"] + call)
            alive = {n: size for n, size in {**alive, **sizes}.items() if uses.get(n, 0) > places[id(each)]}
            # What is read behind this equation goes through memory all the same.
            if (gain := saved - sum(alive.values()) / of["bytes a microsecond"]) > best and has_layer:
                best, end = gain, count
        return end

    def evaluate(self, *arguments: Any) -> list[Any]:
        """The results for the types that the program was made of."""
        inside = {id(each) for each in self._chosen[: self.first]}
        values = {**self._flat.known, **dict(zip(self._flat.arguments, arguments, strict=True))}
        made = {number for each in self._chosen[: self.first] for number in each.outputs}
        read_later = {number for each in self._flat.equations if id(each) not in inside for number in each.inputs}
        crossing = sorted(made & {*read_later, *self._flat.outputs})
        given = sorted({n for each in self._chosen[: self.first] for n in each.inputs if n in self._axes} - made)
        pending = [each for each in self._flat.equations if id(each) not in inside]
        before = [each for each in pending if not _depends(each, made)]  # which grows
        for each in before:
            equations.evaluate(each, values)
        found = self._in_micro_batches([values[number] for number in given], given, crossing, values)
        values.update(zip(crossing, found, strict=True))
        done = set(map(id, before))
        for each in pending:
            if id(each) not in done:
                equations.evaluate(each, values)
        return [values[number] for number in self._flat.outputs]

    def _in_micro_batches(
        self, maps: Sequence[Any], given: Sequence[int], crossing: Sequence[int], values: Any
    ) -> list[Any]:
        """The values `crossing` of all images."""
        images, micro = self._batch.images, self._batch.micro

        def parted(value: Any, axis: int) -> Any:
            first = jnp.moveaxis(value, axis, 0)
            return first.reshape(images // micro, micro, *first.shape[1:])

        # Such as `platform_index`, which XLA resolves where it is read.
        free = [each for each in self._flat.equations if not each.inputs]

        def body(parts: Sequence[Any]) -> list[Any]:
            here = dict(values)
            for each in free:
                equations.evaluate(each, here)
            here.update(
                (number, jnp.moveaxis(part, 0, self._axes[number])) for number, part in zip(given, parts, strict=True)
            )
            for each in self._chosen[: self.first]:
                axes = [self._axes.get(number) for number in each.inputs]
                operands = [here[number] for number in each.inputs]
                here.update(zip(each.outputs, self._batch.run(each.equation, operands, axes), strict=True))
            return [jnp.moveaxis(here[number], self._axes[number], 0) for number in crossing]

        out = jax.lax.map(body, [parted(value, self._axes[n]) for n, value in zip(given, maps, strict=True)])
        whole = [value.reshape(images, *value.shape[2:]) for value in out]
        return [jnp.moveaxis(value, 0, self._axes[number]) for number, value in zip(crossing, whole, strict=True)]


def _arguments_of_layers(flat: FlatJaxpr) -> set[int]:
    """The arguments that kernels and biases are made of, and no map."""
    makers = {number: each for each in flat.equations for number in each.outputs}
    maps = {id(each): _maps_of(each) for each in flat.equations}
    weights = [number for each in flat.equations for number in each.inputs if number not in maps[id(each)]]

    def made_of(numbers: Iterable[int]) -> set[int]:
        found, left = set[int](), list(numbers)
        while left:
            if (number := left.pop()) not in found:
                found.add(number)
                left += maps[id(makers[number])] if number in makers else []
        return found

    read = made_of(number for each in flat.equations if _is_layer(each) for number in maps[id(each)])
    return (made_of(weights) - read).intersection(flat.arguments)


def _is_layer(each: Equation) -> bool:
    return each.equation.primitive in (primitives.conv_p, dense_blocks.dense_block_p)


def _bytes_inside(each: Equation) -> list[int]:
    """Of the maps that a CPU's dense block has beside its result. Each counts once, whatever its layers read again."""
    if each.equation.primitive is not dense_blocks.dense_block_p:
        return []
    maps = dense_blocks.maps_on_cpu(
        [variable.aval for variable in each.equation.invars], each.equation.params["packed"]
    )
    return [equations.bytes_of(aval) for aval in maps]


def _maps_of(each: Equation) -> Sequence[int]:
    """What an equation reads, but for the weights of a layer."""
    if each.equation.primitive is dense_blocks.dense_block_p:
        return each.inputs[:1]
    if each.equation.primitive is primitives.conv_p:
        named = primitives.Operands.of(each.inputs, each.equation.params["config"])
        return [number for number in (named.x, named.residual) if number is not None]
    return each.inputs


def _depends(each: Equation, made: set[int]) -> bool:
    """Whether an equation reads what is in `made`, where its own results then are, too."""
    if made.isdisjoint(each.inputs):
        return False
    made.update(each.outputs)
    return True
