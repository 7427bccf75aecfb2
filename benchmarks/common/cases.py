"""The layers that are timed: one dataclass and the named sets that `benchmarks layers --set` takes."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, TypeAlias

Op: TypeAlias = Literal["conv", "conv_pool", "dense"]

KINDS = {"highest": ("float32", "highest"), "default": ("float32", None), "bfloat16": ("bfloat16", None)}
"""Of a whole network: dtype and precision."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with bias and ReLU, on a square map.

    Attributes:
      name: what tables and results call it.
      op: "conv", "conv_pool" (2x2 max pool, stride 2) or "dense".
      channels: C, input channels; a dense layer's inputs.
      out_channels: K.
      size: H = W of the input map; 1 for a dense layer.
      kernel: kh = kw.
      strides: of the convolution, SAME padding.
      maps: key of real input maps [N, H, W, C] in the file that `--maps` names, or None.
      zeros: percentages of i.i.d. zeros; 0 is always added.
      implementation: what is timed against XLA unless `--implementation` says otherwise.
    """

    name: str
    op: Op
    channels: int
    out_channels: int
    size: int = 1
    kernel: int = 3
    strides: int = 1
    maps: str | None = None
    zeros: tuple[int, ...] = (85, 95)
    implementation: str = "ecr"

    def x_shape(self, batch: int) -> tuple[int, ...]:
        """[N, C] of a dense layer, else [N, H, W, C]."""
        return (batch, self.channels) if self.op == "dense" else (batch, self.size, self.size, self.channels)

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """[C, K] of a dense layer, else [kh, kw, C, K]."""
        if self.op == "dense":
            return (self.channels, self.out_channels)
        return (self.kernel, self.kernel, self.channels, self.out_channels)

    def dense_flops(self, batch: int) -> int:
        """Operations of the dense layer, a multiplication and an addition counted as two."""
        out = -(-self.size // self.strides)
        taps = 1 if self.op == "dense" else self.kernel**2
        return 2 * batch * out * out * taps * self.channels * self.out_channels


_CONV = re.compile(r"(\d+)->(\d+) (\d+)")
_CONV4_BLOCK5 = "resnet50/conv4_block5_2_conv"


def conv3x3(text: str, **fields: object) -> Layer:
    """A 3x3 convolution from "channels->out_channels size"."""
    match = _CONV.fullmatch(text)
    if match is None:
        raise ValueError(f"text={text!r} is not of the form '256->256 14'")
    channels, out_channels, size = map(int, match.groups())
    name = f"conv 3x3 {channels}->{out_channels} {size}x{size}"
    return dataclasses.replace(Layer(name, "conv", channels, out_channels, size), **fields)  # type: ignore[arg-type]


CPU = (
    conv3x3("512->512 28"),
    conv3x3("512->512 14"),
    conv3x3("256->256 14", maps=_CONV4_BLOCK5),
    conv3x3("512->512 7"),
    conv3x3("128->128 28"),
    conv3x3("128->32 14"),
    conv3x3("128->32 7"),
    conv3x3("256->256 56"),
    conv3x3("64->64 56"),
)

GPU = (
    conv3x3("256->256 14", name="resnet50 conv4_block5 3x3", maps=_CONV4_BLOCK5, zeros=(85,)),
    conv3x3("512->512 7", zeros=(85,)),
    conv3x3("512->512 14", zeros=(85,)),
    Layer("vgg19 conv5_4 + pool", "conv_pool", 512, 512, 14, zeros=(85,), implementation="pecr"),
    Layer("vgg19 first fully connected", "dense", 25088, 4096, kernel=1, zeros=(80,)),
)

# Layers with real maps: the inputs of twelve convolutions of ResNet-50 and DenseNet-169 on photographs.
MAPS = (
    conv3x3("64->64 56", name="resnet50 conv2_block3 3x3", maps="resnet50/conv2_block3_2_conv"),
    conv3x3("128->128 28", name="resnet50 conv3_block4 3x3", maps="resnet50/conv3_block4_2_conv"),
    conv3x3("256->256 14", name="resnet50 conv4_block1 3x3", maps="resnet50/conv4_block1_2_conv"),
    conv3x3("1024->256 14", name="resnet50 conv4_block3 1x1", kernel=1, maps="resnet50/conv4_block3_1_conv"),
    conv3x3("256->256 14", name="resnet50 conv4_block5 3x3", maps=_CONV4_BLOCK5),
    conv3x3("256->1024 14", name="resnet50 conv4_block5 1x1", kernel=1, maps="resnet50/conv4_block5_3_conv"),
    conv3x3("128->32 28", name="densenet169 conv3_block9 3x3", maps="densenet169/conv3_block9_2_conv"),
    conv3x3("128->32 14", name="densenet169 conv4_block14 3x3", maps="densenet169/conv4_block14_2_conv"),
    conv3x3("128->32 14", name="densenet169 conv4_block26 3x3", maps="densenet169/conv4_block26_2_conv"),
    conv3x3("128->32 7", name="densenet169 conv5_block8 3x3", maps="densenet169/conv5_block8_2_conv"),
    conv3x3("128->32 7", name="densenet169 conv5_block20 3x3", maps="densenet169/conv5_block20_2_conv"),
    conv3x3("1600->128 7", name="densenet169 conv5_block31 1x1", kernel=1, maps="densenet169/conv5_block31_1_conv"),
)

# Small batches of dense layers: what `implementation="direct"` is for. Its time does not depend on zeros.
DIRECT = tuple(
    dataclasses.replace(layer, zeros=(), implementation="direct")
    for layer in (
        conv3x3("64->64 224", name="vgg19 conv1_2 3x3"),
        conv3x3("64->128 112", name="vgg19 conv2_1 3x3"),
        conv3x3("128->128 112", name="vgg19 conv2_2 3x3"),
        conv3x3("128->256 56", name="vgg19 conv3_1 3x3"),
        conv3x3("256->256 56", name="vgg19 conv3_2 3x3"),
        conv3x3("256->512 28", name="vgg19 conv4_1 3x3"),
        conv3x3("512->512 28", name="vgg19 conv4_2 3x3"),
        conv3x3("512->512 14", name="vgg19 conv5_1 3x3"),
        conv3x3("64->64 56", name="resnet50 conv2 3x3"),
        conv3x3("128->128 28", name="resnet50 conv3 3x3"),
        conv3x3("256->256 14", name="resnet50 conv4 3x3"),
        conv3x3("512->512 7", name="resnet50 conv5 3x3"),
        conv3x3("64->256 56", name="resnet50 conv2 1x1", kernel=1),
        conv3x3("1024->256 14", name="resnet50 conv4 1x1", kernel=1),
        conv3x3("512->2048 7", name="resnet50 conv5 1x1", kernel=1),
    )
)

# 3x3 layers of the networks that cuSNN (Xiang et al. 2022, section 4) was measured on, with the densities that its own
# kernels were timed at here, and their real maps.
CUSNN = tuple(
    dataclasses.replace(layer, zeros=(50, 70, 85, 95), implementation="coo")
    for layer in (
        *(layer for layer in MAPS if layer.kernel == 3),
        conv3x3("512->512 7"),
        conv3x3("512->512 14"),
        conv3x3("512->512 28"),
        conv3x3("256->256 56"),
        conv3x3("128->128 112"),
        conv3x3("64->64 224"),
    )
)

# VGG-19's five convolutions with a pool.
POOL = tuple(
    Layer(f"vgg19 {name} + pool", "conv_pool", channels, channels, size, zeros=(), implementation="direct")
    for name, channels, size in (
        ("conv1_2", 64, 224),
        ("conv2_2", 128, 112),
        ("conv3_4", 256, 56),
        ("conv4_4", 512, 28),
        ("conv5_4", 512, 14),
    )
)

# What the CPU kernels are measured on (the suite cpu): CPU, and what else they do.
CPU_KERNELS = (
    *(dataclasses.replace(layer, maps=None) for layer in CPU),
    *MAPS,
    Layer("vgg19 conv5_4 + pool", "conv_pool", 512, 512, 14, implementation="pecr"),
    Layer("vgg19 conv4_4 + pool", "conv_pool", 512, 512, 28, implementation="pecr"),
    Layer("vgg19 conv3_4 + pool", "conv_pool", 256, 256, 56, implementation="pecr"),
    Layer("vgg19 conv2_2 + pool", "conv_pool", 128, 128, 112, implementation="pecr"),
    Layer("vgg19 conv1_2 + pool", "conv_pool", 64, 64, 224, implementation="pecr"),
    Layer("vgg19 first fully connected", "dense", 25088, 4096, kernel=1),
)

SETS: dict[str, tuple[Layer, ...]] = {
    "cpu": CPU,
    "cpu_kernels": CPU_KERNELS,
    "gpu": GPU,
    "maps": MAPS,
    "direct": DIRECT,
    "cusnn": CUSNN,
    "pool": POOL,
    "all": tuple({layer.name: layer for layer in (*CPU, *GPU, *MAPS)}.values()),
}
