"""A convolution or dense layer that a walk over a function has met, and what has joined it since.

A `Pending` is made into a call when something reads its result that cannot join it. Each joined equation keeps the
`Pending` in front of it and the equation itself. So what turns out to be no call, such as half an average pool, is the
call before it, and the equations behind that as they were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_conv._src.accelerate.rows import Row
from jax_sparse_conv._src.api import ops
from jax_sparse_conv._src.api.arguments import KERNEL_DTYPES
from jax_sparse_conv._src.primitive import channels, explicit, packing, reference
from jax_sparse_conv._src.primitive.packing import PackedKernel
from jax_sparse_conv._src.primitive.primitives import Config, Operands
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem.geometry import Geometry, Pads, Pair, Pool, is_symbolic, windowed_size

# Results for each weight, from which on a call scales weights that are not fixed. Scaling reads and writes each weight,
# and what it spares reads and writes each result: level at 1, and small layers are left some room.
_CHEAP_FOLD = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What is to be computed: pool(activation(scale * layer(x, kernel) + shift + residual)), in [N, H, W, K].

    Attributes:
      x: [N, H, W, C], of a dense layer [..., C].
      kernel: [kh, kw, C / groups, K], of a dense layer [C, K].
      geometry: of the convolution, and of the pool if there is one; None for a dense layer.
      precision: as in lax.
      is_fixed: whether the kernel depends on weights alone.
      shape: of the convolution's result as [N, H, W, K].
      dtype: of the result at this point.
      scale, shift: [K], [1] or None.
      residual: of the result's shape, or None.
      activation: None or "relu".
      sums: whether the pool's sums are not divided by the window's size yet.
    """

    x: jax.Array
    kernel: jax.Array
    geometry: Geometry | None
    precision: Any
    is_fixed: bool
    shape: tuple[Any, ...]
    dtype: Any
    scale: jax.Array | None = None
    shift: jax.Array | None = None
    residual: jax.Array | None = None
    activation: ActivationName | None = None
    sums: bool = False
    joined: tuple[str, ...] = ()

    @property
    def pool(self) -> Pool | None:
        return None if self.geometry is None else self.geometry.pool

    @property
    def result_shape(self) -> tuple[Any, ...]:
        """[N, H, W, K] behind the pool."""
        if self.pool is None:
            return self.shape
        along = zip(self.shape[1:3], self.pool.window, self.pool.strides, self.pool.padding, strict=True)
        height, width = (windowed_size(size, window, stride, pads, 1) for size, window, stride, pads in along)
        return (self.shape[0], height, width, self.shape[3])

    @property
    def is_linear(self) -> bool:
        """Whether nothing but scale and shift has joined."""
        return self.residual is None and self.activation is None and self.pool is None

    def is_call(self) -> bool:
        """Whether an operation of this package computes this."""
        if self.sums or self.dtype != self.x.dtype or (self.residual is not None and self.pool is not None):
            return False
        if self.scale is None or self.is_fixed:
            return True
        if is_symbolic(*self.shape):
            return False
        return bool(math.prod(self.shape) >= _CHEAP_FOLD * math.prod(self.kernel.shape))

    def emit(self) -> jax.Array:
        """The call."""
        kernel: jax.Array | PackedKernel = self.kernel
        bias = None if self.shift is None else jnp.broadcast_to(self.shift, self.shape[-1:]).astype(self.x.dtype)
        if self.scale is not None:
            wide = jnp.promote_types(self.kernel.dtype, jnp.float32)
            scaled = self.kernel.astype(wide) * self.scale.astype(wide).reshape((1,) * (self.kernel.ndim - 1) + (-1,))
            kernel = scaled.astype(self.kernel.dtype)
        if self.geometry is None:
            y = ops.dense(self.x, kernel, bias, activation=self.activation, precision=self.precision)
            return y.reshape(self.shape)
        if self.is_fixed and packing.reads(kernel.shape, self.geometry):
            kernel = packing.pack(kernel, feature_group_count=self.geometry.groups)
        options: dict[str, Any] = {
            "strides": self.geometry.strides,
            "padding": self.geometry.padding,
            "kernel_dilation": self.geometry.dilation,
            "feature_group_count": self.geometry.groups,
            "activation": self.activation,
            "precision": self.precision,
        }
        if self.pool is None:
            y = ops.conv(self.x, kernel, bias, residual=self.residual, **options)
        else:
            pool: dict[str, Any] = {"pool": self.pool.kind, "window_shape": self.pool.window}
            pool |= {"window_strides": self.pool.strides, "window_padding": self.pool.padding}
            y = ops.conv_pool(self.x, kernel, bias, **options, **pool)
        result: jax.Array = y
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class Norm:
    """The same of a map's channels in the place of a layer: activation((x - center) * scale + shift + residual).

    Attributes:
      x: [N, H, W, C], of which `channels.sums` were taken: a batch norm in training.
      center: [C], [1] or None.
    """

    x: jax.Array
    dtype: Any
    center: jax.Array | None = None
    scale: jax.Array | None = None
    shift: jax.Array | None = None
    residual: jax.Array | None = None
    activation: ActivationName | None = None
    joined: tuple[str, ...] = ()
    geometry: None = None
    pool: None = None
    sums: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.x.shape)

    @property
    def is_bare(self) -> bool:
        return self.center is None and self.scale is None and self.shift is None

    @property
    def is_linear(self) -> bool:
        return self.residual is None and self.activation is None

    def is_call(self) -> bool:
        """Whether an operation of this package computes this."""
        return self.scale is not None and self.dtype == self.x.dtype

    def emit(self) -> jax.Array:
        """The call."""

        def row(values: jax.Array | None, otherwise: float) -> jax.Array:
            given = jnp.full((1,), otherwise) if values is None else values
            return jnp.broadcast_to(given, self.x.shape[-1:])

        rows = row(self.center, 0), row(self.scale, 1), row(self.shift, 0)
        return channels.affine(self.x, *rows, self.residual, relu=self.activation == "relu")


@dataclasses.dataclass(eq=False)
class Pending:
    """A layer that may still grow.

    Attributes:
      call: what it is so far.
      before: the layer before the last equation joined, None at the start.
      redo: the last equation, of the result of `before`; at the start the layer as the function had it.
      row: what is reported of it, None of what is no layer.
      position: of its equation in the function.
    """

    call: Call | Norm
    before: Pending | None
    redo: Callable[..., jax.Array]
    row: Row | None
    position: int
    made: jax.Array | None = None

    def joined(self, name: str, redo: Callable[[jax.Array], jax.Array], **changes: Any) -> Pending:
        """This with one more equation."""
        names = (*self.call.joined, name) if name and name not in self.call.joined[-1:] else self.call.joined
        call = dataclasses.replace(self.call, joined=names, **changes)
        return Pending(call, self, redo, self.row, self.position)

    def array(self, emitted: Callable[[Row], None]) -> jax.Array:
        """The result as [N, H, W, K], computed once. `emitted` hears of a call that is made."""
        if self.made is None:
            if self.call.is_call():
                if self.row is not None:
                    emitted(self.row)
                    self.row.joined = self.call.joined
                self.made = self.call.emit()
            elif self.before is None:
                if self.row is not None:
                    self.row.reason = f"its result is {self.call.dtype} of x in {self.call.x.dtype}, and stays so"
                self.made = self.redo()
            else:
                self.made = self.redo(self.before.array(emitted))
        return self.made


# --- what may join ---------------------------------------------------------------------------------------------------


def with_scale(pending: Pending, values: jax.Array, redo: Callable[[jax.Array], jax.Array]) -> Pending | None:
    """Multiplied by [K] or [1]."""
    call = pending.call
    if not call.is_linear:
        return None
    values = _wide(values)
    shift = None if call.shift is None else call.shift * values
    return _affine(pending, _product(call.scale, values), shift, redo)


def with_shift(pending: Pending, values: jax.Array, redo: Callable[[jax.Array], jax.Array]) -> Pending | None:
    """[K] or [1] added."""
    call = pending.call
    if call.activation is not None or call.pool is not None:
        return None
    if isinstance(call, Norm) and call.is_bare:
        return pending.joined("", redo, center=-_wide(values))
    return _affine(pending, call.scale, _wide(values) if call.shift is None else call.shift + _wide(values), redo)


def _affine(
    pending: Pending, scale: jax.Array | None, shift: jax.Array | None, redo: Callable[[jax.Array], jax.Array]
) -> Pending:
    """With this scale and shift in the place of those before."""
    name = " and ".join(name for name, value in (("scale", scale), ("bias", shift)) if value is not None)
    names = tuple(each for each in pending.call.joined if each not in ("scale", "bias", "scale and bias"))
    call = dataclasses.replace(pending.call, scale=scale, shift=shift, joined=(*names, name))
    return Pending(call, pending, redo, pending.row, pending.position)


def with_residual(pending: Pending, residual: jax.Array, redo: Callable[[jax.Array], jax.Array]) -> Pending | None:
    """A map of the same shape added."""
    call = pending.call
    is_alike = residual.shape == call.shape and residual.dtype == call.dtype == call.x.dtype
    if not is_alike or not call.is_linear or (call.geometry is None and isinstance(call, Call)):
        return None
    return pending.joined("residual", redo, residual=residual)


def with_relu(pending: Pending, redo: Callable[[jax.Array], jax.Array]) -> Pending | None:
    """A ReLU, which a max pool may stand in front of."""
    call = pending.call
    if call.activation is not None or (call.pool is not None and not _commutes(call.pool)):
        return None
    return pending.joined("relu", redo, activation="relu")


def _commutes(pool: Pool) -> bool:
    """Whether a ReLU may go in front of a pool: of maxima of windows that are not all padding."""
    pads = zip(pool.window, pool.padding, strict=True)
    return pool.kind == "max" and all(max(padding) < window for window, padding in pads)


def with_dtype(pending: Pending, dtype: Any, redo: Callable[[jax.Array], jax.Array]) -> Pending | None:
    """Converted between floating-point types."""
    if pending.call.sums or str(jnp.dtype(dtype)) not in KERNEL_DTYPES:
        return None
    if jnp.promote_types(dtype, pending.call.x.dtype) != dtype:
        return None  # rounding to less is not undone
    return pending.joined("", redo, dtype=jnp.dtype(dtype))


def with_pool(
    pending: Pending, kind: str, window: Pair, strides: Pair, padding: Pads, redo: Callable[[jax.Array], jax.Array]
) -> Pending | None:
    """A pool over height and width: "max", or "sum" that is to be divided."""
    call = pending.call
    if isinstance(call, Norm) or explicit.has_split_pixels(call.x):
        return None  # the result of a call with a pool is split by images and channels alone
    if call.geometry is None or call.pool is not None or call.residual is not None:
        return None
    if min(map(min, padding)) < 0:
        return None
    pool = Pool("max" if kind == "max" else "avg", window, strides, padding)
    changes: dict[str, Any] = {"geometry": dataclasses.replace(call.geometry, pool=pool), "sums": kind == "sum"}
    if min(dataclasses.replace(call, geometry=changes["geometry"]).result_shape[1:3]) <= 0:
        return None
    return pending.joined("max pool" if kind == "max" else "average pool", redo, **changes)


def with_mean(pending: Pending, divisor: float, redo: Callable[[jax.Array], jax.Array]) -> Pending | None:
    """Sums of a pool divided by the window's size."""
    call = pending.call
    if not call.sums or call.pool is None or not math.isclose(divisor, math.prod(call.pool.window), rel_tol=1e-6):
        return None
    return pending.joined("average pool", redo, sums=False)


def _wide(values: jax.Array) -> jax.Array:
    """In float32 at least, so that folding rounds once."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _product(first: jax.Array | None, second: jax.Array) -> jax.Array:
    return second if first is None else first * second


# --- the start -------------------------------------------------------------------------------------------------------


def of_map(x: jax.Array, dtype: Any, position: int) -> Pending:
    """A map [N, H, W, C] of which `channels.sums` were taken, in a dtype of the function's."""
    return Pending(Norm(x, jnp.dtype(dtype)), None, lambda: x.astype(dtype), None, position)


def of_conv(
    x: jax.Array,
    kernel: jax.Array,
    geometry: Geometry,
    precision: Any,
    dtype: Any,
    is_fixed: bool,
    row: Row,
    position: int,
) -> Pending:
    """A convolution of x [N, H, W, C] and kernel [kh, kw, C / groups, K] whose result is of `dtype`."""
    size = geometry.conv_size(x.shape[1:3], kernel.shape[:2])

    def as_it_was() -> jax.Array:
        return reference.conv(x, kernel, geometry, precision, dtype)

    shape = (x.shape[0], *size, kernel.shape[3])
    call = Call(x, kernel, geometry, precision, is_fixed, shape, jnp.dtype(dtype))
    return Pending(call, None, as_it_was, row, position)


def of_dense(
    x: jax.Array, kernel: jax.Array, precision: Any, is_fixed: bool, dtype: Any, row: Row, position: int
) -> Pending:
    """A product of x [N, C] or [C] and kernel [C, K], whose result lies as [N, 1, 1, K]."""
    rows: Sequence[Any] = x.shape[:-1] or (1,)
    shape = (*rows, 1, 1, kernel.shape[1])

    def as_it_was() -> jax.Array:
        y = jnp.matmul(x, kernel, precision=precision, preferred_element_type=dtype)
        return y.reshape(shape)

    call = Call(x, kernel, None, precision, is_fixed, shape, jnp.dtype(dtype))
    return Pending(call, None, as_it_was, row, position)


def of_own(operands: Operands, config: Config, is_fixed: bool, row: Row, position: int) -> Pending:
    """A call of this package under `implementation=None`, with what has joined it: kernel as in `of_conv`, bias [K]."""
    x, kernel, pool = operands.x, operands.kernel, config.geometry.pool
    size = config.geometry.without_pool().conv_size(x.shape[1:3], kernel.shape[:2])
    parts = (
        operands.bias is not None and "bias",
        operands.residual is not None and "residual",
        config.activation,
        pool is not None and f"{'max' if pool.kind == 'max' else 'average'} pool",
    )
    call = Call(
        x,
        kernel,
        config.geometry,
        config.precision,
        is_fixed,
        (x.shape[0], *size, kernel.shape[3]),
        x.dtype,
        shift=operands.bias,
        residual=operands.residual,
        activation=config.activation,
        joined=tuple(part for part in parts if part),
    )
    return Pending(call, None, call.emit, row, position)
