"""Networks whose convolutions skip zeros, and their weights.

`layers` is what they are made of, `vgg` and `resnet` the networks, `registry` finds them by name, `weights` loads what
others trained, and `profile` makes random weights with a trained network's zeros.
"""

from jax_sparse_conv.models.layers import (
    ConvNet,
    ConvUnit,
    fold_batch_norm,
    layer_inputs,
    set_network_implementation,
)
from jax_sparse_conv.models.profile import PROFILES, set_sparsity_profile
from jax_sparse_conv.models.registry import CONVENTIONS, NETWORKS, Network, build, preprocess
from jax_sparse_conv.models.resnet import ResNet, resnet50
from jax_sparse_conv.models.vgg import VGG, vgg16, vgg19
from jax_sparse_conv.models.weights import LoadedWeights, find_convention, load_weights

__all__ = [
    "CONVENTIONS",
    "NETWORKS",
    "PROFILES",
    "VGG",
    "ConvNet",
    "ConvUnit",
    "LoadedWeights",
    "Network",
    "ResNet",
    "build",
    "find_convention",
    "fold_batch_norm",
    "layer_inputs",
    "load_weights",
    "preprocess",
    "resnet50",
    "set_network_implementation",
    "set_sparsity_profile",
    "vgg16",
    "vgg19",
]
