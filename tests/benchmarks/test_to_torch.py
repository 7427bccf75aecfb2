"""The translation of dense networks to PyTorch: the same results as JAX's, and no transposes between layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from benchmarks.common import prepared
from benchmarks.networks import to_torch
from jax_sparse_conv import models

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'jax-sparse-conv[peers]'")

RNG = np.random.default_rng(0)
NUMBERS = ("NHWC", "HWIO", "NHWC")


def weights(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


IMAGE = weights(2, 9, 8, 6)
KERNEL, BIAS, ROWS = weights(3, 3, 6, 4), weights(4), weights(6, 5)


def conv(x: jax.Array, padding: Any = "SAME", kernel: jax.Array = KERNEL, **more: Any) -> jax.Array:
    strides = more.pop("window_strides", (1, 1))
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NUMBERS, **more)


def windows(x: jax.Array, init: float, function: Any, size: int, stride: int, padding: Any, **more: Any) -> jax.Array:
    pads = ((0, 0), *padding, (0, 0))
    return lax.reduce_window(x, init, function, (1, size, size, 1), (1, stride, stride, 1), pads, **more)


def pooled(x: jax.Array) -> jax.Array:
    return jnp.sum(x * (1 / 72), axis=(1, 2))


# With the operations of the module, without those that put axes in order.
FUNCTIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], list[str]]] = {
    "a bias is the convolution's": (lambda x: jax.nn.relu(conv(x) + BIAS), ["conv2d", "relu"]),
    "a convolution that is read twice": (lambda x: (y := conv(x)) * (y + BIAS), ["conv2d", "conv2d", "mul"]),
    "two biases": (lambda x: conv(x) + BIAS + BIAS, ["conv2d", "add"]),
    "padding that differs": (lambda x: conv(x, ((0, 1), (2, 0)), window_strides=(2, 2)), ["pad", "conv2d"]),
    "groups and dilation": (
        lambda x: conv(x, kernel=KERNEL[:, :, :3], feature_group_count=2, rhs_dilation=(2, 1)),
        ["conv2d"],
    ),
    "a residual": (lambda x: jax.nn.relu(conv(x) + BIAS + x[..., :4]), ["conv2d", "getitem", "add", "relu"]),
    "a batch norm": (lambda x: jax.nn.relu(x * ROWS[:, 0] + ROWS[:, 1]), ["batch_norm", "relu"]),
    "factors of pixels": (lambda x: x * x[:1, :, :, :1] + 2.0, ["getitem", "mul", "add"]),
    "a max pool": (lambda x: windows(x, -jnp.inf, lax.max, 3, 2, ((1, 1), (1, 1))), ["max_pool2d"]),
    "a max pool's padding": (lambda x: windows(x, -jnp.inf, lax.max, 2, 2, ((0, 1), (0, 0))), ["pad", "max_pool2d"]),
    "a dilated max pool": (
        lambda x: windows(x, -jnp.inf, lax.max, 3, 1, ((0, 0), (0, 0)), window_dilation=(1, 2, 2, 1)),
        ["max_pool2d"],
    ),
    "an average pool": (lambda x: windows(x, 0.0, lax.add, 2, 2, ((0, 0), (0, 0))) / 4, ["avg_pool2d"]),
    "a sum of windows": (lambda x: windows(x, 0.0, lax.add, 3, 1, ((1, 1), (1, 1))), ["avg_pool2d", "mul"]),
    "a mean of all pixels": (pooled, ["avg_pool2d", "flatten"]),
    "a sum of all pixels": (lambda x: jnp.sum(x, axis=(1, 2)), ["sum"]),
    "a sum over channels": (lambda x: jnp.sum(x, axis=3), ["sum"]),
    "rows": (lambda x: pooled(x) @ ROWS + ROWS[0], ["avg_pool2d", "flatten", "linear"]),
    "a flattened map": (lambda x: x.reshape(2, -1) @ jnp.tile(ROWS, (72, 1)), ["flatten", "linear"]),
    "a flattened map, on its own": (lambda x: x.reshape(2, -1), ["reshape"]),
    "a product of other axes": (lambda x: jnp.tensordot(x, ROWS.T[:, :6], ((3,), (1,))), ["tensordot"]),
    "maps side by side": (lambda x: jnp.concatenate([x, conv(x), jnp.ones((2, 9, 8, 1))], 3), ["conv2d", "cat"]),
    "slices and padding": (
        lambda x: lax.pad(x[:, 1::3, :5], 2.0, ((0, 0, 0), (1, -1, 0), (0, 2, 0), (0, 1, 0))),
        ["getitem", "pad"],
    ),
    "arithmetic": (
        lambda x: jnp.maximum(1 - x / 3, lax.max(x - 2, 0.5)) - x,
        ["truediv", "sub", "sub", "clamp", "maximum", "sub"],
    ),
    "transposed": (lambda x: jnp.transpose(x, (0, 2, 1, 3)), []),
    "values of each image": (
        lambda x: x * pooled(x)[:, None, None, :],
        ["avg_pool2d", "flatten", "reshape", "mul"],
    ),
    "under jit": (jax.jit(lambda x: jax.nn.relu(lax.squeeze(x[:1], (0,)))), ["getitem", "reshape", "relu"]),
}


def run(module: Any, x: jax.Array) -> np.ndarray:
    given = torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        return np.asarray(module(given))


def called(module: Any) -> list[str]:
    return [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]


def check(function: Callable[[jax.Array], jax.Array], module: Any, x: jax.Array, limit: float) -> None:
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(function)(x))
    found = run(module, x)
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= limit * np.linalg.norm(expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_jax_computes(name: str) -> None:
    function, names = FUNCTIONS[name]
    module = to_torch.module(function, IMAGE.shape)
    assert [each for each in called(module) if each not in ("permute", "expand")] == names
    assert len(list(module.parameters())) == len([node for node in module.graph.nodes if node.op == "get_attr"])
    check(function, module, IMAGE, 1e-6)


REFUSED: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "a primitive": (jnp.sin, "the primitive 'sin' has no translation"),
    "a dtype": (lambda x: x.astype(jnp.bfloat16), "from float32 to bfloat16"),
    "a kernel": (lambda x: conv(x, kernel=x[:1, :3, :3].reshape(3, 3, 6, 1)), "a kernel that depends on the image"),
    "an input that is dilated": (lambda x: conv(x, ((1, 1), (1, 1)), lhs_dilation=(2, 2)), "lhs_dilation"),
    "a layout": (
        lambda x: lax.conv_general_dilated(x, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NCHW")),
        "dimension_numbers",
    ),
    "windows of channels": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 1, 2), (1, 1, 1, 2), "VALID"),
        "over images or channels",
    ),
    "a product of each image": (lambda x: jnp.matmul(x, x.transpose(0, 1, 3, 2)), "batch dimensions"),
    "space between elements": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0))), "pad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_translation_is_named(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        to_torch.module(function, IMAGE.shape)


def test_a_function_has_one_result() -> None:
    with pytest.raises(ValueError, match="returns 2 arrays"):
        to_torch.module(lambda x: (x, x), IMAGE.shape)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", ["vgg19", "resnet50", "densenet121", "regnetx_400mf"])
def test_networks(name: str) -> None:
    """Tiny ones, with weights as initialised and biases that are not zero."""
    model = prepared._folded(name, quick=True)
    moved = lambda leaf: leaf + 0.1 * weights(*leaf.shape) if leaf.ndim == 1 else leaf  # noqa: E731
    nnx.update(model, jax.tree.map(moved, nnx.state(model)))
    models.set_network_implementation(model, "xla")
    x = weights(2, 16, 16, 3)
    function = lambda x: model(x)  # noqa: E731
    module = to_torch.module(function, x.shape)
    counts = Counter(called(module))
    if name != "densenet121":  # whose batch norms are in front of convolutions
        assert all(node.args[2] is not None for node in module.graph.nodes if node.target is torch.conv2d)
    if name != "vgg19":  # whose pool to a fixed size is a product in JAX, where it does anything
        assert counts["permute"] == counts["mul"] == 0
    assert (counts["batch_norm"] > 0) == (name == "densenet121")
    check(function, module, x, 1e-5)


def test_no_transpose_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'jax-sparse-conv[peers]'")
    onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'jax-sparse-conv[peers]'")
    function = lambda x: pooled(jax.nn.relu(conv(conv(x) + BIAS, kernel=weights(1, 1, 4, 3)))) @ ROWS[:3]  # noqa: E731
    module = to_torch.module(function, IMAGE.shape)
    path = tmp_path / "network.onnx"
    torch.onnx.export(module, (torch.zeros(2, 6, 9, 8),), str(path), dynamo=True, verbose=False)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("Conv") == 2
    assert "Transpose" not in nodes
