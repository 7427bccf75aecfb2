"""Weights files as torchvision, timm and Keras write them, with seeded values, and what their networks compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from networks import CLASSES, VGG_HIDDEN, VGG_POOL, average_to

Tensors = dict[str, np.ndarray]


class File:
    """Tensors of a file with seeded values."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.rng = np.random.default_rng(7)

    def add(self, name: str, *shape: int, scale: float = 0.3) -> None:
        self.tensors[name] = (scale * self.rng.standard_normal(shape)).astype(np.float32)

    def add_positive(self, name: str, *shape: int) -> None:
        self.tensors[name] = self.rng.uniform(0.5, 1.5, shape).astype(np.float32)

    def add_torch_norm(self, prefix: str, channels: int) -> None:
        self.add_positive(f"{prefix}.weight", channels)
        self.add(f"{prefix}.bias", channels)
        self.add(f"{prefix}.running_mean", channels)
        self.add_positive(f"{prefix}.running_var", channels)
        self.tensors[f"{prefix}.num_batches_tracked"] = np.asarray(5, np.int64)

    def add_keras_norm(self, prefix: str, channels: int) -> None:
        self.add_positive(f"{prefix}/gamma", channels)
        self.add(f"{prefix}/beta", channels)
        self.add(f"{prefix}/moving_mean", channels)
        self.add_positive(f"{prefix}/moving_variance", channels)


# --- VGG: a stage of one convolution and one of two, as the frameworks name them --------------------------------------


def torch_vgg(batch_norm: bool = False, timm: bool = False) -> Tensors:
    file = File()
    positions = ((0, 3, 8), (4, 8, 16), (7, 16, 16)) if batch_norm else ((0, 3, 8), (3, 8, 16), (5, 16, 16))
    for position, inputs, outputs in positions:
        file.add(f"features.{position}.weight", outputs, inputs, 3, 3)
        file.add(f"features.{position}.bias", outputs)
        if batch_norm:
            file.add_torch_norm(f"features.{position + 1}", outputs)
    names = (
        ("pre_logits.fc1", "pre_logits.fc2", "head.fc") if timm else ("classifier.0", "classifier.3", "classifier.6")
    )
    features = 16 * VGG_POOL**2
    shapes: list[tuple[int, ...]] = [(VGG_HIDDEN, features), (VGG_HIDDEN, VGG_HIDDEN), (CLASSES, VGG_HIDDEN)]
    if timm:
        shapes[:2] = [(VGG_HIDDEN, 16, VGG_POOL, VGG_POOL), (VGG_HIDDEN, VGG_HIDDEN, 1, 1)]
    for name, shape in zip(names, shapes, strict=True):
        file.add(f"{name}.weight", *shape)
        file.add(f"{name}.bias", shape[0])
    return file.tensors


def run_torch_vgg(tensors: Tensors, x: jax.Array) -> jax.Array:
    """What torch computes: NCHW, OIHW, and a feature map flattened as C, H, W."""
    x = x.transpose(0, 3, 1, 2)
    batch_norm = "features.1.running_mean" in tensors
    positions = (0, 4, 7) if batch_norm else (0, 3, 5)
    for position in positions:
        x = lax.conv(x, tensors[f"features.{position}.weight"], (1, 1), "SAME")
        x = x + tensors[f"features.{position}.bias"][:, None, None]
        if batch_norm:
            norm = {k: tensors[f"features.{position + 1}.{k}"][:, None, None] for k in TORCH_NORM}
            x = (x - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-5) * norm["weight"] + norm["bias"]
        x = jax.nn.relu(x)
        if position != positions[1]:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = average_to(x.transpose(0, 2, 3, 1), VGG_POOL).transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
    names = [name.removesuffix(".weight") for name in tensors if name.startswith(("classifier", "pre", "head"))]
    for index, name in enumerate(name for name in names if not name.endswith(".bias")):
        weight = tensors[f"{name}.weight"]
        x = x @ weight.reshape(weight.shape[0], -1).T + tensors[f"{name}.bias"]
        x = jax.nn.relu(x) if index < 2 else x
    return x


TORCH_NORM = ("weight", "bias", "running_mean", "running_var")


def keras_vgg() -> Tensors:
    file = File()
    for name, inputs, outputs in (("block1_conv1", 3, 8), ("block2_conv1", 8, 16), ("block2_conv2", 16, 16)):
        file.add(f"{name}/kernel", 3, 3, inputs, outputs)
        file.add(f"{name}/bias", outputs)
    heads = (
        ("fc1", 16 * VGG_POOL**2, VGG_HIDDEN),
        ("fc2", VGG_HIDDEN, VGG_HIDDEN),
        ("predictions", VGG_HIDDEN, CLASSES),
    )
    for name, inputs, outputs in heads:
        file.add(f"{name}/kernel", inputs, outputs)
        file.add(f"{name}/bias", outputs)
    return file.tensors


def run_keras_vgg(tensors: Tensors, x: jax.Array) -> jax.Array:
    for name in ("block1_conv1", "block2_conv1", "block2_conv2"):
        kernel = tensors[f"{name}/kernel"]
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + tensors[f"{name}/bias"])
        if name != "block2_conv1":
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = average_to(x, VGG_POOL).reshape(x.shape[0], -1)
    for name in ("fc1", "fc2"):
        x = jax.nn.relu(x @ tensors[f"{name}/kernel"] + tensors[f"{name}/bias"])
    return x @ tensors["predictions/kernel"] + tensors["predictions/bias"]


# --- ResNet: a stage of one block and one of two ---------------------------------------------------------------------

_BLOCKS = ((0, 0, 8, 8), (1, 0, 32, 16), (1, 1, 64, 16))  # stage, block, inputs, width


def torch_resnet() -> Tensors:
    file = File()
    file.add("conv1.weight", 8, 3, 7, 7)
    file.add_torch_norm("bn1", 8)
    for stage, block, inputs, width in _BLOCKS:
        prefix = f"layer{stage + 1}.{block}"
        sizes = ((1, width, inputs, 1), (2, width, width, 3), (3, 4 * width, width, 1))
        for i, outputs, channels, size in sizes:
            file.add(f"{prefix}.conv{i}.weight", outputs, channels, size, size)
            file.add_torch_norm(f"{prefix}.bn{i}", outputs)
        if block == 0:
            file.add(f"{prefix}.downsample.0.weight", 4 * width, inputs, 1, 1)
            file.add_torch_norm(f"{prefix}.downsample.1", 4 * width)
    file.add("fc.weight", CLASSES, 64)
    file.add("fc.bias", CLASSES)
    return file.tensors


def torch_resnet_parameters(tensors: Tensors) -> Any:
    """The file as the nested dict that `dense_resnet` takes."""

    def layer(conv: str, norm: str) -> Any:
        names = ("scale", "bias", "mean", "var")
        statistics = {k: tensors[f"{norm}.{t}"] for k, t in zip(names, TORCH_NORM, strict=True)}
        return {"conv": {"kernel": tensors[f"{conv}.weight"].transpose(2, 3, 1, 0)}, "batch_norm": statistics}

    def block(prefix: str) -> Any:
        found: Any = {"convs": {i: layer(f"{prefix}.conv{i + 1}", f"{prefix}.bn{i + 1}") for i in range(3)}}
        if f"{prefix}.downsample.0.weight" in tensors:
            found["shortcut"] = layer(f"{prefix}.downsample.0", f"{prefix}.downsample.1")
        return found

    return {
        "stem": layer("conv1", "bn1"),
        "stages": {0: {0: block("layer1.0")}, 1: {0: block("layer2.0"), 1: block("layer2.1")}},
        "fc": {"kernel": tensors["fc.weight"].T, "bias": tensors["fc.bias"]},
    }


def keras_resnet() -> Tensors:
    file = File()
    layers = [("conv1", 7, 3, 8)]
    for stage, block, inputs, width in _BLOCKS:
        name = f"conv{stage + 2}_block{block + 1}"
        layers += [(f"{name}_0", 1, inputs, 4 * width)] if block == 0 else []
        layers += [(f"{name}_1", 1, inputs, width), (f"{name}_2", 3, width, width), (f"{name}_3", 1, width, 4 * width)]
    for name, size, inputs, outputs in layers:
        file.add(f"{name}_conv/kernel", size, size, inputs, outputs)
        file.add(f"{name}_conv/bias", outputs)
        file.add_keras_norm(f"{name}_bn", outputs)
    file.add("predictions/kernel", 64, CLASSES)
    file.add("predictions/bias", CLASSES)
    return file.tensors


def keras_resnet_parameters(tensors: Tensors) -> Any:
    def layer(name: str) -> Any:
        pairs = {"scale": "gamma", "bias": "beta", "mean": "moving_mean", "var": "moving_variance"}
        return {
            "conv": {"kernel": tensors[f"{name}_conv/kernel"], "bias": tensors[f"{name}_conv/bias"]},
            "batch_norm": {k: tensors[f"{name}_bn/{t}"] for k, t in pairs.items()},
        }

    def block(name: str) -> Any:
        found = {"convs": {i: layer(f"{name}_{i + 1}") for i in range(3)}}
        return found | ({"shortcut": layer(f"{name}_0")} if f"{name}_0_conv/kernel" in tensors else {})

    return {
        "stem": layer("conv1"),
        "stages": {0: {0: block("conv2_block1")}, 1: {0: block("conv3_block1"), 1: block("conv3_block2")}},
        "fc": {"kernel": tensors["predictions/kernel"], "bias": tensors["predictions/bias"]},
    }
