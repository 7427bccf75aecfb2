"""Every network against its published size and against the same network in plain lax."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from networks import SMALL, assert_close, images_of, parameters, photographs, tabulated

from jax_sparse_conv import models
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.tune.workloads import OneKey
from jax_sparse_conv.models.layers import layer_names
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear

forward = nnx.jit(lambda model, x: model(x))

# As torchvision publishes them; timm for RegNetX 004, 600MF, 4.0GF, 6.4GF and 12GF; LeNet-5 by LeCun et al. with all
# connections. ResNet v1 is v1.5 with its strides elsewhere.
PARAMETERS = {
    "lenet5": 61_706,
    "alexnet": 61_100_840,
    "alexnet_cifar": 2_472_266,
    "googlenet": 6_624_904,
    "squeezenet1_0": 1_248_424,
    "squeezenet1_1": 1_235_496,
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg13": 133_047_848,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet50_v1": 25_557_032,
    "resnet101_v1": 44_549_160,
    "resnet152_v1": 60_192_808,
    "densenet121": 7_978_856,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "regnetx_004": 5_157_512,
    "regnetx_400mf": 5_495_976,
    "regnetx_600mf": 6_196_040,
    "regnetx_800mf": 7_259_656,
    "regnetx_1_6gf": 9_190_136,
    "regnetx_3_2gf": 15_296_552,
    "regnetx_4gf": 22_118_248,
    "regnetx_6_4gf": 26_209_256,
    "regnetx_8gf": 39_572_648,
    "regnetx_12gf": 46_106_056,
    "regnetx_16gf": 54_278_536,
    "regnetx_32gf": 107_811_560,
}


pytestmark = pytest.mark.usefixtures("float32_products")


@functools.cache
def abstract(name: str) -> Any:
    """The network's shapes."""
    return nnx.eval_shape(lambda: models.build(name, rngs=OneKey()))


def test_every_network_has_a_published_count() -> None:
    assert models.NETWORKS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name: str) -> None:
    state = nnx.state(abstract(name), nnx.Param)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == PARAMETERS[name]


@pytest.mark.parametrize("name", SMALL)
def test_a_network_equals_dense_folded_or_not(name: str) -> None:
    build, dense, _, batch_norms = SMALL[name]
    model, x = build(), images_of(name)
    expected = jax.jit(dense)(parameters(model), x)
    assert expected.std() > 1e-3
    assert_close(forward(model, x), expected)
    assert models.fold_batch_norm(model) == batch_norms
    if batch_norms:
        assert not any(isinstance(module, nnx.BatchNorm) for _, module in nnx.iter_modules(model))
        assert_close(forward(model, x), expected)
    assert models.fold_batch_norm(model) == 0


@pytest.mark.parametrize(
    ("name", "layers", "pooled"),
    [
        ("lenet5", 5, ["conv1", "conv2"]),
        ("alexnet", 8, ["conv1", "conv2", "conv5"]),
        ("googlenet", 58, ["conv1", "conv3", *(f"inception{m}_{i}" for m in ("3b", "4e") for i in (1, 3, 5, 7))]),
        ("squeezenet1_0", 26, ["conv1", *(f"fire{i}_expand{k}x{k}" for i in (4, 8) for k in (1, 3))]),
        ("squeezenet1_1", 26, ["conv1", *(f"fire{i}_expand{k}x{k}" for i in (3, 5) for k in (1, 3))]),
        ("vgg19", 19, ["conv1_2", "conv2_2", "conv3_4", "conv4_4", "conv5_4"]),
        ("resnet34", 37, ["conv1"]),
        ("resnet50", 54, ["conv1"]),
        ("densenet121", 121 + 62, ["conv1", "pool2", "pool3", "pool4"]),
        ("regnetx_16gf", 72, []),
    ],
)
def test_pools_are_part_of_their_convolutions(name: str, layers: int, pooled: list[str]) -> None:
    named = dict(abstract(name).named_layers())
    assert len(named) == layers
    assert [n for n, layer in named.items() if isinstance(getattr(layer, "conv", None), SparseConvPool)] == pooled


@pytest.mark.parametrize(
    ("name", "smallest", "features"),
    [
        ("lenet5", 16, (1, 1, 16)),
        ("alexnet", 63, (1, 1, 256)),
        ("alexnet_cifar", 29, (1, 1, 256)),
        ("vgg11", 32, (1, 1, 512)),
        ("googlenet", 15, (1, 1, 1024)),
        ("squeezenet1_0", 21, (1, 1, 512)),
        ("squeezenet1_1", 17, (1, 1, 512)),
        ("resnet18", 1, (1, 1, 512)),
        ("densenet121", 29, (1, 1, 1024)),
        ("regnetx_400mf", 1, (1, 1, 400)),
    ],
)
def test_the_smallest_images(name: str, smallest: int, features: tuple[int, ...]) -> None:
    model, channels = abstract(name), 1 if name == "lenet5" else 3

    def run(size: int) -> Any:
        x = jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)
        return nnx.eval_shape(lambda m, v: (m.features(v), m(v)), model, x)

    found = run(smallest)
    assert found[0].shape == (1, *features)
    assert found[1].shape == (1, 10 if models.NETWORKS[name].input_size == 32 else 1000)
    if smallest > 1:
        with pytest.raises(ValueError, match=rf"is too small: height and width must be at least {smallest}"):
            run(smallest - 1)


@pytest.mark.parametrize("name", ["regnet", "densenet", "googlenet"])
def test_a_network_skips_zeros_with_the_same_result(name: str) -> None:
    model, x = SMALL[name].build(), images_of(name)
    models.fold_batch_norm(model)
    models.set_network_implementation(model, "xla")
    expected = forward(model, x)
    models.set_network_implementation(model, "pecr")
    assert_close(forward(model, x), expected)


@pytest.mark.parametrize("name", SMALL)
def test_every_network_names_each_layer_once_and_what_it_feeds(name: str) -> None:
    model, x = SMALL[name].build(), images_of(name, 1)
    named = [n for n, _ in model.named_layers()]
    assert sorted(models.layer_inputs(model, x)) == sorted(set(named)) == sorted(named)
    for producer, consumer in model.feeds().items():
        assert producer in named
        assert consumer == "features" or consumer in named
    sparse = {id(m): m for _, m in nnx.iter_modules(model) if isinstance(m, (SparseConv, SparseLinear))}
    assert {*layer_names(model)} == {*sparse}
    assert {*layer_names(model).values()} == {n for n in named if not n.endswith("norm")}


def test_densenet_convolutions_see_what_a_relu_left() -> None:
    model, x = SMALL["densenet"].build(), images_of("densenet")
    for folded in (False, True):
        inputs = models.layer_inputs(model, x)
        convolutions = [name for name in inputs if name.startswith(("conv2_", "conv3_", "pool")) and "norm" not in name]
        assert convolutions
        for name in convolutions:
            assert inputs[name][0].min() == 0, (name, folded)
        models.fold_batch_norm(model)


def test_half_precision_stays_half_precision() -> None:
    for name in ("regnet", "densenet", "googlenet", "lenet"):
        model = SMALL[name].build(param_dtype=jnp.bfloat16)
        x = images_of(name).astype(jnp.bfloat16)
        for _ in range(2):
            assert nnx.eval_shape(lambda m, v: m(v), model, x).dtype == jnp.bfloat16
            models.fold_batch_norm(model)


def test_errors_name_the_argument() -> None:
    rngs = nnx.Rngs(0)
    for build in (models.AlexNet, models.LeNet5, models.densenet121, models.googlenet, models.regnetx_400mf):
        with pytest.raises(ValueError, match="implementation='fast' is not one"):
            nnx.eval_shape(lambda build=build: build(implementation="fast", rngs=rngs))
    with pytest.raises(ValueError, match="block='wide' is not one of 'basic', 'bottleneck'"):
        models.ResNet((1,), block="wide", rngs=rngs)
    with pytest.raises(ValueError, match=r"x.shape=\(1, 40, 40, 3\) must be \[N, H, W, 1\]"):
        SMALL["lenet"].build()(photographs(1, 40, 40))


@pytest.mark.parametrize("name", SMALL)
def test_tabulate_counts_every_parameter(name: str) -> None:
    """Flax compiles every public method of a module that runs, so those must take and return arrays."""
    model = SMALL[name].build()
    text = tabulated(model, images_of(name))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat))))
    assert f"Total Parameters: {count:,} " in text


@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_tabulate_where_a_network_may_be_a_chain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    test_tabulate_counts_every_parameter(name)


def test_a_convolution_in_front_of_a_batch_norm_has_its_mask() -> None:
    unit = models.ConvUnit(8, 8, 3, padding=1, rngs=nnx.Rngs(0))
    unit.conv.mask = nnx.data(jnp.zeros((3, 3, 8, 8)))
    x = jax.random.normal(jax.random.key(0), (1, 5, 5, 8))
    assert_close(unit(x), jnp.zeros_like(x))
    assert unit.fold_batch_norm()
    assert_close(unit(x), jnp.zeros_like(x))
