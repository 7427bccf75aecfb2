"""A program with its layers in chains, what each chain reads of the weights in one array.

Every argument of a call costs the host (`python -m benchmarks host`), and a network has hundreds of weights. On a GPU a
fused chain takes all of them as one operand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.accelerate import equations, hoist
from jax_sparse_conv._src.accelerate.hoist import Split
from jax_sparse_conv._src.fusion import chains, one_array, rewrite
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr

# Bytes up to which an array of the user's own is copied into the one array. All others have been computed, so that no
# other copy of them is needed.
_LARGEST_COPY = 2**16


def with_chains(split: Split) -> Split:
    """A split program whose second part has its layers in chains, where that is faster."""

    def every(*values: Any) -> list[Any]:
        return rewrite.evaluate(split.every, values)[0]

    chained = Split(split.once, jax.make_jaxpr(every)(*split.every.in_avals))
    return _packed(chained) if devices.default_platform() == "gpu" else chained


@dataclasses.dataclass
class _Chain:
    """A chain, and what is to be in its one array.

    Attributes:
      equation: the chain.
      slots: by place among its operands, the number of what stands there in the array.
      entries: that number by (weight, shape as the chain has it). A weight that several layers read is there once.
    """

    equation: Equation
    slots: dict[int, int] = dataclasses.field(default_factory=dict)
    entries: dict[tuple[int, one_array.Shape], int] = dataclasses.field(default_factory=dict)

    def take(self, place: int, weight: int) -> None:
        """Have an operand in the array."""
        shape = self.equation.equation.invars[place].aval.shape
        self.slots[place] = self.entries.setdefault((weight, shape), len(self.entries))

    @property
    def weights(self) -> list[int]:
        """What is in the array, in order."""
        return [weight for weight, _ in self.entries]

    def reads(self) -> list[int]:
        """The operands that stay, by number."""
        return [number for place, number in enumerate(self.equation.inputs) if place not in self.slots]

    def bind(self, values: dict[int, Any], array: Any) -> list[Any]:
        """The chain of values by number, and of its array."""
        count = len(self.equation.inputs)
        kept = [place for place in range(count) if place not in self.slots]
        numbers = {place: number for number, place in enumerate(kept)}
        numbers |= {place: len(kept) + slot for place, slot in self.slots.items()}
        layers = tuple(layer.renumbered(numbers) for layer in self.equation.equation.params["layers"])
        operands = [*(values[number] for number in self.reads()), array]
        packed = tuple(shape for _, shape in self.entries)
        return equations.bind(self.equation.equation, operands, layers=layers, packed=packed)


def _packed(split: Split) -> Split:
    """A split program whose chains take their weights as one array each."""
    flat = FlatJaxpr(split.every, split.every.in_avals, lambda equation: None)
    count = len(split.once.out_avals)
    found = _chains(flat, _roots(flat, flat.arguments[:count]), _may_be_copied(split.once))
    if not found:
        return split
    gone = {number for each in found for number in each.weights}
    kept = [place for place, number in enumerate(flat.arguments[:count]) if number not in gone]
    groups = [[flat.arguments.index(number) for number in each.weights] for each in found]

    def once(*weights: Any) -> list[Any]:
        out = hoist.evaluate(split.once, *weights)
        return [*(out[place] for place in kept), *(one_array.joined([out[i] for i in group]) for group in groups)]

    first = jax.make_jaxpr(once)(*split.once.in_avals)

    def every(others: Sequence[Any], arrays: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        known = dict(zip([flat.arguments[place] for place in kept], others, strict=True))
        known |= dict(zip(flat.arguments[count:], given, strict=True))
        of_chains = {id(each.equation): (each, array) for each, array in zip(found, arrays, strict=True)}
        return _evaluated(flat, known, of_chains)

    types, rest = list(first.out_avals), split.every.in_avals[count:]
    return Split(first, jax.make_jaxpr(every)(types[: len(kept)], types[len(kept) :], rest))


def _roots(flat: FlatJaxpr, weights: Sequence[int]) -> dict[int, int]:
    """By number the weight that a value is, or shows in another shape."""
    roots = {number: number for number in weights}
    for each in flat.equations:
        if hoist.is_view(each.equation) and each.inputs[0] in roots:
            roots.update(dict.fromkeys(each.outputs, roots[each.inputs[0]]))
    return roots


def _may_be_copied(once: Any) -> list[bool]:
    """Of each result of a program, whether it is computed there, or small."""
    given = set(once.jaxpr.invars)
    sizes = [math.prod(aval.shape) * aval.dtype.itemsize for aval in once.out_avals]
    return [
        size <= _LARGEST_COPY or variable not in given for size, variable in zip(sizes, once.jaxpr.outvars, strict=True)
    ]


def _chains(flat: FlatJaxpr, roots: dict[int, int], may_be_copied: Sequence[bool]) -> list[_Chain]:
    """The chains that are one call and read weights that nothing else reads."""
    readers: dict[int, set[int]] = {}
    for each in flat.equations:
        if not (hoist.is_view(each.equation) and each.outputs[0] in roots):
            for number in each.inputs:
                readers.setdefault(roots.get(number, -1), set()).add(id(each))
    for number in flat.outputs:
        readers.setdefault(roots.get(number, -1), set()).add(-1)
    weights = dict(zip(flat.arguments, may_be_copied, strict=False))
    found = []
    for each in flat.equations:
        traced = each.equation
        if traced.primitive is not chains.fused_chain_p or not chains.is_one_call_of(traced):
            continue
        layers = traced.params["layers"]
        read = {number for layer in layers for number in layer.weights()}
        of_maps = {
            number for layer in layers for number in (layer.x, layer.residual) if number is not None and number >= 0
        }
        also_maps = {roots.get(each.inputs[place]) for place in of_maps}
        chain = _Chain(each)
        for place in sorted(read):
            root, aval = roots.get(each.inputs[place]), traced.invars[place].aval
            if root is None or root in also_maps or not weights[root] or readers[root] != {id(each)}:
                continue
            if aval.dtype == traced.invars[0].aval.dtype:
                chain.take(place, root)
        if len(chain.entries) > 1:
            found.append(chain)
    return found


def _evaluated(flat: FlatJaxpr, known: dict[int, Any], found: dict[int, tuple[_Chain, Any]]) -> list[Any]:
    """The results, by the values that are known from the start; chains of `found` with their one array."""
    values = {**flat.known, **known}

    def reads(equation: Equation) -> list[int]:
        return found[id(equation)][0].reads() if id(equation) in found else equation.inputs

    for each in equations.live(flat.equations, flat.outputs, reads):
        if id(each) in found:
            chain, array = found[id(each)]
            results = chain.bind(values, array)
        else:
            results = equations.bind(each.equation, [values[number] for number in each.inputs])
        values.update(zip(each.outputs, results, strict=True))
    return [values[number] for number in flat.outputs]
