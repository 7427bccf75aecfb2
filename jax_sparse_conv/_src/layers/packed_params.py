"""Packed kernels as the parameters of `flax.nnx` layers."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse_conv._src.layers import layers
from jax_sparse_conv._src.layers.layers import Planned
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv._src.primitive.packing import PackedKernel
from jax_sparse_conv._src.problem import geometry as geo

_READERS = (None, "ecr", "pecr")  # implementations that may read a packed copy


class PackedParam(nnx.Param[Any]):
    """A kernel with its packed copy, as one parameter: to Flax it is the kernel, to a sparse layer both.

    `param[...]`, arithmetic and `nnx.to_pure_dict` have the kernel. `param[...] = new` packs anew. `nnx.update` with a
    plain array leaves that array, which runs and is packed in each call. In `nnx.split` and in checkpoints of the state
    the value is a `PackedKernel` with two arrays. Derivatives by it are refused: `unpack` a model before training.
    """

    def get_value(self, *, index: Any = ...) -> Any:
        """The kernel, or `kernel[index]`."""
        kernel = packing.plain(self.get_raw_value())
        return kernel if index is ... else kernel[index]

    def set_value(self, value: Any, *, index: Any = ...) -> None:
        """Replace the kernel, or `kernel[index]`, and its copy."""
        old = self.get_raw_value()
        if index is not ...:
            value = self.get_value().at[index].set(value)
        if isinstance(old, PackedKernel) and isinstance(value, (jax.Array, np.ndarray)):
            value = packing.pack(jnp.asarray(value), feature_group_count=old.feature_group_count)
        self.set_raw_value(value)


def references(model: nnx.Module) -> Mapping[int, int]:
    """`id(parameter)` -> how many attributes of the model's modules are that parameter."""
    values = (value for _, module in nnx.iter_modules(model) for value in vars(module).values())
    return collections.Counter(id(value) for value in values if isinstance(value, nnx.Variable))


def kernel_of(layer: Any) -> jax.Array | PackedKernel:
    """A layer's kernel, packed where its parameter is."""
    param = layer.kernel
    return param.get_raw_value() if isinstance(param, PackedParam) else param[...]


def pack(convs: Iterable[Any], references: Mapping[int, int]) -> int:
    """Pack the kernels of those layers that read a copy; returns how many hold one now.

    A kernel that other layers share, of `references` to it, is packed where all of them would read the same copy.
    """
    readers: dict[int, list[Any]] = {}
    for layer in convs:
        if _reads_packed(layer.implementation) and why_not_packed(layer) is None:
            readers.setdefault(id(layer.kernel), []).append(layer)
    packed = 0
    for key, sharing in readers.items():
        groups = {layer.feature_group_count for layer in sharing}
        if len(sharing) == references[key] and len(groups) == 1:
            kernel = _packed(sharing[0].kernel, groups.pop())
            for layer in sharing:
                layer.kernel = kernel
            packed += isinstance(kernel, PackedParam) * len(sharing)
    return packed


def unpack(convs: Iterable[Any]) -> int:
    """Leave the kernels alone of those layers that are packed; returns how many were."""
    made: dict[int, nnx.Variable[Any]] = {}
    unpacked = 0
    for layer in convs:
        if isinstance(layer.kernel, PackedParam):
            plain = nnx.Param.from_metadata(layer.kernel.get_value(), layer.kernel.get_metadata())
            layer.kernel = made.setdefault(id(layer.kernel), plain)
            unpacked += 1
    return unpacked


def why_not_packed(layer: Any) -> str | None:
    """Why no implementation of a convolution layer would read a packed kernel, or None."""
    if type(layer.kernel) not in (nnx.Param, PackedParam) or _has_hooks(layer.kernel):
        return f"the kernel is a {type(layer.kernel).__name__} of its own, or has hooks"
    if layer.mask is not None:
        return "the kernel is masked in every call"
    if layer.dtype is not None and layer.dtype != layer.kernel.dtype:
        return f"the kernel is cast to {layer.dtype} in every call"
    if reason := layers.why_dense_conv(layer):
        return reason
    strides, dilation = (
        geo.pair(name, 1 if value is None else value)
        for name, value in (("strides", layer.strides), ("kernel_dilation", layer.kernel_dilation))
    )
    if _reads_few_pixels(layer):
        strides = (1, 1)
    if not packing.is_read(tuple(layer.kernel.shape), strides, dilation):
        return "only convolutions of 1x1, 3x3 and, on some processors, 5x5 with a stride of 1 read a packed kernel"
    return None


def _reads_few_pixels(layer: Any) -> bool:
    """Whether it is a 1x1 convolution without padding and pool, which runs on the pixels that it reads."""
    is_unpadded = layer.padding in ("SAME", "VALID") or not np.any(layer.padding)
    return tuple(layer.kernel.shape[:2]) == (1, 1) and is_unpadded and not hasattr(layer, "pool")


def _has_hooks(param: nnx.Variable[Any]) -> bool:
    return any(value for name, value in param.get_metadata().items() if name.startswith("on_"))


def _reads_packed(implementation: layers.Implementation) -> bool:
    if isinstance(implementation, Planned):
        return any(name in _READERS for name in implementation.names)
    return implementation in _READERS


def _packed(param: nnx.Variable[Any], groups: int) -> nnx.Variable[Any]:
    """The parameter with a packed copy; itself where there would be none, as for a kernel without values."""
    if isinstance(param.get_value(), jax.ShapeDtypeStruct):
        return param
    made = packing.pack(param[...], feature_group_count=groups)
    return param if made.packed is None else PackedParam.from_metadata(made, param.get_metadata())
