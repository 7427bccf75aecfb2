"""The walk over a function's equations that makes calls of its convolutions and of what surrounds them.

A layer is `pending` when it is met. Equations behind it join it as long as `pending` has rules for them and nothing
else reads the value between. Equations that only rename axes of a map change no array. Others are evaluated on maps as
they lie (`on_maps`), or with their operands in the function's order of axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src.accelerate import equations, maps, on_maps, pending, pools
from jax_sparse_conv._src.accelerate.maps import Axes
from jax_sparse_conv._src.accelerate.pending import Pending
from jax_sparse_conv._src.accelerate.rows import UNKNOWN_SIZES, Row
from jax_sparse_conv._src.accelerate.statistics import Norms
from jax_sparse_conv._src.accelerate.values import Map, Values
from jax_sparse_conv._src.api.arguments import KERNEL_DTYPES
from jax_sparse_conv._src.fusion.jaxprs import Equation, FlatJaxpr
from jax_sparse_conv._src.primitive import jax_internals, packing, primitives
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

_DENSE_ROWS = 16  # up to which a product is a dense layer: `implementation=None` is XLA's for more


def rewritten(closed: Any, fixed: Sequence[bool]) -> tuple[Any, list[Row]]:
    """A closed jaxpr with its layers as calls of this package, and what became of each.

    Args:
      closed: the jaxpr.
      fixed: of its arguments, which depend on weights alone.
    """
    rows: list[Row] = []

    def function(*arguments: Any) -> list[Any]:
        flat = equations.flattened(closed, arguments, equations.apart)
        walk = _Walk(flat, {number for number, each in zip(flat.arguments, fixed, strict=True) if each})
        out = walk.run()
        rows.extend(walk.rows)
        return out

    return jax.make_jaxpr(function)(*closed.in_avals), rows


class _Walk:
    """Evaluates the equations of a function in order."""

    def __init__(self, flat: FlatJaxpr, fixed: set[int]) -> None:
        self._flat, self._values = flat, Values(flat, fixed)
        self._norms = Norms(flat)
        self._deferred: dict[int, Equation] = {}  # by result of `x > 0`, where that may be part of a ReLU of x
        self._position = 0
        self.rows: list[Row] = []

    def run(self) -> list[Any]:
        """The results of the function."""
        for position, equation in enumerate(self._flat.equations):
            self._position = position
            self._values.note(equation)
            if not self._is_deferred(equation):
                self._values.set(equation, self._evaluated(equation))
        for number in self._flat.outputs:
            self._resolve(number)
        given = [self._values.given(number) for number in self._flat.outputs]
        return [value if isinstance(value, jax.Array) else jnp.asarray(value) for value in given]

    # --- equations ---------------------------------------------------------------------------------------------------

    def _evaluated(self, equation: Equation) -> list[Any]:
        name = equation.equation.primitive.name
        if name == "select_n" and (selected := self._selected(equation)) is not None:
            return [selected]
        for number in equation.inputs:
            self._resolve(number)
        if (summed := self._norms.sum(self._values, equation)) is not None:
            return [summed]
        if name == "conv_general_dilated":
            return self._conv(equation)
        if name == "dot_general":
            return self._dense(equation)
        if equation.equation.primitive is primitives.conv_p:
            return self._own(equation)
        if not any(map(self._values.is_map, equation.inputs)):
            return self._plain(equation)
        result: Map | jax.Array | None = on_maps.view(self._values, equation) or self._joined(equation)
        if result is None:
            result = on_maps.evaluate(self._values, equation)
        return self._plain(equation) if result is None else [result]

    def _plain(self, equation: Equation) -> list[Any]:
        """An equation as it is, but for max pools, and for layers in the bodies of loops and the like."""
        if (pooled := pools.plain(self._values, equation)) is not None:
            return [pooled]
        for each in equations.out_of_reach(equation.equation):
            name = equation.equation.primitive.name
            reason = f"it is inside of {name}, which is left as it is; {name} takes a function that accelerate returns"
            self.rows.append(Row.of_conv(each, (equation.equation, *equation.callers), reason))
        operands = [self._values.given(number) for number in equation.inputs]
        return equations.bind(equation.equation, operands, **equations.with_bodies(equation.equation, self._body))

    def _body(self, closed: Any) -> Any:
        program, rows = rewritten(closed, [False] * len(closed.in_avals))
        self.rows += [dataclasses.replace(each, call=None) for each in rows]
        return program

    def _is_deferred(self, equation: Equation) -> bool:
        """Whether an equation compares a layer with zero, which a ReLU of it may take in."""
        number = equation.outputs[0] if equation.outputs else -1
        operand = self._values.positive.get(number)
        if operand is None or self._values.pending(operand) is None:
            return False
        self._deferred[number] = equation
        return True

    def _resolve(self, number: int) -> None:
        """Evaluate a comparison that was put off."""
        equation = self._deferred.pop(number, None)
        if equation is not None:
            self._values.set(equation, self._evaluated(equation))

    # --- layers ------------------------------------------------------------------------------------------------------

    def _conv(self, equation: Equation) -> list[Any]:
        if all(map(self._values.is_fixed, equation.inputs)):
            return self._plain(equation)  # of weights alone
        params, (x, kernel) = equation.equation.params, equation.inputs
        dimensions = params["dimension_numbers"]
        axes = maps.axes_of(dimensions.lhs_spec) if len(self._values.shape(x)) == maps.RANK else ()
        to_hwio = maps.to_hwio(dimensions)
        row = Row.of_conv(equation.equation, equation.callers, _why_xlas(equation) or _why_no_conv(equation.equation))
        self.rows.append(row)
        if row.reason is not None:
            return self._plain(equation)
        x, padding = self._unpadded(x, dimensions.lhs_spec, [pools.ints(pads) for pads in params["padding"]])
        row.x_shape = maps.stored_shape(axes, self._values.shape(x))
        geometry = Geometry(
            pools.ints(params["window_strides"]),
            padding,
            pools.ints(params["rhs_dilation"]),
            params["feature_group_count"],
        )
        stored, weights = self._values.like(x, axes), jnp.asarray(self._values.given(kernel))
        assert stored is not None
        layer = pending.of_conv(
            stored,
            weights if to_hwio == (0, 1, 2, 3) else lax.transpose(weights, to_hwio),
            geometry,
            params["precision"],
            equation.equation.outvars[0].aval.dtype,
            self._values.is_fixed(kernel),
            row,
            self._position,
        )
        return [Map(layer, maps.axes_of(dimensions.out_spec))]

    def _own(self, equation: Equation) -> list[Any]:
        """A call of this package that the function makes itself. More joins it, where it is one of those made here."""
        config, values = equation.equation.params["config"], self._values
        numbers = primitives.Operands.of(equation.inputs, config)
        x_shape, (stacks, *kernel_shape) = values.shape(numbers.x), values.shape(numbers.kernel)
        row = Row(
            "dense" if config.method == "dense" else "conv",
            x_shape,
            tuple(kernel_shape),
            (x_shape[0], *config.geometry.conv_size(x_shape[1:3], kernel_shape[:2]), kernel_shape[-1]),
            str(values.type_of(numbers.x).dtype),
            jax_internals.source_of(equation.equation, equation.callers),
        )
        self.rows.append(row)
        is_fixed = values.is_fixed(numbers.kernel)
        is_like_made = config == dataclasses.replace(
            config, method=primitives.sparse_method(config.geometry), fallback=True
        )
        if not is_like_made or stacks != 1 or config.has_nonzeros or (config.has_packed and not is_fixed):
            values.emitted(row)
            return self._with_copy(equation, numbers) if is_fixed and stacks == 1 else self._plain(equation)
        operands = self._stored(numbers)
        operands.kernel = jnp.squeeze(operands.kernel, 0)
        operands.bias = None if operands.bias is None else jnp.squeeze(operands.bias, 0)
        return [Map(pending.of_own(operands, config, is_fixed, row, self._position), maps.STORED)]

    def _with_copy(self, equation: Equation, numbers: primitives.Operands) -> list[Any]:
        """A call that stays as it is, its kernel packed once where it reads packed ones."""
        config, shape = equation.equation.params["config"], self._values.shape(numbers.kernel)[1:]
        if config.has_packed or config.method not in packing.READERS or not packing.reads(shape, config.geometry):
            return self._plain(equation)
        operands = self._stored(numbers)
        if not packing.has_reader(operands.kernel.dtype, config.fallback):
            return self._plain(equation)
        made = packing.pack(jnp.squeeze(operands.kernel, 0), feature_group_count=config.geometry.groups).packed
        operands.packed = None if made is None else made[None]
        config, present = operands.present(config)
        return equations.bind(equation.equation, primitives.same_varying_axes(present), config=config)

    def _stored(self, numbers: primitives.Operands) -> primitives.Operands:
        """The operands of a call of this package, by their numbers; without the packed copy, which is made anew."""

        def given(number: int | None) -> Any:
            return None if number is None else self._values.given(number)

        names = ("x", "kernel", "bias", "residual", "nonzeros")
        return primitives.Operands(**{name: given(getattr(numbers, name)) for name in names})

    def _unpadded(self, x: int, spec: Sequence[int], padding: Sequence[Any]) -> tuple[int, Any]:
        """A convolution's operand and padding, a pad of height and width in front taken into the latter."""
        if x in self._values.padded:
            operand, config = self._values.padded[x]
            outside, along = [config[axis] for axis in spec[:2]], [config[axis] for axis in spec[2:]]
            is_plain = all(interior == 0 and min(low, high) >= 0 for low, high, interior in along)  # crops nothing
            if is_plain and not any(map(any, outside)):
                pads = zip(padding, along, strict=True)
                return operand, tuple(pools.ints((a + c, b + d)) for (a, b), (c, d, _) in pads)
        return x, tuple(padding)

    def _dense(self, equation: Equation) -> list[Any]:
        """A product of a few rows and a matrix, in either order."""
        values, sides = self._values, equation.inputs
        (left, right), _ = equation.equation.params["dimension_numbers"]
        is_turned = values.is_weight(sides[0]) and not values.is_weight(sides[1])  # the matrix is on the left
        x, kernel = sides[::-1] if is_turned else sides
        x_axes, kernel_axes = (right, left) if is_turned else (left, right)
        if _why_xlas(equation) or not self._is_dense(equation, x, kernel, x_axes, kernel_axes):
            return self._plain(equation)
        matrix, rows = jnp.asarray(values.given(kernel)), jnp.asarray(values.given(x))
        matrix = matrix if kernel_axes[0] == 0 else matrix.T
        source = jax_internals.source_of(equation.equation, equation.callers)
        row = Row("dense", rows.shape, matrix.shape, (*rows.shape[:-1], matrix.shape[1]), str(rows.dtype), source)
        self.rows.append(row)
        precision, dtype = equation.equation.params["precision"], equation.equation.outvars[0].aval.dtype
        layer = pending.of_dense(rows, matrix, precision, values.is_fixed(kernel), dtype, row, self._position)
        axes: Axes = (3,) if rows.ndim == 1 else (3, 0) if is_turned else (0, 3)
        return [Map(layer, axes)]

    def _is_dense(
        self, equation: Equation, x: int, kernel: int, x_axes: Sequence[int], kernel_axes: Sequence[int]
    ) -> bool:
        """Whether a product is a dense layer that has a kernel."""
        values, params = self._values, equation.equation.params
        if values.is_fixed(x):  # of weights alone
            return False
        shape, kernel_shape = values.shape(x), values.shape(kernel)
        if tuple(map(tuple, params["dimension_numbers"][1])) != ((), ()) or params.get("out_sharding") is not None:
            return False
        if len(kernel_shape) != 2 or len(shape) not in (1, 2) or tuple(x_axes) != (len(shape) - 1,):
            return False
        if geo.is_symbolic(*shape, *kernel_shape) or 0 in (*shape, *kernel_shape):
            return False
        if math.prod(shape[:-1]) > _DENSE_ROWS or (tuple(kernel_axes) == (1,) and not values.is_fixed(kernel)):
            return False
        dtypes = {str(values.type_of(number).dtype) for number in (x, kernel)}
        return len(dtypes) == 1 and dtypes <= set(KERNEL_DTYPES)

    # --- what joins a layer ------------------------------------------------------------------------------------------

    def _joined(self, equation: Equation) -> Map | None:
        """The layer with this equation as its last part, or None."""
        single = [number for number in equation.inputs if self._values.readers(number) == 1]
        layers = [(layer, number) for number in single if (layer := self._values.pending(number)) is not None]
        for each in () if layers else equation.inputs:
            if (layer := self._norms.start(self._values, each, self._position)) is not None:
                layers.append((layer, each))
        if not layers:
            return None
        layer, number = max(layers, key=lambda each: each[0].position)
        axes: Axes = self._values[number].axes
        redo = self._redo(equation, number, axes)
        name, rest = equation.equation.primitive.name, [other for other in equation.inputs if other != number]
        grown: Pending | None = None
        if name in pools.KINDS:
            grown = _pooled(layer, axes, equation)
        elif equations.is_relu(equation.equation):
            grown = pending.with_relu(layer, redo)
        elif name == "convert_element_type":
            grown = pending.with_dtype(layer, equation.equation.params["new_dtype"], redo)
        elif name == "neg":
            grown = pending.with_scale(layer, jnp.full((1,), -1, layer.call.dtype), redo)
        elif len(rest) == 1:
            grown = self._with_operand(layer, axes, equation, rest[0], redo)
        return None if grown is None else Map(grown, axes)

    def _with_operand(
        self, layer: Pending, axes: Axes, equation: Equation, other: int, redo: Callable[[jax.Array], jax.Array]
    ) -> Pending | None:
        """A layer with a value added, multiplied, or the like."""
        name, is_first = equation.equation.primitive.name, equation.inputs[1] == other
        if name == "max":
            return pending.with_relu(layer, redo) if self._values.is_zero(other) else None
        if name not in ("add", "sub", "mul", "div"):
            return None
        if layer.call.sums and self._values.is_number(other):
            factor = float(self._values[other])
            divisor = factor if name == "div" and is_first else 1 / factor if name == "mul" and factor else 0.0
            return pending.with_mean(layer, divisor, redo)
        values = self._values.per_channel(other, axes)
        if values is not None and values.shape[0] in (1, layer.call.shape[3]):
            return _affine(layer, name, values, is_first, redo)
        if name != "add" or self._values.shape(other) != equation.equation.outvars[0].aval.shape:
            return None
        residual = self._values.like(other, axes)
        return None if residual is None else pending.with_residual(layer, residual, redo)

    def _redo(self, equation: Equation, number: int, axes: Axes) -> Callable[[jax.Array], jax.Array]:
        """An elementwise equation as a function of one operand's [N, H, W, C]."""
        return lambda y: on_maps.elementwise(self._values, equation, axes, {number: y})

    def _selected(self, equation: Equation) -> Map | None:
        """A ReLU in the spelling `where(x > 0, x, 0)`."""
        if len(equation.inputs) != 3:
            return None
        is_positive, zero, number = equation.inputs
        layer = self._values.pending(number)
        if layer is None or self._values.positive.get(is_positive) != number or not self._values.is_zero(zero):
            return None
        # What compares it is the other reader, and is not computed if this is its only one.
        if (self._values.readers(number), self._values.readers(is_positive)) != (2, 1):
            return None
        grown = pending.with_relu(layer, lambda y: jnp.where(y > 0, y, jnp.zeros((), y.dtype)))
        return None if grown is None else Map(grown, self._values[number].axes)


def _why_xlas(equation: Equation) -> str | None:
    """Why XLA is to run an equation whatever else could, or None."""
    return 'implementation="xla" was asked for' if jax_internals.is_xlas(equation.equation, equation.callers) else None


def _why_no_conv(equation: Any) -> str | None:
    """Why a convolution of lax is left as it is, or None."""
    params, (x, kernel) = equation.params, (variable.aval for variable in equation.invars)
    if len(x.shape) != maps.RANK:
        return f"it has {len(x.shape) - 2} spatial dimensions, not 2"
    if any(size != 1 for size in params["lhs_dilation"]):
        return f"its lhs_dilation is {tuple(params['lhs_dilation'])}, as of a transposed convolution"
    if params["batch_group_count"] != 1:
        return f"its batch_group_count is {params['batch_group_count']}"
    if params.get("out_sharding") is not None:
        return "it says how its result is split over devices"
    if str(x.dtype) not in KERNEL_DTYPES or x.dtype != kernel.dtype:
        return f"there are no kernels for x of {x.dtype} with a kernel of {kernel.dtype}"
    if geo.is_symbolic(*kernel.shape, *(x.shape[axis] for axis in params["dimension_numbers"].lhs_spec[1:])):
        return UNKNOWN_SIZES
    if reason := geo.too_far(params["window_strides"], params["padding"], params["rhs_dilation"]):
        return reason
    return f"there is nothing to compute of {x.shape} and {kernel.shape}" if 0 in (*x.shape, *kernel.shape) else None


def _pooled(layer: Pending, axes: Axes, equation: Equation) -> Pending | None:
    """A layer with a pool of its height and width."""
    kind, found = pools.KINDS[equation.equation.primitive.name], pools.spec_of(pools.params(equation, axes))
    if kind == "min" or found is None:
        return None
    redo = functools.partial(pools.pool, equation, axes)
    return pending.with_pool(layer, kind, *found, redo)


def _affine(
    layer: Pending, name: str, values: jax.Array, is_first: bool, redo: Callable[[jax.Array], jax.Array]
) -> Pending | None:
    """A layer with [K] or [1] added, subtracted, multiplied or divided; `is_first` where the layer's value is left."""
    if name == "add":
        return pending.with_shift(layer, values, redo)
    if name == "mul":
        return pending.with_scale(layer, values, redo)
    if name == "div":
        return pending.with_scale(layer, 1 / values, redo) if is_first else None
    if is_first:
        return pending.with_shift(layer, -values, redo)
    negative = pending.with_scale(layer, -jnp.ones((1,), values.dtype), redo)
    joined = None if negative is None else pending.with_shift(negative, values, redo)
    return None if joined is None else dataclasses.replace(joined, before=layer)
