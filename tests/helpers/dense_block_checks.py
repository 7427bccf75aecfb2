"""Runs of the kernel of dense blocks, and a DenseNet that is made of them."""

from __future__ import annotations

from typing import Any

import cases
import jax
import numpy as np
import pytest
from flax import nnx
from networks import copied
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.fusion.block_parameters import DenseBlockLayer, DenseTransition
from jax_sparse_conv.models.densenet import DenseNet


def require_kernel(dtype: str) -> None:
    reason = _native.why_missing("dense_block", PLATFORM, dtype)
    if reason is None and _native.device_properties(0)["major"] < 9:
        reason = "the kernel of dense blocks needs compute capability 9.0"
    if reason is not None:
        pytest.skip(reason)


def run(x: Any, layers: list[DenseBlockLayer], precision: str, transition: DenseTransition | None = None) -> np.ndarray:
    """The kernel's result, of memory that held NaN before; twice the same."""
    options: Any = {"precision": precision, "implementation": "fused"}
    function = jax.jit(lambda x, layers, behind: jsc.dense_block(x, layers, transition=behind, **options))
    operands = jax.tree.map(cases.on_device, (x, layers, transition))
    assert "jsc_dense_block" in function.lower(*operands).as_text()
    shape = jax.eval_shape(function, *operands)
    buffers = [jax.device_put(np.full(shape.shape, np.nan, shape.dtype)) for _ in range(3)]
    jax.block_until_ready(buffers)
    for buffer in buffers:
        buffer.delete()
    first, again = np.asarray(function(*operands)), np.asarray(function(*operands))
    np.testing.assert_array_equal(first.astype(np.float64), again.astype(np.float64))
    return first


def check_same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, tree) for tree in (found, wanted)))


@copied
def small_densenet(fold: bool = True) -> DenseNet:
    model = DenseNet((2, 3), 10, width=64, rngs=nnx.Rngs(0))
    if fold:
        models.fold_batch_norm(model)
    return model


def blocks_of(model: DenseNet, x: jax.Array) -> int:
    """How many blocks of a network are one call."""
    return str(jax.make_jaxpr(lambda x: model(x))(x)).count("jsc_dense_block[")
