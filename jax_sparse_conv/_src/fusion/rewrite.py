"""A transformation that makes fused chains of the convolutions that feed each other in a function.

It reads the function's jaxpr equation by equation. One chain is open at a time, and convolutions of this package join
it. An equation that reads no result of the open chain stays before it. An equation that does waits behind it. A
convolution that needs a waiting result closes the chain and opens the next. A layer that only the next chain reads
goes there, where that takes less memory meanwhile. Dense layers of one row join at the end, if they read a result flat
or averaged over its pixels.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.fusion import chain_rules, chains
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr, last_uses, traced
from jax_sparse_conv._src.fusion.schedule import Layer
from jax_sparse_conv._src.primitive import primitives

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FEWEST = 2  # layers of a fused chain


def fuse(function: _Function, chosen: bool = False) -> _Function:
    """Run each chain of convolutions in `function` as one call, whether that is faster or not.

    All else is evaluated as before. `accelerate` makes chains where they pay; this is for tests and benchmarks.
    `docs/guide/your_model.md` says which layers are fused, as `chain_rules` has it.

    Args:
      function: of arrays.
      chosen: only layers under `implementation=None`, and only on devices where it is expected to pay.

    Raises:
      TypeError: `function` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"function={function!r} cannot be called")

    def fused(*args: Any, **kwargs: Any) -> Any:
        jaxpr, arrays, results = traced(function, args, kwargs)
        return jax.tree.unflatten(results, evaluate(jaxpr, arrays, chosen)[0])

    functools.update_wrapper(fused, function, updated=())
    return fused  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class _Row:
    """What a dense layer reads of a fused chain: a layer's value, and equations between that nothing else needs."""

    source: int
    averages: bool
    between: tuple[Equation, ...]


def evaluate(jaxpr: Any, arguments: Sequence[Any], chosen: bool = True) -> tuple[list[Any], list[tuple[int, ...]]]:
    """The results of a closed jaxpr, its layers in chains; and of each chain the layers, by number in the jaxpr."""
    flat = FlatJaxpr(jaxpr, arguments)
    run = _Run(flat, chosen)
    for equation in flat.equations:
        run.add(equation)
    run.close()
    return [_array(run.values[number]) for number in flat.outputs], run.chains(flat)


def _array(value: Any) -> jax.Array:
    """A result as `jit` gives it: JAX keeps constants of a trace as values of its own."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


class _Run:
    """Evaluates a jaxpr in order, except for the open fused chain and the equations that wait for it.

    Args:
      jaxpr: to evaluate.
      chosen: as in `chains.fused_chain_p`; then only layers under `implementation=None` join.
    """

    def __init__(self, jaxpr: FlatJaxpr, chosen: bool) -> None:
        self._chosen = chosen
        self.values: dict[int, Any] = dict(jaxpr.known)
        self._given = frozenset(jaxpr.known)
        self._needed = last_uses(jaxpr)
        self._readers = collections.Counter(number for each in jaxpr.equations for number in each.inputs)
        self._readers.update(jaxpr.outputs)
        self._open: list[Equation] = []
        self._steps = 0
        self._waiting: list[Equation] = []
        self._held: list[Equation] = []  # of the open fused chain, for the next one
        self._rows: dict[int, _Row] = {}  # of dense layers in fused chains, by their results
        self._chains: list[list[Equation]] = []
        self._position = 0

    def chains(self, jaxpr: FlatJaxpr) -> list[tuple[int, ...]]:
        """The layers of every chain that was made, by number among the layers of the jaxpr."""
        layers = [each for each in jaxpr.equations if each.equation.primitive is primitives.conv_p]
        numbers = {each.outputs[0]: number for number, each in enumerate(layers)}
        return [tuple(numbers[each.outputs[0]] for each in chain) for chain in self._chains]

    def add(self, equation: Equation) -> None:
        """Take the next equation of the jaxpr."""
        fits = self._fits(equation)
        while fits and self._blocks(equation):
            self._open_next(equation)
        if fits:
            self._open.append(equation)
            self._steps += _steps(equation)
        elif equation.equation.effects:
            self.close()
            self._evaluate(equation)
        elif all(number in self.values for number in equation.inputs):
            self._evaluate(equation)
        else:
            self._waiting.append(equation)
        self._position += 1

    def close(self) -> None:
        """Evaluate the open fused chain, with dense layers at its end, then what waits for it."""
        if len(self._open) >= _FEWEST:
            self._take_rows()
            self._evaluate_chain()
        elif self._open:
            self._evaluate(self._open[0])
        self._open, self._steps = [], 0
        waiting, self._waiting = self._waiting, []
        for equation in waiting:
            self._evaluate(equation)

    def _open_next(self, equation: Equation) -> None:
        """Close the open chain in front of an equation. Layers that take less memory in the next chain go there."""
        kind = _kind(equation.equation)
        self._held = [each for each in self._open if _kind(each.equation) == kind and self._may_be_held(each)]
        stay = [each for each in self._open if each not in self._held]
        least = chain_rules.LEAST_LAYERS if self._chosen else _FEWEST
        if len(stay) < min(least, len(self._open)):  # or there is no chain any more
            self._held, stay = [], self._open
        self._open, self._steps = stay, sum(map(_steps, stay))
        self.close()
        self._open, self._held = self._held, []
        self._steps = sum(map(_steps, self._open))

    def _take_rows(self) -> None:
        """Put the dense layers that wait for the open fused chain at its end."""
        for equation in self._waiting:
            row = self._row_of(equation)
            if row is not None:
                gone = (equation, *row.between)
                self._waiting = [each for each in self._waiting if not any(each is other for other in gone)]
                self._open.append(equation)
                self._rows[equation.outputs[0]] = row
                self._steps += 1

    def _row_of(self, equation: Equation) -> _Row | None:
        """What a dense layer at the end of the open fused chain reads of it, or None for all other equations."""
        traced = equation.equation
        if traced.primitive is not primitives.conv_p or traced.params["config"].method != "dense":
            return None
        config, operands = traced.params["config"], primitives.Operands.of(equation.inputs, traced.params["config"])
        x, kernel = (variable.aval for variable in traced.invars[:2])
        if (self._chosen and not config.fallback) or chain_rules.why_not(config, x, kernel) is not None:
            return None
        if any(number not in self.values for number in equation.inputs if number != operands.x):
            return None
        first = self._open[0].equation
        if _kind(first) != _kind(traced) or self._steps + 1 > chain_rules.MAX_LAYERS:
            return None
        made = {each.outputs[0]: each.equation.outvars[0].aval for each in self._open}
        between: list[Equation] = []
        number, is_shared = operands.x, False
        while number not in made:
            producer = next((each for each in self._waiting if number in each.outputs), None)
            if producer is None:
                return None
            is_shared |= self._readers[number] != 1
            between.insert(0, producer)
            unknown = [each for each in producer.inputs if each not in self.values]
            if len(unknown) != 1:
                return None
            number = unknown[0]
        source = made[number]
        form = _form_of(between, source, self.values)
        averages = form == "average"
        if averages and is_shared:
            return None
        channels = source.shape[3] if averages else math.prod(source.shape[1:])
        if form is None or source.shape[0] != 1 or channels != x.shape[3]:
            return None
        if averages and chain_rules.why_not_average(source.shape, kernel.shape[4], x.dtype.itemsize) is not None:
            return None
        return _Row(number, averages, () if is_shared else tuple(between))

    def _may_be_held(self, equation: Equation) -> bool:
        """Whether nothing reads a layer's result until the next chain, and what it reads is smaller.

        An example is a projection whose block goes on in a layer that no chain takes. There the result would wait.
        """
        (result,) = equation.outputs
        if any(result in other.inputs for other in (*self._open, *self._waiting)):
            return False
        variables = zip(equation.inputs, equation.equation.invars, strict=True)
        kept = (_bytes(variable.aval) for number, variable in variables if not self._is_kept(number))
        return sum(kept) < _bytes(equation.equation.outvars[0].aval)

    def _is_kept(self, number: int) -> bool:
        """Whether a value stays in memory, whatever becomes of the open layers."""
        return number in self._given or self._needed[number] >= self._position

    def _fits(self, equation: Equation) -> bool:
        if equation.equation.primitive is not primitives.conv_p:
            return False
        config = equation.equation.params["config"]
        x, kernel = (variable.aval for variable in equation.equation.invars[:2])
        if config.method == "dense":
            return False
        return (config.fallback or not self._chosen) and chain_rules.why_not(config, x, kernel) is None

    def _blocks(self, equation: Equation) -> bool:
        """Whether a convolution cannot join the open fused chain."""
        if not self._open:
            return not all(number in self.values for number in equation.inputs)
        made = {number for other in self._open for number in other.outputs}
        operands = primitives.Operands.of(equation.inputs, equation.equation.params["config"])
        maps = {number for number in (operands.x, operands.residual) if number is not None}
        if not all(number in self.values or (number in made and number in maps) for number in equation.inputs):
            return True
        first = self._open[0].equation
        return _kind(first) != _kind(equation.equation) or self._steps + _steps(equation) > chain_rules.MAX_LAYERS

    def _evaluate(self, equation: Equation) -> None:
        traced = equation.equation
        operands = [self.values[number] for number in equation.inputs]
        with traced.ctx.manager:
            out = traced.primitive.bind(*operands, **traced.primitive.get_bind_params(traced.params))
        results = out if traced.primitive.multiple_results else [out]
        self.values.update(zip(equation.outputs, results, strict=True))

    def _evaluate_chain(self) -> None:
        made = {equation.outputs[0]: index for index, equation in enumerate(self._open)}
        operands: dict[int, int] = {}

        def number_of(value: int | None) -> int | None:
            if value is None:
                return None
            return ~made[value] if value in made else operands.setdefault(value, len(operands))

        layers = []
        for equation in self._open:
            config = equation.equation.params["config"]
            named, row = primitives.Operands.of(equation.inputs, config), self._rows.get(equation.outputs[0])
            x, kernel = number_of(named.x if row is None else row.source), number_of(named.kernel)
            assert x is not None
            assert kernel is not None
            rest = (number_of(named.bias), number_of(named.residual), number_of(named.packed))
            layers.append(Layer(config, x, kernel, *rest, averages=row is not None and row.averages))
        self._chains.append(list(self._open))
        end = self._position
        results = tuple(i for value, i in made.items() if self._needed.get(value, -1) >= end or self._waits_for(value))
        out = chains.fused_chain_p.bind(
            *primitives.same_varying_axes([self.values[value] for value in operands]),
            layers=tuple(layers),
            results=results,
            chosen=self._chosen,
            packed=None,
        )
        self.values.update(zip([self._open[i].outputs[0] for i in results], out, strict=True))

    def _waits_for(self, value: int) -> bool:
        return any(value in equation.inputs for equation in (*self._waiting, *self._held))


def _form_of(between: Sequence[Equation], source: Any, known: Mapping[int, Any]) -> str | None:
    """How equations make a row of a map [N, H, W, C]: "flat", "average", or None for neither.

    An average is that of `jnp.mean`, or scaled first as in `reference.average_of_pixels`. Maps of 16 bits are summed in
    float32, and converted back.
    """
    core = [each.equation for each in between if not _is_plain_reshape(each.equation)]
    if not core:
        return "flat"
    if _is_conversion(core[0], source.dtype, jnp.float32):
        core = core[1:]
    if core and _is_conversion(core[-1], jnp.float32, source.dtype):
        core = core[:-1]
    names = tuple(each.primitive.name for each in core)
    if names not in (("mul", "reduce_sum"), ("reduce_sum", "div")):
        return None
    is_scaled_first = names[0] == "mul"
    scaled, summed = core if is_scaled_first else core[::-1]
    inputs = next(each.inputs for each in between if each.equation is scaled)
    factor = next((known[number] for number in inputs if number in known), None)
    if factor is None or np.ndim(factor) != 0 or isinstance(factor, jax.core.Tracer):
        return None
    if not is_scaled_first and inputs[1] not in known:
        return None
    of_map, pixels = summed.invars[0].aval, source.shape[1] * source.shape[2]
    is_mean = math.isclose(float(factor), 1 / pixels if is_scaled_first else pixels, rel_tol=1e-6)
    is_wide = of_map.dtype == jnp.float32 and of_map.shape == source.shape
    return "average" if is_mean and is_wide and sorted(summed.params["axes"]) == [1, 2] else None


def _is_plain_reshape(equation: Any) -> bool:
    """Not `lax.reshape` with another order of the dimensions, which moves elements."""
    return equation.primitive.name == "reshape" and equation.params["dimensions"] is None


def _is_conversion(equation: Any, source: Any, to: Any) -> bool:
    is_one = equation.primitive.name == "convert_element_type"
    return is_one and equation.invars[0].aval.dtype == source and equation.outvars[0].aval.dtype == to


def _kind(equation: Any) -> tuple[Any, ...]:
    """What the layers of a fused chain have in common."""
    x = equation.invars[0].aval
    return (x.dtype, chain_rules.is_precise(equation.params["config"], x.dtype))


def _steps(equation: Equation) -> int:
    return 2 if equation.equation.params["config"].geometry.pool else 1


def _bytes(shape: Any) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize
