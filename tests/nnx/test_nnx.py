"""The nnx layers against `nnx.Conv` and `nnx.Linear` in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_checks import close, expected, feature_map
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from platforms import require

from jax_sparse_conv.nnx import SparseConv, SparseConvPool, SparseLinear

pytestmark = pytest.mark.usefixtures("float32_products")


def max_pool(y: np.ndarray, window: int, stride: int) -> np.ndarray:
    rows = range(0, y.shape[-3] - window + 1, stride)
    columns = range(0, y.shape[-2] - window + 1, stride)
    return np.stack(
        [np.stack([y[..., r : r + window, c : c + window, :].max((-3, -2)) for c in columns], axis=-2) for r in rows],
        axis=-3,
    )


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": (3, 3)},
    "no_bias_strided": {"kernel_size": (3, 2), "strides": (2, 1), "padding": "VALID", "use_bias": False},
    "int_padding_dilated": {"kernel_size": (3, 3), "padding": 2, "kernel_dilation": 2, "strides": None},
    "grouped_pairs": {"kernel_size": [1, 3], "padding": ((0, 1), 2), "feature_group_count": 2},
    "masked": {"kernel_size": (2, 2), "mask": np.tril(np.ones((2, 2, 4, 6), np.float32))},
    "one_dimensional": {"kernel_size": 3},
    "causal": {"kernel_size": (3,), "padding": "CAUSAL"},
    "three_dimensional": {"kernel_size": (2, 2, 2), "strides": 2},
    "circular": {"kernel_size": (3, 3), "padding": "CIRCULAR"},
    "reflect": {"kernel_size": (3, 3), "padding": "REFLECT"},
    "input_dilated": {"kernel_size": (3, 3), "padding": 1, "input_dilation": (2, 1)},
    "preferred_type": {"kernel_size": (3, 3), "preferred_element_type": jnp.float32},
}
DENSE_ONLY = (
    "one_dimensional",
    "causal",
    "three_dimensional",
    "circular",
    "reflect",
    "input_dilated",
    "preferred_type",
)


def input_for(arguments: dict[str, Any], leading: tuple[int, ...] = (2,)) -> jax.Array:
    size = arguments["kernel_size"]
    rank = 1 if isinstance(size, int) else len(size)
    return feature_map((*leading, *(7, 6, 5)[:rank], 4))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv_is_flax_conv(name: str) -> None:
    arguments = CONVOLUTIONS[name]
    dense = nnx.Conv(4, 6, **arguments, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    sparse = SparseConv(4, 6, **arguments, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0), activation="relu")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(dense), nnx.state(sparse))
    x = input_for(arguments)
    plain = expected(dense, x)
    residual = np.random.default_rng(3).normal(size=plain.shape).astype(np.float32)
    close(nnx.jit(lambda m, x, r: m(x, r))(sparse, x, residual), np.maximum(plain + residual, 0))
    sparse.activation = None
    close(nnx.jit(lambda m, x: m(x))(sparse, x), plain)


@pytest.mark.parametrize("name", DENSE_ONLY)
def test_named_implementation_refuses_what_it_lacks(name: str) -> None:
    arguments = CONVOLUTIONS[name]
    layer = SparseConv(4, 6, **arguments, implementation="ecr", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run this layer: .*; None or 'xla' can"):
        layer(input_for(arguments))
    layer.implementation = "xla"
    dense = nnx.Conv(4, 6, **arguments, rngs=nnx.Rngs(0))
    assert jax.eval_shape(layer, input_for(arguments)) == jax.eval_shape(dense, input_for(arguments))


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0,), (2, 0)])
def test_leading_axes(leading: tuple[int, ...]) -> None:
    x = feature_map((*leading, 5, 6, 3))
    layer = SparseConv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    reference = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    flat = expected(reference, x.reshape(int(np.prod(leading)), 5, 6, 3))
    residual = jnp.ones((*leading, 5, 6, 4))
    close(nnx.jit(lambda m, x, r: m(x, r))(layer, x, residual), (flat + 1).reshape(*leading, 5, 6, 4))
    pool = SparseConvPool(3, 4, (3, 3), rngs=nnx.Rngs(0))
    assert jax.eval_shape(pool, x).shape == (*leading, 2, 3, 4)


def test_own_conv_general_dilated_is_used() -> None:
    calls = []

    def own(*args: Any, **kwargs: Any) -> jax.Array:
        calls.append(1)
        return jax.lax.conv_general_dilated(*args, **kwargs)

    layer = SparseConv(3, 4, (3, 3), conv_general_dilated=own, activation="relu", rngs=nnx.Rngs(0))
    x = feature_map((1, 4, 4, 3))
    close(layer(x), expected(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), x, relu=True))
    assert calls


@pytest.mark.parametrize(
    ("dtype", "param_dtype"), [(None, "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
)
def test_dtypes_promote_as_in_flax(dtype: Any, param_dtype: Any) -> None:
    x = feature_map((2, 5, 5, 3))
    arguments: dict[str, Any] = {"dtype": dtype and jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype)}
    pairs = [
        (
            nnx.Conv(3, 4, (3, 3), **arguments, rngs=nnx.Rngs(0)),
            SparseConv(3, 4, (3, 3), **arguments, rngs=nnx.Rngs(0)),
        ),
        (nnx.Linear(3, 4, **arguments, rngs=nnx.Rngs(0)), SparseLinear(3, 4, **arguments, rngs=nnx.Rngs(0))),
    ]
    for dense, sparse in pairs:
        wanted, got = dense(x), sparse(x)
        assert got.dtype == wanted.dtype
        assert sparse.kernel[...].dtype == jnp.dtype(param_dtype)
        close(got, np.asarray(wanted, np.float64), 2e-2)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_conv_pool(implementation: str | None) -> None:
    x = feature_map((2, 7, 8, 3))
    layer = SparseConvPool(
        3, 4, (3, 3), window_shape=3, window_strides=2, implementation=implementation, rngs=nnx.Rngs(0)
    )
    dense = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    close(layer(x), max_pool(expected(dense, x, relu=True), 3, 2))
    residual = np.random.default_rng(3).normal(size=(2, 7, 8, 4)).astype(np.float32)
    close(layer(x, residual), max_pool(expected(dense, x, residual, relu=True), 3, 2))
    average = SparseConvPool(3, 4, (3, 3), pool="avg", activation=None, rngs=nnx.Rngs(0))
    close(average(x), expected(dense, x)[:, :6].reshape(2, 3, 2, 4, 2, 4).mean((2, 4)))


@pytest.mark.parametrize("implementation", ["ecr", "pecr"])
def test_native_layers(implementation: str) -> None:
    require(implementation, "float32")
    x = feature_map((2, 7, 8, 3))
    pool = SparseConvPool(3, 4, (3, 3), implementation=implementation, rngs=nnx.Rngs(0))
    dense = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    close(pool(x), max_pool(expected(dense, x, relu=True), 2, 2))
    if implementation == "ecr":
        residual = np.random.default_rng(3).normal(size=(2, 7, 8, 4)).astype(np.float32)
        conv = SparseConv(3, 4, (3, 3), activation="relu", implementation="ecr", rngs=nnx.Rngs(0))
        close(conv(x, residual), expected(dense, x, residual, relu=True))
        linear = SparseLinear(3, 4, implementation="ecr", rngs=nnx.Rngs(0))
        close(linear(x), expected(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), x))


def test_out_sharding() -> None:
    mesh = jax.make_mesh((1,), ("images",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = PartitionSpec("images")
        x = jax.device_put(feature_map((2, 4, 4, 3)), NamedSharding(mesh, spec))
        conv, linear = SparseConv(3, 4, (3, 3), rngs=nnx.Rngs(0)), SparseLinear(3, 4, rngs=nnx.Rngs(0))
        outputs = [conv(x, out_sharding=spec), conv(x, spec), linear(x, out_sharding=spec)]
        assert all(jax.typeof(y).sharding.spec[0] == "images" for y in outputs)
        np.testing.assert_array_equal(outputs[0], outputs[1])
    close(outputs[1], expected(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), np.asarray(x)))
    close(outputs[2], expected(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), np.asarray(x)))


def test_conv_pool_of_a_dense_only_convolution() -> None:
    x = feature_map((2, 6, 6, 3))
    layer = SparseConvPool(3, 4, (3, 3), padding="CIRCULAR", rngs=nnx.Rngs(0))
    dense = nnx.Conv(3, 4, (3, 3), padding="CIRCULAR", rngs=nnx.Rngs(0))
    close(layer(x), max_pool(expected(dense, x, relu=True), 2, 2))


def test_linear() -> None:
    x = feature_map((2, 3, 5))
    dense = nnx.Linear(5, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    sparse = SparseLinear(5, 4, bias_init=nnx.initializers.normal(), activation="relu", rngs=nnx.Rngs(0))
    close(sparse(x), expected(dense, x, relu=True))
    close(sparse(x[0, 0]), expected(dense, x[0, 0], relu=True))
    own = SparseLinear(
        5, 4, dot_general=lambda *a, **k: -jax.lax.dot_general(*a, **k), use_bias=False, rngs=nnx.Rngs(0)
    )
    close(own(x), -expected(nnx.Linear(5, 4, use_bias=False, rngs=nnx.Rngs(0)), x))
    own.implementation = "ecr"
    with pytest.raises(ValueError, match="dot_general"):
        own(x)


def test_checkpoints_are_interchangeable() -> None:
    dense, sparse = (cls(3, 4, (3, 3), rngs=nnx.Rngs(seed)) for seed, cls in enumerate((nnx.Conv, SparseConv)))
    x = feature_map((1, 5, 5, 3))
    nnx.update(sparse, nnx.state(dense))
    close(sparse(x), expected(dense, x))
    pure = nnx.to_pure_dict(nnx.state(sparse))
    assert set(pure) == {"kernel", "bias"}
    graph, state = nnx.split(sparse)
    close(nnx.merge(graph, state)(x), expected(dense, x))


def test_transformations() -> None:
    x = feature_map((3, 2, 5, 5, 3))
    dense = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    sparse = SparseConv(3, 4, (3, 3), activation="relu", rngs=nnx.Rngs(0))
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(sparse, x), expected(dense, x, relu=True))

    def loss(model: Any, x: jax.Array, activation: Any) -> jax.Array:
        return jnp.sum(activation(model(x)) ** 2)

    wanted = nnx.grad(loss)(dense, x[0], jax.nn.relu)
    got = nnx.jit(nnx.grad(functools.partial(loss, activation=lambda y: y)))(sparse, x[0])
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, wanted)

    @nnx.vmap(in_axes=0)
    def make(key: jax.Array) -> SparseConv:
        return SparseConv(3, 4, (3, 3), rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 2))
    out = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(stack, x[0])
    with jax.enable_x64(True):
        one = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    one.kernel[...], one.bias[...] = stack.kernel[...][1], stack.bias[...][1]
    close(out[1], expected(one, x[0]))


def test_bad_arguments() -> None:
    rngs = nnx.Rngs(0)
    x = jnp.ones((1, 4, 4, 3))
    with pytest.raises(ValueError, match="activation='gelu' is not one of None, 'relu'"):
        SparseConv(3, 4, (3, 3), activation="gelu", rngs=rngs)
    with pytest.raises(ValueError, match="implementation='pecr' is not one of"):
        SparseConv(3, 4, (3, 3), implementation="pecr", rngs=rngs)
    with pytest.raises(ValueError, match="implementation='fast' is not one of"):
        SparseLinear(3, 4, implementation="fast", rngs=rngs)
    with pytest.raises(ValueError, match="kernel_size=3 is not two ints"):
        SparseConvPool(3, 4, 3, rngs=rngs)
    for groups in (0, -1, "a"):
        with pytest.raises(ValueError, match=rf"feature_group_count={groups!r} is not an int of 1 to 2\*\*31 - 1"):
            SparseConv(3, 4, (3, 3), feature_group_count=groups, rngs=rngs)
    with pytest.raises(ValueError, match="pool='min' is not one of"):
        SparseConvPool(3, 4, (3, 3), pool="min", rngs=rngs)
    with pytest.raises(ValueError, match="window_shape=0"):
        SparseConvPool(3, 4, (3, 3), window_shape=0, rngs=rngs)
    with pytest.raises(ValueError, match="padding='SAMEE'"):
        SparseConv(3, 4, (3, 3), padding="SAMEE", rngs=rngs)(x)
    with pytest.raises(ValueError, match=r"residual\.shape=\(1, 4, 4, 5\)"):
        SparseConv(3, 4, (3, 3), rngs=rngs)(x, jnp.ones((1, 4, 4, 5)))
    with pytest.raises(ValueError, match=r"residual\.shape=\(2, 4, 4, 4\)"):
        SparseConv(3, 4, (3, 3), rngs=rngs)(x, jnp.ones((2, 4, 4, 4)))
    with pytest.raises(ValueError, match=r"inputs\.shape=\(4, 3\)"):
        SparseConv(3, 4, (3, 3), rngs=rngs)(x[0, 0])
    with pytest.raises(ValueError, match=r"mask\.shape=\(2, 3\)"):
        SparseConv(3, 4, (3, 3), mask=jnp.ones((2, 3)), rngs=rngs)(x)
    with pytest.raises(ValueError, match="implementation='pecr' has no residual"):
        SparseConvPool(3, 4, (3, 3), implementation="pecr", rngs=rngs)(x, jnp.ones((1, 4, 4, 4)))


@pytest.mark.parametrize("kind", [SparseConv, SparseConvPool])
def test_layers_take_and_return_counts(kind: Any) -> None:
    require("adaptive", "float32")
    x = feature_map((2, 1, 6, 6, 4))
    arguments: Any = {"in_features": 4, "out_features": 6, "kernel_size": (3, 3), "activation": "relu"}
    first = kind(**arguments, implementation="adaptive", rngs=nnx.Rngs(0))
    plain = kind(**arguments, implementation="xla", rngs=nnx.Rngs(0))
    for nonzeros in (None, [[1, 100]], [[99, 100]]):
        y, counts = first(x, nonzeros=nonzeros, count_nonzeros=True)
        np.testing.assert_allclose(y, plain(x), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(counts).sum(0), [np.count_nonzero(y), y.size])
    if kind is SparseConv:
        y, counts = plain(x, plain(x), count_nonzeros=True)
        np.testing.assert_array_equal(np.asarray(counts).sum(0), [np.count_nonzero(y), y.size])
    with pytest.raises(ValueError, match="nonzeros is given, but implementation='xla' does not read it"):
        plain(x, nonzeros=counts)


def test_a_layer_that_runs_densely_counts_too() -> None:
    layer = SparseConv(4, 6, (3,), padding="CAUSAL", activation="relu", rngs=nnx.Rngs(0))
    y, counts = layer(feature_map((2, 9, 4)), count_nonzeros=True)
    np.testing.assert_array_equal(np.asarray(counts).sum(0), [np.count_nonzero(y), y.size])
