"""What every network does: folding, transformations, implementations, layers by name."""

from __future__ import annotations

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import (
    assert_close,
    average_to,
    dense_resnet,
    dense_vgg,
    parameters,
    photographs,
    small_densenet,
    small_resnet,
    small_vgg,
)
from platforms import require

from jax_sparse_conv import models
from jax_sparse_conv._src.tune.workloads import OneKey
from jax_sparse_conv.models.chain import adaptive_average_pool
from jax_sparse_conv.models.initializers import he_normal
from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear

forward = nnx.jit(lambda model, x: model(x))


pytestmark = pytest.mark.usefixtures("float32_products")


def test_use_version_moves_the_strides() -> None:
    model, x = small_resnet(version="v1.5"), photographs(1, 32, 32)
    model.use_version("v1")
    assert_close(forward(model, x), forward(small_resnet(version="v1"), x), 0)
    with pytest.raises(ValueError, match=r"version='v2' is not one of 'v1', 'v1.5'"):
        model.use_version("v2")


def test_folding_leaves_one_convolution_with_a_bias() -> None:
    model = small_resnet()
    models.fold_batch_norm(model)
    for _, module in nnx.iter_modules(model):
        assert not isinstance(module, nnx.BatchNorm)
        if isinstance(module, SparseConv):
            assert module.use_bias
            assert module.bias is not None
            assert module.bias.shape == (module.out_features,)
    residual = jnp.ones((1, 4, 4, 32))
    last = model.stages[0][0].convs[2]
    x = jax.nn.relu(jax.random.normal(jax.random.key(0), (1, 4, 4, 8)))
    assert_close(last(x, residual), last.conv(x, residual), 0)


def test_folding_needs_values_and_leaves_a_model_without_them_as_it_is() -> None:
    model = nnx.eval_shape(small_resnet)
    with pytest.raises(ValueError, match=r"stages.0.0.convs.0.batch_norm.bias has no value, it is float32\[8\] only"):
        models.fold_batch_norm(model)
    assert any(isinstance(module, nnx.BatchNorm) for _, module in nnx.iter_modules(model))
    dense = nnx.eval_shape(small_densenet)
    dense.blocks[0][0].norm.batch_norm.mean.set_value(jnp.zeros(8))
    with pytest.raises(ValueError, match=r"the model's blocks.0.0.conv1.batch_norm.bias has no value"):
        models.fold_batch_norm(dense)
    nnx.update(model, nnx.state(small_resnet()))
    folded = models.fold_batch_norm(model)
    assert folded > 0
    x = photographs(1, 32, 32)
    assert_close(forward(model, x), forward(small_resnet(), x))

    def made_and_folded() -> models.ResNet:
        made = small_resnet()
        assert models.fold_batch_norm(made) == folded
        return made

    shapes, wanted = nnx.state(nnx.eval_shape(made_and_folded)), nnx.state(model)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, wanted)


class Siblings(nnx.Module):
    """Two units of one convolution, each with or without a batch norm."""

    def __init__(self, *, second_norm: bool) -> None:
        self.first = models.ConvUnit(4, 4, 3, padding=1, rngs=nnx.Rngs(0))
        self.second = models.ConvUnit(4, 4, 3, padding=1, batch_norm=second_norm, rngs=nnx.Rngs(1))
        self.second.conv = self.first.conv
        self.first.batch_norm.mean[...] = jnp.arange(4.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def test_batch_norms_of_other_code_are_refused() -> None:
    other = nnx.Sequential(nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"the model's layers\.1 is a batch norm of code of your own.*jit_inference"):
        models.fold_batch_norm(other)


@pytest.mark.parametrize("second_norm", [True, False])
def test_a_convolution_that_units_share_is_folded_into_none_of_them(second_norm: bool) -> None:
    model, x = Siblings(second_norm=second_norm), jax.random.normal(jax.random.key(0), (1, 5, 5, 4))
    expected = model(x)
    with pytest.raises(
        ValueError, match=r"'first' and 'second' share one convolution, .* by nnx.clone, before folding"
    ):
        models.fold_batch_norm(model)
    assert_close(model(x), expected, 0)
    model.second.conv = nnx.clone(model.first.conv)
    assert models.fold_batch_norm(model) == 1 + second_norm
    assert_close(model(x), expected)


def test_a_convolution_that_units_share_without_batch_norms_stays_shared() -> None:
    model = Siblings(second_norm=False)
    model.first.batch_norm = nnx.data(None)
    assert models.fold_batch_norm(model) == 0
    assert model.first.conv is model.second.conv


@pytest.mark.parametrize("size", [(7, 7), (1, 1), (10, 14), (5, 9)])
def test_adaptive_average_pool(size: tuple[int, int]) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, *size, 3)), jnp.float32)
    assert_close(adaptive_average_pool(x, 7), average_to(x, 7), 1e-6)


def test_shapes_at_other_sizes() -> None:
    vgg16 = nnx.eval_shape(lambda: models.vgg16(num_classes=5, rngs=OneKey()))
    resnet = nnx.eval_shape(lambda: models.ResNet((1, 1, 1, 1), 5, rngs=OneKey()))
    for model, size, shape in (
        (vgg16, (224, 256), (7, 8, 512)),
        (vgg16, (32, 33), (1, 1, 512)),
        (resnet, (224, 65), (7, 3, 2048)),
        (resnet, (1, 1), (1, 1, 2048)),
    ):
        x = jax.ShapeDtypeStruct((2, *size, 3), jnp.float32)
        features, logits = nnx.eval_shape(lambda m, v: (m.features(v), m(v)), model, x)
        assert features.shape == (2, *shape)
        assert logits.shape == (2, 5)


def test_stages_of_a_resnet() -> None:
    model, x = small_resnet(), photographs(1, 32, 32)
    assert model.features(x, last_stage=1).shape == (1, 8, 8, 8)
    assert model.features(x, last_stage=2).shape == (1, 8, 8, 32)
    assert model.features(x).shape == (1, 4, 4, 64)
    with pytest.raises(ValueError, match="last_stage=4 is not between 1 and 3"):
        model.features(x, last_stage=4)


def test_batch_jit_and_vmap_agree() -> None:
    for model in (small_vgg(), small_resnet(depths=(1,))):
        x = photographs(3, 16, 20)
        expected = forward(model, x)
        assert_close(forward(model, x[1:2]), expected[1:2])
        graph, state = nnx.split(model)

        def one(image: jax.Array, graph: Any = graph, state: Any = state) -> jax.Array:
            return nnx.merge(graph, state)(image[None])[0]

        assert_close(jax.jit(jax.vmap(one))(x), expected)


@pytest.mark.parametrize("build", [small_vgg, small_resnet])
def test_gradient_equals_dense(build: Any) -> None:
    model = small_vgg() if build is small_vgg else small_resnet(depths=(1,))
    x = photographs(1, 12, 12)
    graph, trained, rest = nnx.split(model, nnx.Param, ...)

    def loss(state: Any) -> jax.Array:
        return jnp.sum(nnx.merge(graph, state, rest)(x) ** 2)

    def dense_loss(state: Any) -> jax.Array:
        params = parameters(nnx.merge(graph, state, rest))
        return jnp.sum((dense_vgg(params, x) if build is small_vgg else dense_resnet(params, x, "v1.5")) ** 2)

    actual, expected = (jax.tree.leaves(jax.jit(jax.grad(f))(trained)) for f in (loss, dense_loss))
    for value, reference in zip(actual, expected, strict=True):
        assert_close(value, reference, 1e-4)


@pytest.mark.parametrize("build", [small_vgg, small_resnet])
def test_adaptive_neighbours_pass_counts_on(build: Any) -> None:
    require("adaptive", "float32")
    x = photographs(2, 16, 20)
    model = build()
    assert "jsc_conv_counted" not in str(jax.make_jaxpr(lambda v: model(v))(x))
    models.set_network_implementation(model, "adaptive")
    assert "jsc_conv_counted" not in str(jax.make_jaxpr(lambda v: model(v))(x)) or build is small_vgg  # batch norms
    models.fold_batch_norm(model)
    assert "jsc_conv_counted" in str(jax.make_jaxpr(lambda v: model(v))(x))
    found = forward(model, x)
    models.set_network_implementation(model, "xla")
    assert_close(found, forward(model, x))


@pytest.mark.parametrize("build", [small_vgg, small_resnet])
@pytest.mark.parametrize("implementation", ["ecr", "pecr"])
def test_implementations_agree(build: Any, implementation: str) -> None:
    for method in ("ecr", "pecr", "dense"):
        require(method, "float32")
    x = photographs(2, 16, 20)
    model = build()
    models.fold_batch_norm(model)
    models.set_network_implementation(model, "xla")
    expected = forward(model, x)
    models.set_network_implementation(model, implementation)
    assert_close(forward(model, x), expected)
    text = jax.jit(lambda v: model(v)).lower(x).as_text()
    assert "jsc_" in text
    assert "stablehlo.convolution" not in text


def test_set_network_implementation_means_pecr_only_where_a_pool_follows() -> None:
    for model in (small_vgg(implementation="pecr"), small_vgg()):
        models.set_network_implementation(model, "pecr")
        found = {type(m): m.implementation for _, m in nnx.iter_modules(model) if hasattr(m, "implementation")}
        assert found == {SparseConv: "ecr", SparseConvPool: "pecr", SparseLinear: "ecr"}
    with pytest.raises(ValueError, match="implementation='fast' is not one"):
        models.set_network_implementation(model, "fast")
    with pytest.raises(ValueError, match="implementation='fast' is not one"):
        small_vgg(implementation="fast")


@pytest.mark.parametrize("arguments", [{"param_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}])
def test_half_precision_stays_half_precision(arguments: dict[str, Any]) -> None:
    x = photographs(1, 12, 12)
    half = x.astype(jnp.bfloat16) if "param_dtype" in arguments else x
    model = small_vgg(True, **arguments)
    out = forward(model, half)
    assert out.dtype == jnp.bfloat16
    assert_close(out, forward(small_vgg(True), x), 0.1)
    models.fold_batch_norm(model)
    assert nnx.eval_shape(lambda m, v: m(v), model, half).dtype == jnp.bfloat16
    resnet = nnx.eval_shape(lambda: small_resnet(depths=(1,), **arguments))
    assert nnx.eval_shape(lambda m, v: m(v), resnet, half).dtype == jnp.bfloat16


def test_layer_inputs_are_named_and_ordered() -> None:
    model, x = small_resnet(), photographs(1, 16, 16)
    inputs = models.layer_inputs(model, x)
    assert list(inputs) == [name for name, _ in model.named_layers()]
    assert list(inputs)[:6] == [
        "conv1",
        "conv2_block1_0",
        "conv2_block1_1",
        "conv2_block1_2",
        "conv2_block1_3",
        "conv3_block1_0",
    ]
    value, residual = inputs["conv3_block2_3"]
    assert residual is not None
    assert residual.shape == (1, 2, 2, 64)
    assert value.shape == (1, 2, 2, 16)


def test_only_networks_have_layer_inputs() -> None:
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="model is a Linear, which is no network"):
        models.layer_inputs(linear, jnp.ones((1, 8, 8, 3)))


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"height and width must be at least 4"):
        small_vgg()(photographs(1, 3, 8))
    for model in (small_vgg(), small_resnet()):
        with pytest.raises(ValueError, match=r"x.shape=\(8, 8, 3\) must be \[N, H, W, 3\]"):
            model(jnp.zeros((8, 8, 3)))
    with pytest.raises(
        ValueError, match=r"network='vgg17' is not one of lenet5, alexnet, .*; did you mean 'vgg1[0-9]'"
    ):
        models.build("vgg17", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"network='tiny' is not one of .* regnetx_32gf$"):
        models.build("tiny", rngs=nnx.Rngs(0))


def test_weights_are_drawn_from_something() -> None:
    with pytest.raises(TypeError, match="rngs=None is not what weights are drawn from"):
        models.build("lenet5", rngs=None)


def test_preprocess_follows_the_convention() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), np.uint8)
    for convention in ("torchvision", "timm"):
        expected = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        assert_close(models.preprocess(images, convention), expected, 1e-6)
    expected = images[..., ::-1] - np.asarray([103.939, 116.779, 123.68])
    assert_close(models.NETWORKS["resnet50"].preprocess(images, "keras"), expected, 1e-6)
    with pytest.raises(ValueError, match="convention='caffe' is not one of"):
        models.preprocess(images, "caffe")
    with pytest.raises(ValueError, match="must be uint8"):
        models.preprocess(images.astype(np.float32))


def test_initial_kernels_have_he_variance_and_do_not_depend_on_tracing() -> None:
    key, shape = jax.random.key(3), (3, 3, 512, 65)
    kernel = he_normal(key, shape)
    assert abs(float(kernel.var()) / (2 / (9 * 512)) - 1) < 0.02
    assert_close(jax.jit(lambda k: he_normal(k, shape))(key), kernel, 1e-6)
    for small in ((3, 3, 4, 5), (64, 64)):
        assert_close(jax.jit(lambda k, shape=small: he_normal(k, shape))(key), he_normal(key, small), 1e-6)
    assert he_normal(key, (0, 4)).shape == (0, 4)
    assert he_normal(key, (2, 4), jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("classes", [0, -3, True, 2.5, "10", jnp.ones(2)])
def test_a_number_of_classes_that_is_none_is_refused(classes: Any) -> None:
    wanted = rf"num_classes={re.escape(repr(classes))} must be an int of at least 1"
    with pytest.raises(ValueError, match=wanted):
        models.build("resnet18", classes, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=wanted):
        models.lenet5(classes, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "build",
    ["alexnet", "alexnet_cifar", "googlenet", "squeezenet1_1", "vgg11", "resnet18", "densenet121", "regnetx_004"],
)
def test_every_builder_refuses_a_number_of_classes_below_one(build: str) -> None:
    def built(key: jax.Array) -> models.ConvNet:
        rngs: Any = types.SimpleNamespace(params=lambda: key)  # one key for every layer, which is traced faster
        return getattr(models, build)(num_classes=-1, rngs=rngs)

    with pytest.raises(ValueError, match=r"num_classes=-1 must be an int of at least 1"):
        nnx.eval_shape(built, jax.random.key(0))


def test_classes_may_be_numpys_and_hidden_features_are_checked_too() -> None:
    model = models.LeNet5(np.int64(3), rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 32, 32, 1))).shape == (1, 3)
    with pytest.raises(ValueError, match=r"out_features=0 must be an int of at least 1"):
        models.VGG((1,), features=(4,), hidden=0, pool_size=1, rngs=nnx.Rngs(0))
