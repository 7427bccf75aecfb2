"""Zero fractions of each layer's input in trained networks, for seeded weights: measured, printed, or filled in.

Xu et al. 2023 print fourteen layers' (Table 3). ResNet-50 (conv1 to conv4) and DenseNet-169 are measured on ImageNet
weights and photographs. What lies between is filled in by hand: a rise with depth, and fewer zeros behind a max pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_sparse_conv.models.alexnets import AlexNet, AlexNetCifar
from jax_sparse_conv.models.densenet import DenseNet
from jax_sparse_conv.models.inception import GoogLeNet
from jax_sparse_conv.models.layers import LAST, ConvNet
from jax_sparse_conv.models.lenet import LeNet5
from jax_sparse_conv.models.residual import ResidualNet
from jax_sparse_conv.models.vgg import VGG

# Zero fraction of each layer's input. Xu et al. 2023 print two numbers for VGG-19 (Table 3: conv13, here conv5_1, 0.85;
# conv15, here conv5_3, 0.83) and say of Fig. 2 that deep layers are above 0.7 and usually above 0.8; the others are a
# rise from 0.45 to there. Inputs that come out of a max pool have fewer zeros than the convolution before it left.
_VGG: dict[str, float] = {
    "conv1_1": 0.0,
    "conv1_2": 0.45,
    "conv2_1": 0.35,
    "conv2_2": 0.55,
    "conv3_1": 0.45,
    "conv3_2": 0.60,
    "conv3_3": 0.65,
    "conv3_4": 0.65,
    "conv4_1": 0.55,
    "conv4_2": 0.70,
    "conv4_3": 0.75,
    "conv4_4": 0.80,
    "conv5_1": 0.85,
    "conv5_2": 0.80,
    "conv5_3": 0.83,
    "conv5_4": 0.85,
    "fc6": 0.80,
    "fc7": 0.80,
    "fc8": 0.80,
}

# Zero fraction of the input of convolutions 1, 2 and 3 of each block; the residual's convolution has that of 1.
# conv2 to conv4: measured on ImageNet weights and photographs. conv5: not measured; it goes on as conv4 ends, with the
# 0.9 that Xu et al. 2023 print for a 3x3 convolution at 7x7 (Table 3, conv46).
_RESNET_BLOCKS: dict[str, tuple[float, float, float]] = {
    "conv2_block1": (0.256, 0.410, 0.375),
    "conv2_block2": (0.395, 0.500, 0.471),
    "conv2_block3": (0.292, 0.565, 0.533),
    "conv3_block1": (0.284, 0.509, 0.467),
    "conv3_block2": (0.569, 0.642, 0.630),
    "conv3_block3": (0.513, 0.645, 0.642),
    "conv3_block4": (0.538, 0.716, 0.484),
    "conv4_block1": (0.307, 0.549, 0.581),
    "conv4_block2": (0.616, 0.650, 0.716),
    "conv4_block3": (0.590, 0.765, 0.685),
    "conv4_block4": (0.620, 0.774, 0.727),
    "conv4_block5": (0.617, 0.819, 0.604),
    "conv4_block6": (0.619, 0.803, 0.537),
    "conv5_block1": (0.40, 0.80, 0.70),
    "conv5_block2": (0.65, 0.85, 0.75),
    "conv5_block3": (0.65, 0.90, 0.75),
}
_RESNET: dict[str, float] = {"conv1": 0.0, LAST: 0.65} | {
    f"{block}_{i}": fraction for block, (*each,) in _RESNET_BLOCKS.items() for i, fraction in enumerate(each, 1)
}

# The inputs of the two convolutions of each layer, DenseNet-169: measured, as are those of the transitions.
_DENSENET_BLOCKS: dict[str, tuple[tuple[float, float], ...]] = {
    "conv2": (
        (0.279, 0.354),
        (0.225, 0.381),
        (0.389, 0.529),
        (0.383, 0.532),
        (0.535, 0.690),
        (0.565, 0.647),
    ),
    "conv3": (
        (0.613, 0.500),
        (0.489, 0.498),
        (0.517, 0.587),
        (0.471, 0.660),
        (0.443, 0.696),
        (0.462, 0.690),
        (0.415, 0.750),
        (0.472, 0.783),
        (0.408, 0.694),
        (0.500, 0.754),
        (0.550, 0.796),
        (0.510, 0.816),
    ),
    "conv4": (
        (0.490, 0.621),
        (0.447, 0.541),
        (0.432, 0.602),
        (0.393, 0.486),
        (0.439, 0.589),
        (0.504, 0.656),
        (0.554, 0.691),
        (0.563, 0.675),
        (0.452, 0.708),
        (0.478, 0.699),
        (0.494, 0.760),
        (0.504, 0.733),
        (0.463, 0.774),
        (0.479, 0.792),
        (0.512, 0.737),
        (0.438, 0.782),
        (0.520, 0.745),
        (0.458, 0.716),
        (0.491, 0.765),
        (0.502, 0.775),
        (0.461, 0.761),
        (0.473, 0.773),
        (0.483, 0.842),
        (0.486, 0.819),
        (0.480, 0.853),
        (0.496, 0.830),
        (0.492, 0.838),
        (0.479, 0.838),
        (0.509, 0.864),
        (0.514, 0.859),
        (0.505, 0.811),
        (0.498, 0.871),
    ),
    "conv5": (
        (0.642, 0.741),
        (0.566, 0.661),
        (0.570, 0.680),
        (0.594, 0.730),
        (0.532, 0.667),
        (0.552, 0.680),
        (0.581, 0.808),
        (0.599, 0.850),
        (0.559, 0.786),
        (0.582, 0.793),
        (0.630, 0.874),
        (0.621, 0.887),
        (0.602, 0.817),
        (0.625, 0.892),
        (0.627, 0.914),
        (0.621, 0.911),
        (0.633, 0.905),
        (0.639, 0.940),
        (0.655, 0.926),
        (0.664, 0.936),
        (0.681, 0.943),
        (0.678, 0.922),
        (0.677, 0.922),
        (0.686, 0.935),
        (0.692, 0.922),
        (0.707, 0.938),
        (0.706, 0.939),
        (0.712, 0.915),
        (0.724, 0.920),
        (0.720, 0.924),
        (0.728, 0.944),
        (0.712, 0.858),
    ),
}
_DENSENET: dict[str, float] = {"conv1": 0.0, "pool2": 0.373, "pool3": 0.515, "pool4": 0.624, LAST: 0.458} | {
    f"{stage}_block{b}_{i}": fraction
    for stage, rows in _DENSENET_BLOCKS.items()
    for b, row in enumerate(rows, 1)
    for i, fraction in enumerate(row, 1)
}

# (module's input, input of the 3x3, input of the "5x5"). Printed: 0.9 for inception4a_1, 4a_2, 5a_2 and 4e_3, 0.95 for
# 5b_3. Not kept: 0.95 for 5a_1, which sees the same map as 5a_2, and for 4a_7, which sees 4a's behind a max pool.
_GOOGLENET_MODULES: dict[str, tuple[float, float, float]] = {
    "inception3a": (0.40, 0.55, 0.55),
    "inception3b": (0.60, 0.65, 0.65),
    "inception4a": (0.90, 0.75, 0.75),
    "inception4b": (0.80, 0.80, 0.80),
    "inception4c": (0.80, 0.80, 0.80),
    "inception4d": (0.85, 0.85, 0.85),
    "inception4e": (0.85, 0.90, 0.90),
    "inception5a": (0.90, 0.90, 0.90),
    "inception5b": (0.90, 0.95, 0.95),
}
_GOOGLENET: dict[str, float] = {"conv1": 0.0, "conv2": 0.30, "conv3": 0.50, LAST: 0.90} | {
    f"{module}_{i}": fraction
    for module, row in _GOOGLENET_MODULES.items()
    for i, fraction in zip((1, 3, 5), row, strict=True)
}

# Printed: conv4 of "AlexNetI" 0.9, conv3 of "AlexNetC" 0.9, conv2 of LeNet 0.95.
_ALEXNET: dict[str, float] = {
    "conv1": 0.0,
    "conv2": 0.40,
    "conv3": 0.60,
    "conv4": 0.90,
    "conv5": 0.80,
    "fc6": 0.75,
    "fc7": 0.80,
    "fc8": 0.80,
}
_ALEXNET_CIFAR: dict[str, float] = {
    "conv1": 0.0,
    "conv2": 0.40,
    "conv3": 0.90,
    "conv4": 0.90,
    "conv5": 0.80,
    "fc": 0.75,
}
_LENET: dict[str, float] = {"conv1": 0.0, "conv2": 0.95, "fc1": 0.60, "fc2": 0.60, "fc3": 0.60}

PROFILES: dict[str, dict[str, float]] = {
    "vgg": _VGG,
    "resnet": _RESNET,
    "densenet": _DENSENET,
    "googlenet": _GOOGLENET,
    "alexnet": _ALEXNET,
    "alexnet_cifar": _ALEXNET_CIFAR,
    "lenet": _LENET,
}
_NAMES: dict[type[ConvNet], str] = {
    VGG: "vgg",
    ResidualNet: "resnet",
    DenseNet: "densenet",
    GoogLeNet: "googlenet",
    AlexNet: "alexnet",
    AlexNetCifar: "alexnet_cifar",
    LeNet5: "lenet",
}
# Blocks per stage of the networks that the tables of blocks are of.
_DEPTHS = {"resnet": (3, 4, 6, 3), "densenet": (6, 12, 32, 32)}


def profile_of(model: ConvNet) -> dict[str, float]:
    """Zero fraction of each layer's input, by layer, and of "features", the last feature map, as far as there are any.

    A network that is deeper or shallower than the one in the table takes each block's from the table. It is the block
    at the same relative place in its stage. RegNetX, of which nothing is printed or measured, takes ResNet-50's. For
    SqueezeNet, which is like none of these, there is nothing.
    """
    family = next((name for kind, name in _NAMES.items() if isinstance(model, kind)), None)
    profile = {} if family is None else PROFILES[family]
    if family not in _DEPTHS:
        return profile
    residual = isinstance(model, ResidualNet)
    stages: Sequence[Sequence[object]] = model.stages if residual else model.blocks  # type: ignore[attr-defined]
    names = model.names[1:] if residual else [f"conv{s}" for s in range(2, len(stages) + 2)]  # type: ignore[attr-defined]
    found = {name: fraction for name, fraction in profile.items() if "_block" not in name}
    for s, (name, stage) in enumerate(zip(names, stages, strict=True)):
        source = min(s, len(_DEPTHS[family]) - 1)
        for b in range(len(stage)):
            block = f"conv{source + 2}_block{1 + _same_place(b, len(stage), _DEPTHS[family][source])}"
            found |= {
                f"{name}_block{b + 1}_{i}": profile[f"{block}_{i}"] for i in (1, 2, 3) if f"{block}_{i}" in profile
            }
    return {name: fraction for name, fraction in found.items() if name == LAST or name in dict(model.named_layers())}


def _same_place(index: int, length: int, other: int) -> int:
    """The index in a sequence of another length whose relative place is nearest."""
    return round(index * (other - 1) / max(1, length - 1))
