"""The networks by name, with how to build them and what their weights expect of an image."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.api.arguments import check_positive
from jax_sparse_conv._src.problem.arrays import as_array
from jax_sparse_conv.models import alexnets, densenet, inception, lenet, regnet, resnet, squeezenet, vgg
from jax_sparse_conv.models.layers import ConvNet

Convention: TypeAlias = Literal["torchvision", "timm", "keras"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
NetworkName: TypeAlias = Literal[
    "lenet5",
    "alexnet",
    "alexnet_cifar",
    "googlenet",
    "squeezenet1_0",
    "squeezenet1_1",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet50_v1",
    "resnet101",
    "resnet101_v1",
    "resnet152",
    "resnet152_v1",
    "densenet121",
    "densenet169",
    "densenet201",
    "regnetx_004",
    "regnetx_400mf",
    "regnetx_600mf",
    "regnetx_800mf",
    "regnetx_1_6gf",
    "regnetx_3_2gf",
    "regnetx_4gf",
    "regnetx_6_4gf",
    "regnetx_8gf",
    "regnetx_12gf",
    "regnetx_16gf",
    "regnetx_32gf",
]
_CAFFE_BGR_MEAN = (103.939, 116.779, 123.68)
_LUMA = (0.299, 0.587, 0.114)
# Mean and deviation of the pixels in 0..1.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CENTRED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_MNIST = ((0.1307,), (0.3081,))
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network that the registry knows.

    Attributes:
      name: its key in `NETWORKS`.
      build: makes it; takes `num_classes` and the keyword arguments of its class, `rngs` among them.
      input_size: height and width of the images it was published for.
      description: one line.
      preprocess: (images uint8 [N, H, W, 3], convention="torchvision") -> float32 [N, H, W, C], what weights of that
        convention expect.
    """

    name: NetworkName
    build: Callable[..., ConvNet]
    input_size: int
    description: str
    preprocess: Callable[..., jax.Array]


def preprocess(images: jax.typing.ArrayLike, convention: Convention = "torchvision") -> jax.Array:
    """What weights of a convention expect of RGB images, for most networks (`Network.preprocess` is right for each).

    Args:
      images: uint8 [N, H, W, 3], RGB, already of the size that the network shall see.
      convention: "torchvision" and "timm" scale to 0..1 and normalise with ImageNet's mean and deviation. "keras" (VGG
        and ResNet v1) reverses the channels to BGR and subtracts ImageNet's mean.

    Returns:
      float32 [N, H, W, 3].

    Raises:
      ValueError: an unknown convention, or images of another shape or dtype.
    """
    if convention == "keras":
        return _checked(images, convention)[..., ::-1] - np.asarray(_CAFFE_BGR_MEAN, np.float32)
    return normalised(images, convention, statistics=_IMAGENET)


def normalised(
    images: jax.typing.ArrayLike, convention: Convention = "torchvision", *, statistics: Statistics
) -> jax.Array:
    """Scaled to 0..1, made grey where there is one mean, and normalised; the same for every convention."""
    values = _checked(images, convention) / 255
    mean, deviation = (np.asarray(value, np.float32) for value in statistics)
    if mean.size == 1:
        values = jnp.sum(values * np.asarray(_LUMA, np.float32), axis=-1, keepdims=True)
    return (values - mean) / deviation


def _checked(images: jax.typing.ArrayLike, convention: str) -> jax.Array:
    array = as_array("images", images)
    if array.ndim != 4 or array.shape[3] != 3 or array.dtype != jnp.uint8:
        raise ValueError(f"images are {array.dtype}{list(array.shape)}; they must be uint8 [N, H, W, 3]")
    if convention not in CONVENTIONS:
        raise ValueError(f"convention={convention!r} is not one of {', '.join(map(repr, CONVENTIONS))}")
    return array.astype(jnp.float32)


def _normalise(statistics: Statistics) -> Callable[..., jax.Array]:
    return functools.partial(normalised, statistics=statistics)


def _network(name: str, *fields: Any) -> Network:
    """One whose name is put together, which a type checker cannot follow."""
    return Network(cast(NetworkName, name), *fields)


def _networks() -> Iterator[Network]:
    imagenet = _normalise(_IMAGENET)  # Keras too, for DenseNet
    yield Network("lenet5", lenet.lenet5, 32, "LeNet-5, grey 32x32 images, 10 classes", _normalise(_MNIST))
    yield Network("alexnet", alexnets.alexnet, 224, "AlexNet for ImageNet, as torchvision has it", imagenet)
    cifar = _normalise(_CIFAR)
    yield Network("alexnet_cifar", alexnets.alexnet_cifar, 32, "AlexNet for 32x32 images, 10 classes", cifar)
    centred = _normalise(_CENTRED)  # torchvision's weights are TensorFlow's
    yield Network("googlenet", inception.googlenet, 224, "GoogLeNet (Inception v1) with batch norm", centred)
    for version in ("1_0", "1_1"):
        build = getattr(squeezenet, f"squeezenet{version}")
        yield _network(f"squeezenet{version}", build, 224, f"SqueezeNet {version.replace('_', '.')}", imagenet)
    for depth in (11, 13, 16, 19):
        build = getattr(vgg, f"vgg{depth}")
        yield _network(f"vgg{depth}", build, 224, f"VGG-{depth}", preprocess)
        with_norm = functools.partial(build, batch_norm=True)
        yield _network(f"vgg{depth}_bn", with_norm, 224, f"VGG-{depth} with batch norm", preprocess)
    for depth in (18, 34, 50, 101, 152):
        build = getattr(resnet, f"resnet{depth}")
        yield _network(f"resnet{depth}", build, 224, f"ResNet-{depth} v1.5", preprocess)
        if depth >= 50:
            first = functools.partial(build, version="v1")
            yield _network(f"resnet{depth}_v1", first, 224, f"ResNet-{depth} v1, strides in the 1x1", preprocess)
    for depth in (121, 169, 201):
        build = getattr(densenet, f"densenet{depth}")
        yield _network(f"densenet{depth}", build, 224, f"DenseNet-{depth}", imagenet)
    for name, size in regnet.SIZES.items():
        yield _network(name, getattr(regnet, name), 224, f"RegNetX-{size}", imagenet)


NETWORKS: dict[NetworkName, Network] = {network.name: network for network in _networks()}


def get(name: str) -> Network:
    """The registry's entry.

    Raises:
      ValueError: a name that is not in `NETWORKS`, with the names that are.
    """
    if not isinstance(name, str) or name not in NETWORKS:
        close = difflib.get_close_matches(str(name), NETWORKS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"network={name!r} is not one of {', '.join(NETWORKS)}{meant}")
    return NETWORKS[name]


def build(name: NetworkName, num_classes: int | None = None, **arguments: Any) -> ConvNet:
    """Build a network by name.

    Args:
      name: a key of `NETWORKS`.
      num_classes: logits; None is as many as were published, 1000 or, for small images, 10.
      **arguments: those of the network's class; `rngs` is required.

    Raises:
      TypeError: rngs that are None.
      ValueError: a name that is not in `NETWORKS`, with the names that are, or a num_classes that is no int of
        at least 1.
    """
    if "rngs" in arguments and arguments["rngs"] is None:
        raise TypeError("rngs=None is not what weights are drawn from; flax.nnx.Rngs(0) is")
    if num_classes is not None:
        check_positive("num_classes", num_classes)  # before large layers are made
    classes = () if num_classes is None else (num_classes,)
    return get(name).build(*classes, **arguments)
