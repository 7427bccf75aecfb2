"""Linen modules in `nnx.bridge.ToNNX`: `jit_inference` takes them, and `replace` says what does."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn
from flax_checks import feature_map

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

X = feature_map((2, 8, 8, 3))


class Linen(nn.Module):
    drops: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(16, (3, 3))(x)))
        x = nn.Dropout(0.5, deterministic=not self.drops)(x)
        return nn.Dense(5)(x.mean((1, 2)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, module: nn.Module) -> None:
        self.conv = nnx.Conv(3, 3, (3, 3), rngs=rngs)
        self.body = nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(X)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.body(self.conv(x))


def test_inference() -> None:
    model = Net(nnx.Rngs(0), Linen())
    predict = jsc.nnx.jit_inference(model)
    np.testing.assert_allclose(predict(X), model(X), rtol=1e-5, atol=1e-5)
    report = predict.report(X)
    assert [row.reason for row in report.rows] == [None, None, None]
    assert report.rows[1].joined == ("scale and bias", "relu")  # the batch norm is in the kernel
    other = Net(nnx.Rngs(1), Linen())
    predict.update(other)
    np.testing.assert_allclose(predict(X), other(X), rtol=1e-5, atol=1e-5)


def test_random_keys_are_arguments() -> None:
    model = Net(nnx.Rngs(0), Linen(drops=True))
    with pytest.raises(errors.InvalidRngError, match='needs PRNG for "dropout"'):
        jsc.nnx.jit_inference(model)(X)
    dropping = jsc.nnx.jit_inference(model, lambda model, x, key: model.body(x, rngs=nnx.Rngs(dropout=key)))
    once, again, other = (dropping(X, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other)


def test_replace_says_what_takes_it() -> None:
    model = Net(nnx.Rngs(0), Linen())
    wanted, report = model(X), jsc.nnx.replace(model)
    assert [entry.path for entry in report.swapped] == ["conv"]
    (entry,) = report.left
    assert (entry.path, entry.old_type) == ("body", "ToNNX")
    assert "jax_sparse_conv.linen.sparse_layers() swaps them while it runs" in entry.reason
    np.testing.assert_allclose(model(X), wanted, rtol=1e-5, atol=1e-5)

    def calls() -> int:
        return nnx.jit(lambda model, x: model.body(x)).lower(model, X).as_text().count("@jsc_")

    plain = calls()
    with jsc.linen.sparse_layers():
        assert calls() > plain
