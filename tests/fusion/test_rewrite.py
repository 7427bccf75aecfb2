"""`fuse`: which equations end in a fused chain, with the same results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import block, block_parameters, equations, names, small_resnet, weights

import jax_sparse_conv as jsc
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.fusion import chain_rules, rewrite

TF32 = 5e-4  # relative (Frobenius), of a layer


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        rewrite.fuse(3)  # type: ignore[type-var]


def test_a_block_becomes_one_chain() -> None:
    x, parameters = weights(0, 1, 9, 9, 8), block_parameters()
    assert names(rewrite.fuse(block), x, parameters) == ["chain 4"]
    (equation,) = equations(rewrite.fuse(block), x, parameters)
    assert equation.params["results"] == (3,)
    assert [layer.x for layer in equation.params["layers"]] == [0, 0, ~1, ~2]
    assert equation.params["layers"][3].residual == ~0


def test_convolutions_in_jitted_functions_join() -> None:
    x, parameters = weights(0, 1, 9, 9, 8), block_parameters()
    inner = jax.jit(lambda x: block(x, parameters))
    assert names(rewrite.fuse(lambda x: jax.jit(lambda y: inner(y)[..., :8])(x)), x) == ["chain 4"]
    twice = rewrite.fuse(lambda x: inner(inner(x)[..., :8]))
    assert names(twice, x) == ["chain 4", "chain 4"]
    np.testing.assert_allclose(twice(x), inner(inner(x)[..., :8]), rtol=1e-5, atol=1e-5)


def test_what_needs_a_result_waits_and_what_does_not_goes_first() -> None:
    parameters = block_parameters()

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jsc.conv(x, parameters[1])
        density = jsc.density(y)
        return jsc.conv(y, parameters[2] * 2), density

    assert names(rewrite.fuse(function), weights(0, 1, 5, 5, 8)) == ["chain 2"]
    between = rewrite.fuse(lambda x: jsc.conv(jnp.tanh(jsc.conv(x, parameters[1])), parameters[2]))
    assert names(between, weights(0, 1, 5, 5, 8)) == ["conv", "conv"]


def test_what_the_kernel_lacks_stays_a_convolution() -> None:
    grouped = weights(1, 3, 3, 4, 8)
    plain = weights(2, 3, 3, 8, 8)

    def function(x: jax.Array, **options: Any) -> jax.Array:
        y = jsc.conv(jsc.conv(x, plain), plain, **options)
        return jsc.conv(y, plain)

    x = weights(0, 1, 9, 9, 8)
    assert names(rewrite.fuse(function), x) == ["chain 3"]
    assert names(rewrite.fuse(function), weights(0, 9, 9, 9, 8)) == ["conv"] * 3
    assert names(rewrite.fuse(lambda x: jsc.conv(function(x), grouped, feature_group_count=2)), x) == [
        "chain 3",
        "conv",
    ]
    wide = weights(1, 1, 1, 8, 128), weights(2, 3, 3, 32, 256)
    in_groups = lambda x: jsc.conv(jsc.conv(x, wide[0]), wide[1], feature_group_count=4)  # noqa: E731
    assert names(rewrite.fuse(in_groups), x) == ["chain 2"]
    image = weights(0, 1, 9, 9, 3)
    of_image = lambda x: jsc.conv(jsc.conv(x, weights(1, 3, 3, 3, 8)), plain)  # noqa: E731
    assert names(rewrite.fuse(of_image), image) == ["chain 2"]
    dilated = lambda x: jsc.conv(jsc.conv(x, weights(1, 3, 3, 3, 8), kernel_dilation=2), plain)  # noqa: E731
    assert names(rewrite.fuse(dilated), image) == ["conv", "conv"]
    large = jax.ShapeDtypeStruct((8, 224, 224, 64), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    twice = lambda x, kernel: jsc.conv(jsc.conv(x, kernel), kernel)  # noqa: E731
    assert names(rewrite.fuse(twice), large, kernel) == ["conv", "conv"]  # so much work that its start does not matter
    assert names(rewrite.fuse(lambda x: function(x, precision="highest")), x) == ["conv"] * 3
    pooled = rewrite.fuse(lambda x: jsc.conv_pool(jsc.conv(x, plain), plain, pool="avg"))
    assert names(pooled, x) == ["conv", "conv"]


def test_long_chains_are_cut() -> None:
    kernel = weights(1, 1, 1, 8, 8)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(chain_rules.MAX_LAYERS + 3):
            x = jsc.conv(x, kernel)
        return x

    assert names(rewrite.fuse(chain), weights(0, 1, 3, 3, 8)) == [f"chain {chain_rules.MAX_LAYERS}", "chain 3"]


def early_projection(x: jax.Array, wide: int, last: bool = True) -> jax.Array:
    """x [N, H, W, 3]: a stem and a block whose middle layer is depthwise, so that it is no part of a fused chain."""
    stem = jsc.conv(x, weights(1, 3, 3, 3, 8))
    shortcut = jsc.conv(stem, weights(2, 1, 1, 8, wide))
    y = jsc.conv(jsc.conv(stem, weights(3, 1, 1, 8, 8)), weights(4, 1, 1, 8, 16))
    y = jsc.conv(y, weights(5, 3, 3, 1, 16), feature_group_count=16)
    y = jsc.conv(y, weights(6, 1, 1, 16, wide), residual=shortcut if last else None)
    return jsc.conv(y, weights(7, 1, 1, wide, 8)) + jnp.mean(shortcut)


def test_what_only_the_next_chain_reads_goes_there_where_it_would_wait_in_more_memory(float32_products: None) -> None:
    x = weights(0, 1, 9, 9, 3)
    for wide, found in ((32, ["chain 3", "conv", "chain 3"]), (8, ["chain 4", "conv", "chain 2"])):
        function = lambda x, wide=wide: early_projection(x, wide)  # noqa: E731
        assert names(rewrite.fuse(function), x) == found
        np.testing.assert_allclose(rewrite.fuse(function)(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)
    front = next(iter(equations(rewrite.fuse(lambda x: early_projection(x, 32)), x)))
    assert [variable.aval.shape[3] for variable in front.outvars] == [8, 16]  # the stem's result, of which it is made


def test_what_the_next_chain_does_not_read_goes_on_to_the_end(float32_products: None) -> None:
    x = weights(0, 1, 9, 9, 3)
    function = lambda x: early_projection(x, 32, last=False)  # noqa: E731
    assert names(rewrite.fuse(function), x) == ["chain 3", "conv", "chain 3"]
    np.testing.assert_allclose(rewrite.fuse(function)(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_for_the_next_chain_that_leaves_one_layer_alone(float32_products: None) -> None:
    def function(x: jax.Array) -> jax.Array:
        shortcut = jsc.conv(x, weights(1, 1, 1, 8, 32))
        y = jsc.conv(x, weights(2, 1, 1, 8, 16))
        y = jsc.conv(y, weights(3, 3, 3, 1, 16), feature_group_count=16)
        return jsc.conv(jsc.conv(y, weights(4, 1, 1, 16, 32), residual=shortcut), weights(5, 1, 1, 32, 8))

    x = weights(0, 1, 9, 9, 8)
    assert names(rewrite.fuse(function), x) == ["chain 2", "conv", "chain 2"]
    np.testing.assert_allclose(rewrite.fuse(function)(x), jax.jit(function)(x), rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_for_layers_of_another_kind() -> None:
    def function(x: jax.Array) -> jax.Array:
        stem = jsc.conv(x, weights(1, 3, 3, 8, 8))
        shortcut = jsc.conv(stem, weights(2, 1, 1, 8, 32))
        y = jsc.conv(stem, weights(3, 1, 1, 8, 8))
        y = jsc.conv(jnp.tanh(y), weights(4, 1, 1, 8, 32), precision="highest")
        return jsc.conv(y, weights(5, 1, 1, 32, 8), precision="highest") + jnp.mean(shortcut)

    x = weights(0, 1, 9, 9, 8)
    assert names(rewrite.fuse(function), x) == ["chain 3", "chain 2"]
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(function)(x))
    assert np.linalg.norm(rewrite.fuse(function)(x) - expected) <= 10 * TF32 * np.linalg.norm(expected)


@pytest.mark.parametrize(("groups", "is_fused"), [(1, True), (2, True), (4, False), (6, True), (8, False)])
def test_groups_of_few_channels_are_fused(h200: Device, groups: int, is_fused: bool) -> None:
    """48 channels in groups of 48, 24, 12, 8 and 6: there are kernels for whole eights, and for 32 and more."""
    kernel = weights(1, 3, 3, 48 // groups, 48)

    def function(x: jax.Array) -> jax.Array:
        return jsc.conv(jsc.conv(x, kernel, feature_group_count=groups), weights(2, 1, 1, 48, 8))

    found = names(rewrite.fuse(function), weights(0, 1, 9, 9, 48))
    assert (found == ["chain 2"]) == is_fused


def test_layers_stay_where_a_chain_pays_only_with_them() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(chain_rules.LEAST_LAYERS - 1):
            x = jsc.conv(x, weights(1, 1, 1, 8, 8))
        shortcut = jsc.conv(x, weights(2, 1, 1, 8, 32))
        y = jsc.conv(jnp.tanh(x), weights(3, 1, 1, 8, 32), residual=shortcut)
        return jsc.conv(y, weights(4, 1, 1, 32, 8))

    x = weights(0, 1, 9, 9, 8)
    assert names(rewrite.fuse(function, chosen=True), x) == [f"chain {chain_rules.LEAST_LAYERS}", "chain 2"]
    assert names(rewrite.fuse(function), x) == [f"chain {chain_rules.LEAST_LAYERS - 1}", "chain 3"]


FAR = {
    "padding": lambda x, kernel: jsc.conv(x, kernel, padding=((0, 9000), (0, 0))),
    "strides": lambda x, kernel: jsc.conv(x, kernel, strides=9000),
    "dilation": lambda x, kernel: jsc.conv(x, kernel, kernel_dilation=9000),
    "strides of a pool": lambda x, kernel: jsc.conv_pool(x, kernel, window_shape=2, window_strides=9000),
}


@pytest.mark.parametrize("kind", FAR)
def test_far_windows_are_no_layers(kind: str) -> None:
    kernel, x = weights(1, 1, 1, 8, 8), weights(0, 1, 4, 4, 8)
    assert names(rewrite.fuse(lambda x: jsc.conv(FAR[kind](x, kernel), kernel)), x) == ["conv", "conv"]


@pytest.mark.parametrize("most", [256, 4])
@pytest.mark.parametrize("seed", range(6))
def test_programs_of_any_form(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals, pools, depthwise layers and other operations between, chains that end early: the same results."""
    monkeypatch.setattr(chain_rules, "MAX_LAYERS", most)

    def function(x: jax.Array) -> list[jax.Array]:
        rng, maps, results = np.random.default_rng(seed), [x], []
        for number in range(16):
            source = maps[-1 - int(rng.integers(min(4, len(maps))))]
            channels, out_channels, kind = source.shape[3], int(rng.choice([8, 16, 32])), rng.random()
            kernel = weights(number, 1, 1, channels, out_channels)
            if kind < 0.6:
                alike = [y for y in maps if y.shape == (*source.shape[:3], out_channels)]
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
    assert any(name.startswith("chain") for name in names(rewrite.fuse(function), x))
    for expected, found in zip(jax.jit(function)(x), jax.jit(rewrite.fuse(function))(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_effects_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = weights(1, 1, 1, 8, 8)

    def function(x: jax.Array) -> jax.Array:
        y = jsc.conv(jsc.conv(x, kernel), kernel)
        jax.debug.print("seen")
        return jsc.conv(jsc.conv(y, kernel), kernel)

    assert names(rewrite.fuse(function), weights(0, 1, 3, 3, 8)) == ["chain 2", "chain 2"]
    jax.block_until_ready(rewrite.fuse(function)(weights(0, 1, 3, 3, 8)))
    jax.effects_barrier()
    assert capsys.readouterr().out == "seen\n"


def test_results_are_those_of_the_function() -> None:
    x, parameters = weights(0, 2, 9, 9, 8), block_parameters()
    fused = rewrite.fuse(lambda x, parameters: block(x, parameters, precision="highest"))
    plain = jax.jit(lambda x, parameters: block(x, parameters, precision="highest"))
    np.testing.assert_allclose(jax.jit(fused)(x, parameters), plain(x, parameters), rtol=1e-5, atol=1e-5)
    batch = jnp.stack([x, 2 * x, -x])
    expected = jnp.stack([plain(each, parameters) for each in batch])
    np.testing.assert_allclose(jax.vmap(fused, (0, None))(batch, parameters), expected, rtol=1e-5, atol=1e-5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), parameters)
    expected = jnp.stack([plain(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked)) for i in range(3)])
    np.testing.assert_allclose(jax.vmap(fused, (None, 0))(x, stacked), expected, rtol=1e-5, atol=1e-5)
    assert jax.vmap(fused, (0, None))(batch[:0], parameters).shape == (0, 2, 9, 9, 16)
    gradients = [jax.jit(jax.grad(lambda p, f=f: jnp.sum(f(x, p) ** 2)))(parameters) for f in (fused, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    derivative = lambda x, f: jax.jvp(lambda x: f(x, parameters), (x,), (jnp.ones_like(x),))[1]  # noqa: E731
    tangents = [jax.jit(derivative, static_argnums=1)(x, f) for f in (fused, plain)]
    np.testing.assert_allclose(*tangents, rtol=1e-4, atol=1e-4)


def test_a_network_is_one_chain() -> None:
    model, x = small_resnet(), weights(0, 1, 40, 40, 3)
    fused = rewrite.fuse(model)
    assert names(fused, x)[:2] == ["chain 12", "conv"]
    np.testing.assert_allclose(jax.jit(fused)(x), jax.jit(lambda x: model(x))(x), rtol=2e-3, atol=2e-3)


# --- dense layers behind the convolutions -----------------------------------------------------------------------------
