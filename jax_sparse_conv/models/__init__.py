"""Networks whose convolutions skip zeros, and their weights.

`build` makes a network by its name. `load_weights` loads what others trained. `set_sparsity_profile` gives random
weights the zeros of a trained network. `fold_batch_norm` makes each layer one operation.
"""

from jax_sparse_conv.models.alexnets import AlexNet, AlexNetCifar, alexnet, alexnet_cifar
from jax_sparse_conv.models.densenet import DenseNet, densenet121, densenet169, densenet201
from jax_sparse_conv.models.inception import GoogLeNet, googlenet
from jax_sparse_conv.models.layers import ConvNet, fold_batch_norm, layer_inputs, set_network_implementation
from jax_sparse_conv.models.lenet import LeNet5, lenet5
from jax_sparse_conv.models.profile import set_sparsity_profile
from jax_sparse_conv.models.profile_tables import PROFILES, profile_of
from jax_sparse_conv.models.registry import CONVENTIONS, NETWORKS, Network, build, preprocess
from jax_sparse_conv.models.regnet import (
    RegNetX,
    regnetx_004,
    regnetx_1_6gf,
    regnetx_3_2gf,
    regnetx_4gf,
    regnetx_6_4gf,
    regnetx_8gf,
    regnetx_12gf,
    regnetx_16gf,
    regnetx_32gf,
    regnetx_400mf,
    regnetx_600mf,
    regnetx_800mf,
)
from jax_sparse_conv.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101, resnet152
from jax_sparse_conv.models.squeezenet import SqueezeNet, squeezenet1_0, squeezenet1_1
from jax_sparse_conv.models.units import ConvUnit, PreActivation
from jax_sparse_conv.models.vgg import VGG, vgg11, vgg13, vgg16, vgg19
from jax_sparse_conv.models.weights import LoadedWeights, find_convention, load_weights

__all__ = [
    "CONVENTIONS",
    "NETWORKS",
    "PROFILES",
    "VGG",
    "AlexNet",
    "AlexNetCifar",
    "ConvNet",
    "ConvUnit",
    "DenseNet",
    "GoogLeNet",
    "LeNet5",
    "LoadedWeights",
    "Network",
    "PreActivation",
    "RegNetX",
    "ResNet",
    "SqueezeNet",
    "alexnet",
    "alexnet_cifar",
    "build",
    "densenet121",
    "densenet169",
    "densenet201",
    "find_convention",
    "fold_batch_norm",
    "googlenet",
    "layer_inputs",
    "lenet5",
    "load_weights",
    "preprocess",
    "profile_of",
    "regnetx_004",
    "regnetx_1_6gf",
    "regnetx_3_2gf",
    "regnetx_4gf",
    "regnetx_6_4gf",
    "regnetx_8gf",
    "regnetx_12gf",
    "regnetx_16gf",
    "regnetx_32gf",
    "regnetx_400mf",
    "regnetx_600mf",
    "regnetx_800mf",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "set_network_implementation",
    "set_sparsity_profile",
    "squeezenet1_0",
    "squeezenet1_1",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]


def __dir__() -> list[str]:
    return sorted(__all__)
