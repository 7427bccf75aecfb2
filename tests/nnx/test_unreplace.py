"""`unreplace`: what `replace` changed is as it was, and what more was left says why."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax_checks import feature_map

import jax_sparse_conv as jsc
from jax_sparse_conv._src.layers.packed_params import PackedParam


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.inner = nnx.Sequential(nnx.Conv(16, 16, (3, 3), strides=2, rngs=rngs), nnx.relu)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.inner(nnx.relu(self.conv(x))).mean((1, 2)))


def taken_apart(model: nnx.Module) -> Any:
    graph, state = nnx.split(model)
    return graph, jax.tree.structure(state), [id(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("implementation", [None, "ecr"])
def test_a_model_is_what_it_was(implementation: str | None) -> None:
    model, x = Net(nnx.Rngs(0)), feature_map((2, 8, 8, 3))
    before, wanted = taken_apart(model), model(x)
    jsc.nnx.replace(model, implementation=implementation)
    assert taken_apart(model) != before
    report = jsc.nnx.unreplace(model)
    assert taken_apart(model) == before
    assert [type(layer) for layer in (model.conv, model.inner.layers[0], model.head)] == [
        nnx.Conv,
        nnx.Conv,
        nnx.Linear,
    ]
    np.testing.assert_array_equal(model(x), wanted)
    assert [(entry.path, entry.old_type, entry.new_type) for entry in report.swapped] == [
        ("conv", "SparseConv", "Conv"),
        ("head", "SparseLinear", "Linear"),
        ("inner.layers.0", "SparseConv", "Conv"),
    ]
    assert not report.left
    assert not jsc.nnx.unreplace(model).entries


def test_a_layer_that_is_replaced_again() -> None:
    model = nnx.Conv(3, 16, (3, 3), rngs=nnx.Rngs(0))
    for _ in range(2):
        assert len(jsc.nnx.replace(model).swapped) == 1
        assert len(jsc.nnx.unreplace(model).swapped) == 1
    assert type(model) is nnx.Conv


def test_what_is_left() -> None:
    class Own(jsc.nnx.SparseConv):
        pass

    rngs = nnx.Rngs(0)
    folded = nnx.Sequential(nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs))
    folded.eval()
    jsc.nnx.replace(folded, fold=True)
    model = nnx.List(
        [
            jsc.nnx.SparseConv(3, 16, (3, 3), activation="relu", rngs=rngs),
            jsc.nnx.SparseConvPool(3, 16, (3, 3), rngs=rngs),
            Own(3, 16, (3, 3), rngs=rngs),
            folded,
        ]
    )
    report = jsc.nnx.unreplace(model)
    assert [entry.new_type for entry in report.swapped] == ["Conv"]
    assert {entry.old_type: entry.reason for entry in report.left} == {
        "SparseConv": "activation='relu' is part of it",
        "SparseConvPool": "Flax's layers have no pool",
        "Own": "a subclass of SparseConv",
        "FoldedBatchNorm": "it is part of the layer in front of it, which cannot be undone",
    }
    with pytest.raises(TypeError, match=r"model is a dict, which is not an nnx\.Module"):
        jsc.nnx.unreplace({})  # type: ignore[arg-type]


def test_a_packed_kernel_is_unpacked_first() -> None:
    model = jsc.nnx.SparseConv(16, 16, (3, 3), rngs=nnx.Rngs(0))
    if not jsc.nnx.pack(model):
        pytest.skip("kernels have packed copies on a CPU only")
    assert isinstance(model.kernel, PackedParam)
    (entry,) = jsc.nnx.unreplace(model).left
    assert entry.reason == "its kernel is packed; unpack the model first"
    jsc.nnx.unpack(model)
    assert len(jsc.nnx.unreplace(model).swapped) == 1
