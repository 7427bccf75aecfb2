"""The layers that the papers' experiments run: those they name, and those of the package's networks.

Xu et al. print a layer's name, the size of its map and its zeros, and their code runs one channel. Here every layer has
the input channels, output channels and kernel of the published network that it is named after.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.common.cases import Layer
from jax_sparse_conv import models
from jax_sparse_conv.nnx import SparseConv, SparseConvPool

Window = tuple[int, int, tuple[int, int], str]
Padding = Literal["SAME"] | tuple[tuple[int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class PaperLayer(Layer):
    """A `Layer` with what networks have beside it.

    Attributes:
      groups: of the convolution.
      padding: of the convolution: "SAME", or (low, high) of rows and of columns.
      window: (size, stride, (low, high) padding, kind) of the pool of a "conv_pool".
      activation: "relu" or None.
      network: what it belongs to.
      count: how many layers of the network look like this one.
    """

    groups: int = 1
    padding: Padding = "SAME"
    window: Window = (2, 2, (0, 0), "max")
    activation: str | None = "relu"
    network: str = ""
    count: int = 1

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """[C, K] of a dense layer, else [kh, kw, C / groups, K]."""
        *taps, channels, out_channels = super().kernel_shape
        return (*taps, channels // self.groups, out_channels)

    def dense_flops(self, batch: int) -> int:
        """Operations of the dense layer, as in `Layer`."""
        return super().dense_flops(batch) // self.groups

    @property
    def conv_size(self) -> int:
        """Rows and columns of the convolution's result."""
        if self.padding == "SAME":
            return -(-self.size // self.strides)
        return (self.size + sum(self.padding[0]) - self.kernel) // self.strides + 1


def shrunk(layer: PaperLayer) -> PaperLayer:
    """A tiny layer of the same kind, for smoke tests."""
    groups = min(layer.groups, 2)
    small = {"channels": 4 * groups, "out_channels": 4 * groups, "groups": groups, "size": min(layer.size, 6)}
    return dataclasses.replace(layer, **small, maps=None)


def _conv(network: str, name: str, size: int, zeros: int, shape: str, kernel: int, **fields: Any) -> PaperLayer:
    channels, out_channels = map(int, shape.split("->"))
    return PaperLayer(f"{network} {name}", "conv", channels, out_channels, size, kernel, zeros=(zeros,), **fields)


# Xu et al. 2023, Table 3, in its order. AlexNetC is the one for CIFAR, AlexNetI the one for ImageNet. A module's
# convolutions count as 1: 1x1, 2: the 1x1 before the 3x3, 3: the 3x3, and so on; 7 exists in no listing of the module
# that we know, and stands for the 1x1 after its pool. Of ResNet-50's convolutions 42 and 46 the 3x3 of their blocks.
TABLE3 = (
    _conv("LeNet", "conv2", 11, 95, "6->16", 5),
    _conv("AlexNetC", "conv3", 6, 90, "192->384", 3),
    _conv("AlexNetI", "conv4", 5, 90, "384->256", 3),
    _conv("GoogLeNet", "inception4a.1", 14, 90, "480->192", 1),
    _conv("GoogLeNet", "inception4a.2", 14, 90, "480->96", 1),
    _conv("GoogLeNet", "inception4e.3", 14, 90, "160->320", 3),
    _conv("GoogLeNet", "inception5a.1", 7, 95, "832->256", 1),
    _conv("GoogLeNet", "inception5a.2", 7, 90, "832->160", 1),
    _conv("GoogLeNet", "inception5b.3", 7, 95, "192->384", 3),
    _conv("GoogLeNet", "inception4a.7", 7, 95, "480->64", 1),
    _conv("VGG-19", "conv13", 14, 85, "512->512", 3),
    _conv("VGG-19", "conv15", 14, 83, "512->512", 3),
    _conv("ResNet-50", "conv42", 14, 86, "256->256", 3, maps="resnet50/conv4_block5_2_conv"),
    _conv("ResNet-50", "conv46", 7, 90, "512->512", 3),
)

# Of which network and layer Table 3's layers without real maps take one on a photograph, cut to the paper's size.
# AlexNetC has AlexNetI's channels, whose map is large enough.
TABLE3_MAPS = {
    "LeNet conv2": ("lenet5", "conv2"),
    "AlexNetC conv3": ("alexnet", "conv3"),
    "AlexNetI conv4": ("alexnet", "conv4"),
    "GoogLeNet inception4a.1": ("googlenet", "inception4a_1"),
    "GoogLeNet inception4a.2": ("googlenet", "inception4a_2"),
    "GoogLeNet inception4e.3": ("googlenet", "inception4e_3"),
    "GoogLeNet inception5a.1": ("googlenet", "inception5a_1"),
    "GoogLeNet inception5a.2": ("googlenet", "inception5a_2"),
    "GoogLeNet inception5b.3": ("googlenet", "inception5b_3"),
    "GoogLeNet inception4a.7": ("googlenet", "inception4a_1"),
    "VGG-19 conv13": ("vgg19", "conv5_1"),
    "VGG-19 conv15": ("vgg19", "conv5_3"),
    "ResNet-50 conv46": ("resnet50", "conv5_block2_2"),
}

# One layer for each kind of map that the sensitivity figures vary (sections 8.3 to 8.6).
ECR_LAYERS = (
    _conv("ResNet-50", "conv3 3x3", 28, 70, "128->128", 3, maps="resnet50/conv3_block4_2_conv"),
    _conv("ResNet-50", "conv4 3x3", 14, 80, "256->256", 3, maps="resnet50/conv4_block5_2_conv"),
    _conv("VGG-19", "conv5_1", 14, 85, "512->512", 3),
)
PECR_LAYERS = tuple(
    PaperLayer(f"VGG-19 {name} + pool", "conv_pool", channels, channels, size, zeros=(zeros,), implementation="pecr")
    for name, channels, size, zeros in (("conv3_4", 256, 56, 65), ("conv4_4", 512, 28, 80), ("conv5_4", 512, 14, 85))
)

# The 3x3 convolutions of DenseNet-201 and ResNet-152, which differ only in their zeros within a row of this list, and
# where there are any the maps of DenseNet-169 and ResNet-50, whose shapes are the same (cuSNN leaves out the 1x1).
CUSNN = (
    _conv("DenseNet", "block 1", 56, 50, "128->32", 3),
    _conv("DenseNet", "block 2", 28, 70, "128->32", 3, maps="densenet169/conv3_block9_2_conv"),
    _conv("DenseNet", "block 3", 14, 80, "128->32", 3, maps="densenet169/conv4_block14_2_conv"),
    _conv("DenseNet", "block 4", 7, 90, "128->32", 3, maps="densenet169/conv5_block20_2_conv"),
    _conv("ResNet", "conv2", 56, 50, "64->64", 3, maps="resnet50/conv2_block3_2_conv"),
    _conv("ResNet", "conv3", 28, 70, "128->128", 3, maps="resnet50/conv3_block4_2_conv"),
    _conv("ResNet", "conv4", 14, 80, "256->256", 3, maps="resnet50/conv4_block5_2_conv"),
    _conv("ResNet", "conv5", 7, 90, "512->512", 3),
)


@functools.cache
def of_network(name: str) -> tuple[PaperLayer, ...]:
    """Every convolution of a network of the registry, in the order they run; nothing is computed."""
    network = models.NETWORKS[name]
    model = nnx.eval_shape(lambda: models.build(name, rngs=nnx.Rngs(0)))
    return of_model(model, network.input_size, name)


def of_model(model: models.ConvNet, size: int, network: str) -> tuple[PaperLayer, ...]:
    """Every convolution of `model` on images of `size` rows and columns, in the order they run."""
    found: list[PaperLayer] = []

    def keep(name: str, layer: Any, x: jax.Array, residual: Any) -> None:
        conv = getattr(layer, "conv", layer)
        if isinstance(conv, SparseConv):
            found.append(_of_conv(conv, name, x.shape, network))

    graph, state = nnx.split(model)
    images = jax.ShapeDtypeStruct((1, size, size, getattr(model, "channels", 3)), jnp.float32)
    jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x, before_layer=keep), state, images)
    return tuple(found)


def _of_conv(conv: SparseConv, name: str, shape: tuple[int, ...], network: str) -> PaperLayer:
    kernel, _, group_channels, out_channels = conv.kernel.shape
    pool: dict[str, Any] = {"op": "conv", "implementation": "ecr"}
    if isinstance(conv, SparseConvPool):
        sizes = (_first(conv.window_shape), _first(conv.window_strides or conv.window_shape))
        window = (*sizes, _low_high(conv.window_padding), conv.pool)
        pool = {"op": "conv_pool", "implementation": "pecr", "window": window}
    return PaperLayer(
        f"{network} {name}",
        channels=shape[-1],
        out_channels=out_channels,
        size=shape[1],
        kernel=kernel,
        strides=_first(conv.strides or 1),
        groups=shape[-1] // group_channels,
        padding=conv.padding,
        activation=conv.activation,
        network=network,
        **pool,
    )


def _first(value: Any) -> int:
    return value if isinstance(value, int) else value[0]


def _low_high(padding: Any) -> tuple[int, int]:
    if padding == "VALID":
        return (0, 0)
    both = padding if isinstance(padding, int) else padding[0]
    return (both, both) if isinstance(both, int) else (both[0], both[1])


def distinct(layers: Sequence[PaperLayer]) -> tuple[PaperLayer, ...]:
    """One layer of each shape but for its input channels (the middle one), with the number that it stands for.

    Input channels are left out because those of a DenseNet's 1x1 convolutions all differ; Xu et al. average there too.
    """
    groups: dict[tuple[Any, ...], list[PaperLayer]] = {}
    for layer in layers:
        groups.setdefault(kind(layer), []).append(layer)
    return tuple(dataclasses.replace(members[len(members) // 2], count=len(members)) for members in groups.values())


def kind(layer: PaperLayer) -> tuple[Any, ...]:
    """What layers have in common for which `distinct` has one."""
    has_many_channels = layer.channels > 3
    return layer.op, has_many_channels, layer.out_channels, layer.size, layer.kernel, layer.strides, layer.groups > 1
