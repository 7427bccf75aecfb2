"""Weights files of torchvision, timm and Keras, written here, against the networks they describe in plain lax."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from networks import (
    CLASSES,
    SMALL,
    VGG_HIDDEN,
    VGG_POOL,
    assert_close,
    average_to,
    dense_resnet,
    photographs,
    small_resnet,
    small_vgg,
)

from jax_sparse_conv import models
from jax_sparse_conv.models import weights as weights_module
from jax_sparse_conv.nnx import SparseLinear

pytest.importorskip("safetensors", reason="weights files need the extra [examples]")

from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file

forward = nnx.jit(lambda model, x: model(x))
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """No TF32 on a GPU: the tolerances are those of float32."""
    with jax.default_matmul_precision("highest"):
        yield


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


# --- round trips -----------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], Any], Callable[[], Tensors], str, Callable[[Tensors, jax.Array], jax.Array]]] = {
    "vgg torchvision": (small_vgg, torch_vgg, "torchvision", run_torch_vgg),
    "vgg_bn torchvision": (lambda: small_vgg(True), lambda: torch_vgg(True), "torchvision", run_torch_vgg),
    "vgg timm": (small_vgg, lambda: torch_vgg(timm=True), "timm", run_torch_vgg),
    "vgg_bn timm": (lambda: small_vgg(True), lambda: torch_vgg(True, True), "timm", run_torch_vgg),
    "vgg keras": (small_vgg, keras_vgg, "keras", run_keras_vgg),
    "resnet torchvision": (
        small_resnet,
        torch_resnet,
        "torchvision",
        lambda tensors, x: dense_resnet(torch_resnet_parameters(tensors), x, "v1.5"),
    ),
    "resnet keras": (
        small_resnet,
        keras_resnet,
        "keras",
        lambda tensors, x: dense_resnet(keras_resnet_parameters(tensors), x, "v1", epsilon=1.001e-5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_network_computes_what_its_framework_does(case: str, tmp_path: Path) -> None:
    build, write, convention, run = CASES[case]
    tensors, model, x = write(), build(), photographs(2, 17, 14)
    save_file(tensors, tmp_path / "w.safetensors")
    loaded = models.load_weights(model, tmp_path / "w.safetensors")
    assert loaded == models.LoadedWeights(convention, (), ())
    expected = jax.jit(lambda v: run(tensors, v))(x)
    assert_close(forward(model, x), expected)
    if models.fold_batch_norm(model):
        assert_close(forward(model, x), expected)


def test_keras_sets_what_keras_does_differently(tmp_path: Path) -> None:
    save_file(keras_resnet(), tmp_path / "w.safetensors")
    model = small_resnet(version="v1.5")
    models.load_weights(model, tmp_path / "w.safetensors")
    assert model.version == "v1"
    assert {m.epsilon for _, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)} == {1.001e-5}


def test_loading_twice_is_loading_once(tmp_path: Path) -> None:
    save_file(keras_resnet(), tmp_path / "w.safetensors")
    model = small_resnet()
    models.load_weights(model, tmp_path / "w.safetensors")
    once = np.asarray(model.stem.batch_norm.mean[...])
    models.load_weights(model, tmp_path / "w.safetensors")
    assert_close(model.stem.batch_norm.mean[...], once, 0)


@pytest.mark.parametrize("stored", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_stored_dtype_becomes_the_parameter_dtype(stored: Any, param_dtype: Any, tmp_path: Path) -> None:
    tensors = torch_vgg()
    save_jax({name: jnp.asarray(value, stored) for name, value in tensors.items()}, tmp_path / "w.safetensors")
    model = small_vgg(param_dtype=param_dtype)
    models.load_weights(model, tmp_path / "w.safetensors")
    assert {v.dtype for v in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(param_dtype)}
    expected = tensors["features.0.weight"].transpose(2, 3, 1, 0)
    assert_close(model.convs[0].conv.kernel[...].astype(jnp.float32), expected, 1e-2)


def published_names(build: Callable[..., Any], tensors: dict[str, tuple[int, ...]], tmp_path: Path) -> set[str]:
    """Every name that a full-size network looks for in a file that holds `tensors`."""
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "w.safetensors")
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
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


ALEXNET = tuple(f"features.{i}" for i in (0, 3, 6, 8, 10))


@pytest.mark.parametrize(
    ("network", "expected", "convention"),
    [
        ("densenet", densenet_names(), "torchvision"),
        ("googlenet", googlenet_names(), "torchvision"),
        ("regnet", regnet_names(False), "torchvision"),
        ("regnet", regnet_names(True), "timm"),
        ("alexnet", biased_names(*ALEXNET, "classifier.1", "classifier.4", "classifier.6"), "torchvision"),
        ("alexnet_cifar", biased_names(*ALEXNET, "classifier"), "torchvision"),
        ("lenet", biased_names("conv1", "conv2", "fc1", "fc2", "fc3"), "torchvision"),
    ],
)
def test_names_of_the_other_networks(network: str, expected: set[str], convention: str, tmp_path: Path) -> None:
    last = min(name for name in expected if name.endswith(".bias") and name.startswith(("fc", "head", "classifier")))
    outputs = 120 if last == "fc1.bias" else 12 if last == "classifier.1.bias" else 10
    save_file({last: np.arange(outputs, dtype=np.float32)}, tmp_path / "w.safetensors")
    model = SMALL[network].build()
    loaded = models.load_weights(model, tmp_path / "w.safetensors", partial=True)
    assert loaded.convention == convention
    assert {last, *loaded.missing} == expected
    biases = [layer.bias[...] for _, layer in model.named_layers() if isinstance(layer, SparseLinear)]
    assert any(np.array_equal(bias, np.arange(outputs)) for bias in biases)


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


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_or_not_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no weights file .*none\.safetensors"):
        models.load_weights(small_vgg(), tmp_path / "none.safetensors")
    with pytest.raises(IsADirectoryError, match="is a folder, not a weights file"):
        models.load_weights(small_vgg(), tmp_path)
    (tmp_path / "text").write_text("not weights at all")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        models.load_weights(small_vgg(), tmp_path / "text")
    save_file({"something": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"no tensor has a name that torchvision, timm, keras give a VGG.*something"):
        models.load_weights(small_vgg(), tmp_path / "w.safetensors")


def test_tensors_that_do_not_fit_are_named_and_change_nothing(tmp_path: Path) -> None:
    tensors = torch_vgg()
    del tensors["features.3.bias"]
    tensors["features.99.weight"] = np.zeros(3, np.float32)
    tensors["classifier.6.weight"] = np.zeros((7, VGG_HIDDEN), np.float32)
    save_file(tensors, tmp_path / "w.safetensors")
    model = small_vgg()
    before = nnx.to_pure_dict(nnx.state(model))
    with pytest.raises(ValueError, match="does not fit the network") as error:
        models.load_weights(model, tmp_path / "w.safetensors")
    text = str(error.value)
    assert "1 missing: features.3.bias" in text
    assert "1 unexpected: features.99.weight" in text
    assert f"1 misshapen: classifier.6.weight is [7, {VGG_HIDDEN}] and must be [{CLASSES}, {VGG_HIDDEN}]" in text
    after = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (np.bool_, "BOOL")])
@pytest.mark.parametrize("partial", [False, True])
def test_tensors_without_a_float_dtype_are_refused(dtype: Any, name: str, partial: bool, tmp_path: Path) -> None:
    tensors = torch_vgg()
    tensors["features.0.weight"] = tensors["features.0.weight"].astype(dtype)
    save_file(tensors, tmp_path / "w.safetensors")
    sentence = f"1 mistyped: features.0.weight is {name} and must be one of F64, F32, F16, BF16"
    with pytest.raises(ValueError, match=sentence):
        models.load_weights(small_vgg(), tmp_path / "w.safetensors", partial=partial)


def test_partial_reports_what_is_missing_and_what_is_ignored(tmp_path: Path) -> None:
    tensors = {name: value for name, value in keras_resnet().items() if not name.startswith("conv3_block2_3_conv")}
    tensors["conv9/kernel"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "w.safetensors")
    model = small_resnet()
    kept = np.asarray(model.stages[1][1].convs[2].conv.kernel[...])
    loaded = models.load_weights(model, tmp_path / "w.safetensors", partial=True)
    assert loaded == models.LoadedWeights("keras", ("conv3_block2_3_conv/kernel",), ("conv9/kernel",))
    assert_close(model.stages[1][1].convs[2].conv.kernel[...], kept, 0)
    tensors["predictions/bias"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"1 misshapen: predictions/bias is \[3\] and must be \[10\]"):
        models.load_weights(model, tmp_path / "w.safetensors", partial=True)


def test_folded_networks_take_no_weights(tmp_path: Path) -> None:
    model = small_resnet()
    models.fold_batch_norm(model)
    with pytest.raises(ValueError, match="load weights before fold_batch_norm"):
        models.load_weights(model, tmp_path / "w.safetensors")


def test_without_safetensors_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-sparse-conv\[examples\]'"):
        models.load_weights(small_vgg(), tmp_path / "w.safetensors")
