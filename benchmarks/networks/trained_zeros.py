"""A trained network's zeros for any function of weights and images: its biases are moved.

Random weights leave about half of every feature map zero. `with_zeros` evaluates a function on an image, equation by
equation. At each ReLU it looks for an array of the weights that is added to the ReLU's operand, such as a bias or a
batch norm's, and moves it until the wanted share of the operand is not positive. Before, kernels are scaled so that
layers' results have a deviation of 1, or they would vanish or grow with depth, from framework to framework. It is what
`jax_sparse_conv.models.set_sparsity_profile` does for networks of the package.
Functions inside of loops and the like are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.accelerate import by_numpy, equations
from jax_sparse_conv._src.accelerate.values import Values
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr, traced
from jax_sparse_conv._src.primitive import primitives
from jax_sparse_conv.models.profile import channel_shares

_Array = np.ndarray[Any, Any]
_Step = tuple[Equation, int]  # an equation, and the place of the operand that one came from

_LAYERS = ("conv_general_dilated", "dot_general", primitives.conv_p.name)
_SUMS = ("add", "add_any", "sub")
_VIEWS = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
_BEFORE_A_POOL = ("pad", *_VIEWS)
_FEWEST_POSITIONS = 16  # with fewer a channel's own share means little, and one threshold serves the whole layer
_OUTSIDE = -1  # the place of what a pad adds


def with_zeros(
    function: Callable[[Any, jax.Array], Any], weights: Any, x: jax.Array, shares: Sequence[float], seed: int = 0
) -> tuple[Any, float]:
    """Weights with which the function's ReLUs make given shares of zeros on `x`, computed on the CPU.

    Channels differ in their share as in a trained network. Where nothing but a max pool reads a ReLU's result, the
    share is that of the pool's. A ReLU to whose operand no array of the weights is added stays, and so does one whose
    array another has moved before. Shares are reached to within rounding for float32 weights.

    Args:
      function: of weights and images.
      weights: a pytree of arrays.
      x: images.
      shares: in [0, 1), in the order of the network, interpolated over its ReLUs. Empty leaves the weights as they are.
      seed: of the channels' shares.

    Returns:
      The weights, of the same structure and dtypes, and the mean share of zeros of the convolutions' inputs on `x`.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        closed, arrays, _ = traced(function, (weights, x), {})
        walk = _Walk(equations.flattened(closed, arrays), len(arrays) - 1)
        walk.run(shares, np.random.default_rng(seed))
    moved = iter([walk.moved.get(number) for number in walk.weights])
    leaves, tree = jax.tree.flatten(weights)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and (new := next(moved)) is not None:
            leaves[place] = jnp.asarray(new)
    return jax.tree.unflatten(tree, leaves), walk.share_of_zeros()


class _Walk:
    """Evaluates the equations of a function in order.

    Args:
      flat: the function.
      weights: how many of its first arguments are weights.
    """

    def __init__(self, flat: FlatJaxpr, weights: int) -> None:
        self._equations = flat.equations
        self._values = {n: np.asarray(v) if isinstance(v, jax.Array) else v for n, v in flat.known.items()}
        self._maker = {number: each for each in flat.equations for number in each.outputs}
        self._readers: dict[int, list[Equation]] = {}
        self._known = Values(flat, set())
        for equation in flat.equations:
            self._known.note(equation)
            for number in equation.inputs:
                self._readers.setdefault(number, []).append(equation)
        self.weights = flat.arguments[:weights]
        self.moved: dict[int, _Array] = {}
        """By number of a weight: its new value."""

    def run(self, shares: Sequence[float], rng: np.random.Generator) -> None:
        """Evaluate everything, with weights moved on the way."""
        every = enumerate(self._equations)
        relus = [position for position, each in every if self._path(self._relu_operand(each)) is not None]
        wanted: dict[int, float] = {}
        if shares:
            places = np.linspace(0, 1, len(relus)), np.linspace(0, 1, len(shares))
            wanted = dict(zip(relus, np.interp(*places, shares), strict=True))
        for position, equation in enumerate(self._equations):
            if position in wanted:
                self._move(position, wanted[position], rng)
            self._evaluate(equation)
            if wanted and _name(equation) in _LAYERS:
                self._scale(position)

    def share_of_zeros(self) -> float:
        """Of the convolutions' inputs, before they are padded: their mean, 0 where there are none."""
        inputs = [each.inputs[0] for each in self._equations if _is_convolution(each.equation)]
        unpadded = [self._maker[n].inputs[0] if _name(self._maker.get(n)) == "pad" else n for n in inputs]
        found = [np.mean(np.asarray(self._values[number]) == 0) for number in unpadded]
        return float(np.mean(found)) if found else 0.0

    def _evaluate(self, equation: Equation) -> None:
        operands = [self._values[number] for number in equation.inputs]
        self._values.update(zip(equation.outputs, by_numpy.results(equation.equation, operands), strict=True))

    # --- ReLUs -------------------------------------------------------------------------------------------------------

    def _relu_operand(self, equation: Equation) -> int | None:
        """What an equation is a ReLU of, None where it is none."""
        if equations.is_relu(equation.equation):
            return equation.inputs[0]
        if _name(equation) != "max":
            return None
        others = [number for number in equation.inputs if not self._known.is_zero(number)]
        return others[0] if len(others) == 1 else None

    def _path(self, number: int | None, through: Sequence[str] = (*_SUMS, *_VIEWS)) -> tuple[int, list[_Step]] | None:
        """A weight that is added to a value and has not been moved, and the equations from there to the value."""
        if number in self.weights and number not in self.moved:
            is_real = jnp.issubdtype(jnp.result_type(self._values[number]), jnp.floating)
            return (number, []) if is_real else None
        equation = self._maker.get(-1 if number is None else number)
        if _name(equation) not in through:
            return None
        assert equation is not None
        for place, operand in enumerate(equation.inputs):
            found = self._path(operand, through)
            if found is not None:
                return found[0], [*found[1], (equation, place)]
        return None

    def _move(self, position: int, share: float, rng: np.random.Generator) -> None:
        """Move a weight so that a ReLU makes a share of zeros, and evaluate anew what has been computed of it."""
        relu = self._equations[position]
        operand = self._relu_operand(relu)
        found = self._path(operand)
        if found is None or operand is None:
            return  # another ReLU's by now
        weight, steps = found
        old = np.asarray(self._values[weight])
        places, sign = _along(np.arange(old.size, dtype=np.int32).reshape(old.shape), steps)
        values = np.asarray(self._values[operand], np.float32)
        for equation in self._to_pool(relu.outputs[0]):
            places, values = _on(equation, places, _OUTSIDE), _on(equation, values, -np.inf)
        columns = _columns(values, places, old.size)
        if columns is None:
            return
        shifts = sign * _shifts(columns, share, rng).reshape(old.shape)
        self._replace(weight, old.astype(np.float32) + shifts, position)

    def _scale(self, position: int) -> None:
        """Scale a layer's kernel so that its results have a deviation of 1, as He initialisation intends."""
        equation = self._equations[position]
        found = [path for path in (self._path(number, _VIEWS) for number in equation.inputs[:2]) if path is not None]
        deviation = float(np.std(np.asarray(self._values[equation.outputs[0]], np.float32)))
        if len(found) == 1 and deviation > 0:
            kernel = found[0][0]
            self._replace(kernel, np.asarray(self._values[kernel], np.float32) / deviation, position + 1)

    def _replace(self, weight: int, value: _Array, position: int) -> None:
        """Give a weight another value, and evaluate anew what has been computed of it before a position."""
        self._values[weight] = self.moved[weight] = value.astype(self._values[weight].dtype)
        stale = {weight}
        for equation in self._equations[:position]:
            if stale.intersection(equation.inputs):
                stale.update(equation.outputs)
                self._evaluate(equation)

    def _to_pool(self, number: int) -> list[Equation]:
        """The equations from a value to the max pool that alone reads it; none where there is no such pool."""
        found: list[Equation] = []
        while len(readers := self._readers.get(number, [])) == 1 and _name(readers[0]) in _BEFORE_A_POOL:
            found.append(readers[0])
            number = readers[0].outputs[0]
        is_pooled = len(readers) == 1 and _name(readers[0]) == "reduce_window_max"
        return [*found, readers[0]] if is_pooled else []


def _name(equation: Equation | None) -> str:
    return "" if equation is None else equation.equation.primitive.name


def _is_convolution(equation: Any) -> bool:
    if equation.primitive is primitives.conv_p:
        return bool(equation.params["config"].method != "dense")
    return bool(equation.primitive.name == "conv_general_dilated")


def _along(places: _Array, steps: Sequence[_Step]) -> tuple[_Array, int]:
    """Which element of a weight each element of a value has, and whether that was added (1) or subtracted (-1)."""
    sign = 1
    for equation, place in steps:
        if _name(equation) in _SUMS:
            places = np.broadcast_to(places, equation.equation.outvars[0].aval.shape)
            sign *= -1 if _name(equation) == "sub" and place == 1 else 1
        else:
            places = _on(equation, places, _OUTSIDE)
    return places, sign


def _on(equation: Equation, values: _Array, padding: float) -> _Array:
    """A view, a pad or a max pool of other values than the function's."""
    if _name(equation) == "convert_element_type":
        return values
    more = [np.asarray(padding, values.dtype)] if _name(equation) == "pad" else []
    return np.asarray(equations.bind(equation.equation, [values, *more])[0])


def _columns(values: _Array, places: _Array, size: int) -> _Array | None:
    """Values by the element of a weight that they have, [size, positions]; None where not all are as many."""
    inside = places.ravel() >= 0
    places, values = places.ravel()[inside], values.ravel()[inside]
    if len(set(np.bincount(places, minlength=size))) != 1:
        return None
    order = np.argsort(places.astype(np.min_scalar_type(size)), kind="stable")
    return values[order].reshape(size, -1)


def _shifts(columns: _Array, share: float, rng: np.random.Generator) -> _Array:
    """What to add to each row of columns [channels, positions] so that a share of them all is not positive."""
    channels = len(columns)
    shares = np.asarray([share])
    if columns.shape[1] < _FEWEST_POSITIONS:
        columns = columns.reshape(1, -1)
    else:
        shares = channel_shares(share, channels, rng)
    counts = np.minimum(np.rint(shares * columns.shape[1]).astype(int), columns.shape[1] - 1)
    ordered = np.sort(columns, axis=1)
    low, high = (
        np.take_along_axis(ordered, each[:, None], axis=1)[:, 0] for each in (np.maximum(counts - 1, 0), counts)
    )
    return np.broadcast_to(-(low + high) / 2, channels)
