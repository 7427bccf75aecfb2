"""`replace` and what else is done to all layers of an nnx model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_checks import close, expected, feature_map

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src.api import ops
from jax_sparse_conv.nnx import (
    SparseConv,
    SparseConvPool,
    SparseLinear,
    jit_inference,
    layer_paths,
    record_calls,
    replace,
    set_implementation,
    unpack,
)

pytestmark = pytest.mark.usefixtures("float32_products")


class Net(nnx.Module):
    """A little of everything that `replace` meets."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.blocks = nnx.List([nnx.Conv(8, 8, (3, 3), feature_group_count=2, rngs=rngs) for _ in range(2)])
        self.shared = self.blocks[0]
        self.circular = nnx.Conv(8, 8, (3, 3), padding="CIRCULAR", rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), strides=(2, 2), rngs=rngs)
        self.head = nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 5, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in (*self.blocks, self.shared, self.circular):
            x = x + nnx.relu(block(x))
        return self.head(self.up(x).mean((1, 2)))


class OwnConv(nnx.Conv):
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return 2 * super().__call__(*args, **kwargs)


def test_replace_keeps_state_and_result() -> None:
    model, before = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    x = feature_map((2, 6, 6, 3))
    report = replace(model, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(before), nnx.state(model))
    close(nnx.jit(lambda m, x: m(x))(model, x), expected(before, x))
    assert {entry.path for entry in report.swapped} == {
        "stem",
        "blocks.0",
        "blocks.1",
        "head.layers.0",
        "head.layers.2",
    }
    assert {entry.path: entry.reason for entry in report.left} == {
        "circular": "padding='CIRCULAR' is not padding with zeros",
        "up": "there is no sparse ConvTranspose",
    }
    assert type(model.shared) is SparseConv
    assert model.stem.implementation == model.head.layers[2].implementation == "xla"
    assert "stem: Conv -> SparseConv" in str(report)
    assert "5 layers swapped, 2 left" in str(report)
    assert repr(report) == str(report)  # as notebooks show it
    assert repr(report.entries[0]) == str(report.entries[0])


def test_replace_leaves_what_it_does_not_know() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        OwnConv(3, 3, (3, 3), rngs=rngs),
        nnx.Conv(3, 3, (3,), rngs=rngs),
        nnx.Conv(3, 3, (3, 3), conv_general_dilated=jsc.conv_general_dilated, rngs=rngs),
        nnx.LinearGeneral((3,), (3,), rngs=rngs),
        nnx.Linear(3, 3, preferred_element_type=jnp.float32, rngs=rngs),
        SparseConv(3, 3, (3, 3), activation="relu", rngs=rngs),
    )
    report = replace(model)
    assert not report.swapped
    reasons = [entry.reason for entry in sorted(report.left, key=lambda entry: entry.path)]
    assert reasons[0] == "a subclass of Conv may compute something else"
    assert "(3,) is not two-dimensional" in reasons[1]
    assert "is not lax's" in reasons[2]
    assert reasons[3] == "there is no sparse LinearGeneral"
    assert "preferred_element_type" in reasons[4]
    assert reasons[5] == "already sparse"
    assert model.layers[5].activation == "relu"


def test_replace_a_bare_layer() -> None:
    layer = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    report = replace(layer)
    assert isinstance(layer, SparseConv)
    assert report.entries[0].path == ""
    assert nnx.graphdef(layer) == nnx.graphdef(SparseConv(3, 4, (3, 3), rngs=nnx.Rngs(0)))


def test_set_implementation() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        SparseConv(3, 4, (3, 3), rngs=rngs), SparseConvPool(4, 4, (3, 3), rngs=rngs), SparseLinear(4, 2, rngs=rngs)
    )
    set_implementation(model, conv="ecr", conv_pool="pecr", dense="xla")
    assert [layer.implementation for layer in model.layers] == ["ecr", "pecr", "xla"]
    set_implementation(model)
    assert [layer.implementation for layer in model.layers] == [None, None, None]
    with pytest.raises(ValueError, match="conv='pecr' is not one of None, 'xla', 'ecr'"):
        set_implementation(model, conv="pecr")
    with pytest.raises(
        ValueError, match=r"the Conv has no layer of this package; jax_sparse_conv.nnx.replace\(model\)"
    ):
        set_implementation(nnx.Conv(3, 4, (3, 3), rngs=rngs), conv="ecr")


def test_record_calls() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        SparseConv(3, 4, (3, 3), rngs=rngs), SparseConvPool(4, 4, (3, 3), rngs=rngs), SparseLinear(4, 2, rngs=rngs)
    )
    x = feature_map((1, 4, 4, 3))
    with record_calls() as calls:
        y = model(x)
        nnx.jit(lambda m, x: m(x))(model, x)
    model(x)
    paths = layer_paths(model)
    assert [paths[id(call.layer)] for call in calls] == ["layers.0", "layers.1", "layers.2"]
    assert calls[0].inputs is x
    assert calls[1].inputs is calls[0].output
    assert calls[2].output is y
    assert all(call.residual is None for call in calls)


@pytest.mark.parametrize("model", [{}, None, nn.Dense(3), [SparseLinear(2, 2, rngs=nnx.Rngs(0))], SparseLinear])
@pytest.mark.parametrize("function", [layer_paths, unpack, jit_inference, models.fold_batch_norm])
def test_what_is_no_model_is_refused(function: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(TypeError, match=rf"model is a {type(model).__name__}, which is not an nnx.Module"):
        function(model)


def test_bad_arguments_of_replace() -> None:
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="implementation='pecr' is not one of"):
        replace(Net(rngs), implementation="pecr")
    with pytest.raises(TypeError, match=r"^model is a list, which is not an nnx\.Module$"):
        replace([Net(rngs)])  # type: ignore[arg-type]
    assert set(ops.DENSE_IMPLEMENTATIONS) <= set(ops.CONV_IMPLEMENTATIONS)  # what replace() assumes
