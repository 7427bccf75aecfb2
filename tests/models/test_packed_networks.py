"""DenseNets whose blocks are packed, each as one parameter of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_block_checks import blocks_of, check_same, require_kernel, small_densenet
from flax import nnx
from networks import tabulated
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src.fusion import dense_blocks
from jax_sparse_conv._src.fusion.block_parameters import BlockSizes
from jax_sparse_conv._src.fusion.dense_blocks import dense_block_p
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv.models.densenet import DenseNet


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack what a GPU would read, and run it as a GPU would: here the primitive is lowered layer by layer."""
    if PLATFORM != "cpu":
        pytest.skip("where there is a GPU, test_a_packed_network_on_the_gpu runs")
    monkeypatch.setattr(packing, "_is_on_one_cpu", lambda kernel: False)
    monkeypatch.setattr(dense_blocks, "reads_packed", lambda *_: True)
    monkeypatch.setattr(dense_blocks, "is_available", lambda dtype: True)
    monkeypatch.setattr(dense_blocks, "why_not", lambda *_: None)


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, 32, 32, 3))


def call(model: DenseNet, x: jax.Array) -> Any:
    """With the state as an argument."""
    graph, state = nnx.split(model)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)


def leaves(model: DenseNet) -> list[Any]:
    found: list[Any] = jax.tree.leaves(nnx.state(model))
    return found


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_network_holds_one_parameter_a_block(x: jax.Array) -> None:
    model = small_densenet()
    wanted, before = call(model, x), [np.asarray(leaf) for leaf in leaves(model)]
    assert jsc.nnx.pack(model) == 2 * 5 + 1
    assert len(leaves(model)) == len(before) - (5 * 5 + 3) + 2
    assert {name: param.get_value().sizes for name, param in model.packed.items()} == {
        "conv2": BlockSizes(64, 2, 128, 32, 64),
        "conv3": BlockSizes(64, 3, 128, 32),
    }
    assert jsc.nnx.pack(model) == 2 * 5 + 1
    assert blocks_of(model, x) == 2
    (first, _) = (e for e in jax.make_jaxpr(lambda x: model(x))(x).jaxpr.eqns if e.primitive is dense_block_p)
    assert first.params["packed"] == BlockSizes(64, 2, 128, 32, 64)
    check_same(call(model, x), wanted)
    for run in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x)), jax.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(run(model, x), wanted, rtol=1e-4, atol=1e-5)
    assert jsc.nnx.unpack(model) == 2 * 5 + 1
    check_same([np.asarray(leaf) for leaf in leaves(model)], before)
    check_same(call(model, x), wanted)
    assert jsc.nnx.unpack(model) == 0


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("packed", [False, True])
def test_tabulate_counts_every_parameter_where_blocks_are_one_call(packed: bool, x: jax.Array) -> None:
    model = small_densenet()
    if packed:
        jsc.nnx.pack(model)
    text = tabulated(model, x)
    count = sum(leaf.size for leaf in leaves(model))
    assert f"Total Parameters: {count:,} " in text


@pytest.mark.usefixtures("as_on_a_gpu")
def test_its_layers_run_by_themselves(x: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_densenet()
    wanted, inputs = call(model, x), models.layer_inputs(model, x)
    jsc.nnx.pack(model)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), models.layer_inputs(model, x), inputs
    )
    with jsc.nnx.record_calls() as calls:
        np.testing.assert_allclose(model(x), wanted, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2 * 5 + 3
    model.fuses = False
    assert blocks_of(model, x) == 0
    np.testing.assert_allclose(call(model, x), wanted, rtol=1e-4, atol=1e-5)
    model.fuses = True
    models.set_network_implementation(model, "xla")
    assert blocks_of(model, x) == 0
    np.testing.assert_allclose(call(model, x), wanted, rtol=1e-4, atol=1e-5)
    models.set_network_implementation(model, None)
    model.transitions[0].conv.conv.implementation = "xla"
    assert blocks_of(model, x) == 2
    np.testing.assert_allclose(call(model, x), wanted, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(dense_blocks, "is_available", lambda dtype: False)  # a device without the kernel
    np.testing.assert_allclose(call(model, x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_plan_is_made_of_packed_layers_and_unpacks_them(x: jax.Array) -> None:
    model = small_densenet()
    wanted = call(model, x)
    jsc.nnx.pack(model)
    plan = jsc.calibrate(model, [x], repeats=1)
    assert len(plan.layers) == len([*model.named_layers()]) - 7  # batch norms apart
    assert {layer.kernel_dtype for layer in plan.layers} == {"float32"}
    jsc.apply_plan(model, plan)
    assert not model.packed
    assert jsc.nnx.pack(model) == 0
    np.testing.assert_allclose(call(model, x), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_parts_are_read_while_the_model_runs_and_never_set(x: jax.Array) -> None:
    model = small_densenet()
    kernel = model.blocks[1][2].conv2.conv.kernel[...]
    jsc.nnx.pack(model)
    part: Any = model.blocks[1][2].conv2.conv.kernel
    assert (part.shape, part.dtype, part.ndim, part.size) == (kernel.shape, kernel.dtype, 4, kernel.size)
    np.testing.assert_array_equal(model.packed["conv3"].get_value().layers[2].kernel2, kernel)
    with pytest.raises(ValueError, match=r"dense block 'conv3' and is read only while.*nnx.unpack\(model\)"):
        part[...]
    for convert in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match="is read only while"):
            convert(part)
    for write in (lambda: part.set_value(kernel), lambda: part.__setitem__(..., kernel)):
        with pytest.raises(ValueError, match="cannot be set"):
            write()
    with pytest.raises(ValueError, match="dense block 'conv2'"):
        models.set_sparsity_profile(model, x)
    for layer in (model.blocks[0][0].conv1.conv, model.transitions[0].conv.conv):
        assert jsc.nnx.pack(layer) == 0
    seen: dict[str, Any] = {}

    def read(name: str, layer: Any, x: jax.Array, residual: jax.Array | None) -> None:
        if name == "conv3_block3_2":
            part = layer.conv.kernel
            seen.update(numpy=np.asarray(part), jax=jnp.asarray(part), row=part[0])

    model(x, before_layer=read)
    check_same(seen, {"numpy": kernel, "jax": kernel, "row": kernel[0]})


@pytest.mark.usefixtures("as_on_a_gpu")
def test_new_weights_and_other_dtypes(x: jax.Array) -> None:
    model, other = small_densenet(), small_densenet()
    nnx.update(other, jax.tree.map(lambda leaf: 0.9 * leaf, nnx.state(other)))
    wanted = call(other, x)
    for each in (model, other):
        jsc.nnx.pack(each)
    nnx.update(model, nnx.state(other))
    check_same(call(model, x), wanted)
    graph, state = nnx.split(model)
    half = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    assert blocks_of(half, x.astype(jnp.bfloat16)) == 2
    assert blocks_of(half, x) == 0
    assert call(half, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.usefixtures("as_on_a_gpu")
def test_parameters_are_not_there_twice(x: jax.Array) -> None:
    model, packed = small_densenet(), small_densenet()
    jsc.nnx.pack(packed)
    halved = jax.tree.map(lambda leaf: 0.5 * leaf, nnx.state(packed))
    nnx.update(packed, halved)
    wanted = call(packed, x)
    nnx.update(model, halved)  # which has no packed blocks, but now does
    for function in (lambda: model(x), lambda: call(model, x), lambda: jsc.nnx.pack(model)):
        with pytest.raises(ValueError, match=r"dense block 'conv2' is packed, and the scale of a PreActivation in it"):
            function()
    assert jsc.nnx.unpack(model) == 11
    np.testing.assert_allclose(call(model, x), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="static attribute"):  # by Flax
        nnx.update(packed, nnx.state(model))
    conv = packed.blocks[1][2].conv2.conv
    conv.kernel = nnx.data(nnx.Param(jnp.zeros(conv.kernel.shape)))  # as Flax advises
    with pytest.raises(ValueError, match=r"'conv3' is packed, and the kernel of a SparseConv.*nnx.unpack\(model\)"):
        packed(x)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_without_values(x: jax.Array) -> None:
    abstract = nnx.eval_shape(small_densenet)
    assert jsc.nnx.pack(abstract) == 0
    assert not abstract.packed

    def packed() -> DenseNet:
        model = small_densenet()
        jsc.nnx.pack(model)
        return model

    graph, state = nnx.split(nnx.eval_shape(packed))
    assert jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, x).shape == (2, 10)
    check_same(call(nnx.merge(graph, nnx.state(packed())), x), call(packed(), x))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_gradients_by_a_packed_parameter(x: jax.Array) -> None:
    model = small_densenet()

    def loss(model: DenseNet) -> jax.Array:
        return (model(x) ** 2).sum()

    derivative = nnx.jit(nnx.grad(loss))
    wanted = derivative(model)
    jsc.nnx.pack(model)
    found = derivative(model)
    kernel = found["packed"]["conv2"].get_value().layers[1].kernel1
    np.testing.assert_allclose(kernel, wanted["blocks"][0][1]["conv1"]["conv"]["kernel"][...], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_optimizer_takes_a_packed_state(x: jax.Array) -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-4)

    def trained(packed: bool) -> DenseNet:
        model = small_densenet()
        if packed:
            assert jsc.nnx.pack(model) == 11
        graph, state = nnx.split(model)
        moments = optimizer.init(state)
        gradient = jax.jit(jax.grad(lambda state: (nnx.merge(graph, state)(x) ** 2).sum()))
        update = jax.jit(optimizer.update)
        for _ in range(2):
            updates, moments = update(gradient(state), moments)
            state = optax.apply_updates(state, updates)
        return nnx.merge(graph, state)

    wanted = call(trained(packed=False), x)
    assert np.max(np.abs(wanted - call(small_densenet(), x))) > 0.1
    np.testing.assert_allclose(call(trained(packed=True), x), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_would_not_be_one_call_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(change: Callable[[DenseNet], None], fold: bool = True) -> tuple[int, list[str]]:
        model = small_densenet(fold)
        change(model)
        return jsc.nnx.pack(model), sorted(model.packed)

    def mask(model: DenseNet) -> None:
        conv = model.blocks[0][1].conv2.conv
        conv.mask = nnx.data(jnp.ones(conv.kernel.shape))

    def name_one(model: DenseNet) -> None:
        model.blocks[1][0].conv1.conv.implementation = "direct"

    def halve(model: DenseNet) -> None:
        kernel = model.blocks[1][0].conv1.conv.kernel
        kernel.set_value(kernel[...].astype(jnp.bfloat16))

    def name_transition(model: DenseNet) -> None:
        model.transitions[0].conv.conv.implementation = "direct"

    def name_axes(model: DenseNet) -> None:
        conv = model.blocks[0][0].conv1.conv
        conv.kernel = nnx.Param(conv.kernel[...], features="model")

    def share(model: DenseNet) -> None:
        model.blocks[1][2].conv2.conv.kernel = model.blocks[1][0].conv2.conv.kernel

    def share_elsewhere(model: DenseNet) -> None:
        model.norm.scale = model.blocks[1][2].norm.scale

    assert packed(lambda model: None) == (11, ["conv2", "conv3"])
    assert packed(name_axes) == (6, ["conv3"])
    assert packed(share) == packed(share_elsewhere) == (5, ["conv2"])
    assert packed(lambda model: None, fold=False) == (0, [])
    assert packed(mask) == (6, ["conv3"])
    assert packed(name_one) == packed(halve) == (5, ["conv2"])
    assert packed(name_transition) == (10, ["conv2", "conv3"])
    assert packed(lambda model: models.set_network_implementation(model, "xla")) == (0, [])
    monkeypatch.setattr(dense_blocks, "reads_packed", lambda *parts: len(parts) == 1)  # not with the transition
    assert packed(lambda model: None) == (10, ["conv2", "conv3"])
    monkeypatch.setattr(dense_blocks, "reads_packed", lambda *_: False)
    assert packed(lambda model: None) == (0, [])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_checkpoints_hold_one_array_a_block(x: jax.Array, tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    model = small_densenet()
    jsc.nnx.pack(model)
    graph, state = nnx.split(model)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.save(tmp_path / "plain", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state)))
        check_same(call(restored, x), call(model, x))
        plain = checkpointer.restore(tmp_path / "plain", jax.eval_shape(lambda: nnx.to_pure_dict(state)))
    fresh = small_densenet()
    jsc.nnx.pack(fresh)
    wanted = nnx.state(fresh)
    nnx.replace_by_pure_dict(wanted, plain)
    nnx.update(fresh, wanted)
    check_same(call(fresh, x), call(model, x))
    copy = nnx.clone(model)
    assert jsc.nnx.unpack(copy) == 11
    assert len(model.packed) == 2
    np.testing.assert_allclose(call(copy, x), call(model, x), rtol=1e-5, atol=1e-6)


def test_a_packed_network_on_the_gpu(gpu: jax.Device) -> None:
    require_kernel("float32")
    model, x = small_densenet(), jax.random.normal(jax.random.key(0), (1, 64, 64, 3))
    with jax.default_matmul_precision("highest"):
        wanted = call(model, x)
        assert jsc.nnx.pack(model) == 11
        graph, state = nnx.split(model)
        lowered = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).as_text()
        assert lowered.count("@jsc_dense_block") == lowered.count("offsets = dense") == 2
        np.testing.assert_allclose(call(model, x), wanted, rtol=1e-5, atol=1e-5)
        assert jsc.nnx.unpack(model) == 11
        np.testing.assert_allclose(call(model, x), wanted, rtol=1e-5, atol=1e-5)
