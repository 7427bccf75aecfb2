"""`jsc.nnx.pack`: packed kernels as parameters of Flax layers never differ from their kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import packing

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_isas(), reason="kernels are packed for the CPU extension only"
)
PACKED = ("first", "pooled")  # layers of Net


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = jsc.nnx.SparseConv(16, 96, (3, 3), activation="relu", rngs=rngs)
        self.pooled = jsc.nnx.SparseConvPool(96, 64, (1, 1), rngs=rngs)
        self.strided = jsc.nnx.SparseConv(64, 32, (3, 3), strides=3, rngs=rngs)
        self.dense = jsc.nnx.SparseLinear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.strided(self.pooled(self.first(x)))
        return self.dense(jax.nn.relu(y).mean((1, 2)))


@pytest.fixture
def net() -> Net:
    return Net(nnx.Rngs(0))


@pytest.fixture
def x() -> jax.Array:
    return jax.nn.relu(jax.random.normal(jax.random.key(1), (2, 8, 8, 16)))


def operands_packed(model: nnx.Module, x: jax.Array) -> int:
    """Calls that read a packed kernel, with the model's state as an argument."""
    graph, state = nnx.split(model)
    function = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return str(function.lower(state, x).as_text()).count("has_packed = 1")


def check_equal(param: Any) -> None:
    """A packed parameter's copy is that of its kernel."""
    value = param.get_raw_value()
    assert isinstance(value, jsc.PackedKernel)
    np.testing.assert_array_equal(value.packed, jsc.pack(value.kernel).packed)


def test_packing_changes_no_result(net: Net, x: jax.Array) -> None:
    expected = net(x)
    assert operands_packed(net, x) == 0
    assert jsc.nnx.pack(net) == len(PACKED)
    assert jsc.nnx.pack(net) == len(PACKED)  # once more: packed anew
    assert operands_packed(net, x) == len(PACKED)
    for run in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x)), jax.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(run(net, x), expected, rtol=1e-5, atol=1e-6)
    images = jnp.stack([x, x])
    every = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(net, images)
    np.testing.assert_allclose(every[1], expected, rtol=1e-5, atol=1e-6)
    assert isinstance(net.strided.kernel, nnx.Param)
    assert not isinstance(net.strided.kernel, jsc.nnx.PackedParam)
    assert jsc.nnx.unpack(net) == len(PACKED)
    assert operands_packed(net, x) == 0
    np.testing.assert_array_equal(net(x), expected)


def test_to_flax_a_packed_parameter_is_the_kernel(net: Net) -> None:
    kernel = net.first.kernel[...]
    plain = nnx.to_pure_dict(nnx.state(net))
    jsc.nnx.pack(net)
    param = net.first.kernel
    assert isinstance(param, nnx.Param)
    assert (param.shape, param.dtype) == (kernel.shape, kernel.dtype)
    for found in (param[...], param.get_value(), jnp.asarray(param), param * 1, nnx.clone(net).first.kernel[...]):
        np.testing.assert_array_equal(found, kernel)
    np.testing.assert_array_equal(param[0, 1], kernel[0, 1])
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(net)), plain)


def double(net: Net) -> None:
    net.first.kernel[...] = 2 * net.first.kernel


def set_value(net: Net) -> None:
    net.first.kernel.set_value(np.ones(net.first.kernel.shape, np.float32))


def one_tap(net: Net) -> None:
    net.first.kernel[0, 1] = 0.0


def map_state(net: Net) -> None:
    nnx.update(net, jax.tree.map(lambda leaf: 0.5 * leaf, nnx.state(net)))


@pytest.mark.parametrize("change", [double, set_value, one_tap, map_state])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_new_weights_are_packed_anew(net: Net, x: jax.Array, change: Callable[[Net], None], wrap: Any) -> None:
    before = net(x)
    jsc.nnx.pack(net)
    wrap(change)(net)
    check_equal(net.first.kernel)
    found = net(x)
    jsc.nnx.unpack(net)
    np.testing.assert_allclose(found, net(x), rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, before)


def test_plain_weights_replace_packed_ones(net: Net, x: jax.Array) -> None:
    other = Net(nnx.Rngs(7))
    jsc.nnx.pack(net)
    nnx.update(net, nnx.state(other))
    np.testing.assert_array_equal(net(x), other(x))
    net.first.kernel[...] = net.first.kernel[...]
    np.testing.assert_array_equal(net(x), other(x))
    assert jsc.nnx.pack(net) == len(PACKED)
    net.first.kernel = nnx.Param(other.first.kernel[...] * 2)
    other.first.kernel[...] = other.first.kernel[...] * 2
    np.testing.assert_allclose(net(x), other(x), rtol=1e-5, atol=1e-6)


def test_training_a_packed_model_is_refused(net: Net, x: jax.Array) -> None:
    def loss(net: Net) -> jax.Array:
        return (net(x) ** 2).sum()

    expected = nnx.grad(loss)(net)
    jsc.nnx.pack(net)
    for implementation in (None, "xla"):
        jsc.nnx.set_implementation(net, conv=implementation, conv_pool=implementation)
        for function in (loss, nnx.jit(loss), lambda net: (net.first.kernel[...] ** 2).sum()):
            with pytest.raises(TypeError, match="derivative by a packed kernel"):
                nnx.grad(function)(net)
    assert jax.grad(lambda x: net(x).sum())(x).shape == x.shape
    jsc.nnx.unpack(net)
    found = nnx.grad(loss)(net)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param).update(net, found)


def test_layers_that_would_not_read_a_copy_are_left() -> None:
    rngs = nnx.Rngs(0)

    def packed(*sizes: Any, **arguments: Any) -> int:
        return jsc.nnx.pack(jsc.nnx.SparseConv(*(sizes or (16, 32, (3, 3))), rngs=rngs, **arguments))

    assert packed() == packed(implementation="ecr") == packed(feature_group_count=2) == packed(padding=1) == 1
    for implementation in ("xla", "direct", "coo"):
        assert packed(implementation=implementation) == 0
    assert packed(16, 32, (7, 7)) == packed(16, 32, (3, 3), 3) == packed(16, 8, (3, 3)) == 0
    assert packed(dtype=jnp.bfloat16) == packed(padding="REFLECT") == packed(kernel_dilation=2) == 0
    assert packed(16, 32, (3, 3), 2) == (_native.cpu_isa() == "avx512")
    assert packed(16, 32, (5, 5)) == _native.cpu_has_many_registers()
    assert packed(mask=jnp.ones((3, 3, 16, 32))) == packed(param_dtype=jnp.float16) == 0
    with pytest.raises(TypeError, match=r"not an nnx\.Module"):
        jsc.nnx.pack(3)  # type: ignore[arg-type]


def test_shared_parameters_stay_shared(net: Net) -> None:
    layer = jsc.nnx.SparseConv(16, 32, (3, 3), rngs=nnx.Rngs(0))
    other = jsc.nnx.SparseConv(16, 32, (3, 3), rngs=nnx.Rngs(0))
    other.kernel = layer.kernel
    both = nnx.List([layer, other])
    assert jsc.nnx.pack(both) == 2
    assert layer.kernel is other.kernel
    assert jsc.nnx.unpack(both) == 2
    assert layer.kernel is other.kernel


def test_checkpoints_hold_both_parts_or_the_kernel(net: Net, x: jax.Array, tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    jsc.nnx.pack(net)
    graph, state = nnx.split(net)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "packed", state)
        checkpointer.save(tmp_path / "plain", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "packed", jax.eval_shape(lambda: state)))
        check_equal(restored.first.kernel)
        np.testing.assert_array_equal(restored(x), net(x))
        fresh = Net(nnx.Rngs(3))
        wanted = nnx.state(fresh)
        nnx.replace_by_pure_dict(wanted, checkpointer.restore(tmp_path / "plain"))
        nnx.update(fresh, wanted)
    np.testing.assert_allclose(fresh(x), net(x), rtol=1e-5, atol=1e-6)


def test_linen_parameters_may_be_packed(x: jax.Array) -> None:
    for layer in (
        jsc.linen.SparseConv(32, (3, 3), implementation="ecr"),
        jsc.linen.SparseConvPool(32, (3, 3), implementation="pecr"),
    ):
        variables = layer.init(jax.random.key(0), x)
        kernel = variables["params"]["kernel"]
        packed = {"params": variables["params"] | {"kernel": jsc.pack(kernel)}}
        function = jax.jit(layer.apply)
        assert "has_packed = 1" in function.lower(packed, x).as_text()
        np.testing.assert_allclose(function(packed, x), layer.apply(variables, x), rtol=1e-5, atol=1e-5)
    strided = jsc.linen.SparseConv(32, (3, 3), padding="CIRCULAR")
    np.testing.assert_allclose(
        strided.apply(packed, x), linen.Conv(32, (3, 3), padding="CIRCULAR").apply(variables, x), atol=1e-5
    )


def test_other_devices_have_no_copies(net: Net, x: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = nnx.jit(lambda m, x: m(x))(net, x)
    monkeypatch.setattr(packing, "_is_on_one_cpu", lambda kernel: False)
    assert jsc.nnx.pack(net) == 0
    packed = jsc.pack(net.first.kernel[...])
    assert packed.packed is None
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(net, x), expected)
    np.testing.assert_array_equal(
        jsc.conv(x, packed, implementation="ecr"), jsc.conv(x, packed[...], implementation="ecr")
    )


def tied(**second: Any) -> nnx.Sequential:
    first = jsc.nnx.SparseConv(16, 16, (3, 3), rngs=nnx.Rngs(0))
    other = jsc.nnx.SparseConv(16, 16, (3, 3), rngs=nnx.Rngs(1), **second)
    other.kernel = first.kernel
    return nnx.Sequential(first, other)


@pytest.mark.parametrize(
    ("arguments", "is_packed"),
    [({"strides": 2}, True), ({"strides": 2, "padding": 1}, False), ({"strides": (1, 3), "padding": "VALID"}, True)],
)
def test_strides_of_a_pixel(arguments: dict[str, Any], is_packed: bool) -> None:
    layer = jsc.nnx.SparseConv(32, 48, (1, 1), rngs=nnx.Rngs(0), **arguments)
    x = jax.nn.relu(jax.random.normal(jax.random.key(0), (1, 7, 8, 32)))
    wanted = layer(x)
    assert jsc.nnx.pack(layer) == is_packed
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("second", [{"strides": 3}, {"mask": jnp.ones((3, 3, 16, 16))}, {}])
def test_kernels_that_layers_share_stay_shared(second: dict[str, Any]) -> None:
    model = tied(**second)
    x = jax.random.normal(jax.random.key(0), (1, 8, 8, 16))
    wanted, leaves = model(x), len(jax.tree.leaves(nnx.state(model)))
    packed = jsc.nnx.pack(model)
    assert packed in ((0,) if second else (0, 2))
    assert model.layers[0].kernel is model.layers[1].kernel
    np.testing.assert_allclose(model(x), wanted, rtol=1e-4, atol=1e-4)
    assert jsc.nnx.unpack(model) == packed
    assert model.layers[0].kernel is model.layers[1].kernel
    assert len(jax.tree.leaves(nnx.state(model))) == leaves


def test_a_kernel_shared_by_other_groups_is_left() -> None:
    first = jsc.nnx.SparseConv(16, 32, (3, 3), rngs=nnx.Rngs(0))
    second = jsc.nnx.SparseConv(32, 32, (3, 3), feature_group_count=2, rngs=nnx.Rngs(1))
    second.kernel = first.kernel
    model = nnx.Sequential(first, second)
    x = jax.random.normal(jax.random.key(0), (1, 8, 8, 16))
    wanted = model(x)
    assert jsc.nnx.pack(model) == 0
    np.testing.assert_allclose(jsc.nnx.jit_inference(model)(x), wanted, rtol=1e-3, atol=1e-3)


class Frozen(nnx.Variable[Any]):
    """A kind of parameter that optimizers do not see."""


@pytest.mark.parametrize("kernel", [Frozen, lambda k: nnx.Param(k, on_get_value=lambda _, value: 2 * value)])
def test_parameters_of_other_kinds_are_left(kernel: Any) -> None:
    layer = jsc.nnx.SparseConv(16, 16, (3, 3), rngs=nnx.Rngs(0))
    layer.kernel = kernel(layer.kernel[...])
    x = jax.random.normal(jax.random.key(0), (1, 8, 8, 16))
    wanted, kind = layer(x), type(layer.kernel)
    assert jsc.nnx.pack(layer) == 0
    assert type(layer.kernel) is kind
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-4, atol=1e-4)


def test_layers_may_compute_with_a_packed_kernel_first() -> None:
    layer = jsc.nnx.SparseConv(16, 16, (3, 3), rngs=nnx.Rngs(0))
    kernel = layer.kernel[...]
    jsc.nnx.pack(layer)
    np.testing.assert_allclose(layer.kernel.mean(), kernel.mean(), rtol=1e-6)
    np.testing.assert_array_equal(layer.kernel.T, kernel.T)
    np.testing.assert_array_equal(jsc.pack(kernel).reshape(9, -1), kernel.reshape(9, -1))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jsc.pack(kernel).nothing  # noqa: B018
