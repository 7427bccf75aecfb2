"""The parameters of a DenseNet block: layer by layer, or all of them in one array.

Every argument of a jitted function costs the host time in every call. A dense block has five a layer, 290 in
DenseNet-121. `pack_dense_block` puts them into one array, once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import export

from jax_sparse_conv._src.fusion import one_array
from jax_sparse_conv._src.primitive import packing

_KERNEL_AXES = 4
_WIDE = ("scale", "shift")  # two rows of bfloat16 where kernels are pairs, whose sum has float32's first 16 digits


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
    """The parameters of a transition: batch norm and ReLU of a block's C channels, 1x1 convolution, 2x2 average pool.

    Attributes:
      scale: [C], of the batch norm, folded: y = relu(scale * x + shift).
      shift: [C].
      kernel: [1, 1, C, K].
    """

    scale: Any
    shift: Any
    kernel: Any


Parts: TypeAlias = tuple[list[DenseBlockLayer], DenseTransition | None]


class BlockSizes(NamedTuple):
    """Sizes of a block's parameters.

    Attributes:
      channels: C0.
      layers: how many.
      middle: M of every layer.
      growth: G of every layer.
      out_channels: K of the transition, None without one.
      is_for_cpu: whether kernels lie as those of `pack` do, [1, blocks, C, kh * kw, block].
      has_pairs: whether they are of pairs of bfloat16. Scales and shifts are two rows then, [2 * C], to be added.
    """

    channels: int
    layers: int
    middle: int
    growth: int
    out_channels: int | None = None
    is_for_cpu: bool = False
    has_pairs: bool = False

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the parameters, in the order of the layers and, in each, of its fields; the transition's come last."""
        found: list[tuple[int, ...]] = []
        for index in range(self.layers):
            c = self.channels + index * self.growth
            found += [(c,), (c,), (1, 1, c, self.middle), (self.middle,), (3, 3, self.middle, self.growth)]
        if self.out_channels is not None:
            c = self.channels + self.layers * self.growth
            found += [(c,), (c,), (1, 1, c, self.out_channels)]
        return found

    def stored(self) -> list[tuple[int, ...]]:
        """As `shapes`, of what the array has."""
        shapes = self.shapes()
        if not self.is_for_cpu:
            return shapes
        dtype = jnp.bfloat16 if self.has_pairs else jnp.float32
        packed = [packing.packed_shape(shape, 1, dtype) if len(shape) == _KERNEL_AXES else shape for shape in shapes]
        named = zip(self._names(), packed, strict=True)
        return [(2 * shape[0],) if self.has_pairs and name in _WIDE else shape for name, shape in named]

    def _names(self) -> list[str]:
        """What each parameter is called."""
        behind = () if self.out_channels is None else DenseTransition._fields
        return [*(self.layers * DenseBlockLayer._fields), *behind]

    def offsets(self) -> list[int]:
        """Elements in front of each parameter in one array of all."""
        return one_array.offsets(self.stored())

    def size(self) -> int:
        """Elements of one array of all."""
        return one_array.size(self.stored())

    def abstract(self, dtype: Any) -> Parts:
        """The layers and the transition without their values."""
        return parts_of([jax.ShapeDtypeStruct(shape, dtype) for shape in self.shapes()])

    def slices(self, values: jax.Array) -> Parts:
        """The layers and the transition, each parameter a slice of one array; of pairs, scales and shifts float32."""
        found = one_array.slices(values, tuple(self.stored()))
        if self.is_for_cpu:
            each = zip(self._names(), found, self.shapes(), strict=True)
            found = [_as_given(name, array, shape, self.has_pairs) for name, array, shape in each]
        return parts_of(found)


def parts_of(parameters: Sequence[Any]) -> Parts:
    """The layers and the transition of parameters in order: five of every layer, three of a transition or none."""
    each = len(DenseBlockLayer._fields)
    layers = [DenseBlockLayer(*parameters[end - each : end]) for end in range(each, len(parameters) + 1, each)]
    rest = parameters[each * len(layers) :]
    return layers, DenseTransition(*rest) if rest else None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("sizes",))
@dataclasses.dataclass(frozen=True, eq=False)
class PackedDenseBlock:
    """The parameters of a dense block, and of the transition behind it, as one array; made by `pack_dense_block`.

    A pytree with one leaf, which `dense_block` takes in the place of its layers. What maps every element alike, such as
    a cast or a step of an optimizer, may be done to it.

    Attributes:
      values: [size], every parameter at a multiple of 64 elements. They are in the order of the layers and of their
        fields; a transition's come last.
      sizes: channels C0, layers, middle M, growth G, and output channels K of the transition or None.
    """

    values: jax.Array
    sizes: BlockSizes

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def layers(self) -> list[DenseBlockLayer]:
        """The layers again, their parameters slices of `values`."""
        return self.sizes.slices(self.values)[0]

    @property
    def transition(self) -> DenseTransition | None:
        """The transition again, if there is one."""
        return self.sizes.slices(self.values)[1]


export.register_pytree_node_serialization(
    PackedDenseBlock,
    serialized_name="jax_sparse_conv.PackedDenseBlock",
    serialize_auxdata=lambda sizes: json.dumps(sizes[0]).encode(),
    deserialize_auxdata=lambda text: (BlockSizes(*json.loads(text)),),
)


def pack_dense_block(layers: Sequence[DenseBlockLayer], transition: DenseTransition | None = None) -> PackedDenseBlock:
    """The parameters of a dense block as one array, to be made once for a model.

    It pays where parameters are arguments of a jitted function. Each argument costs the host time in every call, and a
    block has five a layer. Where a block runs as one call, its kernels read the array as it lies. Where it runs layer
    by layer, each layer reads slices.

    Args:
      layers: one or more, as `dense_block` takes them, all with the same M and G.
      transition: what follows the block, for the channels that it leaves.

    Returns:
      A `PackedDenseBlock` for the `layers` of `dense_block`, of the parameters' dtype. It holds the transition too.

    Raises:
      ValueError: a shape that does not fit.
      TypeError: dtypes that differ, layers that are no `DenseBlockLayer`, or a transition that is no `DenseTransition`.
    """
    require_layers(layers)
    first = jnp.asarray(layers[0].scale)
    if first.ndim != 1:
        raise ValueError(f"layers[0].scale.shape={first.shape} must be (C0,)")
    block = checked_layers(layers, first.shape[0], first.dtype, "layers[0].scale")
    middle, growth = block[0].kernel2.shape[2:]
    for index, layer in enumerate(block):
        if layer.kernel2.shape[2:] != (middle, growth):
            found = "M={} and G={}".format(*layer.kernel2.shape[2:])
            raise ValueError(
                f"layers[{index}] has {found}, and layers[0] M={middle} and G={growth}; they must be equal"
            )
    behind = checked_transition(transition, block, first.shape[0], first.dtype, "layers[0].scale")
    out_channels = behind[0].kernel.shape[3] if behind else None
    sizes = BlockSizes(first.shape[0], len(block), middle, growth, out_channels)
    return PackedDenseBlock(one_array.joined([array for part in (*block, *behind) for array in part]), sizes)


def for_cpu(packed: PackedDenseBlock, dtype: Any) -> PackedDenseBlock:
    """Packed parameters as the CPU's kernels read them for maps of a dtype, float32 or bfloat16."""
    layers, transition = packed.sizes.slices(packed.values)
    parts: list[DenseBlockLayer | DenseTransition] = [*layers, *([] if transition is None else [transition])]
    stored = [_for_cpu(name, array, dtype) for part in parts for name, array in part._asdict().items()]
    sizes = packed.sizes._replace(is_for_cpu=True, has_pairs=dtype == jnp.bfloat16)
    return PackedDenseBlock(one_array.joined(stored), sizes)


def _for_cpu(name: str, array: jax.Array, dtype: Any) -> jax.Array:
    """One parameter as it is stored for a CPU."""
    if array.ndim == _KERNEL_AXES:
        return packing.reordered(array.astype(dtype), 1)
    if name in _WIDE and dtype == jnp.bfloat16:
        high = array.astype(dtype)
        wide = high.astype(jnp.float32)
        rest = jnp.where(jnp.isfinite(high), array.astype(jnp.float32) - wide, wide)  # of infinity, infinity
        return jnp.concatenate([high, rest.astype(dtype)])
    return array.astype(dtype)


def _as_given(name: str, array: jax.Array, shape: tuple[int, ...], has_pairs: bool) -> jax.Array:
    """One parameter of what `for_cpu` made, as it was; a scale or shift of pairs in float32."""
    if len(shape) == _KERNEL_AXES:
        return packing.restored(array, shape)
    if name in _WIDE and has_pairs:
        high, rest = array.astype(jnp.float32).reshape(2, *shape)
        return high + rest
    return array


# --- checks ----------------------------------------------------------------------------------------------------------


def require_layers(layers: Sequence[DenseBlockLayer]) -> None:
    """Raise unless there are layers, all of them of the right class."""
    if not isinstance(layers, Sequence):  # a packed block again, or the nnx.Param that holds one
        raise TypeError(f"layers is {type(layers).__name__}, not a sequence of DenseBlockLayer")
    if not layers:
        raise ValueError(f"layers={layers!r} must be one DenseBlockLayer or more")
    for index, layer in enumerate(layers):
        if not isinstance(layer, DenseBlockLayer):
            raise TypeError(f"layers[{index}] is {type(layer).__name__}, not DenseBlockLayer")


def checked_layers(layers: Sequence[DenseBlockLayer], channels: int, dtype: Any, owner: str) -> list[DenseBlockLayer]:
    """The layers as arrays of the right shapes and of the dtype of `owner`."""
    require_layers(layers)
    checked = []
    for index, layer in enumerate(layers):
        arrays = DenseBlockLayer(*map(jnp.asarray, layer))
        middle, growth = (kernel.shape[-1] if kernel.ndim == 4 else -1 for kernel in (arrays.kernel1, arrays.kernel2))
        wanted = ((channels,), (channels,), (1, 1, channels, middle), (middle,), (3, 3, middle, growth))
        texts = (f"({channels},)", f"({channels},)", f"(1, 1, {channels}, M)", "(M,)", "(3, 3, M, G)")
        _check_fields(f"layers[{index}]", arrays, wanted, texts, f"{owner}.dtype={dtype}", dtype)
        checked.append(arrays)
        channels += growth
    return checked


def checked_transition(
    transition: DenseTransition | None, layers: Sequence[DenseBlockLayer], channels: int, dtype: Any, owner: str
) -> list[DenseTransition]:
    """The transition, if there is one, as arrays of the right shapes and of the dtype of `owner`."""
    if transition is None:
        return []
    if not isinstance(transition, DenseTransition):
        raise TypeError(f"transition is {type(transition).__name__}, not DenseTransition")
    arrays = DenseTransition(*map(jnp.asarray, transition))
    channels += sum(layer.kernel2.shape[3] for layer in layers)
    out_channels = arrays.kernel.shape[-1] if arrays.kernel.ndim == 4 else -1
    wanted = ((channels,), (channels,), (1, 1, channels, out_channels))
    texts = (f"({channels},)", f"({channels},)", f"(1, 1, {channels}, K)")
    _check_fields("transition", arrays, wanted, texts, f"{owner}.dtype={dtype}", dtype)
    return [arrays]


def _check_fields(
    name: str, arrays: Any, wanted: Sequence[tuple[int, ...]], texts: Sequence[str], owner: str, dtype: Any
) -> None:
    for field, array, shape, text in zip(arrays._fields, arrays, wanted, texts, strict=True):
        if array.shape != shape:
            raise ValueError(f"{name}.{field}.shape={array.shape} must be {text}")
        if array.dtype != dtype:
            raise TypeError(f"{name}.{field}.dtype={array.dtype} must equal {owner}")


def checked_packed(packed: PackedDenseBlock, x: jax.Array, transition: DenseTransition | None) -> PackedDenseBlock:
    """Packed parameters that fit x [N, H, W, C0]."""
    if transition is not None:
        raise ValueError(
            "transition must be None where layers are packed; pack_dense_block(layers, transition) packs it with them"
        )
    values, size = jnp.asarray(packed.values), packed.sizes.size()
    if values.ndim != 1 or values.shape[0] < size:  # more: a transition that runs by itself
        raise ValueError(f"layers.values.shape={values.shape} must be ({size},) or longer; make it by pack_dense_block")
    if values.dtype != x.dtype:
        raise TypeError(f"layers.values.dtype={values.dtype} must equal x.dtype={x.dtype}")
    if x.shape[3] != packed.sizes.channels:
        raise ValueError(f"x.shape={x.shape} must be [N, H, W, {packed.sizes.channels}], as layers are packed for")
    return dataclasses.replace(packed, values=values)
