"""Random weights with the zeros of a profile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import SMALL, VGG_POOL, assert_close, parameters, photographs, small_regnet, small_resnet, small_vgg

from jax_sparse_conv import models
from jax_sparse_conv._src.tune.workloads import OneKey
from jax_sparse_conv.models.layers import LAST
from jax_sparse_conv.models.profile import channel_shares, zero_fraction

VGG_PROFILE = {"conv2_1": 0.35, "conv2_2": 0.7, "fc6": 0.8, "fc7": 0.75, "fc8": 0.5}
VGG_SIZE = 4 * VGG_POOL  # the size at which no average follows the last pool
forward = nnx.jit(lambda model, x: model(x))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_vgg_reaches_its_profile(batch_norm: bool) -> None:
    model, x = small_vgg(batch_norm), photographs(3, VGG_SIZE, VGG_SIZE)
    achieved = models.set_sparsity_profile(model, x, VGG_PROFILE)
    assert list(achieved) == [name for name, _ in model.named_layers()]
    for name, fraction in VGG_PROFILE.items():
        assert achieved[name] == pytest.approx(fraction, abs=0.02)
    models.fold_batch_norm(model)
    for name, (value, _) in models.layer_inputs(model, x).items():
        assert zero_fraction(value) == pytest.approx(achieved[name], abs=0.005)
    assert bool(jnp.isfinite(forward(model, x)).all())


def test_resnet_reaches_the_published_profile() -> None:
    model, x = small_resnet(), photographs(2, 64, 64)
    models.fold_batch_norm(model)
    achieved = models.set_sparsity_profile(model, x)
    for name, fraction in models.profile_of(model).items():
        if name != LAST:
            assert achieved[name] == pytest.approx(fraction, abs=0.02)
    assert achieved["conv2_block1_0"] == achieved["conv2_block1_1"]


def test_one_image_and_another_one_differ_and_both_are_sparse() -> None:
    model = small_vgg()
    models.set_sparsity_profile(model, photographs(1, VGG_SIZE, VGG_SIZE), VGG_PROFILE)
    other = models.layer_inputs(model, photographs(1, VGG_SIZE, VGG_SIZE, seed=1))
    for name in ("conv2_1", "conv2_2", "fc6"):
        assert zero_fraction(other[name][0]) == pytest.approx(VGG_PROFILE[name], abs=0.15)


def test_seed_decides() -> None:
    def biases(seed: int) -> np.ndarray:
        model = small_vgg()
        models.set_sparsity_profile(model, photographs(1, 12, 12), VGG_PROFILE, seed=seed)
        return np.asarray(parameters(model)["convs"][1]["conv"]["bias"])

    np.testing.assert_array_equal(biases(3), biases(3))
    assert not np.array_equal(biases(3), biases(4))


def test_activations_keep_their_scale() -> None:
    model, x = small_resnet(), 100 * photographs(2, 64, 64)
    models.fold_batch_norm(model)
    models.set_sparsity_profile(model, x)
    for name, (value, _) in models.layer_inputs(model, x).items():
        if name not in ("conv1", "fc"):
            assert 0.1 < float(jnp.sqrt(jnp.mean(value**2))) < 10, name


def test_layers_without_a_target_keep_a_shift_of_zero() -> None:
    model = small_vgg()
    models.set_sparsity_profile(model, photographs(1, 12, 12), {"conv2_2": 0.9})
    biases = {name: layer.conv.bias[...] for name, layer in model.named_layers() if hasattr(layer, "conv")}
    assert not biases["conv1_1"].any()
    assert biases["conv2_1"].any()


def test_constant_images_and_tiny_maps_do_not_divide_by_zero() -> None:
    resnet = small_resnet(depths=(1,))
    for model, x, profile in (
        (small_vgg(), jnp.zeros((1, 4, 4, 3)), VGG_PROFILE),
        (resnet, jnp.zeros((1, 1, 1, 3)), None),
    ):
        models.set_sparsity_profile(model, x, profile)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("target", [0.0, 0.05, 0.5, 0.95])
def test_channels_differ_around_the_target(target: float) -> None:
    shares = channel_shares(target, 512, np.random.default_rng(0))
    assert shares.mean() == pytest.approx(target, abs=1e-6)
    if target:
        assert np.log(shares / (1 - shares)).std() == pytest.approx(0.9, abs=0.1)


def test_published_profiles_name_the_layers() -> None:
    vgg = nnx.eval_shape(lambda: models.vgg19(rngs=OneKey()))
    assert list(models.PROFILES["vgg"]) == [name for name, _ in vgg.named_layers()]
    resnet = nnx.eval_shape(lambda: models.resnet50(rngs=OneKey()))
    names = {name for name, _ in resnet.named_layers() if not name.endswith("_0")} - {"fc"}
    assert set(models.PROFILES["resnet"]) == names | {LAST}
    assert models.profile_of(resnet) == models.PROFILES["resnet"]


def test_other_depths_take_the_block_at_the_same_relative_place() -> None:
    table = models.PROFILES["resnet"]
    found = models.profile_of(nnx.eval_shape(lambda: models.ResNet((1, 8, 2, 3), rngs=OneKey())))
    assert found["conv2_block1_2"] == table["conv2_block1_2"]
    assert [found[f"conv3_block{b}_2"] for b in (1, 2, 8)] == [table[f"conv3_block{b}_2"] for b in (1, 1, 4)]
    assert found["conv4_block2_3"] == table["conv4_block6_3"]
    regnet = models.profile_of(nnx.eval_shape(lambda: small_regnet()))
    assert regnet["stage2_block2_1"] == table["conv3_block4_1"]


@pytest.mark.parametrize("name", ["regnet", "densenet", "googlenet", "alexnet", "alexnet_cifar", "lenet"])
def test_a_network_reaches_its_profile(name: str) -> None:
    model, channels = SMALL[name].build(), 1 if name == "lenet" else 3
    x = photographs(2, 128, 128, channels=channels)
    if name in ("densenet", "googlenet"):
        models.fold_batch_norm(model)
    achieved = models.set_sparsity_profile(model, x)
    consumers = set(model.feeds().values())
    profile = {layer: fraction for layer, fraction in models.profile_of(model).items() if layer in consumers}
    tolerance = 0.1 if name == "googlenet" else 0.03  # pixels that see only zeros are equal, and many with 12 channels
    fully_connected = {"fc6", "fc", "fc1"}  # at this size an average comes before the first of them
    assert profile
    for layer, fraction in profile.items():
        if layer not in fully_connected:
            assert achieved[layer] == pytest.approx(fraction, abs=tolerance), layer


def test_zeros_that_nobody_has_printed_are_those_of_random_weights() -> None:
    model = SMALL["squeezenet"].build()
    assert models.profile_of(model) == {}
    assert models.profile_of(nnx.eval_shape(lambda: models.squeezenet1_1(rngs=OneKey()))) == {}
    achieved = models.set_sparsity_profile(model, photographs(2, 64, 64))
    assert list(achieved) == [name for name, _ in model.named_layers()]
    assert not any(bool(layer.conv.bias[...].any()) for _, layer in model.named_layers())
    assert 0.2 < np.mean([zeros for name, zeros in achieved.items() if "expand" in name]) < 0.8
    profiled = models.set_sparsity_profile(model, photographs(2, 64, 64), {"conv10": 0.9})
    assert profiled["conv10"] == pytest.approx(0.9, abs=0.03)


def test_errors() -> None:
    x = photographs(1, 12, 12)
    with pytest.raises(ValueError, match="profile has 'conv7_1', which is none of the network's layers"):
        models.set_sparsity_profile(small_vgg(), x, {"conv7_1": 0.5})
    for fraction in (1.0, -0.1, float("nan"), "a", None):
        with pytest.raises(ValueError, match=rf"profile\['fc6'\]={fraction!r} is not a zero fraction in \[0, 1\)"):
            models.set_sparsity_profile(small_vgg(), x, {"fc6": fraction})
    assert_close(forward(small_vgg(), x), forward(small_vgg(), x), 0)
