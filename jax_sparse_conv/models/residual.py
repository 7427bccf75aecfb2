"""Networks of residual blocks: a stem, stages of blocks, a global average and one fully connected layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Unpack

import jax
from flax import nnx

from jax_sparse_conv.models.layers import (
    LAST,
    BeforeLayer,
    ConvNet,
    check_images,
    check_implementation,
    pairs,
    run_layer,
    run_units,
)
from jax_sparse_conv.models.units import ConvUnit, Layer, Shared, fully_connected, smallest_size


class Conv(NamedTuple):
    """A convolution of a block, padded so that a stride of 1 keeps the size; batch norm and ReLU are understood."""

    out_channels: int
    kernel: int
    groups: int = 1


class Block(nnx.Module):
    """Convolutions with a residual: the last one adds it before its ReLU, fused once folded.

    Args:
      in_features: channels of x.
      convs: the convolutions.
      strides: of the block.
      strided: index of the convolution that has the stride.
      project: whether the residual is a 1x1 convolution of x rather than x.
      **shared: see `Shared`.
    """

    def __init__(
        self,
        in_features: int,
        convs: Sequence[Conv],
        strides: int,
        strided: int,
        project: bool,
        **shared: Unpack[Shared],
    ) -> None:
        self.strides = strides
        self.out_features = convs[-1].out_channels
        units = []
        channels = in_features
        for out_channels, kernel, groups in convs:
            units.append(ConvUnit(channels, out_channels, kernel, padding=kernel // 2, groups=groups, **shared))
            channels = out_channels
        self.convs = nnx.List(units)
        self.shortcut: ConvUnit | None = nnx.data(None)
        if project:
            self.shortcut = ConvUnit(in_features, channels, 1, strides, relu=False, **shared)
        self.stride_in(strided)

    def stride_in(self, index: int) -> None:
        """Put the block's stride into one of its convolutions."""
        for i, unit in enumerate(self.convs):
            strides = self.strides if i == index else 1
            unit.conv.strides = (strides, strides)

    def named_layers(self, prefix: str) -> Iterator[tuple[str, ConvUnit]]:
        if self.shortcut is not None:
            yield f"{prefix}_0", self.shortcut
        for i, unit in enumerate(self.convs, 1):
            yield f"{prefix}_{i}", unit

    def __call__(self, x: jax.Array, prefix: str, before_layer: BeforeLayer | None) -> jax.Array:
        residual = x
        if self.shortcut is not None:
            residual = run_layer(f"{prefix}_0", self.shortcut, x, before_layer=before_layer)
        units = ((f"{prefix}_{i}", unit) for i, unit in enumerate(self.convs, 1))
        return run_units(units, x, residual, before_layer=before_layer)


class ResidualNet(ConvNet):
    """What ResNet and RegNetX share.

    Args:
      names: of the stem and of the stages. Block b of a stage is <stage>_block<b>. Its convolutions are <block>_1, _2,
        ..., and the one of its residual is <block>_0.
      stem: the first layer.
      stages: the blocks of each stage.
      num_classes: logits.
      **shared: see `Shared`.
    """

    def __init__(
        self,
        names: Sequence[str],
        stem: ConvUnit,
        stages: Iterable[Sequence[Block]],
        num_classes: int,
        **shared: Unpack[Shared],
    ) -> None:
        check_implementation(shared.get("implementation"))
        self.names = tuple(names)
        self.stem = stem
        self.stages = nnx.List([nnx.List(stage) for stage in stages])
        self.fc = fully_connected(self.stages[-1][-1].out_features, num_classes, relu=False, **shared)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """(name, layer) of every layer with weights, in the order they run."""
        yield self.names[0], self.stem
        for prefix, block in self.named_blocks():
            yield from block.named_layers(prefix)
        yield "fc", self.fc

    def named_blocks(self, stages: int | None = None) -> Iterator[tuple[str, Block]]:
        """(name, block) of the first `stages` stages, by default all."""
        yield from self._blocks(stages)

    def _blocks(self, stages: int | None = None) -> Iterator[tuple[str, Block]]:
        for name, stage in zip(self.names[1:], list(self.stages)[:stages], strict=False):
            for b, block in enumerate(stage, 1):
                yield f"{name}_block{b}", block

    def feeds(self) -> dict[str, str]:
        """By layer, the next one on the main path."""
        chain = [name for name, _ in self.named_layers() if not name.endswith("_0")]
        return pairs([*chain[:-1], LAST])

    def features(
        self, x: jax.Array, *, last_stage: int | None = None, before_layer: BeforeLayer | None = None
    ) -> jax.Array:
        """The feature map of a stage, by default the last: x [N, H, W, 3] -> [N, ceil(H / 32), ceil(W / 32), K].

        Args:
          x: images, preprocessed.
          last_stage: 1 is the stem with its pool, 2 to 5 are the stages of blocks (ResNet's conv2 to conv5).
          before_layer: called before every layer.
        """
        check_images(x, smallest_size([self.stem]))
        last = len(self.stages) + 1 if last_stage is None else last_stage
        if not 1 <= last <= len(self.stages) + 1:
            raise ValueError(f"last_stage={last_stage!r} is not between 1 and {len(self.stages) + 1}")
        x = run_layer(self.names[0], self.stem, x, before_layer=before_layer)
        for prefix, block in self._blocks(last - 1):
            x = block(x, prefix, before_layer)
        return x
