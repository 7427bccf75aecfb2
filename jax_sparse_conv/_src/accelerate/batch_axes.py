"""Equations that take every image of a batch by itself: their batch axes, and the same equations of a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core as jex_core

from jax_sparse_conv._src.accelerate import equations
from jax_sparse_conv._src.fusion import chains, dense_blocks
from jax_sparse_conv._src.fusion.jaxprs import closed_of, taken_apart
from jax_sparse_conv._src.primitive import primitives

Axes: TypeAlias = Sequence[int | None]
"""Of operands or results, the axis of images; None of what is the same for all of them."""

_REDUCTIONS = frozenset(
    ("argmax", "argmin", *(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum")))
)
_WINDOWS = frozenset(f"reduce_window_{name}" for name in ("max", "min", "sum"))


def opened(equation: Any) -> Any:
    """What an equation stands for as a closed jaxpr, or None: a call, or a chain, which a CPU runs layer by layer."""
    if equation.primitive is chains.fused_chain_p:
        return taken_apart(equation, chains.separate, ("layers", "results", "packed"))
    name = equations.CALLS.get(equation.primitive.name)
    return None if name is None else closed_of(equation, name)


@dataclasses.dataclass(frozen=True)
class Batch:
    """How many images a program is traced for, and how many a micro-batch has."""

    images: int
    micro: int

    def axes_of(self, equation: Any, axes: Axes) -> list[int | None] | None:
        """The axes of an equation's results, or None where it is not known to take each image by itself."""
        if all(axis is None for axis in axes):
            return [None] * len(equation.outvars)
        if equation.effects or any(
            axis is not None and variable.aval.shape[axis] != self.images
            for axis, variable in zip(axes, equation.invars, strict=True)
        ):
            return None
        if equation.primitive.name == "cond":
            return self._axes_of_branches(equation, axes)
        if (inner := opened(equation)) is not None:
            return self._axes_of_jaxpr(inner, axes)
        rule = _RULES.get(equation.primitive.name)
        axis = None if rule is None else rule(self, equation, axes)
        return None if axis is None else [axis] * len(equation.outvars)

    def _axes_of_branches(self, equation: Any, axes: Axes) -> list[int | None] | None:
        if axes[0] is not None:
            return None
        found = [self._axes_of_jaxpr(branch, axes[1:]) for branch in equation.params["branches"]]
        return found[0] if all(each == found[0] for each in found) else None

    def _axes_of_jaxpr(self, closed: Any, axes: Axes) -> list[int | None] | None:
        known = dict(zip(closed.jaxpr.invars, axes, strict=True))
        for equation in closed.jaxpr.eqns:
            given = [None if isinstance(each, jex_core.Literal) else known.get(each) for each in equation.invars]
            found = self.axes_of(equation, given)
            if found is None:
                return None
            known.update(zip(equation.outvars, found, strict=True))
        return [None if isinstance(each, jex_core.Literal) else known.get(each) for each in closed.jaxpr.outvars]

    def run(self, equation: Any, operands: Sequence[Any], axes: Axes) -> list[Any]:
        """The results of a micro-batch, where `axes_of` finds axes."""
        if all(axis is None for axis in axes):
            return equations.bind(equation, operands)
        if equation.primitive.name == "cond":
            branches = tuple(self._fewer(branch, operands[1:], axes[1:]) for branch in equation.params["branches"])
            return equations.bind(equation, operands, branches=branches)
        if (inner := opened(equation)) is not None:
            return self._run_jaxpr(inner, operands, axes)
        change = _CHANGES.get(equation.primitive.name)
        return equations.bind(equation, operands, **({} if change is None else change(self, equation, axes)))

    def _fewer(self, closed: Any, operands: Sequence[Any], axes: Axes) -> Any:
        """A branch, for a micro-batch."""
        return jax.make_jaxpr(lambda *values: self._run_jaxpr(closed, values, axes))(*operands)

    def _run_jaxpr(self, closed: Any, operands: Sequence[Any], axes: Axes) -> list[Any]:
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, operands, strict=True))
        known = dict(zip(closed.jaxpr.invars, axes, strict=True))

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, jex_core.Literal) else values[variable]

        for equation in closed.jaxpr.eqns:
            given = [None if isinstance(each, jex_core.Literal) else known.get(each) for each in equation.invars]
            found = self.axes_of(equation, given)
            assert found is not None  # as `_axes_of_jaxpr` has found it
            values.update(zip(equation.outvars, self.run(equation, [*map(read, equation.invars)], given), strict=True))
            known.update(zip(equation.outvars, found, strict=True))
        return [read(variable) for variable in closed.jaxpr.outvars]


# --- rules: the axis of the results, or None --------------------------------------------------------------------------


def _one(axes: Axes) -> int | None:
    """The only operand's axis."""
    return axes[0]


def _elementwise(batch: Batch, equation: Any, axes: Axes) -> int | None:
    found = {axis for axis in axes if axis is not None}
    if len(found) > 1:
        return None
    (image_axis,) = found
    others = [v.aval.shape for axis, v in zip(axes, equation.invars, strict=True) if axis is None]
    return image_axis if all(not shape or shape[image_axis] == 1 for shape in others) else None


def _reduction(batch: Batch, equation: Any, axes: Axes) -> int | None:
    axis, gone = _one(axes), equation.params["axes"]
    return None if len(axes) > 1 or axis is None or axis in gone else axis - sum(each < axis for each in gone)


def _window(batch: Batch, equation: Any, axes: Axes) -> int | None:
    axis, params = _one(axes), equation.params
    sizes = (params["window_dimensions"], params["window_strides"], params["base_dilation"], params["window_dilation"])
    is_plain = axis is not None and all(each[axis] == 1 for each in sizes) and not any(params["padding"][axis])
    return axis if is_plain else None


def _concatenate(batch: Batch, equation: Any, axes: Axes) -> int | None:
    found = set(axes)
    return None if len(found) > 1 or equation.params["dimension"] in found else found.pop()


def _reshape(batch: Batch, equation: Any, axes: Axes) -> int | None:
    params = equation.params
    is_first = axes[0] == 0 and params["new_sizes"][:1] == (batch.images,) and params["dimensions"] is None
    return 0 if is_first and params.get("sharding") is None else None


def _transpose(batch: Batch, equation: Any, axes: Axes) -> int | None:
    return list(equation.params["permutation"]).index(axes[0])


def _squeeze(batch: Batch, equation: Any, axes: Axes) -> int | None:
    axis, gone = _one(axes), equation.params["dimensions"]
    return None if axis is None or axis in gone else axis - sum(each < axis for each in gone)


def _broadcast(batch: Batch, equation: Any, axes: Axes) -> int | None:
    is_plain = len(axes) == 1 and equation.params.get("sharding") is None and axes[0] is not None
    return equation.params["broadcast_dimensions"][axes[0]] if is_plain else None


def _pad(batch: Batch, equation: Any, axes: Axes) -> int | None:
    is_plain = axes[0] is not None and axes[1] is None and equation.params["padding_config"][axes[0]] == (0, 0, 0)
    return axes[0] if is_plain else None


def _slice(batch: Batch, equation: Any, axes: Axes) -> int | None:
    axis, params = _one(axes), equation.params
    assert axis is not None
    steps = params["strides"]
    is_whole = (params["start_indices"][axis], params["limit_indices"][axis]) == (0, batch.images)
    return axis if is_whole and (steps is None or steps[axis] == 1) else None


def _lax_conv(batch: Batch, equation: Any, axes: Axes) -> int | None:
    dimensions = equation.params["dimension_numbers"]
    is_plain = axes == [dimensions.lhs_spec[0], None] and equation.params["batch_group_count"] == 1
    return dimensions.out_spec[0] if is_plain else None


def _product(batch: Batch, equation: Any, axes: Axes) -> int | None:
    contracted, batched = equation.params["dimension_numbers"]
    sides = [side for side, axis in enumerate(axes) if axis is not None]
    side = sides[0]
    if len(sides) > 1 or axes[side] in (*contracted[side], *batched[side]):
        return None
    free = [
        [axis for axis in range(variable.aval.ndim) if axis not in (*contracted[i], *batched[i])]
        for i, variable in enumerate(equation.invars)
    ]
    before = len(batched[0]) + (len(free[0]) if side else 0)
    return before + [axis == axes[side] for axis in free[side]].index(True)


def _conv(batch: Batch, equation: Any, axes: Axes) -> int | None:
    config = equation.params["config"]
    found = primitives.Operands.of(axes, config)
    shapes = primitives.Operands.of([variable.aval.shape for variable in equation.invars], config)
    others = (found.kernel, found.bias, found.packed)
    is_plain = found.x == 0 and found.residual in (None, 0) and others == (None, None, None)
    is_plain &= not config.has_nonzeros and config.tile is None and shapes.kernel[0] == 1
    return 0 if is_plain and (found.residual == 0) == config.has_residual else None


def _dense_block(batch: Batch, equation: Any, axes: Axes) -> int | None:
    return 0 if axes[0] == 0 and all(axis is None for axis in axes[1:]) else None


_Rule: TypeAlias = Callable[[Batch, Any, Axes], int | None]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(equations.ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_WINDOWS, _window),
    "concatenate": _concatenate,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "pad": _pad,
    "slice": _slice,
    "conv_general_dilated": _lax_conv,
    "dot_general": _product,
    primitives.conv_p.name: _conv,
    dense_blocks.dense_block_p.name: _dense_block,
}


# --- parameters that have a shape in them -----------------------------------------------------------------------------


def _at(sizes: Sequence[int], axis: int | None, size: int) -> tuple[int, ...]:
    assert axis is not None
    return (*sizes[:axis], size, *sizes[axis + 1 :])


_Change: TypeAlias = Callable[[Batch, Any, Axes], dict[str, Any]]
_CHANGES: dict[str, _Change] = {
    "reshape": lambda batch, equation, axes: {"new_sizes": _at(equation.params["new_sizes"], 0, batch.micro)},
    "broadcast_in_dim": lambda batch, equation, axes: {
        "shape": _at(equation.params["shape"], equation.params["broadcast_dimensions"][axes[0]], batch.micro)
    },
    "slice": lambda batch, equation, axes: {
        "limit_indices": _at(equation.params["limit_indices"], axes[0], batch.micro)
    },
}
