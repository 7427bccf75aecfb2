"""Dense blocks whose parameters are one array: `pack_dense_block` and `dense_block`, and DenseNets that are packed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from blocks import (
    BLOCKS,
    KIND_IDS,
    KINDS,
    TOLERANCE,
    Block,
    check,
    check_transition,
    transition_values,
    values,
)
from conftest import PLATFORM
from flax import nnx
from test_dense_blocks import require_kernel
from test_dense_networks import blocks_of, small_densenet

import jax_sparse_conv as jsc
from jax_sparse_conv import _native, dense_blocks, models, packing
from jax_sparse_conv.block_parameters import BlockSizes, DenseBlockLayer, DenseTransition, PackedDenseBlock
from jax_sparse_conv.dense_blocks import dense_block_p
from jax_sparse_conv.devices import Device
from jax_sparse_conv.models.densenet import DenseNet

SMALL = (
    Block("small", (2, 6, 5, 32), 2),
    Block("one layer", (1, 9, 8, 160), 1),
    Block("odd sizes", (3, 7, 5, 96), 3),
)
HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def parameters(
    block: Block, dtype: Any = np.float32, **sizes: int
) -> tuple[jax.Array, list[DenseBlockLayer], DenseTransition]:
    """x, layers and a transition, on the device."""
    x, layers = values(block, dtype, **sizes)
    transition = transition_values(block, dtype, growth=sizes.get("growth", 32))
    found: tuple[Any, Any, Any] = jax.tree.map(jnp.asarray, (x, layers, transition))
    return found


def bound(x: Any, packed: PackedDenseBlock) -> Any:
    """The primitive itself, which `dense_block` passes by where no kernel is installed."""
    return dense_block_p.bind(x, packed.values, precision=HIGHEST, must=False, packed=packed.sizes)


def check_same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, tree) for tree in (found, wanted)))


# --- one array -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("block", [*SMALL, Block("narrow", (1, 3, 3, 12), 3)], ids=lambda block: block.name)
def test_the_parts_come_back(block: Block, dtype: str) -> None:
    sizes = {"middle": 10, "growth": 6} if block.name == "narrow" else {}
    with jax.enable_x64(dtype == "float64"):
        _, layers, transition = parameters(block, jnp.dtype(dtype), **sizes)
        for behind in (None, transition):
            packed = jsc.pack_dense_block(layers, behind)
            assert jax.tree.leaves(packed)[0] is packed.values
            assert (packed.values.ndim, packed.dtype) == (1, jnp.dtype(dtype))
            assert packed.sizes[0] == block.x[3]
            assert packed.sizes[4] == (None if behind is None else behind.kernel.shape[3])
            check_same(packed.layers, layers)
            assert (packed.transition is None) == (behind is None)
            check_same(packed.transition, behind)
            assert not any(offset * 2 % 128 for offset in packed.sizes.offsets())  # of 16-bit types
            assert packed.without_transition().transition is None
            check_same(jax.jit(jsc.pack_dense_block)(layers, behind).values, packed.values)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_packed_layers_compute_the_same(block: Block, dtype: str, precision: str, implementation: str | None) -> None:
    x, layers, transition = parameters(block, jnp.dtype(dtype))
    options: Any = {"precision": precision, "implementation": implementation}
    for behind in (None, transition):
        separate = jax.jit(lambda x, layers, behind: jsc.dense_block(x, layers, transition=behind, **options))
        packed = jax.jit(lambda x, packed: jsc.dense_block(x, packed, **options))
        given = jsc.pack_dense_block(layers, behind)
        assert packed.eval_shape(x, given).shape == separate.eval_shape(x, layers, behind).shape
        found, wanted = packed(x, given), separate(x, layers, behind)
        if PLATFORM == "cpu":
            check_same(found, wanted)
        else:  # cuDNN's algorithms are chosen for each program
            tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
            assert oracle.relative_error(np.asarray(found), np.asarray(wanted).astype(np.float64)) <= tolerance


def test_transformations() -> None:
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    plain = functools.partial(jsc.dense_block, precision="highest", implementation="xla")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    wanted = plain(x, layers, transition=transition)
    close(bound(x, packed), wanted)
    close(jax.jit(bound)(x, packed), wanted)
    assert jax.eval_shape(bound, x, packed).shape == wanted.shape
    images = jnp.stack([x, -x, 2 * x])
    mapped = jnp.stack([plain(each, layers, transition=transition) for each in images])
    for function in (bound, plain):
        close(jax.vmap(function, (0, None))(images, packed), mapped)
        close(jax.vmap(function, (2, None))(jnp.moveaxis(images, 0, 2), packed), mapped)
        halved = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), packed)
        each = jnp.stack([wanted, plain(x, *(jax.tree.map(lambda leaf: 0.5 * leaf, (packed,))))])
        close(jax.vmap(function, (None, 0))(x, halved), each)
        tangent = jax.jvp(lambda x, function=function: function(x, packed), (x,), (jnp.ones_like(x),))[1]
        close(tangent, jax.jvp(lambda x: plain(x, layers, transition=transition), (x,), (jnp.ones_like(x),))[1])


def test_derivatives_go_through_the_parts() -> None:
    x, layers, transition = parameters(SMALL[0])

    def loss(function: Callable[..., Any], *arguments: Any) -> Any:
        return jnp.sum(function(*arguments) ** 2)

    def separate(x: Any, layers: Any, transition: Any) -> Any:
        return jsc.dense_block(x, layers, transition=transition, precision="highest", implementation="xla")

    by_x, *by_parts = jax.grad(functools.partial(loss, separate), (0, 1, 2))(x, layers, transition)
    packed = jsc.pack_dense_block(layers, transition)
    found_x, found = jax.grad(functools.partial(loss, bound), (0, 1))(x, packed)
    np.testing.assert_allclose(found_x, by_x, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(*map(jax.tree.leaves, ((found.layers, found.transition), by_parts)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_cast_keeps_the_places() -> None:
    x, layers, transition = parameters(SMALL[0])
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jsc.pack_dense_block(layers, transition))
    check_same(cast.layers, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layers))
    assert jsc.dense_block(x.astype(jnp.bfloat16), cast).dtype == jnp.bfloat16


def test_it_is_exported() -> None:
    pytest.importorskip("flatbuffers")
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    function = jax.jit(functools.partial(jsc.dense_block, precision="highest", implementation="xla"))
    exported = jax.export.export(function)(x, packed)
    check_same(jax.export.deserialize(exported.serialize()).call(x, packed), function(x, packed))


def test_what_does_not_fit_is_named() -> None:
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    with pytest.raises(ValueError, match=r"transition must be None where layers are packed; pack_dense_block\(layers"):
        jsc.dense_block(x, packed, transition=transition)
    with pytest.raises(ValueError, match=r"x.shape=\(2, 6, 5, 64\) must be \[N, H, W, 32\], as layers are packed for"):
        jsc.dense_block(jnp.concatenate([x, x], -1), packed)
    with pytest.raises(TypeError, match=r"layers.values.dtype=float32 must equal x.dtype=bfloat16"):
        jsc.dense_block(x.astype(jnp.bfloat16), packed)
    size = packed.sizes.size()
    for wrong in (packed.values[:-1], packed.values.reshape(2, -1)):
        with pytest.raises(ValueError, match=rf"layers.values.shape=\(.*\) must be \({size},\); make it by"):
            jsc.dense_block(x, PackedDenseBlock(wrong, packed.sizes))
    with pytest.raises(ValueError, match="implementation='ecr' is not one"):
        jsc.dense_block(x, packed, implementation="ecr")
    with pytest.raises(ValueError, match="implementation='fused' cannot run"):
        jsc.dense_block(x[..., :0], jsc.pack_dense_block(*narrow()), implementation="fused")


def narrow() -> tuple[list[DenseBlockLayer], DenseTransition]:
    return parameters(Block("nothing", (1, 2, 2, 0), 1))[1:]


def test_what_cannot_be_packed_is_named() -> None:
    x, layers, transition = parameters(SMALL[0])
    pack: Any = jsc.pack_dense_block
    with pytest.raises(ValueError, match=r"layers=\[\] must be one DenseBlockLayer or more"):
        pack([])
    with pytest.raises(TypeError, match=r"layers\[1\] is tuple, not DenseBlockLayer"):
        pack([layers[0], tuple(layers[1])])
    with pytest.raises(TypeError, match="layers is PackedDenseBlock, not a sequence of DenseBlockLayer"):
        pack(pack(layers))
    with pytest.raises(TypeError, match="layers is Param, not a sequence of DenseBlockLayer"):
        jsc.dense_block(x, nnx.Param(pack(layers)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers\[0\].scale.shape=\(1, 32\) must be \(C0,\)"):
        pack([layers[0]._replace(scale=layers[0].scale[None])])
    with pytest.raises(ValueError, match=r"layers\[1\].scale.shape=\(32,\) must be \(64,\)"):
        pack([layers[0], layers[0]])
    with pytest.raises(TypeError, match=r"layers\[1\].bias1.dtype=float16 must equal layers\[0\].scale.dtype=float32"):
        pack([layers[0], layers[1]._replace(bias1=layers[1].bias1.astype(np.float16))])
    with pytest.raises(ValueError, match=r"transition.scale.shape=\(64,\) must be \(96,\)"):
        pack(layers, transition._replace(scale=transition.scale[:64]))
    with pytest.raises(TypeError, match="transition is tuple, not DenseTransition"):
        pack(layers, tuple(transition))
    wider = DenseBlockLayer(*(jnp.zeros(shape) for shape in ((64,), (64,), (1, 1, 64, 96), (96,), (3, 3, 96, 32))))
    with pytest.raises(ValueError, match=r"layers\[1\] has M=96 and G=32, and layers\[0\] M=128 and G=32"):
        pack([layers[0], wider])


@pytest.mark.parametrize("images", [1, 9])
def test_a_call_has_one_operand_and_its_places(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    for name, value in (("why_missing", None), ("has_warpgroups", True), ("dense_layers_bytes", 4096)):
        monkeypatch.setattr(_native, name, lambda *_, value=value: value)
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(capability=(9, 0))))
    x, layers, transition = parameters(Block("few or many", (images, 6, 6, 64), 2))
    packed = jsc.pack_dense_block(layers, transition)
    traced = jax.jit(lambda x, packed: jsc.dense_block(x, packed)).trace(x, packed)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in lowered.splitlines() if "@jsc_dense_block" in line)
    assert f"(tensor<{images}x6x6x64xf32>, tensor<{packed.values.size}xf32>) ->" in line
    offsets = packed.sizes.offsets()[: 10 if images > 1 else None]  # many images have the transition behind their call
    assert f"offsets = dense<[{', '.join(map(str, offsets))}]>" in line


def test_whether_it_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: False)
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    assert dense_blocks.is_one_call(x, packed)
    assert not dense_blocks.is_one_call(jnp.concatenate([x] * 5), packed)
    row = x[:, :1]
    assert not dense_blocks.is_one_call(row, packed)
    assert dense_blocks.is_one_call(row, packed.without_transition())
    assert not dense_blocks.reads_packed(layers, transition) or jax.default_backend() == "gpu"


# --- networks --------------------------------------------------------------------------------------------------------


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

    wanted = nnx.grad(loss)(model)
    jsc.nnx.pack(model)
    found = nnx.grad(loss)(model)
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
        for _ in range(2):
            updates, moments = optimizer.update(gradient(state), moments)
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


# --- the kernel ------------------------------------------------------------------------------------------------------

FUSED: Any = {"implementation": "fused"}
_PIXELS = 2000  # of all layers


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_the_kernel_reads_one_array_as_it_reads_many(block: Block, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    x, layers, transition = parameters(block, jnp.dtype(dtype))
    for behind in (None, transition) if min(block.x[1:3]) > 1 else (None,):
        separate = jax.jit(lambda x, layers, behind: jsc.dense_block(x, layers, transition=behind, **FUSED))
        packed = jax.jit(functools.partial(jsc.dense_block, precision=None, **FUSED))
        given = jsc.pack_dense_block(layers, behind)
        with jax.default_matmul_precision(precision):
            assert packed.lower(x, given).as_text().count("offsets = dense") == 1
            out, wanted = packed(x, given), separate(x, layers, behind)
        check_same(out.astype(jnp.float32), wanted.astype(jnp.float32))
        tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
        if np.prod(block.x[:3]) * block.layers > _PIXELS:  # against float64 test_dense_blocks has them
            continue
        if behind is None:
            check(out, x, layers, tolerance)
            map_before = out
        else:
            check_transition(out, map_before, behind, tolerance)


@pytest.mark.parametrize("images", [1, 9])
def test_a_call_with_nonsense_is_refused(images: int, gpu: jax.Device) -> None:
    """By the native code, with the reason."""
    require_kernel("float32")
    block = Block("nonsense", (images, 14, 14, 64), 2)
    x, layers, _ = parameters(block)
    packed = jsc.pack_dense_block(layers)
    results = [jax.ShapeDtypeStruct((images, 14, 14, 128), np.float32), jax.ShapeDtypeStruct((0,), np.uint8)]

    def refused(match: str, offsets: list[int], *operands: Any, precision: Any = 2, dtype: Any = np.int64) -> None:
        attributes = {"precision": np.int64(precision), "offsets": np.array(offsets, dtype)}
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            jax.block_until_ready(jax.ffi.ffi_call("jsc_dense_block", results)(x, *operands, **attributes))

    offsets, values = packed.sizes.offsets(), packed.values
    for wrong in (-64, values.size, values.size - 64, 2**62):
        refused(rf"layer 1: offset {wrong} is not a multiple", [*offsets[:-1], wrong], values)
    refused("layer 0: offset 1 is not a multiple of 128 bytes", [0, 1, *offsets[2:]], values)
    refused("layer 1: offset .* leaves the packed parameters", offsets, values[: values.size // 2])
    refused("five parameters a layer", offsets[:-1], values)
    refused("five parameters a layer", [0], values)
    refused("only parameter must be one array", offsets, values, values)
    refused("only parameter must be one array", offsets, values[None])
    refused("only parameter must be one array", offsets, values.astype(jnp.bfloat16))
    refused("offsets must be an array of int64", offsets, values, dtype=np.int32)
    refused("precision must be 0, 1 or 2", offsets, values, precision=3)


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
