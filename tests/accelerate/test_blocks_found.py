"""Blocks of a DenseNet are found in any spelling, and are what the layers were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import relative_error

import jax_sparse_conv as jsc

C0, LAYERS = 64, 3

pytestmark = pytest.mark.usefixtures("dense_blocks_as_on_a_gpu", "float32_products")


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def norm(x: jax.Array, of: Sequence[jax.Array]) -> jax.Array:
    """As Flax spells it."""
    mean, variance, scale, bias = of
    return jax.nn.relu((x - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias)


def other_norm(x: jax.Array, of: Sequence[jax.Array]) -> jax.Array:
    """As Keras and others spell it."""
    mean, variance, scale, bias = of
    inverse = scale / jnp.sqrt(variance + 1e-3)
    return jnp.maximum(x * inverse + (bias - mean * inverse), 0)


def weights() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def of_norm(channels: int) -> list[jax.Array]:
        return [jax.random.uniform(next(keys), (channels,), minval=0.3) for _ in range(4)]

    def kernel(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / np.sqrt(np.prod(shape[:3]))

    channels, layers = C0, []
    for _ in range(LAYERS):
        layers.append((of_norm(channels), kernel(1, 1, channels, 128), of_norm(128), kernel(3, 3, 128, 32)))
        channels += 32
    return layers, of_norm(channels), kernel(1, 1, channels, 64)


def appended(x: jax.Array, layers: Any, norm: Callable[..., jax.Array] = norm) -> jax.Array:
    for first, kernel1, second, kernel2 in layers:
        x = jnp.concatenate([x, conv(norm(conv(norm(x, first), kernel1), second), kernel2)], axis=-1)
    return x


def listed(x: jax.Array, layers: Any) -> jax.Array:
    """As torchvision spells it: each layer concatenates everything."""
    maps = [x]
    for first, kernel1, second, kernel2 in layers:
        maps.append(conv(norm(conv(norm(jnp.concatenate(maps, -1), first), kernel1), second), kernel2))
    return jnp.concatenate(maps, -1)


def transition(x: jax.Array, weights: Any) -> jax.Array:
    y = conv(norm(x, weights[1]), weights[2])
    return lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


def with_another_reader(x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
    """The map between the second and the third layer has another reader."""
    middle = appended(x, weights[0][:2])
    return appended(middle, weights[0][2:]), middle.sum()


def folded(layers: Any) -> list[jsc.DenseBlockLayer]:
    found = []
    for (mean, variance, scale, bias), kernel1, second, kernel2 in layers:
        factor, other = (each[2] * lax.rsqrt(each[1] + 1e-3) for each in ((mean, variance, scale), second))
        shift = second[3] - second[0] * other
        found.append(jsc.DenseBlockLayer(factor, bias - mean * factor, kernel1 * other, shift, kernel2))
    return found


def last_twice(x: jax.Array, layers: Any) -> tuple[jax.Array, jax.Array]:
    """What the last layer appends has another reader."""
    first, kernel1, second, kernel2 = layers[-1]
    x = appended(x, layers[:-1])
    y = conv(norm(conv(norm(x, first), kernel1), second), kernel2)
    return jnp.concatenate([x, y], axis=-1), y.sum()


def tapped(x: jax.Array, layers: Any) -> list[jax.Array]:
    """Each map is concatenated anew for its layer and for who looks at it."""
    maps, taps = [x], []
    for first, kernel1, second, kernel2 in layers:
        maps.append(conv(norm(conv(norm(jnp.concatenate(maps, -1), first), kernel1), second), kernel2))
        taps.append(jnp.concatenate(maps, -1).sum())
    return [*taps, jnp.concatenate(maps, -1).max()]


def inside_out(x: jax.Array, layers: Any) -> list[jax.Array]:
    """What a layer computes first is a result, too."""
    first, kernel1, second, kernel2 = layers[0]
    y = norm(x, first)
    z = norm(conv(y, kernel1), second)
    return [jnp.concatenate([x, conv(z, kernel2)], axis=-1), y, z.mean()]


def with_its_scaled_map(x: jax.Array, weights: Any) -> list[jax.Array]:
    """A transition whose first result has another reader."""
    x = appended(x, weights[0])
    y = norm(x, weights[1])
    pooled = lax.reduce_window(conv(y, weights[2]), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return [pooled, y]


def other_middle(layers: Any) -> Any:
    """The second layer has 64 channels in its middle."""
    first, kernel1, second, kernel2 = layers[1]
    return [layers[0], (first, kernel1[..., :64], [each[:64] for each in second], kernel2[:, :, :64]), *layers[2:]]


def with_other_windows(x: jax.Array, weights: Any) -> jax.Array:
    """A transition with a window of 3x3."""
    x = norm(appended(x, weights[0]), weights[1])
    kernel = jnp.broadcast_to(weights[2], (3, 3, *weights[2].shape[2:]))
    y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


FUNCTIONS: dict[str, tuple[Callable[[Any, jax.Array], Any], int | None]] = {
    "appended": (lambda w, x: appended(x, w[0]).mean((1, 2)), 6),
    "listed": (lambda w, x: listed(x, w[0]).mean((1, 2)), 6),
    "another norm": (lambda w, x: appended(x, w[0], other_norm), 6),
    "with a transition": (lambda w, x: transition(appended(x, w[0]), w), 7),
    "listed, with a transition": (lambda w, x: transition(listed(x, w[0]), w), 7),
    "after a layer": (lambda w, x: appended(jax.nn.relu(conv(x, jnp.ones((1, 1, 64, 64)) / 64)), w[0]), 6),
    "of another reader": (lambda w, x: with_another_reader(x, w), 6),
    "one layer": (lambda w, x: appended(x, w[0][:1]), 2),
    "by dense_block": (lambda w, x: jsc.dense_block(x, folded(w[0])), 6),
    "what is appended last, twice": (lambda w, x: last_twice(x, w[0]), 4),
    "with taps": (lambda w, x: tapped(x, w[0]), 0),
    "inside out": (lambda w, x: inside_out(x, w[0]), 0),
    "with the transition's map": (lambda w, x: with_its_scaled_map(x, w), 6),
    "another middle": (lambda w, x: appended(x, other_middle(w[0])), 0),
    "windows of a transition": (lambda w, x: with_other_windows(x, w), 6),
    "two branches": (lambda w, x: (appended(x, w[0][:1]).sum(), appended(x, w[0])), None),
    "in another order": (lambda w, x: jnp.concatenate([conv(x, w[2][:, :, :64]), x], -1), 0),
}


def wide_norm(x: jax.Array, of: Sequence[jax.Array]) -> jax.Array:
    """As Flax and Keras compute it for maps of 16 bits: in float32."""
    mean, variance, scale, bias = of
    inverse = scale / jnp.sqrt(variance + 1e-3)
    return jax.nn.relu((x.astype(jnp.float32) * inverse + (bias - mean * inverse)).astype(x.dtype))


def converted_last(x: jax.Array, of: Sequence[jax.Array]) -> jax.Array:
    """The ReLU in float32 as well."""
    mean, variance, scale, bias = of
    return jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias).astype(x.dtype)


@pytest.mark.parametrize("spelled", [wide_norm, converted_last])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_blocks_of_16_bits(dtype: str, spelled: Callable[..., jax.Array]) -> None:
    given = jax.tree.map(lambda each: each.astype(dtype) if each.ndim == 4 else each, weights())
    x = jax.nn.relu(jax.random.normal(jax.random.key(3), (1, 14, 14, C0))).astype(dtype)
    predict = jsc.jit_inference(lambda w, x: appended(x, w[0], spelled), given)
    assert sum(row.runs.startswith("dense block") for row in predict.report(x).rows) == 6
    exact = appended(x.astype(jnp.float32), jax.tree.map(lambda each: each.astype(jnp.float32), given[0]))
    assert predict(x).dtype == dtype
    assert relative_error(predict(x), np.asarray(exact, np.float64)) < {"bfloat16": 1e-2, "float16": 1e-3}[dtype]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [7, 14])
def test_blocks(name: str, size: int) -> None:
    (function, count), given = FUNCTIONS[name], weights()
    x = jax.nn.relu(jax.random.normal(jax.random.key(3), (1, size, size, C0)))
    predict = jsc.jit_inference(function, given)
    rows = predict.report(x).rows
    assert count is None or sum(row.runs.startswith("dense block") for row in rows) == count
    assert all(row.reason is None for row in rows)
    for found, wanted in zip(jax.tree.leaves(predict(x)), jax.tree.leaves(function(given, x)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_weights_are_one_array() -> None:
    function, given = FUNCTIONS["with a transition"][0], weights()
    x = jax.random.normal(jax.random.key(3), (1, 14, 14, C0))
    predict = jsc.jit_inference(function, given)
    assert len(predict.prepared(x)) == 1
    predict.update(jax.tree.map(lambda each: 1.1 * each, given))
    wanted = function(jax.tree.map(lambda each: 1.1 * each, given), x)
    np.testing.assert_allclose(predict(x), wanted, rtol=1e-4, atol=1e-4)


def test_weights_that_are_arguments_and_derivatives() -> None:
    function, given = FUNCTIONS["appended"][0], weights()
    x = jax.random.normal(jax.random.key(3), (1, 7, 7, C0))
    fast = jsc.accelerate(function)
    np.testing.assert_allclose(jax.jit(fast)(given, x), function(given, x), rtol=1e-4, atol=1e-4)
    found, wanted = (jax.jit(jax.grad(lambda w, x, f=f: jnp.sin(f(w, x)).sum()))(given, x) for f in (fast, function))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("spelled", "computed"), [("scale first", []), ("shift first", ["sub", "mul", "div"])])
def test_folded_batch_norms_are_read_as_they_are(spelled: str, computed: list[str]) -> None:
    """Each operation on parameters that are arguments is a kernel in every call on a GPU."""

    def norm_of(x: jax.Array, of: Sequence[jax.Array]) -> jax.Array:
        scale, shift, *_ = of
        if spelled == "scale first":
            return jax.nn.relu(x * scale + shift)
        return jax.nn.relu((shift - x) / scale)

    def function(weights: Any, x: jax.Array) -> jax.Array:
        for first, kernel1, second, kernel2 in weights[0]:
            y = jax.nn.relu(conv(norm_of(x, first), kernel1) + second[0])
            x = jnp.concatenate([x, conv(y, kernel2)], axis=-1)
        return x

    given, x = weights(), jax.random.normal(jax.random.key(3), (1, 7, 7, C0))
    fast = jsc.accelerate(function)
    np.testing.assert_allclose(jax.jit(fast)(given, x), function(given, x), rtol=1e-4, atol=1e-4)
    found = [equation.primitive.name for equation in jax.make_jaxpr(fast)(given, x).eqns]
    assert "jsc_dense_block" in found
    arithmetic = {name for name in found if name in ("add", "sub", "mul", "div", "neg")}
    assert arithmetic <= set(computed), found


def test_channels_first() -> None:
    given = weights()

    def function(weights: Any, x: jax.Array) -> jax.Array:
        x = conv_first(x, jnp.ones((1, 1, C0, C0)) / C0)
        for first, kernel1, second, kernel2 in weights[0]:
            y = norm_first(conv_first(norm_first(x, first), kernel1), second)
            x = jnp.concatenate([x, conv_first(y, kernel2)], axis=1)
        return x

    def conv_first(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel.transpose(3, 2, 0, 1), (1, 1), "SAME")

    def norm_first(x: jax.Array, of: Sequence[jax.Array]) -> jax.Array:
        return norm(x, [each[:, None, None] for each in of])

    x = jax.random.normal(jax.random.key(3), (1, C0, 7, 7))
    predict = jsc.jit_inference(function, given)
    assert sum(row.runs == "dense block 1" for row in predict.report(x).rows) == 6
    np.testing.assert_allclose(predict(x), function(given, x), rtol=1e-4, atol=1e-4)
