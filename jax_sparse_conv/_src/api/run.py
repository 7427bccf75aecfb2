"""How a public operation runs once its arguments are checked: by the primitive, or by XLA."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax

from jax_sparse_conv._src.api.arguments import KERNEL_DTYPES, Operands, canonical_precision
from jax_sparse_conv._src.dispatch.coo import configurations
from jax_sparse_conv._src.primitive import counting, explicit, jax_internals, packing, primitives, reference
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.primitive.derived import Derived
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem import taps
from jax_sparse_conv._src.problem.geometry import Geometry

_parts = Derived()  # of constant kernels: the taps that are read
_WITH_ALL_TAPS = ("xla", "coo")  # XLA's own operation, and kernels that there are for square windows alone


def run(
    operands: Operands,
    geometry: Geometry,
    activation: ActivationName | None,
    precision: lax.PrecisionLike,
    implementation: str | None,
    sparse: str,
    count_nonzeros: bool,
    *,
    below: float | None = None,
) -> Any:
    """One call by `implementation`; under None `sparse` is the native method that may be chosen.

    `below` is the density up to which "adaptive" is sparse, None for the model's.
    """
    lists = operands.x if isinstance(operands.x, CooStar) else None
    if isinstance(operands.x, CooStar) and not _reads_lists(operands.x, operands.kernel, geometry, implementation):
        operands, lists = operands._replace(x=operands.x.todense()), None
    if implementation not in _WITH_ALL_TAPS:
        operands, geometry = _with_taps_read(operands, geometry)
    method, fallback = implementation or sparse, implementation is None
    if lists is not None:
        method = "coo"
    packed = packing.for_call(operands.x, operands.kernel, operands.packed, geometry, method, may_be_dense=fallback)
    precision = canonical_precision(precision)
    reason = geo.too_large(geometry, operands.x.shape, operands.kernel.shape)
    if reason is not None and not fallback and method != "xla":
        raise ValueError(f"implementation={method!r} cannot run: {reason}; implementation=None or 'xla' can")
    if fallback and geo.is_symbolic(*operands.x.shape[1:], *operands.kernel.shape):
        geo.warn_of_unknown_sizes()
    if method == "coo" and (missing := configurations.why_not(operands.kernel.shape, geometry)):
        raise ValueError(f"{missing}: implementation='coo' cannot run; None, 'ecr' or 'xla' can")
    nothing_to_skip = operands.x.shape[3] == 0
    if method == "xla" or reason is not None or nothing_to_skip or str(operands.x.dtype) not in KERNEL_DTYPES:
        with scope(implementation):
            if explicit.is_split(*operands[:4]):
                config = primitives.Config(geometry, sparse, activation, by_lax=True, precision=precision)
                return _sparse(operands._replace(packed=None), None, config, count_nonzeros)
            return with_counts(reference.conv_pool(*operands[:4], geometry, activation, precision), count_nonzeros)
    tile = None if lists is None else lists.tile
    config = primitives.Config(
        geometry, method, activation, fallback=fallback, precision=precision, tile=tile, below=below
    )
    return _sparse(operands._replace(packed=None), packed, config, count_nonzeros)


def _with_taps_read(operands: Operands, geometry: Geometry) -> tuple[Operands, Geometry]:
    """A call without the taps that meet nothing but padding.

    A kernel stays whole that has been packed, whose type says how it is split, or that lists of x were made for.
    """
    x, kernel = operands.x, operands.kernel
    if isinstance(x, CooStar) or operands.packed is not None or explicit.is_split(kernel):
        return operands, geometry
    (rows, columns), small = taps.read(geometry, x.shape[1:3], kernel.shape)
    if small is geometry:
        return operands, geometry
    window = (rows.start, rows.stop, columns.start, columns.stop)
    if isinstance(kernel, jax.core.Tracer):
        return operands._replace(kernel=_part(kernel, *window)), small
    return operands._replace(kernel=_parts.of(kernel, window, lambda: _part(kernel, *window))), small


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)
def _part(kernel: jax.Array, top: int, bottom: int, left: int, right: int) -> jax.Array:
    return kernel[top:bottom, left:right]


def _reads_lists(x: CooStar, kernel: jax.Array, geometry: Geometry, implementation: str | None) -> bool:
    """Whether a call reads the lists; under None the dense map serves what no kernel of COO* takes."""
    if implementation is not None:
        return implementation == "coo" and 0 not in x.shape
    is_small = geo.too_large(geometry, x.shape, kernel.shape) is None
    return is_small and 0 not in x.shape and configurations.why_not(kernel.shape, geometry) is None


@functools.partial(jax.jit, static_argnames=("config", "count_nonzeros"))
def _sparse(operands: Operands, packed: jax.Array | None, config: primitives.Config, count_nonzeros: bool) -> Any:
    # Jitted so that an eager call does not copy the kernel to give it the stack axis.
    x, kernel, bias, residual, nonzeros, _ = operands
    lists = None
    if isinstance(operands.x, CooStar):  # the dense map goes along, for derivatives; where none reads it, none is made
        stored = operands.x
        x, lists = stored.todense(), (lax.stop_gradient(stored.values), stored.positions, stored.counts)
    kernel, bias, packed = kernel[None], None if bias is None else bias[None], None if packed is None else packed[None]
    if count_nonzeros:
        return counting.bind(primitives.Operands(x, kernel, bias, residual, packed, nonzeros, lists), config)
    return primitives.bind(x, kernel, bias, residual, config, packed, nonzeros, lists)


def scope(implementation: str | None) -> AbstractContextManager[None]:
    """Names what XLA is to run by the user's own choice, which `accelerate` leaves to it."""
    return jax.named_scope(jax_internals.XLAS) if implementation == "xla" else contextlib.nullcontext()


def with_counts(y: jax.Array, count_nonzeros: bool) -> Any:
    """A result, with the counts of its non-zeros where they are asked for."""
    return (y, counting.counted(y)) if count_nonzeros else y
