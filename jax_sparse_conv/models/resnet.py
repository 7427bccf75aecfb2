"""ResNet-50 (He et al. 2016), with torchvision's and with Keras's placement of the strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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

VERSIONS = ("v1", "v1.5")
_EXPANSION = 4


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolution with a residual: the last one adds it before its ReLU, fused once folded.

    Args:
      in_features: channels of x.
      width: channels inside; the result has four times as many.
      strides: of the block.
      project: whether the residual is a 1x1 convolution of x rather than x.
      shared: arguments of every `ConvUnit`.
    """

    def __init__(self, in_features: int, width: int, strides: int, project: bool, **shared: Any) -> None:
        out_features = _EXPANSION * width
        self.strides = strides
        self.conv1 = ConvUnit(in_features, width, 1, **shared)
        self.conv2 = ConvUnit(width, width, 3, padding=1, **shared)
        self.conv3 = ConvUnit(width, out_features, 1, **shared)
        self.shortcut: ConvUnit | None = nnx.data(None)
        if project:
            self.shortcut = ConvUnit(in_features, out_features, 1, strides, relu=False, **shared)

    def use_version(self, version: str) -> None:
        """Put the block's stride into its first convolution ("v1") or its second ("v1.5")."""
        first, second = (self.strides, 1) if version == "v1" else (1, self.strides)
        self.conv1.conv.strides = (first, first)
        self.conv2.conv.strides = (second, second)

    def named_layers(self, prefix: str) -> Iterator[tuple[str, ConvUnit]]:
        if self.shortcut is not None:
            yield f"{prefix}_0", self.shortcut
        yield from ((f"{prefix}_1", self.conv1), (f"{prefix}_2", self.conv2), (f"{prefix}_3", self.conv3))

    def __call__(self, x: jax.Array, prefix: str, before_layer: BeforeLayer | None) -> jax.Array:
        residual = x
        if self.shortcut is not None:
            residual = run_layer(f"{prefix}_0", self.shortcut, x, before_layer=before_layer)
        x = run_layer(f"{prefix}_1", self.conv1, x, before_layer=before_layer)
        x = run_layer(f"{prefix}_2", self.conv2, x, before_layer=before_layer)
        return run_layer(f"{prefix}_3", self.conv3, x, residual, before_layer=before_layer)


class ResNet(ConvNet):
    """A stem, stages of bottleneck blocks, a global average and one fully connected layer.

    Layers are named as in Keras: conv1, conv2_block1_0 (the residual's convolution), conv2_block1_1 ... , fc.

    Args:
      depths: blocks per stage; the stages are conv2, conv3, ...
      num_classes: logits.
      width: channels of the stem.
      version: "v1.5" strides in the 3x3 convolution (torchvision, timm), "v1" in the first 1x1 (the paper, Keras).
      implementation: None, "xla", "ecr", "coo", "direct" or "pecr" (PECR where a pool follows, ECR elsewhere).
      dtype: of the computation, None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in lax.
      rngs: a stream `params` for the initial values.

    Raises:
      ValueError: an unknown version or implementation.
    """

    def __init__(
        self,
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        width: int = 64,
        version: str = "v1.5",
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
        norm: dict[str, Any] = {"use_bias": False, "batch_norm": True}
        self.stem = ConvUnit(3, width, 7, 2, 3, pool=(3, 2, 1), **norm, **shared)
        stages = []
        channels = width
        for index, depth in enumerate(depths):
            inner = width * 2**index
            stage = []
            for block in range(depth):
                strides = 2 if block == 0 and index > 0 else 1
                stage.append(Bottleneck(channels, inner, strides, block == 0, **norm, **shared))
                channels = inner * _EXPANSION
            stages.append(nnx.List(stage))
        self.stages = nnx.List(stages)
        self.fc = fully_connected(channels, num_classes, relu=False, **shared)
        self.use_version(version)

    def use_version(self, version: str) -> None:
        """Move the strides to where "v1" or "v1.5" has them, in place."""
        if version not in VERSIONS:
            raise ValueError(f"version={version!r} is not one of {', '.join(map(repr, VERSIONS))}")
        self.version = version
        for _, block in self._blocks():
            block.use_version(version)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield "conv1", self.stem
        for prefix, block in self._blocks():
            yield from block.named_layers(prefix)
        yield "fc", self.fc

    def features(
        self, x: jax.Array, *, last_stage: int | None = None, before_layer: BeforeLayer | None = None
    ) -> jax.Array:
        """The feature map of a stage, by default the last: x [N, H, W, 3] -> [N, ceil(H / 32), ceil(W / 32), 2048].

        Args:
          x: images, preprocessed.
          last_stage: 1 is the stem with its pool, 2 to 5 are conv2 to conv5.
          before_layer: called before every layer.
        """
        check_images(x)
        last = len(self.stages) + 1 if last_stage is None else last_stage
        if not 1 <= last <= len(self.stages) + 1:
            raise ValueError(f"last_stage={last_stage!r} is not between 1 and {len(self.stages) + 1}")
        x = run_layer("conv1", self.stem, x, before_layer=before_layer)
        for prefix, block in self._blocks(last - 1):
            x = block(x, prefix, before_layer)
        return x

    def __call__(self, x: jax.Array, *, before_layer: BeforeLayer | None = None) -> jax.Array:
        """x [N, H, W, 3] -> logits [N, num_classes]."""
        x = self.features(x, before_layer=before_layer)
        return run_layer("fc", self.fc, jnp.mean(x, axis=(1, 2)), before_layer=before_layer)

    def _blocks(self, stages: int | None = None) -> Iterator[tuple[str, Bottleneck]]:
        for s, stage in enumerate(list(self.stages)[:stages], 2):
            for b, block in enumerate(stage, 1):
                yield f"conv{s}_block{b}", block


def resnet50(
    num_classes: int = 1000,
    *,
    version: str = "v1.5",
    implementation: str | None = None,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    precision: lax.PrecisionLike = None,
    rngs: nnx.Rngs,
) -> ResNet:
    """ResNet-50: 53 convolutions, 25,557,032 parameters at 1000 classes. Arguments as in `ResNet`."""
    return ResNet(
        (3, 4, 6, 3),
        num_classes,
        version=version,
        implementation=implementation,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        rngs=rngs,
    )
