"""A kernel turned round, as the gradient of x has it: in one native call on a CPU (`cpu/ffi/turned_kernel.cc`).

    jsc_turned_kernel   kernel [S, kh, kw, C / groups, K], another array -> [S, rows, columns, K / groups, C]

Some of its rows and columns, from the last one on, with input and output channels of each group in each other's place.
It is bound in lowerings alone, so it has no derivative and no rule for `vmap`. The other array is not read: a call
waits for it. XLA would else turn all kernels of a training step at its beginning, into memory that nothing else can
have meanwhile and that no cache holds.

XLA's operations have what is no CPU's, what several devices share, and kernels of few elements, by "turned kernel" of
`dispatch/model.json`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import mlir

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.primitive import explicit, jax_internals, partitioning
from jax_sparse_conv._src.primitive.primitives import same_varying_axes
from jax_sparse_conv._src.problem import geometry as geo


class Taps(NamedTuple):
    """Of a kernel's rows, or columns: `first`, `first + step`, ..., so many."""

    first: int
    step: int
    number: int

    @classmethod
    def of(cls, taps: slice, size: int) -> Taps:
        """What a slice takes of so many."""
        found = range(*taps.indices(size))
        return cls(found.start, found.step, len(found))

    @property
    def slice(self) -> slice:
        """That slice."""
        end = self.first + self.step * self.number
        return slice(self.first, None if end < 0 else end, self.step)


def takes(kernel: Any) -> bool:
    """Whether `turned` is faster than XLA's operations, in a program for a CPU; split types are XLA's."""
    if devices.default_platform() != "cpu" or _native.why_missing(_METHOD, "cpu", kernel.dtype) is not None:
        return False
    if geo.is_symbolic(*kernel.shape) or explicit.is_split(kernel):
        return False
    return bool(math.prod(kernel.shape) >= model.shipped("turned kernel")["elements, least"])


def turned(kernel: jax.Array, after: jax.Array, rows: Taps, columns: Taps, groups: int) -> jax.Array:
    """kernel [S, kh, kw, C / groups, K] -> [S, rows, columns, K / groups, C], once `after` is there."""
    kernel, after = same_varying_axes([kernel, lax.stop_gradient(after)])
    out: jax.Array = turned_p.bind(kernel, after, rows=rows, columns=columns, groups=groups)
    return out


def swapped(kernel: jax.Array, groups: int) -> jax.Array:
    """[S, kh, kw, C / groups, K] -> [S, kh, kw, K / groups, C], of XLA's operations."""
    stacks, *taps, channels, out_channels = kernel.shape
    grouped = kernel.reshape(stacks, *taps, channels, groups, out_channels // groups)
    return jnp.transpose(grouped, (0, 1, 2, 5, 4, 3)).reshape(stacks, *taps, out_channels // groups, groups * channels)


def _by_lax(kernel: jax.Array, after: Any = None, *, rows: Taps, columns: Taps, groups: int) -> jax.Array:
    return swapped(kernel, groups)[:, rows.slice, columns.slice]


def _native_call(kernel: jax.Array, after: jax.Array, *, rows: Taps, columns: Taps, groups: int) -> jax.Array:
    shape = _result_shape(kernel, rows, columns, groups)
    call = jax.ffi.ffi_call(_native.target_name(_METHOD), jax.ShapeDtypeStruct(shape, kernel.dtype))
    found: jax.Array = call(
        kernel,
        after,
        first=np.asarray((rows.first, columns.first), np.int64),
        step=np.asarray((rows.step, columns.step), np.int64),
        groups=np.int64(groups),
    )
    return found


def _result_shape(kernel: Any, rows: Taps, columns: Taps, groups: int) -> tuple[int, ...]:
    stacks, _, _, channels, out_channels = kernel.shape
    return stacks, rows.number, columns.number, out_channels // groups, groups * channels


# --- rules -----------------------------------------------------------------------------------------------------------


def _abstract_eval(kernel: Any, after: Any, *, rows: Taps, columns: Taps, groups: int) -> Any:
    return kernel.update(shape=_result_shape(kernel, rows, columns, groups), weak_type=False)


def _lower(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    """Of XLA's operations."""
    return mlir.lower_fun(functools.partial(_by_lax, **parameters), multiple_results=False)(ctx, *operands)


def _lower_on_cpu(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    if partitioning.is_partitioned(ctx) or _native.why_missing(_METHOD, "cpu", ctx.avals_in[0].dtype) is not None:
        return _lower(ctx, *operands, **parameters)
    return mlir.lower_fun(functools.partial(_native_call, **parameters), multiple_results=False)(ctx, *operands)


_METHOD = "turned_kernel"
turned_p = jex_core.Primitive(_native.target_name(_METHOD))
jax_internals.needs_devices(turned_p)
jax_internals.runs_alone(turned_p)
jax_internals.checks_nans(turned_p)
turned_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(turned_p, _lower)
mlir.register_lowering(turned_p, _lower_on_cpu, platform="cpu")
