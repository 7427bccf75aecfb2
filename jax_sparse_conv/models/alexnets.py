"""AlexNet (Krizhevsky et al. 2012), for ImageNet and for CIFAR."""

from __future__ import annotations

from typing import Unpack

from jax_sparse_conv.models.chain import Chain, Conv
from jax_sparse_conv.models.units import Pool, Shared


class AlexNet(Chain):
    """AlexNet as torchvision has it (one GPU's, without response normalisation): conv1 ... conv5, fc6, fc7, fc8.

    Args:
      num_classes: logits.
      widths: output channels of the convolutions.
      hidden: width of fc6 and fc7.
      pool_size: rows and columns that the feature map is averaged to before fc6.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes or hidden that is no int of at least 1.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        widths: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256),
        hidden: int = 4096,
        pool_size: int = 6,
        **shared: Unpack[Shared],
    ) -> None:
        convs = _alexnet_convs(widths, Pool(3, 2), padding=2)
        heads = {"fc6": hidden, "fc7": hidden, "fc8": num_classes}
        super().__init__(convs, heads, pool_size=pool_size, **shared)


class AlexNetCifar(Chain):
    """AlexNet for 32x32 images, with 2x2 pools and one fully connected layer: conv1 ... conv5, fc.

    The papers time a layer of an "AlexNetC" without saying what it is; this is the variant that is commonly trained on
    CIFAR.

    Args:
      num_classes: logits.
      widths: output channels of the convolutions.
      **shared: see `Shared`.

    Raises:
      ValueError: an unknown implementation, or a num_classes that is no int of at least 1.
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        widths: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256),
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(_alexnet_convs(widths, Pool(2, 2), padding=5), {"fc": num_classes}, pool_size=1, **shared)


def _alexnet_convs(widths: tuple[int, ...], pool: Pool, padding: int) -> dict[str, Conv]:
    first, second, *middle, last = widths
    convs = [Conv(first, 11, 4, padding, pool), Conv(second, 5, padding=2, pool=pool)]
    convs += [*(Conv(width, 3, padding=1) for width in middle), Conv(last, 3, padding=1, pool=pool)]
    return {f"conv{i}": conv for i, conv in enumerate(convs, 1)}


# Parameters at 1000 and at 10 classes.
alexnet = AlexNet  # 61,100,840
alexnet_cifar = AlexNetCifar  # 2,472,266
