"""The linen layers against `nn.Conv` and `nn.Dense` in float64, on the same variables."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_conv._src.layers.layer_calls import record_calls
from jax_sparse_conv.linen import SparseConv, SparseConvPool, SparseDense

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": (3, 3)},
    "no_bias_strided": {"kernel_size": (3, 2), "strides": (2, 1), "padding": "VALID", "use_bias": False},
    "grouped_dilated": {"kernel_size": [3, 3], "padding": 2, "kernel_dilation": 2, "feature_group_count": 2},
    "masked": {"kernel_size": (2, 2), "mask": np.tril(np.ones((2, 2, 4, 6), np.float32))},
    "one_dimensional": {"kernel_size": 3},
    "causal": {"kernel_size": (3,), "padding": "CAUSAL"},
    "circular": {"kernel_size": (3, 3), "padding": "CIRCULAR"},
    "input_dilated": {"kernel_size": (3, 3), "padding": 1, "input_dilation": (2, 1)},
    "own_function": {
        "kernel_size": (3, 3),
        "conv_general_dilated": lambda *a, **k: jax.lax.conv_general_dilated(*a, **k),
    },
}


pytestmark = pytest.mark.usefixtures("float32_products")


def feature_map(shape: tuple[int, ...]) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape) * (rng.random(shape) < 0.4), jnp.float32)


def expected(layer: nn.Module, variables: Any, x: Any) -> np.ndarray:
    """What Flax computes in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: jnp.asarray(np.asarray(v), jnp.float64), (variables, x))
        return np.asarray(jax.jit(layer.apply)(*wide))


def close(actual: Any, wanted: np.ndarray) -> None:
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv_is_flax_conv(name: str) -> None:
    arguments = {"features": 6, "bias_init": nn.initializers.normal(), **CONVOLUTIONS[name]}
    size = arguments["kernel_size"]
    x = feature_map((2, *(7, 6)[: 1 if isinstance(size, int) else len(size)], 4))
    dense, sparse = nn.Conv(**arguments), SparseConv(**arguments, activation="relu")
    variables = jax.jit(dense.init)(jax.random.key(0), x)
    ours = jax.jit(sparse.init)(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, ours, variables)
    plain = expected(dense, variables, x)
    residual = np.random.default_rng(3).normal(size=plain.shape).astype(np.float32)
    close(jax.jit(sparse.apply)(variables, x, residual), np.maximum(plain + residual, 0))
    close(jax.jit(SparseConv(**arguments).apply)(variables, x), plain)


@pytest.mark.parametrize("leading", [(), (2, 3), (0,)])
def test_leading_axes(leading: tuple[int, ...]) -> None:
    x = feature_map((*leading, 4, 4, 3))
    y, variables = SparseConv(5, (3, 3)).init_with_output(jax.random.key(0), x)
    flat = expected(nn.Conv(5, (3, 3)), variables, x.reshape(int(np.prod(leading)), 4, 4, 3))
    close(y, flat.reshape(*leading, 4, 4, 5))


def test_conv_pool() -> None:
    x = feature_map((2, 6, 8, 3))
    layer = SparseConvPool(4, (3, 3))
    y, variables = layer.init_with_output(jax.random.key(0), x)
    plain = np.maximum(expected(nn.Conv(4, (3, 3)), variables, x), 0)
    close(y, plain.reshape(2, 3, 2, 4, 2, 4).max((2, 4)))
    average = SparseConvPool(4, (3, 3), pool="avg", window_shape=(6, 8), padding="CIRCULAR")
    wrapped = np.maximum(expected(nn.Conv(4, (3, 3), padding="CIRCULAR"), variables, x), 0)
    close(average.apply(variables, x), wrapped.mean((1, 2), keepdims=True))


def test_dense() -> None:
    x = feature_map((2, 3, 5))
    arguments: dict[str, Any] = {"features": 4, "bias_init": nn.initializers.normal()}
    y, variables = SparseDense(**arguments, activation="relu").init_with_output(jax.random.key(0), x)
    close(y, np.maximum(expected(nn.Dense(**arguments), variables, x), 0))
    own = SparseDense(4, dot_general=lambda *a, **k: -jax.lax.dot_general(*a, **k), use_bias=False)
    kernel = {"params": {"kernel": variables["params"]["kernel"]}}
    close(own.apply(kernel, x), -expected(nn.Dense(4, use_bias=False), kernel, x))


def test_dtypes_promote_as_in_flax() -> None:
    x = feature_map((1, 4, 4, 3))
    for dense, sparse in [
        (nn.Conv(4, (3, 3), dtype=jnp.bfloat16), SparseConv(4, (3, 3), dtype=jnp.bfloat16)),
        (nn.Dense(4, dtype=jnp.bfloat16), SparseDense(4, dtype=jnp.bfloat16)),
    ]:
        wanted, variables = dense.init_with_output(jax.random.key(0), x)
        got = sparse.apply(variables, x)
        assert got.dtype == wanted.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=2e-2, atol=2e-2)


def test_inside_a_model_with_grad_and_vmap() -> None:
    class Net(nn.Module):
        sparse: bool

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            if self.sparse:
                x = SparseConv(4, (3, 3), activation="relu", name="conv")(x)
                return SparseDense(2, name="head")(x.mean((-3, -2)))
            x = nn.relu(nn.Conv(4, (3, 3), name="conv")(x))
            return nn.Dense(2, name="head")(x.mean((-3, -2)))

    x = feature_map((3, 2, 4, 4, 3))
    variables = Net(sparse=False).init(jax.random.key(0), x[0])
    close(jax.jit(jax.vmap(Net(sparse=True).apply, (None, 0)))(variables, x), expected(Net(False), variables, x))
    grads = [
        jax.jit(jax.grad(lambda v, net=net: jnp.sum(net.apply(v, x[0]) ** 2)))(variables)
        for net in (Net(sparse=True), Net(sparse=False))
    ]
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), *grads)


def test_record_calls() -> None:
    x = feature_map((1, 4, 4, 3))
    layer = SparseConv(4, (3, 3))
    variables = layer.init(jax.random.key(0), x)
    with record_calls() as calls:
        y = layer.apply(variables, x)
    assert len(calls) == 1
    assert calls[0].inputs is x
    assert calls[0].output is y


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="activation='gelu' is not one of None, 'relu'"):
        SparseConv(4, (3, 3), activation="gelu")
    with pytest.raises(ValueError, match="implementation='pecr' is not one of"):
        SparseConv(4, (3, 3), implementation="pecr")
    with pytest.raises(ValueError, match="implementation='fast' is not one of"):
        SparseDense(4, implementation="fast")
    with pytest.raises(ValueError, match="kernel_size=3 is not two ints"):
        SparseConvPool(4, 3)
    with pytest.raises(ValueError, match="pool='min' is not one of"):
        SparseConvPool(4, (3, 3), pool="min")
    x = jnp.ones((1, 4, 4, 3))
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run this layer: .*CIRCULAR.*None or 'xla' can"):
        SparseConv(4, (3, 3), padding="CIRCULAR", implementation="ecr").init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="feature_group_count=2 does not divide the C=3"):
        SparseConv(4, (3, 3), feature_group_count=2).init(jax.random.key(0), x)
    for groups in (0, -1, 1.5):
        with pytest.raises(ValueError, match=rf"feature_group_count={groups} is not an int of 1 to 2\*\*31 - 1"):
            SparseConv(4, (3, 3), feature_group_count=groups).init(jax.random.key(0), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SparseConv, SparseConvPool])
def test_layers_take_and_return_counts(kind: Any) -> None:
    x = feature_map((2, 6, 6, 4))
    layer = kind(features=6, kernel_size=(3, 3), activation="relu")
    variables = layer.init(jax.random.key(0), x)
    for nonzeros in (None, [[1, 100]], [[99, 100]]):
        y, counts = layer.apply(variables, x, nonzeros=nonzeros, count_nonzeros=True)
        np.testing.assert_allclose(y, layer.apply(variables, x), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(counts).sum(0), [np.count_nonzero(y), y.size])
