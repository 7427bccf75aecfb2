"""Dense layers at the end of chains that `rewrite.fuse` makes: which rows they may read, and which stay outside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import equations, names, weights
from jax import lax

import jax_sparse_conv as jsc
from jax_sparse_conv._src.fusion import chain_rules, rewrite


def classifier(
    x: jax.Array,
    *,
    scale: float | None = None,
    axes: tuple[int, ...] = (1, 2),
    flat: bool = False,
    out_channels: int = 12,
) -> jax.Array:
    """Two convolutions of x [N, 5, 7, 8], the average of their pixels or all of them, and two dense layers."""
    with jax.default_matmul_precision("highest"):
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8), activation="relu")
        row = y.reshape(y.shape[0], -1) if flat else jnp.sum(y * (1 / 35 if scale is None else scale), axis=axes)
        row = jsc.dense(row.reshape(y.shape[0], -1), weights(3, row.size // y.shape[0], 16), activation="relu")
        return jsc.dense(row, weights(4, 16, out_channels), weights(5, out_channels))


@pytest.mark.parametrize("flat", [False, True])
def test_dense_layers_of_a_row_end_a_chain(flat: bool) -> None:
    x = weights(0, 1, 5, 7, 8)
    fused = rewrite.fuse(lambda x: classifier(x, flat=flat))
    assert names(fused, x) == ["chain 4"]
    (equation,) = equations(fused, x)
    layers = equation.params["layers"]
    assert equation.params["results"] == (3,)
    assert [(layer.x, layer.averages) for layer in layers] == [(0, False), (~0, False), (~1, not flat), (~2, False)]
    np.testing.assert_allclose(fused(x), classifier(x, flat=flat), rtol=1e-5, atol=1e-5)


def test_dense_layers_that_do_not_end_a_chain() -> None:
    x, two = weights(0, 1, 5, 7, 8), weights(0, 2, 5, 7, 8)
    assert names(rewrite.fuse(classifier), two) == ["chain 2", "conv", "conv"]  # two rows
    assert names(rewrite.fuse(lambda x: classifier(x, scale=0.5)), x) == ["chain 2", "conv", "conv"]  # no average
    assert names(rewrite.fuse(lambda x: classifier(x, axes=(1,))), x) == ["chain 2", "conv", "conv"]
    assert names(rewrite.fuse(lambda x: classifier(x, out_channels=10)), x) == ["chain 3", "conv"]  # not whole 16 bytes

    def with_another_reader(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        row = jnp.sum(y * (1 / 35), axis=(1, 2))
        return jsc.dense(row, weights(3, 8, 12)), row

    assert names(rewrite.fuse(with_another_reader), x) == ["chain 2", "conv"]
    for found, expected in zip(rewrite.fuse(with_another_reader)(x), with_another_reader(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_mean_over_height_and_width_is_part_of_a_chain(dtype: str) -> None:
    def function(x: jax.Array, between: Any = None, scale: float | None = None) -> jax.Array:
        y = jsc.conv(jsc.conv(x, kernels[0]), kernels[1], activation="relu")
        row = jnp.mean(y if between is None else y.astype(between).astype(dtype), axis=(1, 2))
        return jsc.dense(row if scale is None else row * scale, kernels[2])

    shapes = ((3, 3, 8, 8), (3, 3, 8, 16), (16, 24))
    kernels = [weights(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    x = weights(9, 1, 5, 7, 8).astype(dtype)
    with jax.default_matmul_precision("highest"):
        assert names(rewrite.fuse(function), x) == ["chain 3"]
        found, expected = (np.asarray(each(x), np.float64) for each in (rewrite.fuse(function), function))
        np.testing.assert_allclose(found, expected, rtol=0, atol={"float32": 1e-5}.get(dtype, 0.05))
        assert names(rewrite.fuse(lambda x: function(x, scale=2.0)), x) == ["chain 2", "conv"]
        rounded = "float8_e4m3fn" if dtype == "bfloat16" else "bfloat16"
        assert names(rewrite.fuse(lambda x: function(x, between=rounded)), x) == ["chain 2", "conv"]


def body(x: jax.Array, out_channels: int = 8, layers: int = 2) -> jax.Array:
    """3x3 convolutions of x [N, H, W, 8]."""
    for index in range(layers):
        kernel = weights(index, 3, 3, 8, out_channels if index == layers - 1 else 8)
        x = jsc.conv(x, kernel, activation="relu", precision="highest")
    return x


def dense(x: jax.Array, out_channels: int = 16) -> jax.Array:
    return jsc.dense(x, weights(9, x.shape[-1], out_channels), precision="highest")


@pytest.mark.parametrize(
    ("function", "images"),
    [
        (lambda x: dense(body(x).ravel(order="F")), 1),
        (lambda x: dense(lax.reshape(body(x), (1, 280), (0, 3, 1, 2))), 1),
        (lambda x: dense(jnp.mean(lax.reshape(body(x[:, :, :5]), (1, 5, 5, 8), (0, 2, 1, 3)), (1, 2))), 1),
        (lambda x: dense(body(x).reshape(1, -1)), 2),
        (lambda x: dense(body(x).reshape(-1)), 2),
        (lambda x: dense(jnp.mean(body(x), (1, 2)).reshape(1, -1)), 2),
    ],
    ids=["columns first", "channels first", "mean of a transposed map", "two images", "a vector", "two means"],
)
def test_rows_in_another_order_or_of_several_images_stay_outside(function: Any, images: int) -> None:
    x = weights(0, images, 5, 7, 8)
    assert names(rewrite.fuse(function), x) == ["chain 2", "conv"]
    np.testing.assert_allclose(jax.jit(rewrite.fuse(function))(x), jax.jit(function)(x), rtol=1e-5, atol=1e-5)


def test_heads_do_not_part_the_convolutions() -> None:
    def heads(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = body(x)
        first = dense(jnp.mean(y, (1, 2)))
        return first, dense(body(y).reshape(1, -1))

    def towers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = dense(jnp.mean(body(x), (1, 2)))
        return first, dense(jnp.mean(body(x, 16), (1, 2)))

    def of_one_map(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = body(x)
        return dense(y.reshape(1, -1)), dense(jnp.mean(y, (1, 2)))

    def of_one_row(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        row = body(x).reshape(1, -1)
        hidden = dense(row)
        return hidden, dense(hidden), dense(row, 24)

    x = weights(0, 1, 5, 7, 8)
    for function, layers in ((heads, 6), (towers, 6), (of_one_map, 4), (of_one_row, 5)):
        assert names(rewrite.fuse(function), x) == [f"chain {layers}"]
        for found, expected in zip(jax.jit(rewrite.fuse(function))(x), jax.jit(function)(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_a_convolution_waits_for_ends_the_chain_in_front(float32_products: None) -> None:
    """Squeeze and excitation, with a projection that the next fused chain has."""

    def function(x: jax.Array) -> jax.Array:
        y = body(x)
        scale = jax.nn.sigmoid(dense(dense(jnp.mean(y, (1, 2))), 8))
        return body(y * scale[:, None, None, :])

    x = weights(0, 1, 5, 7, 8)
    assert names(rewrite.fuse(function), x) == ["chain 4", "chain 2"]
    np.testing.assert_allclose(jax.jit(rewrite.fuse(function))(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)


def test_dense_layers_count_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = weights(0, 1, 5, 7, 8)
    for most, found in ((5, ["chain 5"]), (4, ["chain 4", "conv"])):
        monkeypatch.setattr(chain_rules, "MAX_LAYERS", most)
        assert names(rewrite.fuse(lambda x: dense(body(x, layers=4).reshape(1, -1))), x) == found


def test_a_convolution_and_a_dense_layer_are_no_chain() -> None:
    assert names(rewrite.fuse(lambda x: dense(body(x, layers=1).reshape(1, -1))), weights(0, 1, 5, 7, 8)) == [
        "conv",
        "conv",
    ]


def test_means_of_large_maps_stay_outside() -> None:
    x = weights(0, 1, 24, 24, 8)
    assert names(rewrite.fuse(lambda x: dense(jnp.mean(body(x), (1, 2)))), x) == ["chain 2", "conv"]
    assert names(rewrite.fuse(lambda x: dense(jnp.mean(body(x[:, ::2]), (1, 2)))), x) == ["chain 3"]
    assert names(rewrite.fuse(lambda x: dense(body(x).reshape(1, -1))), x) == ["chain 3"]
    reason = chain_rules.why_not_average((1, 7, 7, 4104), 2048, 4)
    assert reason == "the average of (1, 7, 7, 4104) takes a block 17 rounds"
    assert chain_rules.why_not_average((1, 7, 7, 4104), 1000, 4) is None


def test_a_map_that_others_read_too_is_a_result() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        return jsc.dense(y.reshape(1, -1), weights(3, 280, 12)), jnp.tanh(y)

    x = weights(0, 1, 5, 7, 8)
    assert names(rewrite.fuse(function), x) == ["chain 3"]
    (equation,) = equations(rewrite.fuse(function), x)
    assert equation.params["results"] == (1, 2)
    for found, expected in zip(rewrite.fuse(function)(x), function(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_convolutions_behind_a_dense_layer_are_another_chain() -> None:
    def function(x: jax.Array) -> jax.Array:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        row = jsc.dense(y.reshape(1, -1), weights(3, 280, 32)).reshape(1, 2, 2, 8)
        return jsc.conv(jsc.conv(row, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))

    x = weights(0, 1, 5, 7, 8)
    assert names(rewrite.fuse(function), x) == ["chain 3", "chain 2"]
    np.testing.assert_allclose(rewrite.fuse(function)(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flat", [False, True])
def test_transformations_of_a_chain_with_dense_layers(flat: bool) -> None:
    x, images = weights(0, 1, 5, 7, 8), weights(0, 3, 1, 5, 7, 8)
    fused = rewrite.fuse(lambda x: classifier(x, flat=flat))
    expected = jnp.stack([classifier(image, flat=flat) for image in images])
    np.testing.assert_allclose(jax.jit(jax.vmap(fused))(images), expected, rtol=1e-5, atol=1e-5)

    def loss(function: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(function(x) ** 2)

    found = jax.grad(lambda x: loss(fused, x))(x)
    np.testing.assert_allclose(
        found, jax.grad(lambda x: loss(lambda y: classifier(y, flat=flat), x))(x), rtol=1e-3, atol=1e-3
    )
