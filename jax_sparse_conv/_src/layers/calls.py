"""One call of `conv`, `conv_pool` or `dense` without its arrays: what a plan is keyed by and the cost model reads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.api import by_density, ops
from jax_sparse_conv._src.api.arguments import ACTIVATIONS, default_precision, is_dtype
from jax_sparse_conv._src.dispatch.coo import configurations
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

# x, kernel, bias or None, residual or None: as the operation takes them.
Operands: TypeAlias = tuple[Any, Any, Any, Any]
_POOL_ARGUMENTS = ("pool", "window_shape", "window_strides", "window_padding")
_ONE_CALL = (["ecr", "direct"], ["coo", "direct"])  # what a GPU has kernels of in one custom call


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that decides how long its implementations take, except where the zeros are.

    Attributes:
      op: "conv", "conv_pool" or "dense".
      x_shape: [N, H, W, C], or [..., C] for dense.
      kernel_shape: [kh, kw, C / groups, K], or [C, K] for dense.
      dtype: of every operand.
      precision: what lax would compute with, `jax.default_matmul_precision` resolved: "default", "high", "highest", ...
      geometry: of the convolution and its pool; nothing of it matters for dense.
      bias: whether there is one.
      residual: whether there is one.
      activation: None or "relu".
    """

    op: str
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    dtype: str
    precision: str
    geometry: Geometry
    bias: bool
    residual: bool
    activation: str | None

    @classmethod
    def of(cls, op: str, operands: Operands, arguments: Mapping[str, Any]) -> Call:
        """The call of `op` with these operands (arrays or their shapes) and keyword arguments.

        Raises:
          ValueError: a shape or argument that does not fit.
        """
        x, kernel, bias, residual = operands
        fields = dict(arguments)
        activation, precision = fields.pop("activation", None), fields.pop("precision", None)
        pool = {name: fields.pop(name) for name in _POOL_ARGUMENTS if name in fields}
        geometry = Geometry() if op == "dense" else geo.resolve(x.shape, kernel.shape, **fields)
        if op == "conv_pool":
            conv_size = geometry.conv_size(x.shape[1:3], kernel.shape[:2])
            geometry = geo.with_pool(geometry, conv_size, kind=pool.pop("pool"), **pool)
        return cls(
            op=op,
            x_shape=tuple(x.shape),
            kernel_shape=tuple(kernel.shape),
            dtype=str(x.dtype),
            precision=precision_name(precision),
            geometry=geometry,
            bias=bias is not None,
            residual=residual is not None,
            activation=activation,
        )

    def check(self) -> None:
        """Raise for fields that no `Call.of` has, as those of a damaged file may be.

        Raises:
          ValueError: names the first field that is none, or does not fit the others, and its value.
        """
        for name, value, choices in (
            ("op", self.op, tuple(ops.IMPLEMENTATIONS)),
            ("activation", self.activation, ACTIVATIONS),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")
        if not is_dtype(self.dtype):
            raise ValueError(f"dtype={self.dtype!r} is not the name of a dtype, such as 'float32'")
        for name, shape in (("x_shape", self.x_shape), ("kernel_shape", self.kernel_shape)):
            if min(shape, default=0) < 0:
                raise ValueError(f"{name}={shape} is not a shape; sizes are 0 or more")
        if self.residual and self.op != "conv":
            raise ValueError(f"residual=True is not of op={self.op!r}; only a conv takes one")
        if (self.geometry.pool is not None) != (self.op == "conv_pool"):
            raise ValueError(
                f"geometry.pool={self.geometry.pool} is not of op={self.op!r}; conv_pool has one, and only that"
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        x, kernel = (jax.ShapeDtypeStruct(shape, self.dtype) for shape in (self.x_shape, self.kernel_shape))
        if self.op == "dense" and (x.ndim < 1 or kernel.ndim != 2 or x.shape[-1] != kernel.shape[0]):
            raise ValueError(f"x_shape={x.shape} and kernel_shape={kernel.shape} are not [..., C] and [C, K]")
        resolved = Call.of(self.op, (x, kernel, None, None), self._arguments()).geometry
        if resolved != self.geometry:
            raise ValueError(f"geometry={self.geometry} is not what {self.op} resolves it to, {resolved}")

    @property
    def implementations(self) -> tuple[str, ...]:
        """The kernels that the operation has, of which not all may run this call; "adaptive" is two of them."""
        return tuple(name for name in ops.IMPLEMENTATIONS[self.op] if name != "adaptive")

    def why_not_coo(self) -> str | None:
        """Why "coo" cannot run this convolution, or None."""
        return configurations.why_not(self.kernel_shape, self.geometry)

    @property
    def rows(self) -> int:
        """Rows of x of a dense layer."""
        return math.prod(self.x_shape[:-1])

    def function(self, implementation: str | None) -> Callable[..., jax.Array]:
        """The call as a jitted function of its `present` operands; the same object for equal calls."""
        return _function(self, implementation)

    def present(self, operands: Operands) -> tuple[Any, ...]:
        """The operands that are there, in order: what `function` takes."""
        return tuple(operand for operand in operands if operand is not None)

    def describe(self) -> str:
        """One line, such as "1x14x14x256 * 3x3x256x256"."""
        text = f"{_shape(self.x_shape)} * {_shape(self.kernel_shape)}"
        if self.geometry.strides != (1, 1):
            text += f" /{_shape(self.geometry.strides)}"
        if self.geometry.groups > 1:
            text += f" g{self.geometry.groups}"
        return text

    def first_difference(self, other: Call) -> str | None:
        """The first field in which `other` differs, as "name=its value, not mine", or None."""
        for field in dataclasses.fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            if mine == its:
                continue
            if isinstance(mine, Geometry):
                for part in dataclasses.fields(mine):
                    mine_part, its_part = getattr(mine, part.name), getattr(its, part.name)
                    if mine_part != its_part:
                        return f"{part.name}={its_part}, not {mine_part}"
            return f"{field.name}={its!r}, not {mine!r}"
        return None

    def _arguments(self) -> dict[str, Any]:
        parts = self.precision.split(",")
        precision = parts[0] if len(parts) == 1 else tuple(parts)
        found: dict[str, Any] = {"activation": self.activation, "precision": precision}
        if self.op == "dense":
            return found
        geometry = self.geometry
        found |= {
            "strides": geometry.strides,
            "padding": geometry.padding,
            "kernel_dilation": geometry.dilation,
            "feature_group_count": geometry.groups,
        }
        if geometry.pool is not None:
            pool = geometry.pool
            values = (pool.kind, pool.window, pool.strides, pool.padding)
            found |= dict(zip(_POOL_ARGUMENTS, values, strict=True))
        return found


def precision_name(precision: Any) -> str:
    """What `precision` means now, as one word or two with a comma; None is `jax.default_matmul_precision`."""
    if precision is None:
        precision = default_precision()
    if precision is None:
        return "default"
    if isinstance(precision, (tuple, list)) and not isinstance(precision, lax.DotAlgorithm):
        names = [precision_name(part) for part in precision]
        return names[0] if len(set(names)) == 1 else ",".join(names)
    try:
        return lax.Precision(precision).name.lower()
    except ValueError:
        return str(getattr(precision, "name", precision))  # an algorithm


def run(op: str, operands: Operands, arguments: Mapping[str, Any], implementation: Any) -> Any:
    """`conv`, `conv_pool` or `dense` by name; a pair with the counts that `arguments` may ask for."""
    x, kernel, bias, residual = operands
    if op == "conv":
        return ops.conv(x, kernel, bias, residual=residual, implementation=implementation, **arguments)
    function = ops.conv_pool if op == "conv_pool" else ops.dense
    return function(x, kernel, bias, implementation=implementation, **arguments)


def run_by_density(
    op: str, operands: Operands, arguments: Mapping[str, Any], steps: Sequence[by_density.Step], beyond: str
) -> Any:
    """As `run`, by the implementation of the first step whose density x does not exceed, or by `beyond`.

    Counts of x among the `arguments` decide, else those of a sample. A GPU chooses between "ecr" or "coo" and "direct"
    without the host, which waits for it where it is between others.
    """
    x, kernel, bias, residual = operands
    fields = dict(arguments)
    nonzeros = fields.pop("nonzeros", None)
    names = [*(name for _, name in steps), beyond]
    is_one_call = op == "conv" and names in _ONE_CALL and not isinstance(x, CooStar)
    if is_one_call and devices.default_platform() != "cpu":
        fields |= {"sparse": names[0], "below": steps[0][0], "nonzeros": nonzeros}
        return by_density.conv_up_to(x, kernel, bias, residual, **fields)

    def branch(name: str) -> Callable[..., Any]:
        def function(*present: Any) -> Any:
            given = x.todense() if isinstance(x, CooStar) and name not in ops.READS_LISTS else x
            return run(op, (given, *present), fields, name)

        return function

    nonzeros = by_density.nonzeros_of(x) if nonzeros is None else by_density.checked_nonzeros(nonzeros)
    branches = [branch(name) for name in names]
    return by_density.switch(branches, [density for density, _ in steps], nonzeros, kernel, bias, residual)


@functools.lru_cache(maxsize=4096)
def _function(call: Call, implementation: str | None) -> Callable[..., jax.Array]:
    @jax.jit
    def function(*present: jax.Array) -> jax.Array:
        rest = list(present)
        wanted = (True, True, call.bias, call.residual)
        x, kernel, bias, residual = (rest.pop(0) if is_there else None for is_there in wanted)
        return run(call.op, (x, kernel, bias, residual), call._arguments(), implementation)

    return function


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
