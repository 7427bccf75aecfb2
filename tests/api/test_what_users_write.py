"""What users write first: it works, or the error says what to write instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_sparse_conv as jsc

X = jax.random.normal(jax.random.key(0), (1, 6, 7, 8))
KERNEL = jax.random.normal(jax.random.key(1), (3, 3, 8, 16))


def test_relu_itself_is_an_activation() -> None:
    for relu in (jax.nn.relu, nnx.relu, linen.relu):
        for found, named in (
            (jsc.conv(X, KERNEL, activation=relu), jsc.conv(X, KERNEL, activation="relu")),
            (jsc.conv_pool(X, KERNEL, activation=relu), jsc.conv_pool(X, KERNEL, activation="relu")),
            (jsc.dense(X[0], KERNEL[0, 0], activation=relu), jsc.dense(X[0], KERNEL[0, 0], activation="relu")),
        ):
            np.testing.assert_array_equal(found, named)
    layer = jsc.nnx.SparseConv(8, 16, (3, 3), activation=jax.nn.relu, rngs=nnx.Rngs(0))
    assert float(layer(X).min()) == 0
    strided = jsc.nnx.SparseLinear(8, 16, activation=jax.nn.relu, rngs=nnx.Rngs(0))
    assert float(strided(X).min()) == 0
    of_linen = jsc.linen.SparseConv(16, (3, 3), activation=jax.nn.relu)
    assert float(of_linen.apply(of_linen.init(jax.random.key(0), X), X).min()) == 0  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=r"activation=<.*gelu.*> is not one of None, 'relu', or jax.nn.relu; apply any"
    ):
        jsc.conv(X, KERNEL, activation=jax.nn.gelu)


def test_channels_first_are_named() -> None:
    with pytest.raises(ValueError, match=r"has C=7; x is \[N, H, W, C\] here, and this looks like \[N, C, H, W\]"):
        jsc.conv(X.transpose(0, 3, 1, 2), KERNEL)
    with pytest.raises(ValueError, match=r"this looks like \[K, C, kh, kw\]: kernel.transpose\(2, 3, 1, 0\)"):
        jsc.conv(X, KERNEL.transpose(3, 2, 0, 1))
    with pytest.raises(ValueError, match=r"but x.shape=\(1, 6, 7, 8\) has C=8$"):
        jsc.conv(X, jnp.ones((3, 3, 9, 16)))


def test_a_packed_kernel_is_printed_without_its_values() -> None:
    assert repr(jsc.pack(KERNEL)) in (
        "PackedKernel(float32[3, 3, 8, 16], with a copy, feature_group_count=1)",
        "PackedKernel(float32[3, 3, 8, 16], no copy, feature_group_count=1)",
    )
    assert "no copy" in repr(jsc.pack(KERNEL.astype(jnp.float16)))
    assert "PackedKernel" in repr(jax.tree.map(lambda leaf: None, jsc.pack(KERNEL)))


def test_replace_returns_no_model() -> None:
    model = nnx.Sequential(nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    replaced = jsc.nnx.replace(model)
    with pytest.raises(TypeError, match="replace changes the model in place and returns a report, which is no model"):
        replaced(X)


def test_replace_takes_what_convolutions_alone_have() -> None:
    model = nnx.Sequential(nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    report = str(jsc.nnx.replace(model, implementation="coo"))
    assert "implementation='coo', parameters kept" in report
    assert "implementation=None, parameters kept" in report
    assert (model.layers[0].implementation, model.layers[1].implementation) == ("coo", None)
    with pytest.raises(ValueError, match="implementation='nothing' is not one of"):
        jsc.nnx.replace(model, implementation="nothing")
