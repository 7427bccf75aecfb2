"""VGG (Simonyan and Zisserman 2015), configurations A, B, D and E, with and without batch norm, as in torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from jax_sparse_conv.models.chain import Chain, Conv
from jax_sparse_conv.models.units import Pool, Shared

_FEATURES = (64, 128, 256, 512, 512)


class VGG(Chain):
    """Five stages of 3x3 convolutions, each ending in conv + ReLU + 2x2 max pool, and three fully connected layers.

    Layers are named as in the paper: conv1_1 ... conv5_4, fc6, fc7, fc8.

    Args:
      depths: convolutions per stage.
      num_classes: logits.
      features: output channels per stage.
      hidden: width of fc6 and fc7.
      pool_size: rows and columns that the feature map is averaged to before fc6.
      batch_norm: whether a batch norm follows every convolution (which keeps its own bias, as in torchvision).
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes or hidden that is no int of at least 1.
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
        **shared: Unpack[Shared],
    ) -> None:
        convs = {
            f"conv{s}_{i}": Conv(width, 3, padding=1, pool=Pool(2, 2) if i == depth else None)
            for s, (depth, width) in enumerate(zip(depths, features, strict=True), 1)
            for i in range(1, depth + 1)
        }
        heads = {"fc6": hidden, "fc7": hidden, "fc8": num_classes}
        super().__init__(convs, heads, pool_size=pool_size, batch_norm=batch_norm, **shared)


# Parameters at 1000 classes, without and with batch norm.
vgg11 = partial(VGG, (1, 1, 2, 2, 2))  # 132,863,336 and 132,868,840
vgg13 = partial(VGG, (2, 2, 2, 2, 2))  # 133,047,848 and 133,053,736
vgg16 = partial(VGG, (2, 2, 3, 3, 3))  # 138,357,544 and 138,365,992
vgg19 = partial(VGG, (2, 2, 4, 4, 4))  # 143,667,240 and 143,678,248
