"""What torchvision, timm and Keras call the layers: rules from a network to the prefixes of its tensors.

A rule gives for every layer the prefix of its own tensors and of its batch norm's. timm's names are torchvision's where
a network has no rule for timm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from jax_sparse_conv.models.alexnets import AlexNet, AlexNetCifar
from jax_sparse_conv.models.chain import Chain
from jax_sparse_conv.models.densenet import DenseNet
from jax_sparse_conv.models.inception import GoogLeNet
from jax_sparse_conv.models.layers import ConvNet
from jax_sparse_conv.models.lenet import LeNet5
from jax_sparse_conv.models.regnet import RegNetX
from jax_sparse_conv.models.resnet import ResNet
from jax_sparse_conv.models.squeezenet import SqueezeNet
from jax_sparse_conv.models.units import ConvUnit, PreActivation
from jax_sparse_conv.models.vgg import VGG
from jax_sparse_conv.nnx import SparseConvPool

_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)(?=\.)")
# Layer -> (prefix of its tensors, prefix of its batch norm's).
Prefixes: TypeAlias = dict[str, tuple[str, str]]


def rules(model: ConvNet) -> dict[str, Callable[[Any], Prefixes]]:
    """The network's rules by convention, "torchvision", "timm" or "keras"; none for a network that is not ours."""
    return next((found for family, found in _RULES.items() if isinstance(model, family)), {})


def unused(model: ConvNet) -> tuple[str, ...]:
    """Prefixes of tensors that a file may have and the network leaves out."""
    return ("aux1.", "aux2.") if isinstance(model, GoogLeNet) else ()


def current(tensor: str) -> str:
    """A tensor's name today.

    torchvision's published DenseNet files still say denselayer1.norm.1 for ...norm1, and Keras' fc for predictions.
    """
    return _OLD_DENSENET.sub(r"\1\2", re.sub(r"^fc(?=/)", "predictions", tensor))


def _features(model: Chain, heads: tuple[str, ...]) -> Prefixes:
    """features.<position in the sequence of conv, batch norm, ReLU and pool>, then the fully connected layers."""
    prefixes, position = {}, 0
    for name, layer in zip(model.conv_names, model.convs, strict=True):
        prefixes[name] = (f"features.{position}", f"features.{position + 1}")
        position += 2 + (layer.batch_norm is not None) + isinstance(layer.conv, SparseConvPool)
    return prefixes | _heads(model, heads)


def _heads(model: Chain, heads: tuple[str, ...]) -> Prefixes:
    return {name: (prefix, "") for name, prefix in zip(model.head_names, heads, strict=True)}


def _vgg_torchvision(model: VGG) -> Prefixes:
    return _features(model, ("classifier.0", "classifier.3", "classifier.6"))


def _vgg_timm(model: VGG) -> Prefixes:
    """As torchvision, with fc6 and fc7 as convolutions."""
    return _features(model, ("pre_logits.fc1", "pre_logits.fc2", "head.fc"))


def _vgg_keras(model: VGG) -> Prefixes:
    """block3_conv1, fc1, fc2, predictions. Keras publishes no VGG with batch norm."""
    prefixes = {name: _vgg_block(*name.removeprefix("conv").split("_")) for name in model.conv_names}
    return prefixes | _heads(model, ("fc1", "fc2", "predictions"))


def _vgg_block(stage: str, index: str) -> tuple[str, str]:
    return f"block{stage}_conv{index}", f"block{stage}_bn{index}"


def _alexnet(model: AlexNet) -> Prefixes:
    return _features(model, ("classifier.1", "classifier.4", "classifier.6"))


def _alexnet_cifar(model: AlexNetCifar) -> Prefixes:
    return _features(model, ("classifier",))


def _own_names(model: ConvNet) -> Prefixes:
    """LeNet-5: conv1, conv2, fc1, fc2, fc3, as PyTorch's tutorial has them."""
    return {name: (name, "") for name, _ in model.named_layers()}


def _resnet_torch(model: ResNet) -> Prefixes:
    """layer1.0.conv2 and layer1.0.bn2, layer1.0.downsample.0 and .1; torchvision's and timm's."""
    prefixes = {"conv1": ("conv1", "bn1"), "fc": ("fc", "")}
    for name, stage, block, i in _block_layers(model):
        prefix = f"layer{stage}.{block}"
        shortcut = (f"{prefix}.downsample.0", f"{prefix}.downsample.1")
        prefixes[name] = (f"{prefix}.conv{i}", f"{prefix}.bn{i}") if i else shortcut
    return prefixes


def _block_layers(model: ResNet | RegNetX) -> list[tuple[str, int, int, int]]:
    """(layer, stage from 1, block from 0, convolution from 1 or 0 for the residual's) of the layers in blocks."""
    return [
        (f"{name}_block{b + 1}_{i}", s, b, i)
        for s, (name, stage) in enumerate(zip(model.names[1:], model.stages, strict=True), 1)
        for b, block in enumerate(stage)
        for i in range(block.shortcut is None, len(block.convs) + 1)
    ]


def _keras(model: ResNet | DenseNet) -> Prefixes:
    """conv2_block1_1_conv and conv2_block1_1_bn."""
    return {name: (f"{name}_conv", f"{name}_bn") for name, _ in model.named_layers()}


def _resnet_keras(model: ResNet) -> Prefixes:
    return _keras(model) | {"fc": ("predictions", "")}


def _regnet_torchvision(model: RegNetX) -> Prefixes:
    """trunk_output.block1.block1-0.f.a.0 and .1, .proj.0 and .1."""
    prefixes = {"stem": ("stem.0", "stem.1"), "fc": ("fc", "")}
    for name, stage, block, i in _block_layers(model):
        part = "proj" if i == 0 else f"f.{'abc'[i - 1]}"
        prefix = f"trunk_output.block{stage}.block{stage}-{block}.{part}"
        prefixes[name] = (f"{prefix}.0", f"{prefix}.1")
    return prefixes


def _regnet_timm(model: RegNetX) -> Prefixes:
    """s1.b1.conv1.conv and .bn, s1.b1.downsample.conv and .bn."""
    prefixes = {"stem": ("stem.conv", "stem.bn"), "fc": ("head.fc", "")}
    for name, stage, block, i in _block_layers(model):
        prefix = f"s{stage}.b{block + 1}.{f'conv{i}' if i else 'downsample'}"
        prefixes[name] = (f"{prefix}.conv", f"{prefix}.bn")
    return prefixes


def _densenet_torch(model: DenseNet) -> Prefixes:
    """features.denseblock1.denselayer1.norm1, .conv1, .norm2, .conv2; features.transition1.norm, .conv."""
    prefixes = {"conv1": ("features.conv0", "features.norm0"), "norm": ("", "features.norm5"), "fc": ("classifier", "")}
    for b, block in enumerate(model.blocks, 1):
        for i in range(1, len(block) + 1):
            name, prefix = f"conv{b + 1}_block{i}", f"features.denseblock{b}.denselayer{i}"
            prefixes[f"{name}_1_norm"] = ("", f"{prefix}.norm1")
            prefixes[f"{name}_1"] = (f"{prefix}.conv1", f"{prefix}.norm2")
            prefixes[f"{name}_2"] = (f"{prefix}.conv2", "")
    for t in range(1, len(model.blocks)):
        prefix = f"features.transition{t}"
        prefixes |= {f"pool{t + 1}_norm": ("", f"{prefix}.norm"), f"pool{t + 1}": (f"{prefix}.conv", "")}
    return prefixes


def _densenet_keras(model: DenseNet) -> Prefixes:
    """conv2_block1_0_bn for the batch norm in front of conv2_block1_1, pool2_bn, and bn for the last one."""
    fronts = [name for name, layer in model.named_layers() if isinstance(layer, PreActivation)]
    special = {name: ("", f"{name.removesuffix('_norm').removesuffix('_1')}_0_bn") for name in fronts}
    special |= {name: ("", f"{name.removesuffix('_norm')}_bn") for name in fronts if name.startswith("pool")}
    return _keras(model) | special | {"norm": ("", "bn"), "fc": ("predictions", "")}


def _googlenet(model: GoogLeNet) -> Prefixes:
    """inception3a.branch2.1.conv and .bn."""
    places = {1: "branch1", 2: "branch2.0", 3: "branch2.1", 4: "branch3.0", 5: "branch3.1", 7: "branch4.1"}
    prefixes = {name: name for name, layer in model.named_layers() if isinstance(layer, ConvUnit)}
    prefixes |= {f"{name}_{i}": f"{name}.{place}" for name in model.module_names for i, place in places.items()}
    return {name: (f"{prefix}.conv", f"{prefix}.bn") for name, prefix in prefixes.items()} | {"fc": ("fc", "")}


def _squeezenet(model: SqueezeNet) -> Prefixes:
    """features.3.squeeze, .expand1x1, .expand3x3; positions count the ReLU behind features.0 and the pools."""
    prefixes, position = {"conv1": "features.0", "conv10": "classifier.1"}, 3
    for name, fire in model.named_modules():
        prefixes |= {layer: f"features.{position}.{layer.split('_')[1]}" for layer, _ in fire.named_layers(name)}
        position += 1 + isinstance(fire.expand3x3.conv, SparseConvPool)
    return {name: (prefix, "") for name, prefix in prefixes.items()}


_RULES: dict[type[ConvNet], dict[str, Callable[[Any], Prefixes]]] = {
    VGG: {"torchvision": _vgg_torchvision, "timm": _vgg_timm, "keras": _vgg_keras},
    ResNet: {"torchvision": _resnet_torch, "keras": _resnet_keras},
    RegNetX: {"torchvision": _regnet_torchvision, "timm": _regnet_timm},
    DenseNet: {"torchvision": _densenet_torch, "keras": _densenet_keras},
    GoogLeNet: {"torchvision": _googlenet},
    SqueezeNet: {"torchvision": _squeezenet},
    AlexNet: {"torchvision": _alexnet},
    AlexNetCifar: {"torchvision": _alexnet_cifar},
    LeNet5: {"torchvision": _own_names},
}
