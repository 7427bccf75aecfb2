"""The names that torchvision, timm and Keras give the tensors of every network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from networks import SMALL

from jax_sparse_conv import models
from jax_sparse_conv._src.tune.workloads import OneKey
from jax_sparse_conv.models import weights as weights_module

pytest.importorskip("safetensors", reason="weights files need the extra [examples]")

from safetensors.numpy import save_file


def published_names(build: Callable[..., Any], tensors: dict[str, tuple[int, ...]], tmp_path: Path) -> set[str]:
    """Every name that a full-size network looks for in a file that holds `tensors`."""
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "w.safetensors")
    model = nnx.eval_shape(lambda: build(rngs=OneKey()))
    return {*tensors, *models.load_weights(model, tmp_path / "w.safetensors", partial=True).missing}


def test_published_names(tmp_path: Path) -> None:
    vgg19_convolutions = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)
    expected = {f"features.{i}.{kind}" for i in vgg19_convolutions for kind in ("weight", "bias")}
    heads = {f"classifier.{i}.{kind}" for i in (0, 3, 6) for kind in ("weight", "bias")}
    assert published_names(models.vgg19, {"classifier.0.bias": (4096,)}, tmp_path) == expected | heads
    heads = {f"{n}.{kind}" for n in ("pre_logits.fc1", "pre_logits.fc2", "head.fc") for kind in ("weight", "bias")}
    assert published_names(models.vgg19, {"pre_logits.fc1.bias": (4096,)}, tmp_path) == expected | heads
    vgg16_bn = {"features.40.weight": (512, 512, 3, 3), "features.41.running_mean": (512,)}
    found = published_names(lambda rngs: models.vgg16(batch_norm=True, rngs=rngs), vgg16_bn, tmp_path)
    assert len(found) == 13 * 6 + 6
    assert vgg16_bn.keys() <= found
    last = {"layer4.2.conv3.weight": (2048, 512, 1, 1), "layer4.0.downsample.1.running_var": (2048,)}
    found = published_names(models.resnet50, last, tmp_path)
    assert len(found) == 53 * 5 + 2
    last = {"conv5_block3_3_bn/gamma": (2048,), "conv4_block1_0_conv/bias": (1024,)}
    found = published_names(models.resnet50, last, tmp_path)
    assert len(found) == 53 * 5 + 2 + 1  # biases in front of a batch norm may be there or not


NORM = ("weight", "bias", "running_mean", "running_var")


def torch_names(convs: dict[str, str], linears: tuple[str, ...], norms: tuple[str, ...] = ()) -> set[str]:
    """Tensors of convolutions without bias by name, of their batch norms, and of fully connected layers."""
    found = {f"{conv}.weight" for conv in convs}
    found |= {f"{norm}.{kind}" for norm in (*convs.values(), *norms) if norm for kind in NORM}
    return found | {f"{linear}.{kind}" for linear in linears for kind in ("weight", "bias")}


def densenet_names() -> set[str]:
    convs, norms = {"features.conv0": "features.norm0"}, ["features.norm5"]
    for block, depth in enumerate((2, 1, 1), 1):
        for layer in range(1, depth + 1):
            prefix = f"features.denseblock{block}.denselayer{layer}"
            convs |= {f"{prefix}.conv1": f"{prefix}.norm2", f"{prefix}.conv2": ""}
            norms.append(f"{prefix}.norm1")
        if block < 3:
            convs[f"features.transition{block}.conv"] = ""
            norms.append(f"features.transition{block}.norm")
    return torch_names(convs, ("classifier",), tuple(norms))


def googlenet_names() -> set[str]:
    places = ("branch1", "branch2.0", "branch2.1", "branch3.0", "branch3.1", "branch4.1")
    units = ["conv1", "conv2", "conv3", *(f"inception{m}.{p}" for m in ("3a", "3b", "4a") for p in places)]
    return torch_names({f"{unit}.conv": f"{unit}.bn" for unit in units}, ("fc",))


def regnet_names(timm: bool) -> set[str]:
    units = []
    for stage, depth in ((1, 1), (2, 2)):
        for b in range(depth):
            torchvision = f"trunk_output.block{stage}.block{stage}-{b}"
            parts = ("conv1", "conv2", "conv3") if timm else ("f.a", "f.b", "f.c")
            parts += () if b else ("downsample",) if timm else ("proj",)
            units += [f"s{stage}.b{b + 1}.{part}" if timm else f"{torchvision}.{part}" for part in parts]
    conv, norm = ("conv", "bn") if timm else ("0", "1")
    return torch_names({f"{u}.{conv}": f"{u}.{norm}" for u in ("stem", *units)}, ("head.fc" if timm else "fc",))


def biased_names(*layers: str) -> set[str]:
    return {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


def squeezenet_names(positions: tuple[int, ...]) -> set[str]:
    fires = (f"features.{i}.{part}" for i in positions for part in ("squeeze", "expand1x1", "expand3x3"))
    return biased_names("features.0", *fires, "classifier.1")


ALEXNET = tuple(f"features.{i}" for i in (0, 3, 6, 8, 10))


@pytest.mark.parametrize(
    ("network", "expected", "convention"),
    [
        ("densenet", densenet_names(), "torchvision"),
        ("googlenet", googlenet_names(), "torchvision"),
        ("regnet", regnet_names(False), "torchvision"),
        ("regnet", regnet_names(True), "timm"),
        ("squeezenet", squeezenet_names((3, 4, 6)), "torchvision"),
        ("alexnet", biased_names(*ALEXNET, "classifier.1", "classifier.4", "classifier.6"), "torchvision"),
        ("alexnet_cifar", biased_names(*ALEXNET, "classifier"), "torchvision"),
        ("lenet", biased_names("conv1", "conv2", "fc1", "fc2", "fc3"), "torchvision"),
    ],
)
def test_names_of_the_other_networks(network: str, expected: set[str], convention: str, tmp_path: Path) -> None:
    last = min(name for name in expected if name.endswith(".bias") and name.startswith(("fc", "head", "classifier")))
    outputs = 120 if last == "fc1.bias" else 12 if last == "classifier.1.bias" and network == "alexnet" else 10
    save_file({last: np.arange(outputs, dtype=np.float32)}, tmp_path / "w.safetensors")
    model = SMALL[network].build()
    loaded = models.load_weights(model, tmp_path / "w.safetensors", partial=True)
    assert loaded.convention == convention
    assert {last, *loaded.missing} == expected
    layers = [getattr(layer, "conv", layer) for _, layer in model.named_layers()]
    biases = [layer.bias[...] for layer in layers if getattr(layer, "bias", None) is not None]
    assert any(np.array_equal(bias, np.arange(outputs)) for bias in biases)


def test_published_names_of_squeezenet(tmp_path: Path) -> None:
    tensor = {"classifier.1.weight": (1000, 512, 1, 1)}
    expected = squeezenet_names((3, 4, 5, 7, 8, 9, 10, 12))
    assert published_names(models.squeezenet1_0, tensor, tmp_path) == expected
    expected = squeezenet_names((3, 4, 6, 7, 9, 10, 11, 12))
    assert published_names(models.squeezenet1_1, tensor, tmp_path) == expected


@pytest.mark.parametrize("partial", [False, True])
def test_two_names_of_one_tensor_are_refused(partial: bool, tmp_path: Path) -> None:
    prefix = "features.denseblock1.denselayer1."
    tensors = {f"{prefix}{name}.bias": np.zeros(8, np.float32) for name in ("norm.1", "norm1")}
    save_file(tensors, tmp_path / "w.safetensors")
    model = SMALL["densenet"].build()
    before = jax.tree.leaves(nnx.state(model))
    sentence = rf"{prefix}norm(\.1|1)\.bias and {prefix}norm(\.1|1)\.bias, which are two names of one tensor"
    with pytest.raises(ValueError, match=sentence):
        models.load_weights(model, tmp_path / "w.safetensors", partial=partial)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_auxiliary_heads_are_ignored_and_old_names_understood(tmp_path: Path) -> None:
    for build, extra, old in (
        (SMALL["googlenet"].build, {"aux1.fc1.bias": np.zeros(3, np.float32)}, None),
        (SMALL["densenet"].build, {}, ("features.denseblock1.denselayer2.norm2.bias", "denselayer2.norm.2.bias")),
    ):
        model = build()
        tensors = dict(extra)
        for name, slot in {s.tensor: s for s in weights_module._slots(model, "torchvision")}.items():
            if not slot.optional:
                tensors[name] = np.full(slot.shape, 0.5, np.float32)
        if old is not None:
            tensors["features.denseblock1." + old[1]] = tensors.pop(old[0])
        save_file(tensors, tmp_path / "w.safetensors")
        assert models.load_weights(model, tmp_path / "w.safetensors").ignored == tuple(extra)
        state = jax.tree.leaves(nnx.state(model, nnx.Param))
        assert all(bool((leaf == 0.5).all()) for leaf in state)
