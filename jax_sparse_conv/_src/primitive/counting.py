"""The primitive `jsc_conv_counted`: the operation and, where its result is made, how many non-zeros that has.

The counts are int32 [PARTS, 2]: rows of (non-zeros, elements) of parts of the result. Their sums give its density or an
estimate of it. On CUDA up to PARTS blocks of `ecr`, `pecr`, `direct` and `adaptive` count what they write. Elsewhere
lax counts a sample of the result, or all of it where it lies on several devices. `nonzeros=` of the next layer takes
them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching
from jax.sharding import PartitionSpec

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import batching, differentiation, jax_internals, lowering, partitioning, sampling
from jax_sparse_conv._src.primitive.primitives import Config, Operands, conv_p, result_aval, same_varying_axes

conv_counted_p = jex_core.Primitive("jsc_conv_counted")
conv_counted_p.multiple_results = True
jax_internals.needs_devices(conv_counted_p)


def bind(operands: Operands, config: Config) -> tuple[jax.Array, jax.Array]:
    """The result and its counts."""
    config, present = operands.present(config)
    out, counts = conv_counted_p.bind(*same_varying_axes(present), config=config)
    return out, counts


def counted(y: jax.Array) -> jax.Array:
    """Counts of a map [N, H, W, C], taken by lax: of a sample of it, or of all where it is sharded."""
    if any(axis is not None for axis in jax.typeof(y).sharding.spec):
        return sampling.all_nonzeros(y)
    return sampling.sampled_nonzeros(y)


def _abstract_eval(*avals: Any, config: Config) -> list[Any]:
    out = result_aval(*avals, config=config)
    whole = out.sharding.update(spec=PartitionSpec(None, None))
    return [out, out.update(shape=(sampling.PARTS, 2), dtype=jnp.dtype(jnp.int32), sharding=whole)]


def _lower(ctx: Any, *operands: Any, config: Config, platform: str | None) -> Any:
    together = lowering.lower_counted(ctx, *operands, config=config) if platform == "cuda" else None
    if together is not None:
        return together
    count = sampling.all_nonzeros if partitioning.is_partitioned(ctx) else counted

    def apart(*values: jax.Array) -> list[jax.Array]:
        out = conv_p.bind(*values, config=config)
        return [out, count(out)]

    return mlir.lower_fun(apart, multiple_results=True)(ctx, *operands)


conv_counted_p.def_abstract_eval(_abstract_eval)
jax_internals.runs_alone(conv_counted_p)
jax_internals.checks_nans(conv_counted_p)
for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(conv_counted_p, functools.partial(_lower, platform=_platform), platform=_platform)


def _batch(values: Sequence[Any], axes: Sequence[Any], *, config: Config) -> tuple[list[jax.Array], list[Any]]:
    out, axis = batching.batch(values, axes, config=config)
    if axis is None:
        return [out, counted(out)], [None, None]
    if out.shape[0] == 0:
        return [out, jnp.zeros((0, sampling.PARTS, 2), jnp.int32)], [0, 0]
    return [out, jax.vmap(counted)(out)], [0, 0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, config: Config) -> tuple[list[Any], list[Any]]:
    out, tangent = differentiation.jvp(primals, tangents, config=config)
    counts = counted(out)
    return [out, counts], [tangent, ad.Zero(jax.typeof(counts).to_tangent_aval())]


def _transpose(cotangents: Sequence[Any], *values: Any, config: Config) -> list[Any]:
    return differentiation.transpose(cotangents[0], *values, config=config)


def _taylor(primals: Sequence[Any], series: Sequence[Any], *, config: Config) -> NoReturn:
    raise NotImplementedError("jax.experimental.jet: counts have no Taylor series; leave count_nonzeros=False there")


jax_internals.has_taylor(conv_counted_p, _taylor)
jax_batching.primitive_batchers[conv_counted_p] = _batch
ad.primitive_jvps[conv_counted_p] = _jvp
ad.primitive_transposes[conv_counted_p] = _transpose
