"""ResNet (He et al. 2016), with torchvision's and with Keras's placement of the strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from jax_sparse_conv._src.layers import layers
from jax_sparse_conv.models.residual import Block, Conv, ResidualNet
from jax_sparse_conv.models.units import ConvUnit, Pool, Shared

# Where the strides are, by version: index of a bottleneck's convolution. A basic block has them in its first one.
VERSIONS = {"v1": 0, "v1.5": 1}


def _basic(width: int) -> tuple[Conv, ...]:
    return (Conv(width, 3), Conv(width, 3))


def _bottleneck(width: int) -> tuple[Conv, ...]:
    return (Conv(width, 1), Conv(width, 3), Conv(4 * width, 1))


BLOCKS: dict[str, Callable[[int], tuple[Conv, ...]]] = {"basic": _basic, "bottleneck": _bottleneck}


class ResNet(ResidualNet):
    """A stem, stages of residual blocks, a global average and one fully connected layer.

    Layers are named as in Keras: conv1, conv2_block1_0 (the residual's convolution), conv2_block1_1 ... , fc.

    Args:
      depths: blocks per stage; the stages are conv2, conv3, ...
      num_classes: logits.
      block: "basic" (two 3x3 convolutions) or "bottleneck" (1x1, 3x3 and 1x1 with four times the channels).
      width: channels of the stem.
      version: "v1.5" strides in a bottleneck's 3x3 convolution (torchvision, timm), "v1" in its first 1x1 (the paper,
        Keras); basic blocks do not differ.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown block, version or implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(
        self,
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        block: str = "bottleneck",
        width: int = 64,
        version: str = "v1.5",
        **shared: Unpack[Shared],
    ) -> None:
        layers.check_choice("block", block, tuple(BLOCKS))
        stages = []
        channels = width
        for index, depth in enumerate(depths):
            convs = BLOCKS[block](width * 2**index)
            stage = []
            for b in range(depth):
                strides = 2 if b == 0 and index > 0 else 1
                project = strides != 1 or channels != convs[-1].out_channels
                stage.append(Block(channels, convs, strides, 0, project, **shared))
                channels = convs[-1].out_channels
            stages.append(stage)
        names = ["conv1", *(f"conv{s}" for s in range(2, len(stages) + 2))]
        stem = ConvUnit(3, width, 7, 2, 3, pool=Pool(3, 2, (1, 1)), **shared)
        super().__init__(names, stem, stages, num_classes, **shared)
        self.use_version(version)

    def use_version(self, version: str) -> None:
        """Move the strides to where "v1" or "v1.5" has them, in place."""
        layers.check_choice("version", version, tuple(VERSIONS))
        self.version = version
        for _, block in self.named_blocks():
            block.stride_in(VERSIONS[version] if len(block.convs) == 3 else 0)


# Parameters at 1000 classes.
resnet18 = partial(ResNet, (2, 2, 2, 2), block="basic")  # 11,689,512
resnet34 = partial(ResNet, (3, 4, 6, 3), block="basic")  # 21,797,672
resnet50 = partial(ResNet, (3, 4, 6, 3))  # 25,557,032
resnet101 = partial(ResNet, (3, 4, 23, 3))  # 44,549,160
resnet152 = partial(ResNet, (3, 8, 36, 3))  # 60,192,808
