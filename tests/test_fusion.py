"""`fuse`: which equations end in a segment, with the same results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import block, block_parameters, equations, names, small_resnet, weights
from jax import lax

import jax_sparse_conv as jsc
from jax_sparse_conv import fusion, segment_rules

TF32 = 5e-4  # relative (Frobenius), of a layer


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        jsc.fuse(3)  # type: ignore[type-var]


def test_a_block_becomes_one_segment() -> None:
    x, parameters = weights(0, 1, 9, 9, 8), block_parameters()
    assert names(jsc.fuse(block), x, parameters) == ["segment 4"]
    (equation,) = equations(jsc.fuse(block), x, parameters)
    assert equation.params["results"] == (3,)
    assert [layer.x for layer in equation.params["layers"]] == [0, 0, ~1, ~2]
    assert equation.params["layers"][3].residual == ~0


def test_convolutions_in_jitted_functions_join() -> None:
    x, parameters = weights(0, 1, 9, 9, 8), block_parameters()
    inner = jax.jit(lambda x: block(x, parameters))
    assert names(jsc.fuse(lambda x: jax.jit(lambda y: inner(y)[..., :8])(x)), x) == ["segment 4"]
    twice = jsc.fuse(lambda x: inner(inner(x)[..., :8]))
    assert names(twice, x) == ["segment 4", "segment 4"]
    np.testing.assert_allclose(twice(x), inner(inner(x)[..., :8]), rtol=1e-5, atol=1e-5)


def test_what_needs_a_result_waits_and_what_does_not_goes_first() -> None:
    parameters = block_parameters()

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(x, parameters[1])
        density = jsc.density(y)
        return jsc.conv(y, parameters[2] * 2), density

    assert names(jsc.fuse(function), weights(0, 1, 5, 5, 8)) == ["segment 2"]
    between = jsc.fuse(lambda x: jsc.conv(jnp.tanh(jsc.conv(x, parameters[1])), parameters[2]))
    assert names(between, weights(0, 1, 5, 5, 8)) == ["conv", "conv"]


def test_what_the_kernel_lacks_stays_a_convolution() -> None:
    grouped = weights(1, 3, 3, 4, 8)
    plain = weights(2, 3, 3, 8, 8)

    def function(x: jax.Array, **options: Any) -> jax.Array:
        y = jsc.conv(jsc.conv(x, plain), plain, **options)
        return jsc.conv(y, plain)

    x = weights(0, 1, 9, 9, 8)
    assert names(jsc.fuse(function), x) == ["segment 3"]
    assert names(jsc.fuse(function), weights(0, 9, 9, 9, 8)) == ["conv"] * 3
    assert names(jsc.fuse(lambda x: jsc.conv(function(x), grouped, feature_group_count=2)), x) == ["segment 3", "conv"]
    wide = weights(1, 1, 1, 8, 128), weights(2, 3, 3, 32, 256)
    in_groups = lambda x: jsc.conv(jsc.conv(x, wide[0]), wide[1], feature_group_count=4)  # noqa: E731
    assert names(jsc.fuse(in_groups), x) == ["segment 2"]
    image = weights(0, 1, 9, 9, 3)
    of_image = lambda x: jsc.conv(jsc.conv(x, weights(1, 3, 3, 3, 8)), plain)  # noqa: E731
    assert names(jsc.fuse(of_image), image) == ["segment 2"]
    dilated = lambda x: jsc.conv(jsc.conv(x, weights(1, 3, 3, 3, 8), kernel_dilation=2), plain)  # noqa: E731
    assert names(jsc.fuse(dilated), image) == ["conv", "conv"]
    large = jax.ShapeDtypeStruct((8, 224, 224, 64), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    twice = lambda x, kernel: jsc.conv(jsc.conv(x, kernel), kernel)  # noqa: E731
    assert names(jsc.fuse(twice), large, kernel) == ["conv", "conv"]  # so much work that its start does not matter
    assert names(jsc.fuse(lambda x: function(x, precision="highest")), x) == ["conv"] * 3
    pooled = jsc.fuse(lambda x: jsc.conv_pool(jsc.conv(x, plain), plain, pool="avg"))
    assert names(pooled, x) == ["conv", "conv"]


def test_long_chains_are_cut() -> None:
    kernel = weights(1, 1, 1, 8, 8)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(segment_rules.MAX_LAYERS + 3):
            x = jsc.conv(x, kernel)
        return x

    assert names(jsc.fuse(chain), weights(0, 1, 3, 3, 8)) == [f"segment {segment_rules.MAX_LAYERS}", "segment 3"]


def early_projection(x: jax.Array, wide: int, last: bool = True) -> jax.Array:
    """x [N, H, W, 3]: a stem and a block whose middle layer is depthwise, so that it is no part of a segment."""
    stem = jsc.conv(x, weights(1, 3, 3, 3, 8))
    shortcut = jsc.conv(stem, weights(2, 1, 1, 8, wide))
    y = jsc.conv(jsc.conv(stem, weights(3, 1, 1, 8, 8)), weights(4, 1, 1, 8, 16))
    y = jsc.conv(y, weights(5, 3, 3, 1, 16), feature_group_count=16)
    y = jsc.conv(y, weights(6, 1, 1, 16, wide), residual=shortcut if last else None)
    return jsc.conv(y, weights(7, 1, 1, wide, 8)) + jnp.mean(shortcut)


def test_what_only_the_next_segment_reads_goes_there_where_it_would_wait_in_more_memory(float32_products: None) -> None:
    x = weights(0, 1, 9, 9, 3)
    for wide, found in ((32, ["segment 3", "conv", "segment 3"]), (8, ["segment 4", "conv", "segment 2"])):
        function = lambda x, wide=wide: early_projection(x, wide)  # noqa: E731
        assert names(jsc.fuse(function), x) == found
        np.testing.assert_allclose(jsc.fuse(function)(x), function(x), rtol=1e-4, atol=1e-4)
    front = next(iter(equations(jsc.fuse(lambda x: early_projection(x, 32)), x)))
    assert [variable.aval.shape[3] for variable in front.outvars] == [8, 16]  # the stem's result, of which it is made


def test_what_the_next_segment_does_not_read_goes_on_to_the_end(float32_products: None) -> None:
    x = weights(0, 1, 9, 9, 3)
    function = lambda x: early_projection(x, 32, last=False)  # noqa: E731
    assert names(jsc.fuse(function), x) == ["segment 3", "conv", "segment 3"]
    np.testing.assert_allclose(jsc.fuse(function)(x), function(x), rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_for_the_next_segment_that_leaves_one_layer_alone(float32_products: None) -> None:
    def function(x: jax.Array) -> jax.Array:
        shortcut = jsc.conv(x, weights(1, 1, 1, 8, 32))
        y = jsc.conv(x, weights(2, 1, 1, 8, 16))
        y = jsc.conv(y, weights(3, 3, 3, 1, 16), feature_group_count=16)
        return jsc.conv(jsc.conv(y, weights(4, 1, 1, 16, 32), residual=shortcut), weights(5, 1, 1, 32, 8))

    x = weights(0, 1, 9, 9, 8)
    assert names(jsc.fuse(function), x) == ["segment 2", "conv", "segment 2"]
    np.testing.assert_allclose(jsc.fuse(function)(x), function(x), rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_for_layers_of_another_kind() -> None:
    def function(x: jax.Array) -> jax.Array:
        stem = jsc.conv(x, weights(1, 3, 3, 8, 8))
        shortcut = jsc.conv(stem, weights(2, 1, 1, 8, 32))
        y = jsc.conv(stem, weights(3, 1, 1, 8, 8))
        y = jsc.conv(jnp.tanh(y), weights(4, 1, 1, 8, 32), precision="highest")
        return jsc.conv(y, weights(5, 1, 1, 32, 8), precision="highest") + jnp.mean(shortcut)

    x = weights(0, 1, 9, 9, 8)
    assert names(jsc.fuse(function), x) == ["segment 3", "segment 2"]
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(function(x))
    assert np.linalg.norm(jsc.fuse(function)(x) - expected) <= 10 * TF32 * np.linalg.norm(expected)


def test_layers_stay_where_a_chain_pays_only_with_them() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(segment_rules.LEAST_LAYERS - 1):
            x = jsc.conv(x, weights(1, 1, 1, 8, 8))
        shortcut = jsc.conv(x, weights(2, 1, 1, 8, 32))
        y = jsc.conv(jnp.tanh(x), weights(3, 1, 1, 8, 32), residual=shortcut)
        return jsc.conv(y, weights(4, 1, 1, 32, 8))

    x = weights(0, 1, 9, 9, 8)
    assert names(fusion.fuse_where_faster(function), x) == [f"segment {segment_rules.LEAST_LAYERS}", "segment 2"]
    assert names(jsc.fuse(function), x) == [f"segment {segment_rules.LEAST_LAYERS - 1}", "segment 3"]


FAR = {
    "padding": lambda x, kernel: jsc.conv(x, kernel, padding=((0, 9000), (0, 0))),
    "strides": lambda x, kernel: jsc.conv(x, kernel, strides=9000),
    "dilation": lambda x, kernel: jsc.conv(x, kernel, kernel_dilation=9000),
    "strides of a pool": lambda x, kernel: jsc.conv_pool(x, kernel, window_shape=2, window_strides=9000),
}


@pytest.mark.parametrize("kind", FAR)
def test_far_windows_are_no_layers(kind: str) -> None:
    kernel, x = weights(1, 1, 1, 8, 8), weights(0, 1, 4, 4, 8)
    assert names(jsc.fuse(lambda x: jsc.conv(FAR[kind](x, kernel), kernel)), x) == ["conv", "conv"]


@pytest.mark.parametrize("most", [256, 4])
@pytest.mark.parametrize("seed", range(6))
def test_programs_of_any_form(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals, pools, depthwise layers and other operations between, segments that end early: the same results."""
    monkeypatch.setattr(segment_rules, "MAX_LAYERS", most)

    def function(x: jax.Array) -> list[jax.Array]:
        rng, maps, results = np.random.default_rng(seed), [x], []
        for number in range(16):
            source = maps[-1 - int(rng.integers(min(4, len(maps))))]
            channels, features, kind = source.shape[3], int(rng.choice([8, 16, 32])), rng.random()
            kernel = weights(number, 1, 1, channels, features)
            if kind < 0.6:
                alike = [y for y in maps if y.shape == (*source.shape[:3], features)]
                residual = alike[rng.integers(len(alike))] if alike and rng.random() < 0.6 else None
                maps.append(jsc.conv(source, kernel, residual=residual, activation="relu", precision="highest"))
            elif kind < 0.7 and source.shape[1] > 3:
                maps.append(jsc.conv_pool(source, kernel, precision="highest"))
            elif kind < 0.8:
                depthwise = weights(number, 3, 3, 1, channels)
                maps.append(jsc.conv(source, depthwise, feature_group_count=channels, precision="highest"))
            else:
                maps.append(jnp.tanh(source))
            if rng.random() < 0.2:
                results.append(maps[-1])
        return [*results, maps[-1]]

    x = weights(20, 1, 9, 9, 8)
    assert any(name.startswith("segment") for name in names(jsc.fuse(function), x))
    for expected, found in zip(jax.jit(function)(x), jax.jit(jsc.fuse(function))(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_effects_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = weights(1, 1, 1, 8, 8)

    def function(x: jax.Array) -> jax.Array:
        y = jsc.conv(jsc.conv(x, kernel), kernel)
        jax.debug.print("seen")
        return jsc.conv(jsc.conv(y, kernel), kernel)

    assert names(jsc.fuse(function), weights(0, 1, 3, 3, 8)) == ["segment 2", "segment 2"]
    jax.block_until_ready(jsc.fuse(function)(weights(0, 1, 3, 3, 8)))
    jax.effects_barrier()
    assert capsys.readouterr().out == "seen\n"


def test_results_are_those_of_the_function() -> None:
    x, parameters = weights(0, 2, 9, 9, 8), block_parameters()
    fused = jsc.fuse(lambda x, parameters: block(x, parameters, precision="highest"))
    plain = jax.jit(lambda x, parameters: block(x, parameters, precision="highest"))
    np.testing.assert_allclose(jax.jit(fused)(x, parameters), plain(x, parameters), rtol=1e-5, atol=1e-5)
    batch = jnp.stack([x, 2 * x, -x])
    expected = jnp.stack([plain(each, parameters) for each in batch])
    np.testing.assert_allclose(jax.vmap(fused, (0, None))(batch, parameters), expected, rtol=1e-5, atol=1e-5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), parameters)
    expected = jnp.stack([plain(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked)) for i in range(3)])
    np.testing.assert_allclose(jax.vmap(fused, (None, 0))(x, stacked), expected, rtol=1e-5, atol=1e-5)
    assert jax.vmap(fused, (0, None))(batch[:0], parameters).shape == (0, 2, 9, 9, 16)
    gradients = [jax.grad(lambda p, f=f: jnp.sum(f(x, p) ** 2))(parameters) for f in (fused, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    tangents = [jax.jvp(lambda x, f=f: f(x, parameters), (x,), (jnp.ones_like(x),))[1] for f in (fused, plain)]
    np.testing.assert_allclose(*tangents, rtol=1e-4, atol=1e-4)


def test_a_network_is_one_segment() -> None:
    model, x = small_resnet(), weights(0, 1, 40, 40, 3)
    fused = jsc.fuse(model)
    assert names(fused, x)[:2] == ["segment 12", "conv"]
    np.testing.assert_allclose(jax.jit(fused)(x), jax.jit(lambda x: model(x))(x), rtol=2e-3, atol=2e-3)


# --- dense layers behind the convolutions -----------------------------------------------------------------------------


def classifier(
    x: jax.Array, *, scale: float | None = None, axes: tuple[int, ...] = (1, 2), flat: bool = False, features: int = 12
) -> jax.Array:
    """Two convolutions of x [N, 5, 7, 8], the average of their pixels or all of them, and two dense layers."""
    with jax.default_matmul_precision("highest"):
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8), activation="relu")
        row = y.reshape(y.shape[0], -1) if flat else jnp.sum(y * (1 / 35 if scale is None else scale), axis=axes)
        row = jsc.dense(row.reshape(y.shape[0], -1), weights(3, row.size // y.shape[0], 16), activation="relu")
        return jsc.dense(row, weights(4, 16, features), weights(5, features))


@pytest.mark.parametrize("flat", [False, True])
def test_dense_layers_of_a_row_end_a_segment(flat: bool) -> None:
    x = weights(0, 1, 5, 7, 8)
    fused = jsc.fuse(lambda x: classifier(x, flat=flat))
    assert names(fused, x) == ["segment 4"]
    (equation,) = equations(fused, x)
    layers = equation.params["layers"]
    assert equation.params["results"] == (3,)
    assert [(layer.x, layer.averages) for layer in layers] == [(0, False), (~0, False), (~1, not flat), (~2, False)]
    np.testing.assert_allclose(fused(x), classifier(x, flat=flat), rtol=1e-5, atol=1e-5)


def test_dense_layers_that_do_not_end_a_segment() -> None:
    x, two = weights(0, 1, 5, 7, 8), weights(0, 2, 5, 7, 8)
    assert names(jsc.fuse(classifier), two) == ["segment 2", "conv", "conv"]  # two rows
    assert names(jsc.fuse(lambda x: classifier(x, scale=0.5)), x) == ["segment 2", "conv", "conv"]  # no average
    assert names(jsc.fuse(lambda x: classifier(x, axes=(1,))), x) == ["segment 2", "conv", "conv"]
    assert names(jsc.fuse(lambda x: classifier(x, features=10)), x) == ["segment 3", "conv"]  # not whole 16 bytes

    def with_another_reader(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        row = jnp.sum(y * (1 / 35), axis=(1, 2))
        return jsc.dense(row, weights(3, 8, 12)), row

    assert names(jsc.fuse(with_another_reader), x) == ["segment 2", "conv"]
    for found, expected in zip(jsc.fuse(with_another_reader)(x), with_another_reader(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_mean_over_height_and_width_is_part_of_a_segment(dtype: str) -> None:
    def function(x: jax.Array, between: Any = None, scale: float | None = None) -> jax.Array:
        y = jsc.conv(jsc.conv(x, kernels[0]), kernels[1], activation="relu")
        row = jnp.mean(y if between is None else y.astype(between).astype(dtype), axis=(1, 2))
        return jsc.dense(row if scale is None else row * scale, kernels[2])

    shapes = ((3, 3, 8, 8), (3, 3, 8, 16), (16, 24))
    kernels = [weights(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    x = weights(9, 1, 5, 7, 8).astype(dtype)
    with jax.default_matmul_precision("highest"):
        assert names(jsc.fuse(function), x) == ["segment 3"]
        found, expected = (np.asarray(each(x), np.float64) for each in (jsc.fuse(function), function))
        np.testing.assert_allclose(found, expected, rtol=0, atol={"float32": 1e-5}.get(dtype, 0.05))
        assert names(jsc.fuse(lambda x: function(x, scale=2.0)), x) == ["segment 2", "conv"]
        rounded = "float8_e4m3fn" if dtype == "bfloat16" else "bfloat16"
        assert names(jsc.fuse(lambda x: function(x, between=rounded)), x) == ["segment 2", "conv"]


def body(x: jax.Array, features: int = 8, layers: int = 2) -> jax.Array:
    """3x3 convolutions of x [N, H, W, 8]."""
    for index in range(layers):
        kernel = weights(index, 3, 3, 8, features if index == layers - 1 else 8)
        x = jsc.conv(x, kernel, activation="relu", precision="highest")
    return x


def dense(x: jax.Array, features: int = 16) -> jax.Array:
    return jsc.dense(x, weights(9, x.shape[-1], features), precision="highest")


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
    assert names(jsc.fuse(function), x) == ["segment 2", "conv"]
    np.testing.assert_allclose(jax.jit(jsc.fuse(function))(x), function(x), rtol=1e-5, atol=1e-5)


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
        assert names(jsc.fuse(function), x) == [f"segment {layers}"]
        for found, expected in zip(jax.jit(jsc.fuse(function))(x), function(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_a_convolution_waits_for_ends_the_segment_in_front(float32_products: None) -> None:
    """Squeeze and excitation, with a projection that the next segment has."""

    def function(x: jax.Array) -> jax.Array:
        y = body(x)
        scale = jax.nn.sigmoid(dense(dense(jnp.mean(y, (1, 2))), 8))
        return body(y * scale[:, None, None, :])

    x = weights(0, 1, 5, 7, 8)
    assert names(jsc.fuse(function), x) == ["segment 4", "segment 2"]
    np.testing.assert_allclose(jax.jit(jsc.fuse(function))(x), function(x), rtol=1e-4, atol=1e-4)


def test_dense_layers_count_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = weights(0, 1, 5, 7, 8)
    for most, found in ((5, ["segment 5"]), (4, ["segment 4", "conv"])):
        monkeypatch.setattr(segment_rules, "MAX_LAYERS", most)
        assert names(jsc.fuse(lambda x: dense(body(x, layers=4).reshape(1, -1))), x) == found


def test_a_convolution_and_a_dense_layer_are_no_segment() -> None:
    assert names(jsc.fuse(lambda x: dense(body(x, layers=1).reshape(1, -1))), weights(0, 1, 5, 7, 8)) == [
        "conv",
        "conv",
    ]


def test_means_of_large_maps_stay_outside() -> None:
    x = weights(0, 1, 24, 24, 8)
    assert names(jsc.fuse(lambda x: dense(jnp.mean(body(x), (1, 2)))), x) == ["segment 2", "conv"]
    assert names(jsc.fuse(lambda x: dense(jnp.mean(body(x[:, ::2]), (1, 2)))), x) == ["segment 3"]
    assert names(jsc.fuse(lambda x: dense(body(x).reshape(1, -1))), x) == ["segment 3"]
    reason = segment_rules.why_not_average((1, 7, 7, 4104), 2048, 4)
    assert reason == "the average of (1, 7, 7, 4104) takes a block 17 rounds"
    assert segment_rules.why_not_average((1, 7, 7, 4104), 1000, 4) is None


def test_a_map_that_others_read_too_is_a_result() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        return jsc.dense(y.reshape(1, -1), weights(3, 280, 12)), jnp.tanh(y)

    x = weights(0, 1, 5, 7, 8)
    assert names(jsc.fuse(function), x) == ["segment 3"]
    (equation,) = equations(jsc.fuse(function), x)
    assert equation.params["results"] == (1, 2)
    for found, expected in zip(jsc.fuse(function)(x), function(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_convolutions_behind_a_dense_layer_are_another_segment() -> None:
    def function(x: jax.Array) -> jax.Array:
        y = jsc.conv(jsc.conv(x, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))
        row = jsc.dense(y.reshape(1, -1), weights(3, 280, 32)).reshape(1, 2, 2, 8)
        return jsc.conv(jsc.conv(row, weights(1, 3, 3, 8, 8)), weights(2, 3, 3, 8, 8))

    x = weights(0, 1, 5, 7, 8)
    assert names(jsc.fuse(function), x) == ["segment 3", "segment 2"]
    np.testing.assert_allclose(jsc.fuse(function)(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flat", [False, True])
def test_transformations_of_a_segment_with_dense_layers(flat: bool) -> None:
    x, images = weights(0, 1, 5, 7, 8), weights(0, 3, 1, 5, 7, 8)
    fused = jsc.fuse(lambda x: classifier(x, flat=flat))
    expected = jnp.stack([classifier(image, flat=flat) for image in images])
    np.testing.assert_allclose(jax.jit(jax.vmap(fused))(images), expected, rtol=1e-5, atol=1e-5)

    def loss(function: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(function(x) ** 2)

    found = jax.grad(lambda x: loss(fused, x))(x)
    np.testing.assert_allclose(
        found, jax.grad(lambda x: loss(lambda y: classifier(y, flat=flat), x))(x), rtol=1e-3, atol=1e-3
    )
