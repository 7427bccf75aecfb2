"""`fuse`: which equations end in a segment, and its results against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from conftest import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv import _native, fusion, primitives, segment_rules, segments
from jax_sparse_conv.models.resnet import ResNet

TOLERANCE = {"highest": 2e-6, "default": 5e-4, "bfloat16": 6e-3, "float16": 8e-4}
KINDS = [("float32", "highest"), ("float32", "default"), ("bfloat16", "default"), ("float16", "default")]
KIND_IDS = [f"{dtype} {precision}" for dtype, precision in KINDS]
CASES = [
    case
    for case in (*cases.CONV_CASES, *cases.CONV_POOL_CASES)
    if case.groups == 1 and case.features % 8 == 0 and 1 <= case.x[0] <= segment_rules.MAX_IMAGES and case.pool != "avg"
]
RUNS = [(case, *KINDS[0]) for case in CASES] + [
    (case, *kind) for index, kind in enumerate(KINDS[1:]) for case in CASES[index::4]
]
LARGER = (
    Case("many units", (2, 57, 61, 64), 200, kernel=(1, 1), bias=True, residual=True, activation="relu"),
    Case("deep and small", (1, 7, 7, 512), 512, bias=True, residual=True, activation="relu"),
    Case("strided", (3, 29, 27, 72), 136, strides=2, padding=((1, 0), (2, 1)), activation="relu"),
    Case("dilated", (1, 21, 19, 40), 64, dilation=(2, 3), kernel=(3, 5), padding=((3, 1), (0, 5))),
    Case("stem", (1, 224, 224, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
    *(case for case in (*cases.IMAGE_CASES, *cases.IMAGE_POOL_CASES)
      if case.features % 8 == 0 and case.x[0] <= segment_rules.MAX_IMAGES),
)  # fmt: skip


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        jsc.fuse(3)  # type: ignore[type-var]


def weights(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(np.prod(shape[:-1]))


def block(x: jax.Array, parameters: list[jax.Array], **options: Any) -> jax.Array:
    """A bottleneck with a projection: x [N, H, W, 8] -> [N, H, W, 16]."""
    projection, first, second, third, bias = parameters
    shortcut = jsc.conv(x, projection, bias, **options)
    y = jsc.conv(x, first, activation="relu", **options)
    y = jsc.conv(y, second, activation="relu", **options)
    return jsc.conv(y, third, bias, residual=shortcut, activation="relu", **options)


def block_parameters() -> list[jax.Array]:
    return [weights(1, 1, 1, 8, 16), weights(2, 1, 1, 8, 8), weights(3, 3, 3, 8, 8), weights(4, 1, 1, 8, 16),
            weights(5, 16)]  # fmt: skip


def equations(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Equations of this package, in calls too."""

    def walk(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive in (primitives.conv_p, segments.segment_p):
                yield equation
            elif "jaxpr" in equation.params:
                yield from walk(equation.params["jaxpr"].jaxpr)

    return walk(jax.make_jaxpr(function)(*arguments).jaxpr)


def names(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Names of these equations, with the number of layers of a segment."""
    return [
        f"segment {len(e.params['layers'])}" if e.primitive is segments.segment_p else "conv"
        for e in equations(function, *arguments)
    ]


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
    assert np.linalg.norm(jsc.fuse(function)(x) - expected) <= 10 * TOLERANCE["default"] * np.linalg.norm(expected)


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


def small_resnet() -> Any:
    from flax import nnx

    model = ResNet((1, 2), 10, width=8, rngs=nnx.Rngs(0))
    jsc.models.fold_batch_norm(model)
    model.fuses = False  # without `fuse` it is what a chain is compared with
    return model


def test_a_network_is_one_segment() -> None:
    model, x = small_resnet(), weights(0, 1, 40, 40, 3)
    fused = jsc.fuse(model)
    assert names(fused, x)[:2] == ["segment 12", "conv"]
    np.testing.assert_allclose(jax.jit(fused)(x), jax.jit(lambda x: model(x))(x), rtol=2e-3, atol=2e-3)


# --- the kernel ------------------------------------------------------------------------------------------------------


def require_kernel(dtype: str) -> None:
    reason = _native.why_missing("segment", PLATFORM, dtype)
    if reason is None and _native.device_properties(0)["major"] < 9:
        reason = "the kernel of segments needs compute capability 9.0"
    if reason is not None:
        pytest.skip(reason)


def poison(function: Callable[..., Any], *arguments: Any) -> None:
    """Leave NaN in freed memory of the results' and the workspace's sizes."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    buffers = [jnp.full(shape, jnp.nan) for shape in [*shapes, (1 << 22,)] for _ in range(3)]
    jax.block_until_ready(buffers)
    for buffer in buffers:
        buffer.delete()


def then_1x1(case: Case, precision: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The case's operation, then a 1x1 convolution: of x, kernel, bias, residual and the second kernel."""

    def function(x: Any, first: Any, bias: Any, residual: Any, second: Any) -> tuple[jax.Array, jax.Array]:
        if case.pool is None:
            y = jsc.conv(x, first, bias, residual=residual, precision=precision, **case.arguments)
        else:
            y = jsc.conv_pool(x, first, bias, precision=precision, **case.arguments)
        return y, jsc.conv(y, second, activation="relu", precision=precision)

    return function


def run_twice(case: Case, inputs: cases.Inputs, kernel: Any, precision: str) -> tuple[Any, Any]:
    """The case's operation and a 1x1 convolution as one segment where the kernel takes both."""

    operands = [None if v is None else jnp.asarray(v) for v in (*inputs, kernel)]
    fused = jax.jit(jsc.fuse(then_1x1(case, precision)))
    poison(fused, *operands)
    first = fused(*operands)
    again = fused(*operands)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return first


def check(case: Case, dtype: str, precision: str, inputs: cases.Inputs) -> None:
    kernel = np.asarray(weights(7, 1, 1, case.features, 24)).astype(jnp.dtype(dtype))
    first, second = run_twice(case, inputs, kernel, precision)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    assert first.dtype == second.dtype == jnp.dtype(dtype)
    assert oracle.relative_error(first, oracle.expected(case, inputs)) <= tolerance
    then = dataclasses.replace(Case("then", first.shape, 24, kernel=(1, 1), activation="relu"), features=24)
    operands = cases.Inputs(np.asarray(first), kernel, None, None)
    assert oracle.relative_error(second, oracle.expected(then, operands)) <= tolerance


@pytest.mark.parametrize(("case", "dtype", "precision"), RUNS, ids=[f"{c.name} {d} {p}" for c, d, p in RUNS])
def test_layers_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.name)
def test_larger_layers_against_the_oracle(case: Case, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    check(case, dtype, precision, cases.inputs(case, jnp.dtype(dtype)))


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite(value: float, dtype: str, precision: str, gpu: jax.Device) -> None:
    """Non-finite values go where lax's go, in x and in the kernel: nothing is skipped."""
    require_kernel(dtype)
    case = Case("extreme", (1, 9, 9, 40), 72, bias=True, zeros=0.0)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.x[0, 1, 1, 3] = value
    check(case, dtype, precision, inputs)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    inputs.kernel[1, 1, 2, 5] = value
    check(case, dtype, precision, inputs)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_a_network_on_the_gpu(dtype: str, precision: str, gpu: jax.Device) -> None:
    """One custom call, results within the tolerance that many layers need, and the same in every run."""
    require_kernel(dtype)
    model = small_resnet()
    x = weights(0, 2, 64, 64, 3).astype(dtype)
    from flax import nnx

    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(model)))
    with jax.default_matmul_precision(precision):
        fused = jax.jit(jsc.fuse(model))
        assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_segment"') == 1
        expected = np.asarray(jax.jit(lambda x: model(x))(x), np.float64)
        results = [np.asarray(fused(x), np.float64) for _ in range(20)]
    assert all(np.array_equal(result, results[0]) for result in results)
    tolerance = 20 * TOLERANCE[precision if dtype == "float32" else dtype]
    assert np.linalg.norm(results[0] - expected) <= tolerance * np.linalg.norm(expected)


def large_layers(x: jax.Array, parameters: list[jax.Array], **options: Any) -> jax.Array:
    """x [1, 56, 56, 64]: layers of every kind of kernel, whose results soon take the place of earlier ones."""
    first, narrow, grouped, wide = parameters
    for _ in range(4):
        y = jsc.conv(x, first, activation="relu", **options)
        y = jsc.conv(y, narrow, activation="relu", **options)
        y = jsc.conv(y, grouped, feature_group_count=2, activation="relu", **options)
        x = jsc.conv(y, wide, residual=x, activation="relu", **options)
    return jsc.conv_pool(jsc.conv_pool(x, first, **options), first, window_shape=(3, 3), window_strides=2, **options)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_a_chain_of_large_layers_on_the_gpu(dtype: str, precision: str, gpu: jax.Device) -> None:
    """Kernels that overlap neither read what is not there yet nor write over what is still read."""
    require_kernel(dtype)
    shapes = ((3, 3, 64, 64), (1, 1, 64, 128), (3, 3, 64, 128), (1, 1, 128, 64))
    parameters = [weights(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    x = weights(9, 1, 56, 56, 64).astype(dtype)
    fused = jax.jit(jsc.fuse(lambda x: large_layers(x, parameters, precision=precision)))
    assert (fused.lower(x).compile().as_text() or "").count('custom_call_target="jsc_segment"') == 1
    x64, *wide = (np.asarray(value, np.float64) for value in (x, *parameters))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(large_layers(jnp.asarray(x64), list(map(jnp.asarray, wide)), implementation="xla"))
    results = [fused(x) for _ in range(50)]  # not waited for one by one
    for result in results:
        np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(results[0], np.float64))
    tolerance = 10 * TOLERANCE[precision if dtype == "float32" else dtype]
    assert np.linalg.norm(np.asarray(results[0], np.float64) - expected) <= tolerance * np.linalg.norm(expected)
