"""DenseNets whose blocks are one call: when their layers are joined, what still sees the layers, and results."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_block_checks import blocks_of, require_kernel, small_densenet
from flax import nnx
from oracle import relative_error

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.fusion import block_limits
from jax_sparse_conv._src.fusion.dense_blocks import dense_block_p
from jax_sparse_conv.models import units
from jax_sparse_conv.models.densenet import DenseLayer, DenseNet


def transitions_of(model: DenseNet, x: jax.Array) -> int:
    """How many of them have the transition behind them too."""
    equations = jax.make_jaxpr(lambda x: model(x))(x).jaxpr.eqns
    blocks = [each.params["packed"] for each in equations if each.primitive is dense_block_p]
    return sum(sizes.out_channels is not None for sizes in blocks)


@pytest.mark.usefixtures("dense_blocks_as_on_a_gpu", "float32_products")
def test_a_network_joins_the_layers_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    model = small_densenet()
    model.fuses = False
    assert blocks_of(model, x) == 0
    wanted = jax.jit(lambda x: model(x))(x)
    model.fuses = True
    assert blocks_of(model, x) == 2
    assert transitions_of(model, x) == 1
    np.testing.assert_allclose(jax.jit(lambda x: model(x))(x), wanted, rtol=1e-3, atol=1e-3)
    for name in ("xla", "direct"):
        model.transitions[0].conv.conv.implementation = name
        assert (blocks_of(model, x), transitions_of(model, x)) == (2, 0)
        np.testing.assert_allclose(jax.jit(lambda x: model(x))(x), wanted, rtol=1e-3, atol=1e-3)
    model.transitions[0].conv.conv.implementation = None
    assert blocks_of(small_densenet(fold=False), x) == 0  # it has statistics
    models.set_network_implementation(model, "xla")
    assert blocks_of(model, x) == 0
    norms = [each for _, each in nnx.iter_modules(model) if isinstance(each, units.PreActivation)]
    assert {each.implementation for each in norms} == {"xla"}
    models.set_network_implementation(model, None)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: False)
    many = jnp.zeros((block_limits.most_images("float32", None) + 1, 32, 32, 3))
    assert blocks_of(model, many) == 0


@pytest.mark.usefixtures("dense_blocks_as_on_a_gpu", "float32_products")
def test_weights_may_be_arguments() -> None:
    """As under `nnx.jit`."""
    x, model = jax.random.normal(jax.random.key(0), (1, 32, 32, 3)), small_densenet()
    graph, state = nnx.split(model)

    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    blocks = [each for each in jax.make_jaxpr(run)(state, x).jaxpr.eqns if each.primitive is dense_block_p]
    assert [each.params["packed"] for each in blocks] == [None, None]  # packing would copy them in every call
    model.fuses = False
    wanted = np.asarray(jax.jit(lambda x: model(x))(x), np.float64)
    assert relative_error(jax.jit(run)(state, x), wanted) < 1e-5


@pytest.mark.usefixtures("dense_blocks_as_on_a_gpu")
def test_what_looks_at_layers_sees_them() -> None:
    model, x = small_densenet(), jax.random.normal(jax.random.key(0), (1, 32, 32, 3))
    assert "conv3_block3_2" in models.layer_inputs(model, x)
    assert len(jsc.calibrate(model, [x], repeats=1).layers) == len([*model.named_layers()]) - 7  # batch norms apart


def step_of(model: DenseNet, **changed: Any) -> Any:
    """Loss, stored statistics and gradients in training."""
    model.train()
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        merged = nnx.merge(graph, weights, rest, copy=True)
        return (merged(x, **changed) ** 2).sum(), nnx.state(merged, nnx.BatchStat)

    return functools.partial(jax.jit(jax.value_and_grad(loss, has_aux=True)), weights)


@pytest.mark.parametrize("size", [32, 36])  # maps of 8x8 pixels, and of 9x9, which the transition has no averages of
def test_a_step_is_that_of_xlas_operations(size: int) -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, size, size, 3), "float64")
        build = functools.partial(DenseNet, (2, 3), 10, width=64, param_dtype=jnp.float64)
        wanted = step_of(build(rngs=nnx.Rngs(0), implementation="xla"))(x)
        for changed in ({}, {"before_layer": lambda *_: None}):  # which sees the layers one by one
            found = step_of(build(rngs=nnx.Rngs(0)), **changed)(x)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)


class HalfAsMuch(DenseLayer):
    """Adds half of what its convolutions compute."""

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        y = super().__call__(x, *args)
        return jnp.where(jnp.arange(y.shape[-1]) < x.shape[-1], y, y / 2)


class Leaky(units.PreActivation):
    """With another activation."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(self.preactivation(x))


@pytest.mark.parametrize("replaced", ["a layer", "a norm", "the last norm"])
def test_a_step_runs_parts_of_classes_of_their_own(replaced: str) -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 32, 32, 3), "float64")
        build = functools.partial(DenseNet, (2, 3), 10, width=64, param_dtype=jnp.float64)
        steps = []
        for implementation in (None, "xla"):
            model = build(rngs=nnx.Rngs(0), implementation=implementation)
            layer = model.blocks[1][1]
            if replaced == "a layer":
                layer.__class__ = HalfAsMuch
            elif replaced == "a norm":
                layer.norm.__class__ = Leaky
            else:
                channels = model.norm.batch_norm.num_features
                model.norm = nnx.LayerNorm(channels, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
                model.eval()
                assert model(x).shape == (2, 10)
            steps.append(step_of(model)(x))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), *steps)


@pytest.mark.skipif(devices.default_platform() != "cpu", reason="the calls are the CPU's")
def test_a_step_has_statistics_of_new_channels_alone() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
    step = step_of(small_densenet(fold=False))
    text = step.func.lower(*step.args, x).compile().as_text()
    layers, blocks = 5, 2
    names = ("jsc_channel_joined", "jsc_channel_joined_gradient", "jsc_channel_sums")
    counts = [text.count(f'custom_call_target="{name}"') for name in names]
    assert counts == [layers + blocks, layers + blocks, 1 + blocks + 2 * layers]  # sums of the stem's, too
    assert not re.search(r"f32\[2,\d+,\d+,\d+\]\S* concatenate\(", text)


def test_a_network_on_the_gpu(gpu: jax.Device) -> None:
    require_kernel("float32")
    model, x = small_densenet(), jax.random.normal(jax.random.key(0), (1, 64, 64, 3))
    with jax.default_matmul_precision("highest"):
        joined = jax.jit(lambda x: model(x))
        assert joined.lower(x).as_text().count("@jsc_dense_block") == 2
        found = joined(x)
        models.set_network_implementation(model, "xla")
        np.testing.assert_allclose(found, jax.jit(lambda x: model(x))(x), rtol=1e-4, atol=1e-4)
