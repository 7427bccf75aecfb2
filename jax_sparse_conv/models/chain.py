"""Networks that are one chain: convolutions, an average to a fixed size, and fully connected layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_sparse_conv._src.problem.geometry import is_symbolic
from jax_sparse_conv.models.layers import (
    BeforeLayer,
    ConvNet,
    check_images,
    check_implementation,
    pairs,
    run_layer,
    run_units,
)
from jax_sparse_conv.models.units import ConvUnit, Layer, Pool, Shared, fully_connected, smallest_size


class Conv(NamedTuple):
    """A convolution of a chain: its arguments as in `ConvUnit`, its ReLU understood."""

    out_channels: int
    kernel: int
    strides: int = 1
    padding: int = 0
    pool: Pool | None = None


class Chain(ConvNet):
    """Convolutions with bias and ReLU, some with a pool, then fully connected layers, all but the last with a ReLU.

    Args:
      convs: the convolutions by name, in order.
      heads: widths of the fully connected layers by name, in order; the last one gives the logits.
      pool_size: rows and columns that the feature map is averaged to before the first fully connected layer.
      channels: of the images.
      batch_norm: whether a batch norm follows every convolution (which keeps its own bias, as in torchvision).
      **shared: see `Shared`.
    """

    def __init__(
        self,
        convs: Mapping[str, Conv],
        heads: Mapping[str, int],
        *,
        pool_size: int,
        channels: int = 3,
        batch_norm: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        check_implementation(shared.get("implementation"))
        self.pool_size, self.channels = pool_size, channels
        self.conv_names, self.head_names = tuple(convs), tuple(heads)
        units = []
        for out_channels, kernel, strides, padding, pool in convs.values():
            units.append(
                ConvUnit(
                    channels,
                    out_channels,
                    kernel,
                    strides,
                    padding,
                    use_bias=True,
                    batch_norm=batch_norm,
                    pool=pool,
                    **shared,
                )
            )
            channels = out_channels
        self.convs = nnx.List(units)
        widths = [channels * pool_size**2, *heads.values()]
        self.heads = nnx.List(
            [
                fully_connected(inputs, outputs, relu=index < len(heads), **shared)
                for index, (inputs, outputs) in enumerate(itertools.pairwise(widths), 1)
            ]
        )

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield from zip(self.conv_names, self.convs, strict=True)
        yield from zip(self.head_names, self.heads, strict=True)

    def feeds(self) -> dict[str, str]:
        """By layer, the next one."""
        return pairs([*self.conv_names, *self.head_names])

    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last feature map: x [N, H, W, C] -> [N, h, w, K].

        Raises:
          ValueError: x is not [N, H, W, C], or so small that a window has nothing to see.
        """
        check_images(x, smallest_size(self.convs), self.channels)
        return run_units(zip(self.conv_names, self.convs, strict=True), x, before_layer=before_layer)

    def logits(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """x [N, H, W, C] -> logits [N, num_classes].

        At sizes other than the published one the last feature map is averaged as torch's AdaptiveAvgPool2d does.
        """
        x = adaptive_average_pool(self.features(x, before_layer=before_layer), self.pool_size)
        x = x.reshape(x.shape[0], -1)
        for name, layer in zip(self.head_names, self.heads, strict=True):
            x = run_layer(name, layer, x, before_layer=before_layer)
        return x


def adaptive_average_pool(x: jax.Array, size: int) -> jax.Array:
    """torch's AdaptiveAvgPool2d: x [N, H, W, C] -> [N, size, size, C]; x itself where it has that size."""
    if x.shape[1:3] == (size, size):
        return x
    if is_symbolic(*x.shape[1:3]):
        raise ValueError(
            f"a feature map of {x.shape[1]} x {x.shape[2]} pixels is averaged to {size} x {size} by windows that "
            "depend on its size, which must be known: only the number of images may be symbolic"
        )
    rows, columns = (jnp.asarray(_averages(n, size), x.dtype) for n in x.shape[1:3])
    highest = lax.Precision.HIGHEST
    return jnp.einsum("ih,nhwc,jw->nijc", rows, x, columns, precision=highest)


def _averages(length: int, size: int) -> np.ndarray:
    """[size, length]: row i averages the entries floor(i * length / size) to ceil((i + 1) * length / size)."""
    matrix = np.zeros((size, length))
    for i in range(size):
        low, high = i * length // size, -(-(i + 1) * length // size)
        matrix[i, low:high] = 1 / (high - low)
    return matrix
