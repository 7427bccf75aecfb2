"""The primitive of a fused chain, `jsc_chain` in programs: convolutions that feed each other, then dense layers.

`rewrite` finds chains in a jaxpr. On CUDA devices with clusters (Hopper and later) a chain is one custom call, whose
kernels overlap (`cuda/chain/chain.cu`). Its convolutions are those of "direct" and skip no zeros. Its dense layers are
those of `dense` and do. Everywhere else a chain is the separate operations again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.fusion import chain_rules, one_array
from jax_sparse_conv._src.fusion.schedule import Layer, Schedule, TakesPool, input_of, results_of
from jax_sparse_conv._src.primitive import differentiation, jax_internals, partitioning, primitives, reference
from jax_sparse_conv._src.primitive.primitives import Config

# Parameters: layers; which of them are results; `chosen`: one call only where `chain_rules.pays`; `packed`: None, or
# that the last operand is one array, and the shapes of the operands that it holds.
fused_chain_p = jex_core.Primitive("jsc_chain")
fused_chain_p.multiple_results = True
jax_internals.needs_devices(fused_chain_p)

_MOST_AXES = 5  # of an operand in the last one
Packed: TypeAlias = tuple[one_array.Shape, ...] | None


def separate(
    *operands: jax.Array, layers: Sequence[Layer], results: Sequence[int], packed: Packed = None
) -> list[jax.Array]:
    """What a fused chain means: its layers one by one."""
    operands = _unpacked(operands, packed)
    made: dict[int, jax.Array] = {}
    for index, layer in enumerate(layers):
        made[index] = _one(operands, made, layer)
    return [made[index] for index in results]


def _unpacked(operands: tuple[jax.Array, ...], packed: Packed) -> tuple[jax.Array, ...]:
    """The operands that layers have numbers of."""
    return operands if packed is None else (*operands[:-1], *one_array.slices(operands[-1], packed))


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


def described(operands: Sequence[Any], packed: Packed) -> Sequence[Any]:
    """As `_unpacked`, of abstract values."""
    return operands if packed is None else (*operands[:-1], *one_array.abstract(operands[-1], packed))


def _abstract_eval(
    *operands: Any, layers: tuple[Layer, ...], results: tuple[int, ...], chosen: bool, packed: Packed
) -> list[Any]:
    del chosen
    made = results_of(described(operands, packed), layers)
    return [made[index] for index in results]


fused_chain_p.def_abstract_eval(_abstract_eval)


jax_internals.runs_alone(fused_chain_p)
jax_internals.checks_nans(fused_chain_p)


# --- lowering --------------------------------------------------------------------------------------------------------


@devices.for_lowering
def _lower(
    ctx: Any,
    *operands: Any,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    packed: Packed,
    platform: str | None,
) -> Any:
    types = described(ctx.avals_in, packed)
    if platform != "cuda" or partitioning.is_partitioned(ctx) or not is_one_call(types, layers, chosen):
        lower = functools.partial(_without_dense, layers=layers, results=results, chosen=chosen, packed=packed)
        if platform != "cuda" or not any(layer.is_dense for layer in layers):
            lower = functools.partial(separate, layers=layers, results=results, packed=packed)
        return mlir.lower_fun(lower, multiple_results=True)(ctx, *operands)
    schedule = Schedule.in_least_memory(types, layers, results, _pools_of(devices.ordinals(ctx)))
    scratch = jax.core.ShapedArray((schedule.workspace_bytes,), np.uint8)
    ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    call = jax.ffi.ffi_lowering(_native.target_name("chain"))
    attributes = schedule.attributes()
    if packed is not None:
        attributes["packed"] = _packed_attribute(packed)
    return call(ctx, *operands, **attributes)[:-1]


def _packed_attribute(shapes: Sequence[one_array.Shape]) -> np.ndarray:
    """Of each operand in the last one where it starts, its axes and its sizes (`cuda/chain/decode.h`)."""
    rows = zip(one_array.offsets(shapes), shapes, strict=True)
    filled = [(at, len(shape), *shape, *[0] * (_MOST_AXES - len(shape))) for at, shape in rows]
    return np.asarray(filled, np.int64).reshape(-1)


def _without_dense(
    *operands: jax.Array, layers: tuple[Layer, ...], results: Sequence[int], chosen: bool, packed: Packed
) -> list[jax.Array]:
    """The convolutions as a chain of their own, and the dense layers behind it one by one."""
    operands = _unpacked(operands, packed)
    count = next(index for index, layer in enumerate(layers) if layer.is_dense)
    read = {~layer.x for layer in layers[count:]}
    kept = tuple(index for index in range(count) if index in results or index in read)
    every = [number for each in layers[:count] for number in (each.x, each.residual, *each.weights())]
    used = sorted({number for number in every if number is not None and number >= 0})
    found = tuple(each.renumbered({old: new for new, old in enumerate(used)}) for each in layers[:count])
    out = fused_chain_p.bind(
        *(operands[number] for number in used), layers=found, results=kept, chosen=chosen, packed=None
    )
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


def is_one_call_of(equation: Any) -> bool:
    """Whether the chain of an equation becomes one call on this process's first GPU."""
    params = equation.params
    operands = described([variable.aval for variable in equation.invars], params["packed"])
    return is_one_call(operands, params["layers"], params["chosen"])


def _fits(dtype: Any, calls: Sequence[tuple[Config, Any, Any]]) -> bool:
    """Whether the device has the kernels and they take every layer, with the images that `vmap` added."""
    if _native.why_missing("chain", "cuda", dtype) is not None or not _has_clusters():
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
    values: Sequence[Any],
    axes: Sequence[Any],
    *,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    packed: Packed,
) -> tuple[list[jax.Array], list[int]]:
    """Images are folded into N; with batched weights the layers go their separate ways."""
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    # Those in the last operand are numbered on from the others.
    weights = {min(number, len(values) - 1) for layer in layers for number in layer.weights()}
    if size == 0 or any(axes[number] is not None for number in weights):
        each = functools.partial(separate, layers=layers, results=results, packed=packed)
        out = jax.vmap(each, in_axes=tuple(axes))(*values)
        return out, [0] * len(out)

    def fold(number: int, value: Any, axis: Any) -> Any:
        if number in weights:
            return value
        every = jnp.broadcast_to(value, (size, *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)
        return every.reshape(size * every.shape[1], *every.shape[2:])

    folded = [fold(number, *each) for number, each in enumerate(zip(values, axes, strict=True))]
    out = fused_chain_p.bind(*folded, layers=layers, results=results, chosen=chosen, packed=packed)
    return [y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in out], [0] * len(out)


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    packed: Packed,
) -> Any:
    del chosen  # the layers run one by one
    each = functools.partial(separate, layers=layers, results=results, packed=packed)
    return differentiation.jvp_of(each, primals, tangents)


def _transpose(
    cotangents: Sequence[Any],
    *values: Any,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    packed: Packed,
) -> list[Any]:
    """The transpose of a chain that is linear in its missing operands: layer by layer."""
    del chosen
    each = functools.partial(separate, layers=layers, results=results, packed=packed)
    return differentiation.transposed(each, cotangents, values)


def _taylor(
    primals: Sequence[Any],
    series: Sequence[Any],
    *,
    layers: tuple[Layer, ...],
    results: tuple[int, ...],
    chosen: bool,
    packed: Packed,
) -> Any:
    del chosen
    each = functools.partial(separate, layers=layers, results=results, packed=packed)
    return differentiation.taylor_of(each, primals, series)


jax_internals.has_taylor(fused_chain_p, _taylor)
batching.primitive_batchers[fused_chain_p] = _batch
ad.primitive_jvps[fused_chain_p] = _jvp
ad.primitive_transposes[fused_chain_p] = _transpose
