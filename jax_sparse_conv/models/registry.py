"""The networks by name, with how to build them and what their weights expect of an image."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv.models.layers import ConvNet
from jax_sparse_conv.models.resnet import resnet50
from jax_sparse_conv.models.vgg import vgg16, vgg19

CONVENTIONS = ("torchvision", "timm", "keras")
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_CAFFE_BGR_MEAN = (103.939, 116.779, 123.68)


@dataclasses.dataclass(frozen=True)
class Network:
    """A network that the registry knows.

    Attributes:
      name: its key in `NETWORKS`.
      build: makes it; takes `num_classes` and the keyword arguments of `vgg19` or `resnet50`, `rngs` among them.
      input_size: height and width of the images it was published for.
      description: one line.
      preprocess: (images uint8 [N, H, W, 3], convention="torchvision") -> float32 [N, H, W, 3], what weights of that
        convention expect.
    """

    name: str
    build: Callable[..., ConvNet]
    input_size: int
    description: str
    preprocess: Callable[..., jax.Array]


def preprocess(images: jax.typing.ArrayLike, convention: str = "torchvision") -> jax.Array:
    """What weights of a convention expect of RGB images.

    Args:
      images: uint8 [N, H, W, 3], RGB, already of the size that the network shall see.
      convention: "torchvision" and "timm" scale to 0..1 and normalise with ImageNet's mean and deviation; "keras" (VGG
        and ResNet-50 v1) reverses the channels to BGR and subtracts ImageNet's mean.

    Returns:
      float32 [N, H, W, 3].

    Raises:
      ValueError: an unknown convention, or images of another shape or dtype.
    """
    array = jnp.asarray(images)
    if array.ndim != 4 or array.shape[3] != 3 or array.dtype != jnp.uint8:
        raise ValueError(f"images are {array.dtype}{list(array.shape)}; they must be uint8 [N, H, W, 3]")
    if convention not in CONVENTIONS:
        raise ValueError(f"convention={convention!r} is not one of {', '.join(map(repr, CONVENTIONS))}")
    values = array.astype(jnp.float32)
    if convention == "keras":
        return values[..., ::-1] - np.asarray(_CAFFE_BGR_MEAN, np.float32)
    return (values / 255 - np.asarray(_IMAGENET_MEAN, np.float32)) / np.asarray(_IMAGENET_STD, np.float32)


def _network(name: str, build: Callable[..., ConvNet], description: str) -> Network:
    return Network(name, build, 224, description, preprocess)


NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        _network("vgg16", vgg16, "VGG-16, 13 convolutions and 3 fully connected layers"),
        _network("vgg16_bn", functools.partial(vgg16, batch_norm=True), "VGG-16 with batch norm"),
        _network("vgg19", vgg19, "VGG-19, 16 convolutions and 3 fully connected layers"),
        _network("vgg19_bn", functools.partial(vgg19, batch_norm=True), "VGG-19 with batch norm"),
        _network("resnet50", resnet50, "ResNet-50 v1.5, 53 convolutions and 1 fully connected layer"),
    )
}


def get(name: str) -> Network:
    """The registry's entry.

    Raises:
      ValueError: a name that is not in `NETWORKS`, with the names that are.
    """
    if name not in NETWORKS:
        raise ValueError(f"network={name!r} is not one of {', '.join(NETWORKS)}")
    return NETWORKS[name]


def build(name: str, num_classes: int = 1000, **arguments: Any) -> ConvNet:
    """Build a network by name; `arguments` are those of `vgg19` or `resnet50` (`rngs` is required).

    Raises:
      ValueError: a name that is not in `NETWORKS`, with the names that are.
    """
    return get(name).build(num_classes, **arguments)
