"""Arrays whose types say how they lie over devices (`AxisType.Explicit`): types of results, and how to get them.

Where the axes of a mesh are `Auto`, or there is no mesh, types say nothing and everything here is plain. Elsewhere each
device computes what it has by `shard_map`. XLA's partitioner, left to split a convolution in groups, may sum the
gradient of its kernel over more devices than there are parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from jax_sparse_conv._src.primitive.split import Split
from jax_sparse_conv._src.problem.geometry import Geometry


def spec_of(array: Any) -> tuple[Any, ...]:
    """For every axis of an array, or of its type, what it is split over, or None."""
    return tuple(_type(array).sharding.spec.partitions)


def is_split(*arrays: Any) -> bool:
    """Whether the type of one of the arrays (or of pytrees of them) says that it is split."""
    return any(entry is not None for array in jax.tree.leaves(arrays) for entry in spec_of(array))


def has_split_pixels(x: Any) -> bool:
    """Whether the type of a map [N, H, W, C] says that its height or width is split."""
    return any(entry is not None for entry in spec_of(x)[1:3])


def result_sharding(x: Any, kernel: Any, geometry: Geometry) -> NamedSharding:
    """Of x [N, H, W, C] and kernel [S, kh, kw, C / groups, K]: [N, Ho, Wo, K] split as N and, with one group, as K is.

    Ho and Wo are split as H and W are, where neighbours have what windows read, the devices divide the sizes, and there
    is no pool.

    Raises:
      ValueError: N and K split over one axis of the mesh, or sums that are not taken yet.
    """
    for name, array in (("x", x), ("kernel", kernel)):
        _check_reduced(name, array)
    if geometry.groups == 1:
        check_apart(x, kernel)
    mesh = _mesh(x, kernel)
    if not is_split(x, kernel):
        return NamedSharding(mesh, PartitionSpec(None, None, None, None))
    _, height, width, out_channels = split_of(x, kernel, geometry).result.partitions
    return NamedSharding(mesh, PartitionSpec(spec_of(x)[0], height, width, out_channels))


def split_of(x: Any, kernel: Any, geometry: Geometry) -> Split:
    """What each device computes; as types have it, a result is split evenly."""
    mesh, (images, *pixels, in_channels) = _mesh(x, kernel), spec_of(x)
    sizes = geometry.conv_size(x.shape[1:3], kernel.shape[1:3])
    is_even = [geometry.pool is None and size % _devices(mesh, e) == 0 for size, e in zip(sizes, pixels, strict=True)]
    pixels = [entry if even else None for entry, even in zip(pixels, is_even, strict=True)]
    specs = (images, *pixels, in_channels), spec_of(kernel), (images, None, None, spec_of(kernel)[4])
    return Split.of(geometry, (x.shape, kernel.shape), specs, mesh.shape)


def check_apart(x: Any, kernel: Any, leading: int = 1) -> None:
    """Raise where one axis of the mesh splits leading axes of x and the last one of kernel: a result has both."""
    images = [name for entry in spec_of(x)[:leading] for name in _names(entry)]
    both = [name for name in _names(spec_of(kernel)[-1]) if name in images]
    if both:
        given = _given(kernel)
        raise ValueError(
            f"x is split as {_given(x)} and kernel as {given}: {both[0]!r} cannot split the result's output channels "
            "beside what it splits of x. Accepted are different axes of the mesh, or a kernel of whole output "
            f"channels: jax.sharding.reshard(kernel, {PartitionSpec(*given.partitions[:-1], None)})."
        )


def on_devices(
    function: Callable[..., Any], operands: Sequence[Any], specs: Sequence[PartitionSpec], result: PartitionSpec
) -> Any:
    """`function(*operands)` on each device of the parts that `specs` give it; operands lie so beforehand, or are moved.

    One spec serves all arrays of an operand that is a pytree, and `result` all results.
    """
    mesh = _mesh(*jax.tree.leaves(operands))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    placed = [
        jax.tree.map(functools.partial(reshard, out_shardings=sharding), operand)
        for operand, sharding in zip(operands, shardings, strict=True)
    ]
    axes = set(mesh.explicit_axes)
    if mesh.manual_axes:
        # Inside of a `shard_map` over other axes JAX loses what derivatives save in here: it takes those axes for axes
        # of this one. So they save arguments alone.
        function = jax.checkpoint(function, prevent_cse=False)
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=result, axis_names=axes)(*placed)


def by_image(function: Callable[..., Any], *operands: jax.Array) -> Any:
    """`function` of arrays [N, ...] that takes every image by itself, on each device of those that it has."""
    if not is_split(*operands):
        return function(*operands)
    images = PartitionSpec(spec_of(operands[0])[0])
    return on_devices(function, operands, [images] * len(operands), images)


def convolved(
    function: Callable[[jax.Array, jax.Array, Geometry], jax.Array], x: jax.Array, kernel: jax.Array, geometry: Geometry
) -> jax.Array:
    """`function(x, kernel, geometry)`, a convolution of x and kernel as `primitives` has them, on each device."""
    sharding, split = result_sharding(x, kernel, geometry), split_of(x, kernel, geometry)
    here = split.here(geometry)

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return split.summed(function(split.read(x), kernel, here))

    out = on_devices(local, [x, kernel], [split.x, split.kernel], split.result)
    return reshard(out, sharding)


def whole(x: jax.Array, *axes: int) -> jax.Array:
    """x with all of these axes on each device."""
    spec = list(spec_of(x))
    for axis in axes:
        spec[axis] = None
    return _split(x, spec, x)


def as_split(value: jax.Array, like: jax.Array) -> jax.Array:
    """`value`, whose axes are the last ones of `like` or 1, split as those are."""
    entries = zip(value.shape, spec_of(like)[like.ndim - value.ndim :], strict=True)
    spec = tuple(None if size == 1 else entry for size, entry in entries)
    return _split(value, spec, like)


def with_leading_split(value: jax.Array, like: jax.Array, count: int) -> jax.Array:
    """`value` with its first `count` axes split as those of `like` are."""
    return _split(value, (*spec_of(like)[:count], *spec_of(value)[count:]), like)


def _split(value: jax.Array, spec: Sequence[Any], like: jax.Array) -> jax.Array:
    """`value` split as `spec` says over the mesh of `like`."""
    return value if spec_of(value) == tuple(spec) else reshard(value, NamedSharding(_mesh(like), PartitionSpec(*spec)))


# --- leading axes as one ----------------------------------------------------------------------------------------------


def rows_of(x: jax.Array) -> jax.Array:
    """x [..., C] as maps of one pixel, [rows, 1, 1, C]. Split leading axes stay where they are; C becomes whole.

    Every device's rows lie together. Where several axes are split, `of_rows` knows the rows' order.
    """
    shape = (math.prod(x.shape[:-1]), 1, 1, x.shape[-1])
    if not is_split(x):
        # In two steps: JAX has no rule for both of them at once of an axis that `vmap` adds and that is split.
        return x.reshape(shape) if _no_mesh() else lax.expand_dims(x.reshape(shape[0], shape[-1]), (1, 2))
    return lax.expand_dims(joined(whole(x, -1), x.ndim - 1), (1, 2))


def of_rows(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Rows [rows, 1, 1, K], in the order of `rows_of(like)`, as [..., K] split as `like` is."""
    if not is_split(rows):
        shape = (*like.shape[:-1], rows.shape[-1])
        return rows.reshape(shape) if _no_mesh() else lax.squeeze(rows, (1, 2)).reshape(shape)
    return parted(lax.squeeze(rows, (1, 2)), like, like.ndim - 1)


def joined(x: jax.Array, count: int) -> jax.Array:
    """x with its first `count` axes as one, in the order that `parted` knows: what a device has lies together."""
    leading, rest = _Leading(x, _mesh(x), count), spec_of(x)[count:]
    apart = lax.reshape(x, (*leading.apart, *x.shape[count:]), out_sharding=leading.sharding(*leading.entries, *rest))
    together = jnp.moveaxis(apart, leading.order, range(len(leading.order)))
    shape = (math.prod(x.shape[:count]), *x.shape[count:])
    return lax.reshape(together, shape, out_sharding=leading.sharding(leading.names, *rest))


def parted(y: jax.Array, like: jax.Array, count: int) -> jax.Array:
    """y [rows, ...] with rows as the first `count` axes of `like`, and split as these are; the inverse of `joined`."""
    leading, rest = _Leading(like, _mesh(y), count), spec_of(y)[1:]
    sizes, entries = ([values[i] for i in leading.order] for values in (leading.apart, leading.entries))
    together = lax.reshape(y, (*sizes, *y.shape[1:]), out_sharding=leading.sharding(*entries, *rest))
    apart = jnp.moveaxis(together, range(len(leading.order)), leading.order)
    shape = (*like.shape[:count], *y.shape[1:])
    return lax.reshape(apart, shape, out_sharding=leading.sharding(*spec_of(like)[:count], *rest))


class _Leading:
    """The first `count` axes of x, each as two: over the devices that it is split over, and on one device.

    Attributes:
      apart: sizes of those axes.
      entries: what each is split over.
      order: the ones over devices, then the ones on a device.
      names: all axes of the mesh that they are split over.
    """

    def __init__(self, x: jax.Array, mesh: Any, count: int) -> None:
        self.mesh = mesh
        leading = spec_of(x)[:count]
        devices = [_devices(mesh, entry) for entry in leading]
        pairs = zip(devices, x.shape[:count], strict=True)
        self.apart = [size for parts, whole in pairs for size in (parts, whole // parts)]
        self.entries = [entry for given in leading for entry in (given, None)]
        self.order = [*range(0, len(self.apart), 2), *range(1, len(self.apart), 2)]
        self.names = tuple(name for entry in leading for name in _names(entry))

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))


# --- types -----------------------------------------------------------------------------------------------------------


def _type(array: Any) -> Any:
    return array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)


def _check_reduced(name: str, array: Any) -> None:
    """Raise for an array that holds parts of open sums, or is marked as reduced: sums end before a ReLU."""
    spec = _given(array)
    if spec.unreduced or spec.reduced:
        raise ValueError(
            f"{name} is split as {spec}, with sums that are left open; accepted is an array that is reduced and not "
            f"marked so: jax.sharding.reshard({name}, {PartitionSpec(*spec.partitions)})."
        )


def _given(array: Any) -> PartitionSpec:
    """How a caller's array is split: kernels of `primitives` have one axis in front of that."""
    spec = _type(array).sharding.spec
    entries = spec.partitions[1:] if len(spec.partitions) == 5 else spec.partitions
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def _names(entry: Any) -> tuple[Any, ...]:
    """The mesh's axes of one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _devices(mesh: Any, entry: Any) -> int:
    """Over how many devices one entry of a spec splits."""
    return math.prod(mesh.shape[name] for name in _names(entry))


def _mesh(*arrays: Any) -> Any:
    """The mesh of the first array that has one: constants have none."""
    meshes = [_type(array).sharding.mesh for array in arrays]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def _no_mesh() -> bool:
    """Whether one reshape is enough, which is what chains look for: vmap may split the axes where there is a mesh."""
    return bool(jax.sharding.get_abstract_mesh().empty)
