"""What ECR and PECR share: lists of non-zeros, one per window, and what can be done with them alike."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import PartitionSpec

from jax_sparse_conv._src import typed_json
from jax_sparse_conv._src.primitive import explicit, primitives
from jax_sparse_conv._src.problem import described
from jax_sparse_conv._src.problem.arrays import as_array
from jax_sparse_conv._src.problem.geometry import Geometry, Pair

_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed(abc.ABC):
    """Lists of `capacity` slots, one per window, in the order of (row, column, channel)."""

    values: jax.Array
    indices: jax.Array
    counts: jax.Array
    size: Pair = dataclasses.field(metadata={"static": True})
    channels: int = dataclasses.field(metadata={"static": True})
    kernel_size: Pair = dataclasses.field(metadata={"static": True})
    geometry: Geometry = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return described.without_values(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature map, [N, H, W, C] (more leading axes where `jax.vmap` added them)."""
        return (*self.counts.shape[: self.counts.ndim - self._window_axes], *self.size, self.channels)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.values.dtype)

    @property
    def capacity(self) -> int:
        """Slots per window."""
        return int(self.values.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of values, indices and counts together, unused slots included."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in (self.values, self.indices, self.counts))

    @property
    def multiplications(self) -> jax.Array:
        """Multiplications of one output channel: the non-zeros of all windows.

        A scalar, int32, or float32 where `dense_multiplications` does not fit int32.
        """
        return self._total(jnp.maximum(self.counts, 0))

    @property
    def additions(self) -> jax.Array:
        """Additions of one output channel: one less than the non-zeros of each window; typed as `multiplications`."""
        return self._total(jnp.maximum(self.counts - 1, 0))

    @property
    def dense_multiplications(self) -> int:
        """Multiplications of one output channel that skips nothing, padding included."""
        return self._windows * self._taps

    @property
    def dense_additions(self) -> int:
        """Additions of one output channel that skips nothing."""
        return self._windows * max(self._taps - 1, 0)

    def todense(self) -> jax.Array:
        """The feature map [N, H, W, C]: exact where a window reaches, zero at pixels that no window covers.

        -0.0 comes back as 0.0. An image that overflowed `nse` comes back as NaN.
        """
        dense: jax.Array = self._dense()
        return dense

    @jax.jit
    def _dense(self) -> jax.Array:
        if 0 in self.values.shape:
            return jnp.zeros(self.shape, self.dtype)
        window_shape = self.counts.shape[self.counts.ndim - self._window_axes :]
        images = math.prod(self.shape[:-3])
        lists = (images, *window_shape, self.capacity)
        rows, columns = self._origins()
        pixels = jax.vmap(functools.partial(self._scatter, rows=rows, columns=columns))(
            self.values.reshape(lists), self.indices.reshape(lists)
        )
        overflowed = jnp.any((self.counts > self.capacity).reshape(images, math.prod(window_shape)), axis=1)
        return jnp.where(overflowed[:, None], jnp.nan, pixels).astype(self.dtype).reshape(self.shape)

    def _scatter(self, values: jax.Array, indices: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
        """One image's lists as pixels [H * W * C]; `rows` and `columns` are the windows' first pixels."""
        tap, channel = jnp.divmod(indices, self.channels)
        i, j = jnp.divmod(tap, self.kernel_size[1])
        row = rows[..., None] + i * self.geometry.dilation[0]
        column = columns[..., None] + j * self.geometry.dilation[1]
        length = self.size[0] * self.size[1] * self.channels
        pixel = jnp.where(indices < 0, length, (row * self.size[1] + column) * self.channels + channel)
        return jnp.zeros(length, values.dtype).at[pixel].set(values, mode="drop")

    @abc.abstractmethod
    def _origins(self) -> tuple[np.ndarray, np.ndarray]: ...

    def _convolve(self, kernel: jax.typing.ArrayLike) -> jax.Array:
        """Algorithm 2 of the paper for K output channels: slot after slot, values[s] * kernel[indices[s]]."""
        kernel = as_array("kernel", kernel)
        expected = (*self.kernel_size, self.channels)
        if kernel.ndim != 4 or kernel.shape[:3] != expected:
            raise ValueError(f"kernel.shape={kernel.shape} must be {expected} and the output channels, [kh, kw, C, K]")
        if kernel.dtype != self.dtype:
            raise TypeError(f"kernel.dtype={kernel.dtype} must equal the feature map's dtype={self.dtype}")
        return self._sum_slots(kernel)

    @jax.jit
    def _sum_slots(self, kernel: jax.Array) -> jax.Array:
        if not explicit.is_split(self, kernel):
            return self._sum_slots_of(kernel)
        explicit.check_apart(self.counts, kernel, self.counts.ndim)
        lists, out_channels = explicit.spec_of(self.counts), explicit.spec_of(kernel)[-1]
        specs = (PartitionSpec(*lists), PartitionSpec(None, None, None, out_channels))
        out: jax.Array = explicit.on_devices(
            type(self)._sum_slots_of, (self, kernel), specs, PartitionSpec(*lists, out_channels)
        )
        return out

    def _sum_slots_of(self, kernel: jax.Array) -> jax.Array:
        shape = (*self.counts.shape, kernel.shape[3])
        if 0 in self.values.shape:
            return jnp.zeros(shape, self.dtype)
        accumulator = jnp.promote_types(self.dtype, jnp.float32)
        rows = kernel.reshape(self._taps, kernel.shape[3]).astype(accumulator)

        def step(total: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            value, index = (part[..., None] for part in slot)
            row = rows.at[index[..., 0]].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            return total + jnp.where(index < 0, 0, value.astype(accumulator) * row), None

        start, rows, values, indices = primitives.same_varying_axes(
            [jnp.zeros(shape, accumulator), rows, self.values, self.indices]
        )
        slots = (jnp.moveaxis(values, -1, 0), jnp.moveaxis(indices, -1, 0))
        return lax.scan(step, start, slots)[0].astype(self.dtype)

    def _total(self, per_window: jax.Array) -> jax.Array:
        fits = self.dense_multiplications <= _MAX_INT32
        return jnp.sum(per_window, dtype=jnp.int32 if fits else jnp.float32)

    @property
    def _taps(self) -> int:
        return math.prod(self.kernel_size) * self.channels

    @property
    @abc.abstractmethod
    def _windows(self) -> int: ...

    @property
    @abc.abstractmethod
    def _window_axes(self) -> int: ...


def exportable(cls: type[Compressed]) -> None:
    """Have `jax.export` write a format that is an argument or a result of a program."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jax_sparse_conv.{cls.__name__}",
        serialize_auxdata=_text_of,
        deserialize_auxdata=_fixed_of,
    )


def _text_of(fixed: tuple[Any, ...]) -> bytes:
    return json.dumps([*fixed[:-1], dataclasses.asdict(fixed[-1])]).encode()


def _fixed_of(text: bytes | bytearray) -> tuple[Any, ...]:
    fixed: tuple[Any, ...] = typed_json.read(tuple[Pair, int, Pair, Geometry], json.loads(text), "format")
    return fixed
