"""What each device computes of a convolution that lies on several: decided here, from how arrays are split.

    images N, output channels K   by themselves, without communication
    height H, width W             with the rows or columns of neighbours that their windows read (collective-permute)
    input channels C              a part of every sum; the parts are added before what follows (all-reduce)

Whatever else is split becomes whole first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_sparse_conv._src.problem.geometry import Geometry, Pads, Pool

Names: TypeAlias = tuple[str, ...]  # axes of a mesh
Entries: TypeAlias = Sequence[Any]  # of a PartitionSpec: what each axis of an array is split over
Shape: TypeAlias = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Strip:
    """The rows that one of several devices has and reads of x; or its columns.

    Device d has `has` rows from row `d * has` on. It reads `reads` rows from row `first + d * step` on. Rows before 0
    and from `size` on are padding.
    """

    parts: int
    size: int
    has: int
    first: int
    step: int
    reads: int
    before: int  # rows that a device reads of the one before it, at most
    after: int
    convolved: int  # rows of the whole convolution, in front of a pool

    @classmethod
    def of(cls, geometry: Geometry, axis: int, x_shape: Shape, kernel_shape: Shape, parts: int) -> Strip | None:
        """Along H (axis 0) or W (axis 1); None where a device reads more than it and its two neighbours have."""
        results = geometry.out_size(x_shape[1:3], kernel_shape[:2])[axis]
        pool = geometry.pool
        window, stride, low = (
            (1, 1, 0) if pool is None else (pool.window[axis], pool.strides[axis], pool.padding[axis][0])
        )
        size, makes, has = x_shape[1 + axis], -(-results // parts), -(-x_shape[1 + axis] // parts)
        needs = (makes - 1) * stride + window  # rows of the convolution that a device's results are of
        reads = (needs - 1) * geometry.strides[axis] + (kernel_shape[axis] - 1) * geometry.dilation[axis] + 1
        first = -low * geometry.strides[axis] - geometry.padding[axis][0]
        step = makes * stride * geometry.strides[axis]
        if parts == 1 or results < 1 or size < 1:
            return None
        last = -(-results // makes) - 1  # the last device that makes anything
        before = max(0, -first, last * (has - step) - first)
        after = max(0, first + reads - has, first + reads - has + last * (step - has))
        if max(before, after) > has:
            return None
        convolved = geometry.conv_size(x_shape[1:3], kernel_shape[:2])[axis]
        return cls(parts, size, has, first, step, reads, before, after, convolved)

    def read(self, x: jax.Array, dimension: int, names: Names) -> jax.Array:
        """The rows that this device reads, of the part of x that it has, with zeros for padding."""
        pieces = [x]
        if self.before:
            theirs = lax.slice_in_dim(x, self.has - self.before, self.has, axis=dimension)
            pieces.insert(0, lax.ppermute(theirs, names, [(d, d + 1) for d in range(self.parts - 1)]))
        if self.after:
            theirs = lax.slice_in_dim(x, 0, self.after, axis=dimension)
            pieces.append(lax.ppermute(theirs, names, [(d + 1, d) for d in range(self.parts - 1)]))
        x = lax.concatenate(pieces, dimension)
        start, device = self.before + self.first, lax.axis_index(names)
        if self.step == self.has:
            x = lax.slice_in_dim(x, start, start + self.reads, axis=dimension)
        else:
            x = lax.dynamic_slice_in_dim(x, start + device * (self.step - self.has), self.reads, axis=dimension)
        if self.size == self.parts * self.has:
            return x  # with the zeros that the first and the last device have where nothing was sent to them
        rows = self.first + device * self.step + np.arange(self.reads, dtype=np.int32)
        return _where(rows < self.size, x, 0, dimension)


def _where(is_there: jax.Array, values: jax.Array, other: float, dimension: int) -> jax.Array:
    shape = [-1 if axis == dimension else 1 for axis in range(values.ndim)]
    return jnp.where(is_there.reshape(shape), values, np.asarray(other, values.dtype))


def within(values: jax.Array, dimension: int, names: Names, size: int) -> jax.Array:
    """A device's part of an array, with zeros from index `size` of the whole on, where it has no values."""
    has = values.shape[dimension]
    if not names or has * lax.axis_size(names) == size:
        return values
    indices = lax.axis_index(names) * has + np.arange(has, dtype=np.int32)
    return _where(indices < size, values, 0, dimension)


@dataclasses.dataclass(frozen=True)
class Split:
    """The axes of a mesh that split each axis of a call; `strips` are of H and W, where those are split."""

    kernels: Names
    images: Names
    pixels: tuple[Names, Names]
    strips: tuple[Strip | None, Strip | None]
    in_channels: Names
    out_channels: Names

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        shapes: tuple[Shape, Shape],
        specs: tuple[Entries, Entries, Entries],
        mesh: Mapping[str, int],
    ) -> Split:
        """Of x [N, H, W, C] and kernel [S, kh, kw, C / groups, K], from how those two and the result are split.

        An axis of the mesh splits one thing: first what it splits of the result, then images, H, W, K and C.
        """
        (x_shape, kernel_shape), (x, kernel, result) = shapes, specs
        has_one_group = geometry.groups == 1
        images, height, width, out_channels = (_names(entry) for entry in result)
        free = set(mesh).difference(images, height, width, out_channels)

        def first(*wishes: Any) -> Names:
            """The first of them whose axes split nothing else."""
            found = next((names for names in map(_names, wishes) if names and free.issuperset(names)), ())
            free.difference_update(found)
            return found

        kernels, images = _split_images(mesh, images or first(x[0]), kernel_shape[0], x_shape[0])
        pixels = [height or first(x[1]), width or first(x[2])]
        out_channels = out_channels or first(kernel[4])
        in_channels = first(x[3], kernel[3])
        if not has_one_group or x_shape[3] % _parts(mesh, in_channels):
            in_channels = ()
        strips = [
            Strip.of(geometry, axis, x_shape, kernel_shape[1:], _parts(mesh, names)) if names else None
            for axis, names in enumerate(pixels)
        ]
        height, width = (names if strip else () for names, strip in zip(pixels, strips, strict=True))
        return cls(
            kernels,
            images,
            (height, width),
            (strips[0], strips[1]),
            in_channels,
            out_channels if has_one_group else (),
        )

    @property
    def x(self) -> PartitionSpec:
        return _spec(self.images, *self.pixels, self.in_channels)

    @property
    def kernel(self) -> PartitionSpec:
        return _spec(self.kernels, (), (), self.in_channels, self.out_channels)

    @property
    def bias(self) -> PartitionSpec:
        return _spec(self.kernels, self.out_channels)

    @property
    def result(self) -> PartitionSpec:
        return _spec(self.images, *self.pixels, self.out_channels)

    @property
    def sums(self) -> Names:
        """What splits the pixels of all images that use one kernel: its gradient is a sum over these."""
        images = (name for name in self.images if name not in self.kernels)
        return (*images, *self.pixels[0], *self.pixels[1])

    def read(self, x: jax.Array) -> jax.Array:
        """What a device reads of x, from the part that it has."""
        for dimension, (names, strip) in enumerate(zip(self.pixels, self.strips, strict=True), 1):
            x = x if strip is None else strip.read(x, dimension, names)
        return x

    def summed(self, y: jax.Array) -> jax.Array:
        """A convolution's result, from what a device has of its input channels; in float32 at least."""
        if not self.in_channels:
            return y
        return lax.psum(y.astype(jnp.promote_types(y.dtype, jnp.float32)), self.in_channels).astype(y.dtype)

    def here(self, geometry: Geometry) -> Geometry:
        """The convolution of what a device reads."""
        return dataclasses.replace(geometry, padding=self.unpadded(geometry.padding))

    def unpadded(self, padding: Pads) -> Pads:
        """Of the convolution or the pool: none along H and W where those are split, as what a device reads has it."""
        height, width = (given if strip is None else (0, 0) for given, strip in zip(padding, self.strips, strict=True))
        return height, width

    def pads(self, pool: Pool | None) -> bool:
        """Whether a pool has padding where H or W is split."""
        return pool is not None and self.unpadded(pool.padding) != pool.padding

    def padded(self, y: jax.Array, geometry: Geometry, value: float) -> jax.Array:
        """y, what a device computes in front of a pool, with `value` where that is the pool's padding."""
        assert geometry.pool is not None
        for axis, (names, strip) in enumerate(zip(self.pixels, self.strips, strict=True)):
            if strip is not None:
                step = strip.step // geometry.strides[axis]
                rows = lax.axis_index(names) * step + np.arange(y.shape[1 + axis], dtype=np.int32)
                rows -= geometry.pool.padding[axis][0]
                y = _where((rows >= 0) & (rows < strip.convolved), y, value, 1 + axis)
        return y


def _names(entry: Any) -> Names:
    """The mesh's axes of one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _spec(*axes: Names) -> PartitionSpec:
    return PartitionSpec(*[names or None for names in axes])


def _parts(mesh: Mapping[str, int], names: Names) -> int:
    return math.prod(mesh[name] for name in names)


def _split_images(mesh: Mapping[str, int], names: Names, stacks: int, images: int) -> tuple[Names, Names]:
    """Mesh axes over the kernels and over the images, of those that are wanted over the images.

    Images lie kernel by kernel, so leading axes split the kernels; once each part has one kernel, further axes split
    that kernel's images. An axis that divides neither is dropped, and the images are gathered along it.
    """
    if stacks == 1:
        return (), names
    over_stacks: list[str] = []
    over_images: list[str] = []
    parts = 1
    for name in names:
        whole = stacks if parts < stacks else images
        if whole % (parts * mesh[name]):
            break
        (over_stacks if parts < stacks else over_images).append(name)
        parts *= mesh[name]
    return tuple(over_stacks), tuple(over_stacks + over_images)
