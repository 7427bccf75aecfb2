"""DenseNet blocks (Huang et al. 2017) as one call: layers that each read the maps of all before them.

On CUDA devices with clusters (Hopper and later) a block of few images is one custom call, `cuda/densenet/block.cu`. It
has one buffer, which every layer reads and appends to, and one kernel per layer. Each kernel starts while the one
before it runs. On Hopper a block of many images is one call too, with two kernels per layer
(`cuda/densenet/layers.cu`). These kernels are dense: they skip no zeros. On a CPU a block in float32 or, with
AVX512-BF16, bfloat16 is one call of the sparse kernels (`cpu/ffi/dense_block.cc`): every layer scales what it reads,
and writes into the block's map. Its parameters must be known before the program runs, since the kernels read them
packed. Everywhere else it is the separate operations.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.api import arguments, ops
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.fusion import block_limits, block_parameters
from jax_sparse_conv._src.fusion.block_parameters import (
    BlockSizes,
    DenseBlockLayer,
    DenseTransition,
    PackedDenseBlock,
    pack_dense_block,
    parts_of,
)
from jax_sparse_conv._src.primitive import (
    custom_call,
    differentiation,
    jax_internals,
    lowering,
    partitioning,
    primitives,
    reference,
)

IMPLEMENTATIONS = ("xla", "fused")
# From so many images, or of two or more images from so many pixels, the kernels for many images are faster. That holds
# even where those for few images would do. Fitted by hand (`dispatch/model.json`).
_RULES = model.shipped("gpu chains")
_MANY_IMAGES, _MANY_PIXELS = _RULES["images of a block, many"], _RULES["pixels of a block, many"]
_WARPGROUPS = (9, 0)  # compute capability


def dense_block(
    x: jax.typing.ArrayLike,
    layers: Sequence[DenseBlockLayer] | PackedDenseBlock,
    *,
    transition: DenseTransition | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """A dense block of DenseNet-BC (Huang et al. 2017, section 3) at inference.

    Each layer appends to x, as `conv` would compute it::

        conv(conv(relu(scale * x + shift), kernel1, bias1, activation="relu"), kernel2)

    A transition, if there is one, makes of the block's result what goes to the next block::

        conv_pool(relu(scale * x + shift), kernel, activation=None, pool="avg")

    On a Hopper GPU or later a block of few images is one custom call. Few means up to 2 at HIGHEST, 4 in 16 bits and 8
    in TF32. A layer's kernel computes most of its first convolution while the layer before still runs. Only the newest
    channels have to wait. On Hopper a block of many images is one custom call too, with two kernels per layer.

    One call needs M = 128, G = 32, C a multiple of 32, and float32, bfloat16 or float16. float32 is multiplied as TF32
    unless the precision is HIGHEST; its relative errors are below 2e-6 then. 16-bit types are summed in float32.

    In the call of few images a transition is one more kernel, for at most 2048 channels and K a multiple of 8. It
    averages first and multiplies a quarter of the pixels. These are the same sums in another order; an infinite weight
    gives NaN only where a whole window is 0. Behind many images the transition is separate, unless "fused" is asked
    for.

    On a CPU a block in float32 of known parameters is one call, for any M and G from 16 on. It skips zeros, copies no
    maps and writes none that are scaled. In bfloat16 that needs AVX512-BF16, even C0, M and G and, with a transition,
    even H and W; scaled maps are written, and scales and shifts are multiplied in float32.

    `vmap` over images keeps the one call. Derivatives, `vmap` over parameters, and blocks that `jit` splits over
    several devices run layer by layer.

    Args:
      x: [N, H, W, C0].
      layers: one or more, or `pack_dense_block` of them, in x's dtype. The i-th is for C0 channels and what those
        before it append.
      transition: what follows the block, for the channels that it leaves; x's dtype. Packed layers hold their own.
      precision: as in lax.
      implementation: None is one call where that is expected to be faster, else the layers one by one, by `conv`'s
        None. "xla" is the layers one by one, dense, by XLA. "fused" is one call.

    Returns:
      [N, H, W, C0 + sum of G] in x's dtype: x, then what each layer appends. With a transition
      [N, H // 2, W // 2, K].

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ, layers that are no `DenseBlockLayer`, or a transition that is no `DenseTransition`.
    """
    x = jnp.asarray(x)
    if x.ndim != 4:
        raise ValueError(f"x.shape={x.shape} must be [N, H, W, C]")
    operands, packed = _operands(x, layers, transition)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        choices = ", ".join(map(repr, (None, *IMPLEMENTATIONS)))
        raise ValueError(f"implementation={implementation!r} is not one that dense_block has: {choices}")
    precision = arguments.canonical_precision(precision)
    on_cpu = devices.default_platform() == "cpu"
    if implementation != "xla" and on_cpu:
        operands, packed = _for_cpu(operands, packed, must=implementation == "fused")
    reason = block_limits.why_not(operands, packed)
    if implementation == "fused" and reason is not None:
        reason = (block_limits.why_not_on_cpu(operands, packed) if on_cpu else None) or reason
        raise ValueError(f"implementation='fused' cannot run: {reason}; implementation=None or 'xla' can")
    if implementation == "xla" or (
        implementation is None and not (reason is None and block_limits.may_join(x, precision, packed))
    ):
        return separate(*operands, precision=precision, packed=packed, implementation=implementation)
    operands = primitives.same_varying_axes(operands)
    out: jax.Array = dense_block_p.bind(*operands, precision=precision, must=implementation == "fused", packed=packed)
    return out


def _operands(
    x: jax.Array, layers: Sequence[DenseBlockLayer] | PackedDenseBlock, transition: DenseTransition | None
) -> tuple[list[jax.Array], BlockSizes | None]:
    """Checked operands as the primitive has them, and the sizes of parameters that are packed."""
    if isinstance(layers, PackedDenseBlock):
        packed = block_parameters.checked_packed(layers, x, transition)
        return [x, packed.values], packed.sizes
    block = block_parameters.checked_layers(layers, x.shape[3], x.dtype, "x")
    behind = block_parameters.checked_transition(transition, block, x.shape[3], x.dtype, "x")
    return [x, *(parameter for part in (*block, *behind) for parameter in part)], None


def _for_cpu(
    operands: list[jax.Array], packed: BlockSizes | None, must: bool
) -> tuple[list[jax.Array], BlockSizes | None]:
    """The operands with parameters as the CPU's kernels read them, where they are known or the call must be one.

    Known are those that are constants of a trace. They are packed once, for as long as the program lives.
    """
    x, *parameters = operands
    is_known = isinstance(x, jax.core.Tracer) and not any(isinstance(each, jax.core.Tracer) for each in parameters)
    if (
        (packed is not None and packed.is_for_cpu)
        or not (is_known or must)
        or block_limits.why_not_on_cpu(operands, packed)
    ):
        return operands, packed
    with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():
        plain = None if packed is None else PackedDenseBlock(parameters[0], packed)
        block = block_parameters.for_cpu(pack_dense_block(*parts_of(parameters)) if plain is None else plain, x.dtype)
    return [x, block.values], block.sizes


def separate(
    *operands: jax.Array, precision: Any, packed: BlockSizes | None, implementation: str | None = None
) -> jax.Array:
    """The block's meaning: its layers one by one, of operands as the primitive has them."""
    x, *parameters = operands
    layers, transition = parts_of(parameters) if packed is None else packed.slices(parameters[0])
    options: dict[str, Any] = {"precision": precision, "implementation": implementation}
    for layer in layers:
        y = _scaled(x, layer.scale, layer.shift)
        y = ops.conv(y, layer.kernel1, layer.bias1, activation="relu", **options)
        y = ops.conv(y, layer.kernel2, padding=1, **options)
        x = jnp.concatenate([x, y], axis=-1)
    return x if transition is None else _transition(x, transition, **options)


def _scaled(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """A batch norm and ReLU: x [N, H, W, C], scale and shift [C], which may be wider than x."""
    wide = x.astype(scale.dtype)
    return jax.nn.relu(wide * reference.for_channels_of(wide, scale) + reference.for_channels_of(wide, shift)).astype(
        x.dtype
    )


def _transition(x: jax.Array, transition: DenseTransition, **options: Any) -> jax.Array:
    """What a transition makes of the block's map."""
    y = _scaled(x, transition.scale, transition.shift)
    return ops.conv_pool(y, transition.kernel, activation=None, pool="avg", **options)


# --- the primitive ---------------------------------------------------------------------------------------------------

# x, the five parameters of every layer and three of a transition; or x and one array that `packed` says the sizes of.
dense_block_p = jex_core.Primitive("jsc_dense_block")
jax_internals.needs_devices(dense_block_p)


def _map_of(x: Any, layers: Sequence[DenseBlockLayer]) -> Any:
    """The block's map, as an abstract value."""
    channels = x.shape[3] + sum(layer.kernel2.shape[3] for layer in layers)
    sharding = x.sharding.update(spec=PartitionSpec(*x.sharding.spec[:3], None))
    return x.update(shape=(*x.shape[:3], channels), sharding=sharding, weak_type=False)


def _abstract_eval(*operands: Any, precision: Any, must: bool, packed: BlockSizes | None) -> Any:
    del precision, must
    x, layers, transition = block_limits.described(operands, packed)
    out = _map_of(x, layers)
    if transition is None:
        return out
    sharding = x.sharding.update(spec=PartitionSpec(x.sharding.spec[0], None, None, None))
    size = (x.shape[0], x.shape[1] // 2, x.shape[2] // 2, transition.kernel.shape[3])
    return out.update(shape=size, sharding=sharding)


dense_block_p.def_abstract_eval(_abstract_eval)


jax_internals.runs_alone(dense_block_p)
jax_internals.checks_nans(dense_block_p)


@devices.for_lowering
def _lower(
    ctx: Any, *operands: Any, precision: Any, must: bool, packed: BlockSizes | None, platform: str | None
) -> Any:
    if platform == "cpu" and packed is not None and packed.is_for_cpu and not partitioning.is_partitioned(ctx):
        return _lower_on_cpu(ctx, *operands, packed=packed)
    if packed is not None and packed.is_for_cpu and platform != "cpu":  # lowered on a CPU for something else
        lower = functools.partial(_repacked, precision=precision, must=must, packed=packed)
        return mlir.lower_fun(lower, multiple_results=False)(ctx, *operands)
    reason = _why_not_here(ctx, packed, platform)
    if must and reason is not None:
        raise ValueError(
            f"implementation='fused' cannot run here: {reason}. implementation=None or 'xla' works everywhere"
        )
    scratch = None if reason is not None else _scratch(ctx.avals_in, precision, must, packed)  # with the images of vmap
    if scratch is None or partitioning.is_partitioned(ctx):
        lower = functools.partial(separate, precision=precision, packed=packed)
        return mlir.lower_fun(lower, multiple_results=False)(ctx, *operands)
    x, layers, transition = block_limits.described(ctx.avals_in, packed)
    if scratch > 0 and transition is not None:
        lower = functools.partial(_then_transition, precision=precision, packed=packed)
        return mlir.lower_fun(lower, multiple_results=False)(ctx, *operands)
    results = [*ctx.avals_out, jax.core.ShapedArray((scratch,), np.uint8)]
    if transition is not None:  # the block's map is scratch memory
        results.append(_map_of(x, layers))
    call = jax.ffi.ffi_lowering(_native.target_name("dense_block"))
    attributes: dict[str, Any] = {"precision": np.int64(custom_call.precision_code(precision))}
    if packed is not None:
        attributes["offsets"] = np.array(packed.offsets(), np.int64)
    return call(ctx.replace(avals_out=results), *operands, **attributes)[:1]


def _repacked(x: jax.Array, values: jax.Array, *, precision: Any, must: bool, packed: BlockSizes) -> Any:
    """A block whose parameters are packed for a CPU, by what the other device has."""
    layers, transition = packed.slices(values)
    parts = (*layers, *([] if transition is None else [transition]))
    parameters = [parameter.astype(x.dtype) for part in parts for parameter in part]
    return dense_block_p.bind(x, *parameters, precision=precision, must=must, packed=None)


def maps_on_cpu(operands: Sequence[Any], packed: BlockSizes | None) -> list[Any]:
    """The maps that the CPU's call has beside its result, as abstract values; none where the block is no such call."""
    if packed is None or not packed.is_for_cpu:
        return []
    x, layers, transition = block_limits.described(operands, packed)
    whole = _map_of(x, layers)
    middle = x.update(shape=(*x.shape[:3], packed.middle), weak_type=False)
    # What a layer of pairs reads, and the block's map in front of a transition.
    return [middle, *([whole] if packed.has_pairs else []), *([] if transition is None else [whole])]


def _lower_on_cpu(ctx: Any, *operands: Any, packed: BlockSizes) -> Any:
    results = [*ctx.avals_out, *maps_on_cpu(ctx.avals_in, packed)]
    attributes = {name: np.int64(getattr(packed, name) or 0) for name in ("layers", "middle", "growth", "out_channels")}
    call = jax.ffi.ffi_lowering(_native.target_name("dense_block"))
    offsets = np.array(packed.offsets(), np.int64)
    return call(ctx.replace(avals_out=results), *operands, offsets=offsets, **attributes)[:1]


def _then_transition(*operands: jax.Array, precision: Any, packed: BlockSizes | None) -> jax.Array:
    """The block as one call of many images, which has no kernel for the transition."""
    x, *parameters = operands
    if packed is None:
        layers, transition = parts_of(parameters)
        parameters = [parameter for layer in layers for parameter in layer]
    else:
        transition, packed = packed.slices(parameters[0])[1], packed._replace(out_channels=None)
    assert transition is not None
    out = dense_block_p.bind(x, *parameters, precision=precision, must=False, packed=packed)
    return _transition(out, transition, precision=precision, implementation=None)


def _scratch(operands: Sequence[Any], precision: Any, must: bool, packed: BlockSizes | None) -> int | None:
    """Bytes of scratch memory of one call, 0 for few images; None where layers one by one are expected to be faster."""
    x, layers, transition = block_limits.described(operands, packed)
    images, most, pixels = x.shape[0], block_limits.most_images(x.dtype, precision), math.prod(x.shape[:3])
    many = images > min(most, _MANY_IMAGES - 1) or (images > 1 and pixels >= _MANY_PIXELS)
    if many and _has_warpgroups() and (transition is None or not must):
        exact = str(x.dtype) == "float32" and custom_call.is_highest(precision)
        return _native.dense_layers_bytes(x.dtype.itemsize, exact, pixels, x.shape[3], len(layers))
    return 0 if must or images <= most else None


def _why_not_here(ctx: Any, packed: BlockSizes | None, platform: str | None) -> str | None:
    if platform == "cpu":
        return (
            block_limits.why_not_on_cpu(ctx.avals_in, packed)
            or "its parameters are not packed for a CPU, or split over devices"
        )
    if platform != "cuda":
        return f"there is no kernel for platform {lowering.platform_name(ctx, platform)!r}, only for 'cuda'"
    if not _has_clusters():
        return "it needs a data-center GPU with clusters (compute capability 9.0 or later)"
    return block_limits.why_not(ctx.avals_in, packed)


def _has_clusters() -> bool:
    """Whether the GPU has clusters, and blocks as much shared memory as the largest tiles need."""
    device = devices.known()
    if device is None or not device.has_clusters:
        return False
    return bool(device.block_shared_memory >= _native.planner().dense_block_shared_bytes)


def _has_warpgroups() -> bool:
    """Whether the GPU and this installation have the kernels for many images."""
    device = devices.known()
    return device is not None and device.capability == _WARPGROUPS and _native.has_warpgroups()


for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(dense_block_p, functools.partial(_lower, platform=_platform), platform=_platform)


def _batch(
    values: Sequence[Any], axes: Sequence[Any], *, precision: Any, must: bool, packed: BlockSizes | None
) -> tuple[jax.Array, int]:
    """Images are folded into N; with batched parameters the layers go their separate ways."""
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    if size == 0 or any(axis is not None for axis in axes[1:]):
        each = functools.partial(separate, precision=precision, packed=packed)
        return jax.vmap(each, in_axes=tuple(axes))(*values), 0
    x = jnp.moveaxis(values[0], axes[0], 0)
    folded = x.reshape(size * x.shape[1], *x.shape[2:])
    out = dense_block_p.bind(folded, *values[1:], precision=precision, must=must, packed=packed)
    return out.reshape(size, x.shape[1], *out.shape[1:]), 0


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, precision: Any, must: bool, packed: BlockSizes | None
) -> Any:
    del must  # the layers run one by one
    each = functools.partial(separate, precision=precision, packed=packed)
    return differentiation.jvp_of(each, primals, tangents)


def _taylor(primals: Sequence[Any], series: Sequence[Any], **parameters: Any) -> NoReturn:
    raise NotImplementedError("jax.experimental.jet does not take jax.nn.relu, which every layer of a dense block has")


jax_internals.has_taylor(dense_block_p, _taylor)
batching.primitive_batchers[dense_block_p] = _batch
ad.primitive_jvps[dense_block_p] = _jvp
