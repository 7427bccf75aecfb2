"""An operation by the implementation that a list of densities names, chosen in the running program: for plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src.api import run
from jax_sparse_conv._src.api.arguments import Operands, canonical_activation, check_nonzeros
from jax_sparse_conv._src.primitive import counting, sampling
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.arrays import as_array

Step = tuple[float, str]
"""Up to which density of x an implementation runs."""


def nonzeros_of(x: Any) -> jax.Array:
    """Counts of x, an array or a `CooStar`: of its lists, or of a sample of the array."""
    if isinstance(x, CooStar):
        return sampling.nonzeros_of_counts(x.counts, x.shape)
    return counting.counted(as_array("x", x))


def checked_nonzeros(nonzeros: Any) -> jax.Array:
    """Counts that the caller gives, as an array; errors as of `check_nonzeros`."""
    counts = as_array("nonzeros", nonzeros)
    check_nonzeros(counts, None)
    return counts


def switch(
    functions: Sequence[Callable[..., Any]], densities: Sequence[float], nonzeros: jax.Array, *operands: Any
) -> Any:
    """The first of the functions whose density is not exceeded, or the last one, which has none, of the operands.

    `functions` has one more than `densities`, which increase. Results are of one type.
    """
    exceeded = [jnp.int32(1) - sampling.is_at_most(nonzeros, density).astype(jnp.int32) for density in densities]
    return lax.switch(functools.reduce(jnp.add, exceeded), list(functions), *operands)


def conv_up_to(
    x: Any,
    kernel: Any,
    bias: Any,
    residual: Any,
    *,
    sparse: str,
    below: float,
    nonzeros: Any = None,
    count_nonzeros: bool = False,
    activation: Any = None,
    precision: Any = None,
    **geometry: Any,
) -> Any:
    """`ops.conv` by `sparse`, "ecr" or "coo", up to a density, and beyond by "direct" on a GPU, without the host."""
    operands = Operands.of(x, kernel, bias, residual, nonzeros)
    method = "adaptive" if sparse == "ecr" else sparse
    check_nonzeros(operands.nonzeros, method)
    resolved = geo.resolve(operands.x.shape, operands.kernel.shape, **geometry)
    conv_size = resolved.conv_size(operands.x.shape[1:3], operands.kernel.shape[:2])
    operands.check((operands.x.shape[0], *conv_size, operands.kernel.shape[-1]))
    activation = canonical_activation(activation)
    return run.run(operands, resolved, activation, precision, method, "ecr", count_nonzeros, below=below)
