"""VGG-16 and VGG-19 (Simonyan and Zisserman 2015), with and without batch norm, as torchvision has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_sparse_conv.models.layers import (
    BeforeLayer,
    ConvNet,
    ConvUnit,
    Layer,
    check_images,
    check_implementation,
    fully_connected,
    run_layer,
)

_FEATURES = (64, 128, 256, 512, 512)


class VGG(ConvNet):
    """Five stages of 3x3 convolutions, each ending in conv + ReLU + 2x2 max pool, and three fully connected layers.

    Layers are named as in the paper: conv1_1 ... conv5_4, fc6, fc7, fc8.

    Args:
      depths: convolutions per stage.
      num_classes: logits.
      features: output channels per stage.
      hidden: width of fc6 and fc7.
      pool_size: rows and columns that the feature map is averaged to before fc6.
      batch_norm: whether a batch norm follows every convolution (which keeps its own bias, as in torchvision).
      implementation: None, "xla", "ecr", "coo", "direct" or "pecr" (PECR where a pool follows, ECR elsewhere).
      dtype: of the computation, None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in lax.
      rngs: a stream `params` for the initial values.
    """

    def __init__(
        self,
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        features: Sequence[int] = _FEATURES,
        hidden: int = 4096,
        pool_size: int = 7,
        batch_norm: bool = False,
        implementation: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: lax.PrecisionLike = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_implementation(implementation)
        shared: dict[str, Any] = {
            "implementation": implementation,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        self.pool_size = pool_size
        stages = []
        channels = 3
        for depth, width in zip(depths, features, strict=True):
            stage = []
            for index in range(depth):
                pool = (2, 2, 0) if index == depth - 1 else None
                stage.append(
                    ConvUnit(channels, width, 3, padding=1, use_bias=True, batch_norm=batch_norm, pool=pool, **shared)
                )
                channels = width
            stages.append(nnx.List(stage))
        self.stages = nnx.List(stages)
        self.fc6 = fully_connected(channels * pool_size**2, hidden, relu=True, **shared)
        self.fc7 = fully_connected(hidden, hidden, relu=True, **shared)
        self.fc8 = fully_connected(hidden, num_classes, relu=False, **shared)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield from self._convolutions()
        yield from (("fc6", self.fc6), ("fc7", self.fc7), ("fc8", self.fc8))

    def features(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """The last feature map, after the last pool: x [N, H, W, 3] -> [N, H // 32, W // 32, 512].

        Raises:
          ValueError: x is not [N, H, W, 3], or H or W is below 32, so that a pool has nothing to pool.
        """
        check_images(x)
        smallest = 2 ** len(self.stages)
        if min(x.shape[1:3]) < smallest:
            raise ValueError(f"x.shape={x.shape} is too small: height and width must be at least {smallest}")
        for name, layer in self._convolutions():
            x = run_layer(name, layer, x, before_layer=before_layer)
        return x

    def __call__(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """x [N, H, W, 3] with H and W of at least 32 -> logits [N, num_classes].

        At sizes other than 224 the last feature map is averaged to 7x7 as torch's AdaptiveAvgPool2d does.
        """
        x = adaptive_average_pool(self.features(x, before_layer=before_layer), self.pool_size)
        x = x.reshape(x.shape[0], -1)
        for name, layer in (("fc6", self.fc6), ("fc7", self.fc7), ("fc8", self.fc8)):
            x = run_layer(name, layer, x, before_layer=before_layer)
        return x

    def _convolutions(self) -> Iterator[tuple[str, ConvUnit]]:
        for s, stage in enumerate(self.stages, 1):
            for i, layer in enumerate(stage, 1):
                yield f"conv{s}_{i}", layer


def adaptive_average_pool(x: jax.Array, size: int) -> jax.Array:
    """torch's AdaptiveAvgPool2d: x [N, H, W, C] -> [N, size, size, C]; x itself where it has that size."""
    if x.shape[1:3] == (size, size):
        return x
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


def vgg16(
    num_classes: int = 1000,
    *,
    batch_norm: bool = False,
    implementation: str | None = None,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    precision: lax.PrecisionLike = None,
    rngs: nnx.Rngs,
) -> VGG:
    """VGG-16: 13 convolutions, 138,357,544 parameters at 1000 classes. Arguments as in `VGG`."""
    return VGG(
        (2, 2, 3, 3, 3),
        num_classes,
        batch_norm=batch_norm,
        implementation=implementation,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        rngs=rngs,
    )


def vgg19(
    num_classes: int = 1000,
    *,
    batch_norm: bool = False,
    implementation: str | None = None,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    precision: lax.PrecisionLike = None,
    rngs: nnx.Rngs,
) -> VGG:
    """VGG-19: 16 convolutions, 143,667,240 parameters at 1000 classes. Arguments as in `VGG`."""
    return VGG(
        (2, 2, 4, 4, 4),
        num_classes,
        batch_norm=batch_norm,
        implementation=implementation,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        rngs=rngs,
    )
