"""The primitive of a fused chain, `jsc_segment` in programs: convolutions that feed each other, then dense layers.

`rewrite` finds chains in a jaxpr. On CUDA devices with clusters (Hopper and later) a chain is one custom call, whose
kernels overlap (`cuda/chain/chain.cu`). Its convolutions are those of "direct" and skip no zeros. Its dense layers are
those of `dense` and do. Everywhere else a chain is the separate operations again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import chain_rules
from jax_sparse_conv._src.fusion.schedule import Layer, Schedule, TakesPool, input_of, results_of
from jax_sparse_conv._src.primitive import differentiation, jax_internals, partitioning, primitives, reference
from jax_sparse_conv._src.primitive.primitives import Config

# Parameters: layers; which of them are results; `chosen`: one call only where `chain_rules.pays`.
fused_chain_p = jex_core.Primitive("jsc_segment")
fused_chain_p.multiple_results = True
jax_internals.needs_devices(fused_chain_p)


def separate(*operands: jax.Array, layers: Sequence[Layer], results: Sequence[int]) -> list[jax.Array]:
    """What a fused chain means: its layers one by one."""
    made: dict[int, jax.Array] = {}
    for index, layer in enumerate(layers):
        made[index] = _one(operands, made, layer)
    return [made[index] for index in results]


def _one(operands: Sequence[jax.Array], made: Mapping[int, jax.Array], layer: Layer) -> jax.Array:
    """A layer's separate operation."""

    def value(number: int | None) -> jax.Array | None:
        if number is None:
            return None
        return operands[number] if number >= 0 else made[~number]

    x = value(layer.x)
    assert x is not None
    if layer.is_dense:
        x = reference.average_of_pixels(x) if layer.averages else x
        x = x.reshape(x.shape[0], 1, 1, -1)
    bias, residual, packed = value(layer.bias), value(layer.residual), value(layer.packed)
    return primitives.bind(x, operands[layer.kernel], bias, residual, layer.config, packed)


def keys(operands: Sequence[Any], layers: Sequence[Layer]) -> list[chain_tiles.Key]:
    """What `chain_tiles` knows each layer by."""
    calls = calls_of(operands, layers)
    return [chain_tiles.key_of(x.shape, kernel.shape, config.geometry) for config, x, kernel in calls]


# --- shapes ----------------------------------------------------------------------------------------------------------


def calls_of(operands: Sequence[Any], layers: Sequence[Layer]) -> list[tuple[Config, Any, Any]]:
    """Of every layer its configuration, and what it reads as x and kernel."""
    made = results_of(operands, layers)
    xs = [input_of(layer, operands[layer.x] if layer.x >= 0 else made[~layer.x]) for layer in layers]
    return [(layer.config, x, operands[layer.kernel]) for layer, x in zip(layers, xs, strict=True)]


def _abstract_eval(*operands: Any, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool) -> list[Any]:
    del chosen
    made = results_of(operands, layers)
    return [made[index] for index in results]


fused_chain_p.def_abstract_eval(_abstract_eval)


jax_internals.runs_alone(fused_chain_p)


# --- lowering --------------------------------------------------------------------------------------------------------


@devices.for_lowering
def _lower(
    ctx: Any,
    *operands: Any,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    platform: str | None,
) -> Any:
    if platform != "cuda" or partitioning.is_partitioned(ctx) or not is_one_call(ctx.avals_in, layers, chosen):
        lower = functools.partial(_without_dense, layers=layers, results=results, chosen=chosen)
        if platform != "cuda" or not any(layer.is_dense for layer in layers):
            lower = functools.partial(separate, layers=layers, results=results)
        return mlir.lower_fun(lower, multiple_results=True)(ctx, *operands)
    schedule = Schedule.in_least_memory(ctx.avals_in, layers, results, _pools_of(devices.ordinals(ctx)))
    scratch = jax.core.ShapedArray((schedule.workspace_bytes,), np.uint8)
    ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    call = jax.ffi.ffi_lowering(_native.target_name("segment"))
    return call(ctx, *operands, **schedule.attributes())[:-1]


def _without_dense(
    *operands: jax.Array, layers: tuple[Layer, ...], results: Sequence[int], chosen: bool
) -> list[jax.Array]:
    """The convolutions as a chain of their own, and the dense layers behind it one by one."""
    count = next(index for index, layer in enumerate(layers) if layer.is_dense)
    read = {~layer.x for layer in layers[count:]}
    kept = tuple(index for index in range(count) if index in results or index in read)
    numbers: dict[int, int] = {}  # of the operands that convolutions use

    def number_of(operand: int | None) -> int | None:
        return operand if operand is None or operand < 0 else numbers.setdefault(operand, len(numbers))

    found = []
    for each in layers[:count]:
        x, kernel = number_of(each.x), number_of(each.kernel)
        assert x is not None
        assert kernel is not None
        bias, residual, packed = number_of(each.bias), number_of(each.residual), number_of(each.packed)
        found.append(dataclasses.replace(each, x=x, kernel=kernel, bias=bias, residual=residual, packed=packed))
    used = [operands[number] for number in numbers]
    out = fused_chain_p.bind(*used, layers=tuple(found), results=kept, chosen=chosen)
    made = dict(zip(kept, out, strict=True))
    for index, layer in enumerate(layers[count:], count):
        made[index] = _one(operands, made, layer)
    return [made[index] for index in results]


def _pools_of(ordinals: Sequence[int]) -> TakesPool | None:
    """Whether the kernels of all of these GPUs take a pool; None without any, so that the call must suit every GPU."""
    if not ordinals:
        return None

    gpus = [devices.Device.of(each) for each in ordinals]

    def take(key: chain_tiles.Key, tile: chain_tiles.Tile, element_bytes: int, precise: bool) -> bool:
        return all(chain_tiles.takes_pool(key, tile, element_bytes, precise, gpu) for gpu in gpus)

    return take


def is_one_call(operands: Sequence[Any], layers: Sequence[Layer], chosen: bool) -> bool:
    """Whether a chain becomes one call on the GPU of the lowering, or on this process's first one."""
    calls = calls_of(operands, layers)
    return _fits(operands[0].dtype, calls) and (not chosen or chain_rules.pays(calls))


def _fits(dtype: Any, calls: Sequence[tuple[Config, Any, Any]]) -> bool:
    """Whether the device has the kernels and they take every layer, with the images that `vmap` added."""
    if _native.why_missing("segment", "cuda", dtype) is not None or not _has_clusters():
        return False
    device = devices.known()
    assert device is not None
    return all(chain_rules.why_not(*call, device.block_shared_memory) is None for call in calls)


def _has_clusters() -> bool:
    device = devices.known()
    return device is not None and device.has_clusters


for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(fused_chain_p, functools.partial(_lower, platform=_platform), platform=_platform)


# --- vmap and derivatives --------------------------------------------------------------------------------------------


def _batch(
    values: Sequence[Any], axes: Sequence[Any], *, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool
) -> tuple[list[jax.Array], list[int]]:
    """Images are folded into N; with batched weights the layers go their separate ways."""
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    weights = {number for layer in layers for number in (layer.kernel, layer.bias, layer.packed)}
    if size == 0 or any(axes[number] is not None for number in weights if number is not None):
        out = jax.vmap(functools.partial(separate, layers=layers, results=results), in_axes=tuple(axes))(*values)
        return out, [0] * len(out)

    def fold(number: int, value: Any, axis: Any) -> Any:
        if number in weights:
            return value
        every = jnp.broadcast_to(value, (size, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)
        return every.reshape(size * every.shape[1], *every.shape[2:])

    folded = [fold(number, *each) for number, each in enumerate(zip(values, axes, strict=True))]
    out = fused_chain_p.bind(*folded, layers=layers, results=results, chosen=chosen)
    return [y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in out], [0] * len(out)


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
) -> Any:
    del chosen  # the layers run one by one
    varying = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def moving(*values: Any) -> Any:
        operands = list(primals)
        for index, value in zip(varying, values, strict=True):
            operands[index] = value
        return separate(*operands, layers=layers, results=results)

    return jax.jvp(moving, [primals[i] for i in varying], [tangents[i] for i in varying])


def _transpose(
    cotangents: Sequence[Any], *values: Any, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool
) -> list[Any]:
    """The transpose of a chain that is linear in its missing operands: layer by layer."""
    del chosen
    return differentiation.transposed(functools.partial(separate, layers=layers, results=results), cotangents, values)


batching.primitive_batchers[fused_chain_p] = _batch
ad.primitive_jvps[fused_chain_p] = _jvp
ad.primitive_transposes[fused_chain_p] = _transpose
