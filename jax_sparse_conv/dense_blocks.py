"""Dense blocks (Huang et al. 2017) as one call: layers that each read the maps of all before them.

On CUDA devices with clusters (Hopper and later) a block of few images is one custom call, `cuda/dense_block.cu`: one
buffer that every layer reads and appends to, and one kernel for each layer, which starts while the one before it runs.
On Hopper a block of many images is one as well, with two kernels for each layer, `cuda/dense_layers.cu`. Everywhere
else it is the separate operations. The kernels are dense: they skip no zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jax_sparse_conv import _native, arguments, devices, lowering, ops, partitioning, primitives
from jax_sparse_conv.geometry import MAX_ELEMENTS

IMPLEMENTATIONS = ("xla", "fused")
# Images of a batch up to which `implementation=None` runs a block by the kernels for few where there are none for many.
# DenseNet-121 on an H200 so and layer by layer, us: TF32 577 and 993 at batch 2, 1396 and 1538 at 8; HIGHEST 1016
# and 1177 at 2, 3391 and 2169 at 8; 16 bits at batch 4 some 350 for the blocks, less than all layers take at batch 1
# (development runs, benchmarks/NOTES.md).
_MOST_IMAGES, _MOST_IMAGES_EXACT, _MOST_IMAGES_16BIT = 8, 2, 4
# Images, or pixels of all of two or more, from which the kernels for many are faster also where those for few would do.
_MANY_IMAGES, _MANY_PIXELS = 8, 700

_GROWTH, _MIDDLE, _CHANNELS = 32, 128, 32  # kGrowth, kMiddle, kDenseChannels
_MAX_CHANNELS, _MAX_LAYERS, _FAR = 4096, 128, 2**13
_MAX_TRANSITION, _FEATURES = 2048, 8  # channels of a transition's input; of its result, a multiple of
_SHARED_MEMORY = 200_000  # bytes of a block
_WARPGROUPS = (9, 0)  # compute capability
_DTYPES = ("float32", "bfloat16", "float16")


class DenseBlockLayer(NamedTuple):
    """The parameters of one layer of a dense block, for the C channels that the layers before it leave.

    Attributes:
      scale: [C], of the batch norm in front, folded: y = relu(scale * x + shift).
      shift: [C].
      kernel1: [1, 1, C, M], of the 1x1 convolution, whose own batch norm is folded into it.
      bias1: [M], followed by a ReLU.
      kernel2: [3, 3, M, G], of the 3x3 convolution with zero padding of 1, whose G channels are appended to x.
    """

    scale: Any
    shift: Any
    kernel1: Any
    bias1: Any
    kernel2: Any


class DenseTransition(NamedTuple):
    """The parameters of a transition: batch norm and ReLU of a block's C channels, 1x1 convolution, 2x2 average.

    Attributes:
      scale: [C], of the batch norm, folded: y = relu(scale * x + shift).
      shift: [C].
      kernel: [1, 1, C, K].
    """

    scale: Any
    shift: Any
    kernel: Any


def dense_block(
    x: jax.typing.ArrayLike,
    layers: Sequence[DenseBlockLayer],
    *,
    transition: DenseTransition | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """A dense block of DenseNet-BC (Huang et al. 2017, section 3) at inference.

    Each layer appends to x, as `conv` would compute it,

        conv(conv(relu(scale * x + shift), kernel1, bias1, activation="relu"), kernel2)

    and a transition, if there is one, makes of the block's result what goes to the next block:

        conv_pool(relu(scale * x + shift), kernel, activation=None, pool="avg")

    On a Hopper GPU or later a block of few images (2 at HIGHEST, 4 in 16 bits, 8 in TF32) is one custom call in which a
    layer's kernel does all but the newest channels' share of its first convolution while the layer before still runs;
    on Hopper one of many images is one too, with two kernels for a layer that read and write slices of the result. It
    needs M = 128, G = 32, C a multiple of 32, and float32, bfloat16 or float16. float32 is multiplied as TF32 unless
    the precision is HIGHEST, with relative errors below 2e-6 then; 16-bit types are summed in float32. A transition is
    one more kernel of the call of few images, for at most 2048 channels and K a multiple of 8; it averages first and
    multiplies a quarter of the pixels, the same sums in another order (an infinite weight gives NaN only where a whole
    window is 0). Behind many images it is separate, unless "fused" is asked for. Under `vmap` over images all stays as
    it is; derivatives, `vmap` over parameters and blocks split over several devices by `jit` run layer by layer.

    Args:
      x: [N, H, W, C0].
      layers: one or more, the i-th for C0 plus what those before it append; x's dtype.
      transition: what follows the block, for the channels that it leaves; x's dtype.
      precision: as in lax.
      implementation: None: one call where that is expected to be faster, else the layers one by one, each as
        `implementation=None` of `conv` chooses; "xla": one by one, dense, by XLA; "fused": one call.

    Returns:
      [N, H, W, C0 + sum of G], in x's dtype: x, then what each layer appends; with a transition [N, H // 2, W // 2, K].

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ, layers that are no `DenseBlockLayer`, or a transition that is no `DenseTransition`.
    """
    x = jnp.asarray(x)
    block = _checked(x, layers)
    behind = _checked_transition(x, block, transition)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        choices = ", ".join(map(repr, (None, *IMPLEMENTATIONS)))
        raise ValueError(f"implementation={implementation!r} is not one that dense_block has: {choices}")
    precision = arguments.canonical_precision(precision)
    operands = [x, *(parameter for part in (*block, *behind) for parameter in part)]
    reason = why_not(operands)
    if implementation == "fused" and reason is not None:
        raise ValueError(f"implementation='fused' cannot run: {reason}; implementation=None or 'xla' can")
    if implementation == "xla" or (implementation is None and not (reason is None and _may_join(x, precision))):
        return separate(*operands, precision=precision, implementation=implementation)
    operands = primitives.same_varying_axes(operands)
    out: jax.Array = dense_block_p.bind(*operands, precision=precision, must=implementation == "fused")
    return out


def separate(*operands: jax.Array, precision: Any, implementation: str | None = None) -> jax.Array:
    """The block's meaning: its layers one by one, of operands as the primitive has them."""
    x, layers, transition = _parts(operands)
    options: dict[str, Any] = {"precision": precision, "implementation": implementation}
    for layer in layers:
        y = jax.nn.relu(x * layer.scale + layer.shift)
        y = ops.conv(y, layer.kernel1, layer.bias1, activation="relu", **options)
        y = ops.conv(y, layer.kernel2, padding=1, **options)
        x = jnp.concatenate([x, y], axis=-1)
    return x if transition is None else _transition(x, transition, **options)


def _transition(x: jax.Array, transition: DenseTransition, **options: Any) -> jax.Array:
    """What a transition makes of the block's map."""
    y = jax.nn.relu(x * transition.scale + transition.shift)
    return ops.conv_pool(y, transition.kernel, activation=None, pool="avg", **options)


def _parts(operands: Sequence[Any]) -> tuple[Any, list[DenseBlockLayer], DenseTransition | None]:
    """x, the layers and the transition of operands as the primitive has them: of every layer 5, of a transition 3."""
    each = len(DenseBlockLayer._fields)
    ends = range(1 + each, len(operands) + 1, each)
    layers = [DenseBlockLayer(*operands[end - each : end]) for end in ends]
    rest = operands[1 + each * len(layers) :]
    return operands[0], layers, DenseTransition(*rest) if rest else None


def is_available(dtype: Any) -> bool:
    """Whether this installation has the kernel for a dtype, on whatever GPU."""
    return _native.why_missing("dense_block", "cuda", dtype) is None


def most_images(dtype: Any, precision: Any) -> int:
    """Images of a batch up to which the kernels for few are expected to be faster than layers one by one."""
    if str(dtype) != "float32":
        return _MOST_IMAGES_16BIT
    return _MOST_IMAGES_EXACT if lowering.is_highest(precision) else _MOST_IMAGES


def is_one_call(
    x: jax.Array,
    layers: Sequence[DenseBlockLayer],
    precision: lax.PrecisionLike = None,
    transition: DenseTransition | None = None,
) -> bool:
    """Whether `implementation=None` would run such a block as one call where there is a GPU for it."""
    operands = [x, *(parameter for layer in layers for parameter in layer), *(transition or ())]
    return why_not(operands) is None and _may_join(x, arguments.canonical_precision(precision))


def _may_join(x: Any, precision: Any) -> bool:
    """Whether some GPU that this installation has kernels for is expected to be faster with one call."""
    return bool(x.shape[0] <= most_images(x.dtype, precision)) or _native.has_warpgroups()


def why_not(operands: Sequence[Any]) -> str | None:
    """Why a block cannot be one call on any device that this installation has kernels for, or None."""
    x, block, transition = _parts(operands)
    first, layers = block[0], len(block)
    if (missing := _native.why_missing("dense_block", "cuda", x.dtype)) is not None:
        return missing
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return "its sizes are not known yet"
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype} is not one of {', '.join(_DTYPES)}"
    middle, growth = first.kernel1.shape[3], first.kernel2.shape[3]
    if (middle, growth) != (_MIDDLE, _GROWTH) or any(layer.kernel2.shape[3] != _GROWTH for layer in block):
        return f"M={middle} and G={growth} of its layers are not {_MIDDLE} and {_GROWTH}"
    if x.shape[3] % _CHANNELS or x.shape[3] + layers * _GROWTH > _MAX_CHANNELS:
        return f"C0={x.shape[3]} is not a multiple of {_CHANNELS}, or the result has more than {_MAX_CHANNELS} channels"
    if layers > _MAX_LAYERS:
        return f"it has {layers} layers, more than {_MAX_LAYERS}"
    if min(x.shape) < 1:
        return "it has nothing to compute"
    if max(x.shape[1:3]) > _FAR or math.prod(x.shape[:3]) * (x.shape[3] + layers * _GROWTH) > MAX_ELEMENTS:
        return "its map is too large"
    return None if transition is None else _why_no_transition(x, transition)


def _why_no_transition(x: Any, transition: DenseTransition) -> str | None:
    channels, features = transition.kernel.shape[2:]
    if channels > _MAX_TRANSITION or features % _FEATURES or not 0 < features <= _MAX_CHANNELS:
        return (
            f"its transition from C={channels} to K={features} channels is not from at most {_MAX_TRANSITION} to a "
            f"multiple of {_FEATURES}"
        )
    return "its map is too small for a pool" if min(x.shape[1:3]) < 2 else None


def _checked(x: jax.Array, layers: Sequence[DenseBlockLayer]) -> list[DenseBlockLayer]:
    """The layers as arrays of the right shapes and of x's dtype."""
    if x.ndim != 4:
        raise ValueError(f"x.shape={x.shape} must be [N, H, W, C]")
    if not layers:
        raise ValueError(f"layers={layers!r} must be one DenseBlockLayer or more")
    channels, checked = x.shape[3], []
    for index, layer in enumerate(layers):
        if not isinstance(layer, DenseBlockLayer):
            raise TypeError(f"layers[{index}] is {type(layer).__name__}, not DenseBlockLayer")
        arrays = DenseBlockLayer(*map(jnp.asarray, layer))
        middle, growth = (kernel.shape[-1] if kernel.ndim == 4 else -1 for kernel in (arrays.kernel1, arrays.kernel2))
        wanted = ((channels,), (channels,), (1, 1, channels, middle), (middle,), (3, 3, middle, growth))
        texts = (f"({channels},)", f"({channels},)", f"(1, 1, {channels}, M)", "(M,)", "(3, 3, M, G)")
        for name, array, shape, text in zip(layer._fields, arrays, wanted, texts, strict=True):
            if array.shape != shape:
                raise ValueError(f"layers[{index}].{name}.shape={array.shape} must be {text}")
            if array.dtype != x.dtype:
                raise TypeError(f"layers[{index}].{name}.dtype={array.dtype} must equal x.dtype={x.dtype}")
        checked.append(arrays)
        channels += growth
    return checked


def _checked_transition(
    x: jax.Array, layers: Sequence[DenseBlockLayer], transition: DenseTransition | None
) -> list[DenseTransition]:
    """The transition, if there is one, as arrays of the right shapes and of x's dtype."""
    if transition is None:
        return []
    if not isinstance(transition, DenseTransition):
        raise TypeError(f"transition is {type(transition).__name__}, not DenseTransition")
    arrays = DenseTransition(*map(jnp.asarray, transition))
    channels = x.shape[3] + sum(layer.kernel2.shape[3] for layer in layers)
    features = arrays.kernel.shape[-1] if arrays.kernel.ndim == 4 else -1
    wanted = ((channels,), (channels,), (1, 1, channels, features))
    texts = (f"({channels},)", f"({channels},)", f"(1, 1, {channels}, K)")
    for name, array, shape, text in zip(transition._fields, arrays, wanted, texts, strict=True):
        if array.shape != shape:
            raise ValueError(f"transition.{name}.shape={array.shape} must be {text}")
        if array.dtype != x.dtype:
            raise TypeError(f"transition.{name}.dtype={array.dtype} must equal x.dtype={x.dtype}")
    return [arrays]


# --- the primitive ---------------------------------------------------------------------------------------------------

dense_block_p = jex_core.Primitive("jsc_dense_block")  # x, the five parameters of every layer, three of a transition
partitioning.needs_devices(dense_block_p)


def _map_of(x: Any, layers: Sequence[DenseBlockLayer]) -> Any:
    """The block's map, as an abstract value."""
    channels = x.shape[3] + sum(layer.kernel2.shape[3] for layer in layers)
    sharding = x.sharding.update(spec=PartitionSpec(x.sharding.spec[0], None, None, None))
    return x.update(shape=(*x.shape[:3], channels), sharding=sharding, weak_type=False)


def _abstract_eval(*operands: Any, precision: Any, must: bool) -> Any:
    del precision, must
    x, layers, transition = _parts(operands)
    out = _map_of(x, layers)
    if transition is None:
        return out
    return out.update(shape=(x.shape[0], x.shape[1] // 2, x.shape[2] // 2, transition.kernel.shape[3]))


dense_block_p.def_abstract_eval(_abstract_eval)


@functools.lru_cache(maxsize=256)
def _compiled(precision: Any, must: bool) -> Any:
    return jax.jit(functools.partial(dense_block_p.bind, precision=precision, must=must))


def _impl(*operands: jax.Array, precision: Any, must: bool) -> Any:
    return _compiled(precision, must)(*operands)


dense_block_p.def_impl(_impl)


@devices.for_lowering
def _lower(ctx: Any, *operands: Any, precision: Any, must: bool, platform: str | None) -> Any:
    reason = _why_not_here(ctx, platform)
    if must and reason is not None:
        raise ValueError(
            f"implementation='fused' cannot run here: {reason}. implementation=None or 'xla' works everywhere"
        )
    scratch = None if reason is not None else _scratch(ctx.avals_in, precision, must)  # with the images of vmap
    if scratch is None or partitioning.is_partitioned(ctx):
        lower = functools.partial(separate, precision=precision)
        return mlir.lower_fun(lower, multiple_results=False)(ctx, *operands)
    x, layers, transition = _parts(ctx.avals_in)
    if scratch > 0 and transition is not None:
        lower = functools.partial(_then_transition, precision=precision)
        return mlir.lower_fun(lower, multiple_results=False)(ctx, *operands)
    results = [*ctx.avals_out, jax.core.ShapedArray((scratch,), np.uint8)]
    if transition is not None:  # the block's map is scratch memory
        results.append(_map_of(x, layers))
    call = jax.ffi.ffi_lowering(_native.target_name("dense_block"))
    attribute = np.int64(lowering.precision_code(precision))
    return call(ctx.replace(avals_out=results), *operands, precision=attribute)[:1]


def _then_transition(*operands: jax.Array, precision: Any) -> jax.Array:
    """The block as one call of many images, which has no kernel for the transition."""
    x, layers, transition = _parts(operands)
    assert transition is not None
    parameters = (parameter for layer in layers for parameter in layer)
    out = dense_block_p.bind(x, *parameters, precision=precision, must=False)
    return _transition(out, transition, precision=precision, implementation=None)


def _scratch(operands: Sequence[Any], precision: Any, must: bool) -> int | None:
    """Bytes of scratch memory of one call, 0 for few images; None where layers one by one are expected to be faster."""
    x, layers, transition = _parts(operands)
    images, most, pixels = x.shape[0], most_images(x.dtype, precision), math.prod(x.shape[:3])
    many = images > min(most, _MANY_IMAGES - 1) or (images > 1 and pixels >= _MANY_PIXELS)
    if many and _has_warpgroups() and (transition is None or not must):
        exact = str(x.dtype) == "float32" and lowering.is_highest(precision)
        return _native.dense_layers_bytes(x.dtype.itemsize, exact, pixels, x.shape[3], len(layers))
    return 0 if must or images <= most else None


def _why_not_here(ctx: Any, platform: str | None) -> str | None:
    if platform != "cuda":
        return f"there is no kernel for platform {lowering.platform_name(ctx, platform)!r}, only for 'cuda'"
    if not _has_clusters():
        return "it needs a data-center GPU with clusters (compute capability 9.0 or later)"
    return why_not(ctx.avals_in)


def _has_clusters() -> bool:
    """Whether the GPU has clusters, and blocks as much shared memory as the largest tiles need."""
    device = devices.known()
    return device is not None and device.has_clusters and device.block_shared_memory >= _SHARED_MEMORY


def _has_warpgroups() -> bool:
    """Whether the GPU and this installation have the kernels for many images."""
    device = devices.known()
    return device is not None and device.capability == _WARPGROUPS and _native.has_warpgroups()


for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(dense_block_p, functools.partial(_lower, platform=_platform), platform=_platform)


def _batch(values: Sequence[Any], axes: Sequence[Any], *, precision: Any, must: bool) -> tuple[jax.Array, int]:
    """Images are folded into N; with batched parameters the layers go their separate ways."""
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    if size == 0 or any(axis is not None for axis in axes[1:]):
        return jax.vmap(functools.partial(separate, precision=precision), in_axes=tuple(axes))(*values), 0
    x = jnp.moveaxis(values[0], axes[0], 0)
    folded = x.reshape(size * x.shape[1], *x.shape[2:])
    out = dense_block_p.bind(folded, *values[1:], precision=precision, must=must)
    return out.reshape(size, x.shape[1], *out.shape[1:]), 0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, precision: Any, must: bool) -> Any:
    del must  # the layers run one by one
    varying = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def moving(*values: Any) -> Any:
        operands = list(primals)
        for index, value in zip(varying, values, strict=True):
            operands[index] = value
        return separate(*operands, precision=precision)

    return jax.jvp(moving, [primals[i] for i in varying], [tangents[i] for i in varying])


batching.primitive_batchers[dense_block_p] = _batch
ad.primitive_jvps[dense_block_p] = _jvp
