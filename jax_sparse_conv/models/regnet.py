"""RegNetX (Radosavovic et al. 2020): stages of residual blocks of constant width with grouped 3x3 convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from jax_sparse_conv.models.residual import Block, Conv, ResidualNet
from jax_sparse_conv.models.units import ConvUnit, Shared

_STRIDED = 1  # of a block's convolutions, the 3x3


class RegNetX(ResidualNet):
    """A 3x3 stem, four stages that halve the map, a global average and one fully connected layer.

    Layers are named stem, stage1_block1_0 (the residual's convolution), stage1_block1_1 ... , fc.

    Args:
      depths: blocks per stage.
      widths: channels per stage.
      group_width: channels of a group of the 3x3 convolutions, at most the stage's.
      num_classes: logits.
      stem_width: channels of the stem.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        group_width: int,
        num_classes: int = 1000,
        *,
        stem_width: int = 32,
        **shared: Unpack[Shared],
    ) -> None:
        stages = []
        channels = stem_width
        for depth, width in zip(depths, widths, strict=True):
            convs = (Conv(width, 1), Conv(width, 3, width // min(group_width, width)), Conv(width, 1))
            stage = []
            for b in range(depth):
                stage.append(Block(channels, convs, 2 if b == 0 else 1, _STRIDED, b == 0, **shared))
                channels = width
            stages.append(stage)
        names = ["stem", *(f"stage{s}" for s in range(1, len(stages) + 1))]
        super().__init__(names, ConvUnit(3, stem_width, 3, 2, 1, **shared), stages, num_classes, **shared)


# Parameters at 1000 classes, all twelve of the paper's but its 200MF. For the smallest, the paper (and timm's
# regnetx_004) and torchvision round the widest stage differently.
regnetx_004 = partial(RegNetX, (1, 2, 7, 12), (32, 64, 160, 384), 16)  # 5,157,512
regnetx_400mf = partial(RegNetX, (1, 2, 7, 12), (32, 64, 160, 400), 16)  # 5,495,976
regnetx_600mf = partial(RegNetX, (1, 3, 5, 7), (48, 96, 240, 528), 24)  # 6,196,040
regnetx_800mf = partial(RegNetX, (1, 3, 7, 5), (64, 128, 288, 672), 16)  # 7,259,656
regnetx_1_6gf = partial(RegNetX, (2, 4, 10, 2), (72, 168, 408, 912), 24)  # 9,190,136
regnetx_3_2gf = partial(RegNetX, (2, 6, 15, 2), (96, 192, 432, 1008), 48)  # 15,296,552
regnetx_4gf = partial(RegNetX, (2, 5, 14, 2), (80, 240, 560, 1360), 40)  # 22,118,248
regnetx_6_4gf = partial(RegNetX, (2, 4, 10, 1), (168, 392, 784, 1624), 56)  # 26,209,256
regnetx_8gf = partial(RegNetX, (2, 5, 15, 1), (80, 240, 720, 1920), 120)  # 39,572,648
regnetx_12gf = partial(RegNetX, (2, 5, 11, 1), (224, 448, 896, 2240), 112)  # 46,106,056
regnetx_16gf = partial(RegNetX, (2, 6, 13, 1), (256, 512, 896, 2048), 128)  # 54,278,536
regnetx_32gf = partial(RegNetX, (2, 7, 13, 1), (336, 672, 1344, 2520), 168)  # 107,811,560
SIZES = {
    "regnetx_004": "400MF, as the paper and timm have it",
    "regnetx_400mf": "400MF, as torchvision has it",
    "regnetx_600mf": "600MF",
    "regnetx_800mf": "800MF",
    "regnetx_1_6gf": "1.6GF",
    "regnetx_3_2gf": "3.2GF",
    "regnetx_4gf": "4.0GF",
    "regnetx_6_4gf": "6.4GF",
    "regnetx_8gf": "8GF",
    "regnetx_12gf": "12GF",
    "regnetx_16gf": "16GF",
    "regnetx_32gf": "32GF",
}
