"""A dense network of this package as a PyTorch module, with the same weights: what other frameworks are given to run.

The network's jaxpr is translated equation by equation. Arrays of four axes that depend on the image are [N, H, W, C]
in JAX and [N, C, H, W] in PyTorch, so no transpose stands between layers. What other frameworks fuse is put as they
know it:

- a bias is one of the convolution or of the product in front of it;
- a factor and a summand for each channel are a batch norm;
- a sum of windows over a number is an average pool;
- a product with rows of a flattened map reads them channels first, with its kernel's rows in that order.

Branches that depend on the platform are those that no platform is named for.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend import core

Value: TypeAlias = Any
"""A node of the graph or a constant, a NumPy array in JAX's order that may have ones where JAX's has more."""

CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
"""Of a map: axes of JAX's by PyTorch's, and the other way round."""

_INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")
_IDENTITIES = ("copy", "copy_p", "stop_gradient", "optimization_barrier")
_CONVOLUTION = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
_OF_ROWS = ((1,), (0,))
_SAME = 1e-6  # relative, of numbers that cancel


def module(function: Callable[[jax.Array], jax.Array], shape: Sequence[int]) -> Any:
    """A `torch.fx.GraphModule` that computes the function of one float32 array of this shape.

    Args:
      function: traceable by JAX; arrays that it holds are constants of the module. It returns one array.
      shape: of its argument, [N, H, W, C] or any that has not four axes.

    Returns:
      The module. It takes a map as [N, C, H, W], any other array as it is, and its result is in JAX's order.

    Raises:
      ImportError: PyTorch is not installed.
      ValueError: a primitive that has no translation, or one with arguments that have none.
    """
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(tuple(shape), np.float32))
    if len(closed.out_avals) != 1:
        raise ValueError(f"the function returns {len(closed.out_avals)} arrays, and a module here has one result")
    translation = _Translation()
    x = translation.graph.placeholder("x")
    (result,) = translation.run(closed.jaxpr, closed.consts, [x])
    return translation.finished(result, closed.out_avals[0].shape)


class _Translation:
    """The graph so far, and its constants."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.functional: Any = self.torch.nn.functional
        self.fx: Any = importlib.import_module("torch.fx")
        self.graph = self.fx.Graph()
        self.root = self.torch.nn.Module()
        self.held: dict[Any, np.ndarray] = {}
        """By node: the constant that it stands for, in JAX's order."""

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        """The values of a jaxpr's results."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return np.asarray(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            found = self.equation(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def finished(self, result: Value, shape: Sequence[int]) -> Any:
        self.graph.output(self.in_jax_order(self.node(result), len(shape)))
        self.graph.eliminate_dead_code()
        for name, _ in [*self.root.named_parameters()]:  # what was folded into others
            if all(node.target != name for node in self.graph.nodes):
                delattr(self.root, name)
        made = self.fx.GraphModule(self.root, self.graph)
        made.graph.lint()
        return made.eval()

    def equation(self, equation: Any, values: Sequence[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name in _INLINED:
            inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
        if name == "platform_index":
            return [np.asarray(params["platforms"].index(None))]
        if name == "cond" and not self.is_node(values[0]):
            branch = params["branches"][int(values[0])]
            return self.run(branch.jaxpr, branch.consts, values[1:])
        if not any(map(self.is_node, values)):
            return _folded(equation, values)
        if name in _IDENTITIES:
            return list(values)
        if name not in _TRANSLATIONS:
            raise ValueError(f"the primitive {name!r} has no translation to PyTorch: {equation}"[:300])
        return [_TRANSLATIONS[name](self, equation, *values)]

    # --- nodes and constants ------------------------------------------------------------------------------------------

    def is_node(self, value: Value) -> bool:
        return isinstance(value, self.fx.Node)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.graph.call_function(function, args, kwargs)

    def parameter(self, array: np.ndarray, of: np.ndarray | None = None) -> Any:
        """A node that stands for a constant in PyTorch's order, which is that of JAX's order `of`."""
        values = self.torch.from_numpy(np.array(array))
        if array.ndim == 4:
            values = values.contiguous(memory_format=self.torch.channels_last)
        name = f"constant{len(self.held)}"
        self.root.register_parameter(name, self.torch.nn.Parameter(values, requires_grad=False))
        node = self.graph.get_attr(name)
        self.held[node] = array if of is None else of
        return node

    def node(self, value: Value) -> Any:
        """A value as a node in PyTorch's order."""
        if self.is_node(value):
            return value
        return self.parameter(value.transpose(CHANNELS_FIRST) if value.ndim == 4 else value, value)

    def operand(self, value: Value) -> Any:
        """The same of one that broadcasts: a number where it is one."""
        return float(value.item()) if not self.is_node(value) and value.size == 1 else self.node(value)

    def in_jax_order(self, node: Any, rank: int) -> Any:
        return self.call(self.torch.permute, node, CHANNELS_LAST) if rank == 4 else node

    def in_torch_order(self, node: Any, rank: int) -> Any:
        return self.call(self.torch.permute, node, CHANNELS_FIRST) if rank == 4 else node

    def is_call(self, value: Value, function: Any) -> bool:
        return self.is_node(value) and value.op == "call_function" and value.target is function

    def without_factor(self, value: Value, factor: float) -> Any | None:
        """What a product with this number is of; None of any other value."""
        if not self.is_call(value, operator.mul):
            return None
        inner, number = value.args
        return inner if isinstance(number, float) and math.isclose(number, factor, rel_tol=_SAME) else None

    # --- primitives ---------------------------------------------------------------------------------------------------

    def add(self, equation: Any, x: Value, y: Value) -> Any:
        if not self.is_node(x):
            x, y = y, x
        added = None if self.is_node(y) else _of_channels(y, equation)
        if added is not None and any(self.is_call(x, each) for each in (self.torch.conv2d, self.functional.linear)):
            before, kernel, bias, *others = x.args
            if bias is None:
                return self.call(x.target, before, kernel, self.parameter(added), *others)
        if added is not None and self.is_call(x, operator.mul) and x.args[1] in self.held:
            factor = _of_channels(self.held[x.args[1]], equation)
            if factor is not None and len(equation.outvars[0].aval.shape) == 4:
                return self.batch_norm(x.args[0], factor, added)
        return self.call(operator.add, self.node(x), self.operand(y))

    def batch_norm(self, x: Any, factor: np.ndarray, added: np.ndarray) -> Any:
        epsilon = 2.0**-16  # which PyTorch wants above 0; with the variance it is 1 exactly
        mean, variance = (self.parameter(np.full(len(added), value, np.float32)) for value in (0, 1 - epsilon))
        affine = (self.parameter(factor), self.parameter(added))
        return self.call(self.functional.batch_norm, x, mean, variance, *affine, False, 0.0, epsilon)

    def multiply(self, equation: Any, x: Value, y: Value) -> Any:
        if not self.is_node(x):
            x, y = y, x
        return self.call(operator.mul, self.node(x), self.operand(y))

    def subtract(self, equation: Any, x: Value, y: Value) -> Any:
        return self.call(operator.sub, self.operand(x), self.operand(y))

    def divide(self, equation: Any, x: Value, y: Value) -> Any:
        if not self.is_node(y) and y.size == 1:
            inner = self.without_factor(x, float(y.item()))
            if inner is not None:
                return inner
        return self.call(operator.truediv, self.operand(x), self.operand(y))

    def maximum(self, equation: Any, x: Value, y: Value) -> Any:
        if not self.is_node(x):
            x, y = y, x
        if not self.is_node(y) and y.size == 1:
            return self.call(self.functional.relu, x) if y.item() == 0 else self.call(self.torch.clamp, x, y.item())
        return self.call(self.torch.maximum, x, self.node(y))

    def convolution(self, equation: Any, x: Value, kernel: Value) -> Any:
        params = equation.params
        spec = params["dimension_numbers"]
        if (spec.lhs_spec, spec.rhs_spec, spec.out_spec) != _CONVOLUTION:
            raise ValueError(
                f"conv_general_dilated with dimension_numbers={spec} has no translation, NHWC and HWIO have"
            )
        if params["batch_group_count"] != 1 or set(params["lhs_dilation"]) != {1}:
            raise ValueError("conv_general_dilated with batch_group_count or lhs_dilation has no translation")
        if self.is_node(kernel):
            raise ValueError("conv_general_dilated of a kernel that depends on the image has no translation")
        x, padding = self.padded(self.node(x), params["padding"], 0.0)
        weight = self.parameter(np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)))
        strides, dilation = params["window_strides"], params["rhs_dilation"]
        groups = params["feature_group_count"]
        return self.call(self.torch.conv2d, x, weight, None, tuple(strides), padding, tuple(dilation), groups)

    def padded(
        self, x: Any, padding: Sequence[tuple[int, int]], value: float, most: Sequence[int] | None = None
    ) -> tuple[Any, tuple[int, ...]]:
        """A map and the padding that is left for its rows and columns: all that is the same on both sides."""
        limits = most or (math.inf, math.inf)
        if all(low == high and 0 <= low <= limit for (low, high), limit in zip(padding, limits, strict=True)):
            return x, tuple(low for low, _ in padding)
        (top, bottom), (left, right) = padding
        return self.call(self.functional.pad, x, (left, right, top, bottom), "constant", value), (0, 0)

    def product(self, equation: Any, x: Value, kernel: Value) -> Any:
        contracted, batch = (tuple(map(tuple, each)) for each in equation.params["dimension_numbers"])
        if any(batch):
            raise ValueError(f"dot_general with batch dimensions {batch} has no translation")
        ranks = [len(atom.aval.shape) for atom in equation.invars]
        if not self.is_node(kernel) and (ranks, contracted) == ([2, 2], _OF_ROWS):
            x, rows = self.flattened(x, len(kernel))
            return self.call(self.functional.linear, x, self.parameter(np.ascontiguousarray(kernel[rows].T)), None)
        sides = [self.in_jax_order(self.node(value), rank) for value, rank in zip((x, kernel), ranks, strict=True)]
        return self.in_torch_order(
            self.call(self.torch.tensordot, *sides, contracted), sum(ranks) - 2 * len(contracted[0])
        )

    def flattened(self, x: Value, length: int) -> tuple[Any, Any]:
        """Rows, and which of the kernel's rows theirs are: of a flattened map those that are channels first."""
        if self.is_call(x, self.torch.reshape) and self.is_call(x.args[0], self.torch.permute):
            before, order = x.args[0].args
            shape = x.meta["shape"]
            if order == CHANNELS_LAST and math.prod(shape[1:]) == length:
                rows = np.arange(length).reshape(shape[1:]).transpose(2, 0, 1).reshape(-1)
                return self.call(self.torch.flatten, before, 1), rows
        return self.node(x), slice(None)

    def max_pool(self, equation: Any, x: Value) -> Any:
        window, strides, padding, dilation = self.window(equation)
        x, padding = self.padded(x, padding, -math.inf, [each // 2 for each in window])
        return self.call(self.functional.max_pool2d, x, window, strides, padding, dilation)

    def sum_pool(self, equation: Any, x: Value) -> Any:
        window, strides, padding, dilation = self.window(equation)
        if dilation != (1, 1):
            raise ValueError(f"reduce_window_sum with window_dilation={dilation} has no translation")
        x, padding = self.padded(x, padding, 0.0, [each // 2 for each in window])
        mean = self.call(self.functional.avg_pool2d, x, window, strides, padding, False, True)
        return self.call(operator.mul, mean, float(math.prod(window)))

    def window(self, equation: Any) -> tuple[Any, ...]:
        """Window, strides, padding and dilation of rows and columns."""
        params, name = equation.params, equation.primitive.name
        every = [tuple(params[key]) for key in ("window_dimensions", "window_strides", "padding", "window_dilation")]
        outer = [(each[0], each[-1]) for each in every]
        if [len(each) for each in every] != [4] * 4 or set(params.get("base_dilation", (1,))) != {1}:
            raise ValueError(f"{name} is translated of maps without base_dilation only, this is {params}")
        if outer != [(1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)]:
            raise ValueError(f"{name} over images or channels has no translation, this is {params}")
        return tuple(each[1:3] for each in every)

    def reduced_sum(self, equation: Any, x: Value) -> Any:
        shape, axes = equation.invars[0].aval.shape, tuple(equation.params["axes"])
        if len(shape) == 4 and set(axes) == {1, 2}:
            mean = self.without_factor(x, 1 / (shape[1] * shape[2]))
            if mean is not None:
                return self.call(self.torch.flatten, self.call(self.functional.avg_pool2d, mean, shape[1:3]), 1)
            return self.call(self.torch.sum, x, (2, 3))
        found = self.call(self.torch.sum, self.in_jax_order(x, len(shape)), axes)
        return self.in_torch_order(found, len(shape) - len(axes))

    def concatenated(self, equation: Any, *values: Value) -> Any:
        axis, rank = equation.params["dimension"], len(equation.outvars[0].aval.shape)
        whole = [
            value if self.is_node(value) else np.broadcast_to(value, atom.aval.shape)
            for value, atom in zip(values, equation.invars, strict=True)
        ]
        return self.call(self.torch.cat, list(map(self.node, whole)), CHANNELS_FIRST.index(axis) if rank == 4 else axis)

    def reshaped(self, equation: Any, x: Value) -> Any:
        if equation.primitive.name == "reshape" and equation.params["dimensions"] is not None:
            raise ValueError(f"reshape with dimensions={equation.params['dimensions']} has no translation")
        before, after = (atom.aval.shape for atom in (equation.invars[0], equation.outvars[0]))
        found = self.call(self.torch.reshape, self.in_jax_order(x, len(before)), after)
        found.meta["shape"] = before
        return self.in_torch_order(found, len(after))

    def transposed(self, equation: Any, x: Value) -> Any:
        rank, order = len(equation.invars[0].aval.shape), tuple(equation.params["permutation"])
        return self.in_torch_order(self.call(self.torch.permute, self.in_jax_order(x, rank), order), rank)

    def broadcast(self, equation: Any, x: Value) -> Any:
        before, after = equation.invars[0].aval.shape, equation.params["shape"]
        ones = [1] * len(after)
        for axis, size in zip(equation.params["broadcast_dimensions"], before, strict=True):
            ones[axis] = size
        found = self.call(self.torch.reshape, self.in_jax_order(x, len(before)), tuple(ones))
        return self.in_torch_order(self.call(self.torch.Tensor.expand, found, tuple(after)), len(after))

    def pad(self, equation: Any, x: Value, value: Value) -> Any:
        config = [tuple(each) for each in equation.params["padding_config"]]
        if self.is_node(value) or any(interior for *_, interior in config):
            raise ValueError(f"pad is translated with a constant and nothing between elements, this is {config}")
        ordered = [config[axis] for axis in CHANNELS_FIRST] if len(config) == 4 else config
        sides = tuple(size for low, high, _ in reversed(ordered) for size in (low, high))
        return self.call(self.functional.pad, x, sides, "constant", float(value.item()))

    def sliced(self, equation: Any, x: Value) -> Any:
        params = equation.params
        starts, ends = params["start_indices"], params["limit_indices"]
        found = list(map(slice, starts, ends, params["strides"] or [1] * len(starts)))
        return self.call(
            operator.getitem, x, tuple(found[i] for i in CHANNELS_FIRST) if len(found) == 4 else tuple(found)
        )

    def converted(self, equation: Any, x: Value) -> Any:
        before, after = equation.invars[0].aval.dtype, equation.params["new_dtype"]
        if before != after:
            raise ValueError(
                f"convert_element_type from {before} to {after} has no translation, the network is float32"
            )
        return x


def _folded(equation: Any, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of an equation of constants."""
    if equation.primitive.name == "broadcast_in_dim":  # ones in the place of copies
        shape = [1] * len(equation.params["shape"])
        for axis, size in zip(equation.params["broadcast_dimensions"], values[0].shape, strict=True):
            shape[axis] = size
        return [values[0].reshape(shape)]
    whole = [np.broadcast_to(value, atom.aval.shape) for value, atom in zip(values, equation.invars, strict=True)]
    found = equation.primitive.bind(*whole, **equation.params)
    return [np.asarray(each) for each in (found if equation.primitive.multiple_results else [found])]


def _of_channels(value: np.ndarray, equation: Any) -> np.ndarray | None:
    """A constant as a vector of the result's last axis; None where it differs along another."""
    channels = equation.outvars[0].aval.shape[-1]
    if value.size not in (1, channels) or (value.size > 1 and value.shape[-1] != channels):
        return None
    return np.ascontiguousarray(np.broadcast_to(value.reshape(-1), (channels,)))


_TRANSLATIONS: dict[str, Callable[..., Any]] = {
    "add": _Translation.add,
    "add_any": _Translation.add,
    "broadcast_in_dim": _Translation.broadcast,
    "concatenate": _Translation.concatenated,
    "conv_general_dilated": _Translation.convolution,
    "convert_element_type": _Translation.converted,
    "div": _Translation.divide,
    "dot_general": _Translation.product,
    "max": _Translation.maximum,
    "mul": _Translation.multiply,
    "pad": _Translation.pad,
    "reduce_sum": _Translation.reduced_sum,
    "reduce_window_max": _Translation.max_pool,
    "reduce_window_sum": _Translation.sum_pool,
    "reshape": _Translation.reshaped,
    "slice": _Translation.sliced,
    "squeeze": _Translation.reshaped,
    "sub": _Translation.subtract,
    "transpose": _Translation.transposed,
}
"""By primitive: of the equation and its values, at least one of them a node."""
