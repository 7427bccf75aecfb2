"""`dense_block` on a CPU: one call where its parameters are known, against float64, and what it does not change."""

from __future__ import annotations

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from blocks import TOLERANCE, Block, check, check_transition, expected_layer, transition_values, values
from flax import nnx
from platforms import PLATFORM, on_cpu

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.fusion import block_parameters

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="the backend is not the CPU")

# Block, M, G, K of the transition or None
SIZES = [
    (Block("as in DenseNet", (1, 14, 14, 64), 3), 128, 32, None),
    (Block("batch of odd sizes", (3, 9, 7, 12), 4), 40, 24, 50),
    (Block("one pixel", (2, 1, 1, 17), 2), 16, 16, 16),
    (Block("wide", (1, 8, 8, 256), 2), 128, 32, 160),
]
IDS = [block.name for block, *_ in SIZES]
# Of pairs of bfloat16: even, and no more.
PAIRED = [
    SIZES[0],
    (Block("batch of even sizes", (3, 10, 6, 14), 3), 42, 26, 50),
    (Block("one pixel", (2, 1, 1, 18), 2), 16, 16, None),
    SIZES[3],
]
needs_pairs = pytest.mark.skipif(not _native.cpu_multiplies_pairs(), reason="this processor has no AVX512-BF16")


def on_device(values: Any) -> Any:
    return jax.tree.map(cases.on_device, values)


def calls_of(function: Any, *arguments: Any) -> int:
    return int(jax.jit(function).lower(*arguments).as_text().count("@jsc_dense_block"))


@pytest.mark.parametrize(("block", "middle", "growth", "out_channels"), SIZES, ids=IDS)
def test_against_float64(block: Block, middle: int, growth: int, out_channels: int | None, cpu_isa: str) -> None:
    x, layers = on_device(values(block, np.float32, middle=middle, growth=growth))
    transition = None
    if out_channels is not None:
        transition = on_device(transition_values(block, np.float32, out_channels=out_channels, growth=growth))
    function = jax.jit(lambda x: jsc.dense_block(x, layers))
    assert calls_of(function, x) == 1
    out = function(x)
    check(out, x, layers, TOLERANCE["highest"])
    if transition is not None:
        pooled = jax.jit(lambda x: jsc.dense_block(x, layers, transition=transition))
        assert calls_of(pooled, x) == 1
        check_transition(pooled(x), out, transition, TOLERANCE["highest"])


@pytest.mark.parametrize("loop", ["pixels", "direct", "winograd"])
def test_every_loop_against_float64(loop: str, cpu_isa: str) -> None:
    """Each reads the packed kernels, and what reads pixels in place scales them first, with a transition's average."""
    for block, middle, growth, out_channels in SIZES:
        x, layers = on_device(values(block, np.float32, middle=middle, growth=growth))
        transition = on_device(transition_values(block, np.float32, out_channels=out_channels or 48, growth=growth))
        with on_cpu(loop=loop):
            out = np.asarray(jsc.dense_block(x, layers))
            pooled = np.asarray(jsc.dense_block(x, layers, transition=transition))
        check(out, x, layers, TOLERANCE["highest"])
        check_transition(pooled, out, transition, TOLERANCE["highest"])


@needs_pairs
@pytest.mark.parametrize("loop", ["auto", "pixels of pairs", "direct of pairs", "emulated amx of pairs"])
@pytest.mark.parametrize(
    ("block", "middle", "growth", "out_channels"), PAIRED, ids=[block.name for block, *_ in PAIRED]
)
def test_pairs_against_float64(block: Block, middle: int, growth: int, out_channels: int | None, loop: str) -> None:
    """In bfloat16; a program of pairs runs on a processor without them, too."""
    dtype = jnp.dtype("bfloat16")
    x, layers = on_device(values(block, dtype, middle=middle, growth=growth))
    transition = on_device(transition_values(block, dtype, out_channels=out_channels or 48, growth=growth))
    function = jax.jit(lambda x: jsc.dense_block(x, layers)).lower(x)
    assert function.as_text().count("@jsc_dense_block") == 1
    compiled, even = function.compile(), block.x[1] % 2 == 0
    pooled = jax.jit(lambda x: jsc.dense_block(x, layers, transition=transition)).lower(x)
    assert pooled.as_text().count("@jsc_dense_block") == even
    behind = pooled.compile()
    for isa in _native.cpu_isas():
        with on_cpu(isa=isa, loop=loop):
            out = compiled(x)
            check(out, x, layers, TOLERANCE["bfloat16"])
            check_transition(behind(x), out, transition, TOLERANCE["bfloat16"])


@needs_pairs
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_pairs_keep_what_is_not_finite(value: float) -> None:
    """Elements that are infinite or NaN."""
    block = Block("not finite", (1, 8, 8, 16), 1)
    x, layers = values(block, jnp.dtype("bfloat16"), middle=16, growth=16)
    x[0, 3, 3, 5] = value
    x, layers = on_device((x, layers))
    found, wanted = jax.jit(lambda x: jsc.dense_block(x, layers))(x)[..., 16:], expected_layer(np.asarray(x), layers[0])
    np.testing.assert_array_equal(np.isfinite(np.asarray(found, np.float64)), np.isfinite(wanted))


@needs_pairs
def test_scales_and_shifts_of_pairs_have_more_digits_than_bfloat16() -> None:
    """Which `accelerate` has, as it folds batch norms in float32; the layers one by one read the same."""
    block = Block("digits", (1, 6, 6, 32), 2)
    x, layers = on_device(values(block, np.float32, middle=32, growth=16))
    # 1.00024 * x - 256 of x = 256 is 0.0625, and 0 where the scale is 1.
    layers = [layer._replace(scale=layer.scale * 0 + 1 + 2**-12, shift=layer.shift * 0 - 256) for layer in layers]
    layers = [layer._replace(kernel1=100 * layer.kernel1) for layer in layers]
    narrow = jnp.where(x > 0, 256, 0).astype(jnp.bfloat16)
    packed = block_parameters.for_cpu(jsc.pack_dense_block(layers), jnp.bfloat16)
    wanted = expected_layer(np.asarray(narrow), layers[0])
    assert np.linalg.norm(wanted) > 1
    for function in (jsc.dense_block, functools.partial(jsc.dense_block, implementation="xla")):
        found = jax.jit(lambda x, function=function: function(x, packed))(narrow)
        assert oracle.relative_error(np.asarray(found[..., 32:48]), wanted) <= TOLERANCE["bfloat16"]


@needs_pairs
def test_transformations_of_pairs() -> None:
    block = Block("small", (2, 6, 6, 20), 2)
    x, layers = on_device(values(block, jnp.dtype("bfloat16"), middle=16, growth=16))
    transition = on_device(transition_values(block, jnp.dtype("bfloat16"), out_channels=16, growth=16))

    def by(implementation: str | None) -> Any:
        return lambda x, layers, transition: jsc.dense_block(
            x, layers, transition=transition, implementation=implementation
        ).astype(jnp.float32)

    def is_as_near(found: Any, by_xla: Any, exact: Any) -> None:
        norm = jnp.linalg.norm(exact)
        assert norm > 0
        error, of_xla = (jnp.linalg.norm(each.astype(jnp.float32) - exact) for each in (found, by_xla))
        assert error <= 1.25 * of_xla + 1e-3 * norm

    def of_square(function: Any) -> Any:
        return jax.grad(lambda *given: jnp.sum(function(*given) ** 2), argnums=(0, 1, 2))

    given = (x, layers, transition)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), given)
    for transform in (
        of_square,
        lambda f: lambda x, *weights: jax.vmap(lambda x: f(x, *weights))(jnp.stack([x, -x])),
    ):
        found, by_xla = (transform(by(implementation))(*given) for implementation in ("fused", "xla"))
        jax.tree.map(is_as_near, found, by_xla, transform(by("xla"))(*wide))
    traced = jax.jit(lambda x: jsc.dense_block(x, layers, transition=transition)).trace(x)
    assert "jsc_dense_block" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    with jax.debug_nans(True):
        graph = models.DenseNet((2, 3), growth=16, num_classes=10, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        graph.eval()
        images = jnp.ones((2, 64, 64, 3), jnp.bfloat16)
        assert jnp.isfinite(jsc.nnx.jit_inference(graph)(images)).all()


@needs_pairs
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [(((1, 6, 6, 21), 16, 16), "even"), (((1, 6, 6, 20), 17, 16), "even"), (((1, 6, 6, 20), 16, 8), "below 16")],
)
def test_blocks_without_kernels_of_pairs(sizes: tuple[Any, int, int], reason: str) -> None:
    shape, middle, growth = sizes
    x, layers = on_device(values(Block("", shape, 1), jnp.dtype("bfloat16"), middle=middle, growth=growth))
    assert calls_of(lambda x: jsc.dense_block(x, layers), x) == 0
    with pytest.raises(ValueError, match=f"cannot run: .*{reason}"):
        jsc.dense_block(x, layers, implementation="fused")


@pytest.mark.parametrize("value", [1e6, np.inf, np.nan])
def test_squares_with_an_outlier_are_left_to_the_direct_loop(value: float, cpu_isa: str) -> None:
    """Whose 3x3 kernel is the packed one: what is far from the element, or not finite, keeps its digits."""
    block = Block("an outlier", (1, 12, 12, 32), 1)
    x, layers = values(block, np.float32, middle=64, growth=24)
    x[0, 6, 6, 3] = value
    x, layers = on_device((x, layers))
    with on_cpu(loop="winograd"):
        out = np.asarray(jsc.dense_block(x, layers))
    wanted, found = expected_layer(np.asarray(x), layers[0]), out[..., 32:]
    far = np.s_[:, :5]  # rows whose windows do not have the element
    assert oracle.relative_error(found[far], wanted[far]) <= TOLERANCE["highest"]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


def test_a_map_without_zeros_runs_dense_loops() -> None:
    """The choice is by a sample of the map as it is read, scaled and clipped: other loops add in another order."""
    block = Block("zeros or none", (1, 14, 14, 96), 1)
    x, layers = values(block, np.float32)
    few, many = (layers[0]._replace(shift=layers[0].shift + by) for by in (8, -1))
    for layer, is_dense in ((few, True), (many, False)):
        on = on_device((x, [layer._replace(bias1=layer.bias1 - 9 * (not is_dense))]))
        results = {}
        for loop in ("auto", "pixels"):
            with on_cpu(loop=loop):
                results[loop] = np.asarray(jsc.dense_block(*on))
        assert np.array_equal(results["auto"], results["pixels"]) is not is_dense


def test_what_is_known_when() -> None:
    """Constants and packed parameters are read packed; arguments run layer by layer, unless one call is asked for."""
    block = Block("small", (1, 6, 6, 20), 2)
    x, layers = on_device(values(block, np.float32, middle=16, growth=16))
    packed = jsc.pack_dense_block(layers)
    assert calls_of(lambda x: jsc.dense_block(x, layers), x) == 1
    assert calls_of(lambda x: jsc.dense_block(x, packed), x) == 1
    assert calls_of(lambda x, layers: jsc.dense_block(x, layers), x, layers) == 0
    assert calls_of(lambda x, layers: jsc.dense_block(x, layers, implementation="fused"), x, layers) == 1
    assert calls_of(lambda x: jsc.dense_block(x, layers, implementation="xla"), x) == 0
    wanted = jsc.dense_block(x, layers, implementation="xla")
    for function in (jsc.dense_block, jax.jit(jsc.dense_block, static_argnames="implementation")):
        found = function(x, layers, implementation="fused")
        assert jnp.linalg.norm(found - wanted) <= 2e-6 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 21), ("bfloat16", 22)])
def test_packing_for_the_cpu_and_back(dtype: str, channels: int) -> None:
    block = Block("odd", (1, 4, 4, channels), 3)
    _, layers = on_device(values(block, jnp.dtype(dtype), middle=40, growth=24))
    transition = on_device(transition_values(block, jnp.dtype(dtype), out_channels=50, growth=24))
    plain = jsc.pack_dense_block(layers, transition)
    packed = block_parameters.for_cpu(plain, plain.dtype)
    assert packed.sizes == plain.sizes._replace(is_for_cpu=True, has_pairs=dtype == "bfloat16")
    assert packed.dtype == dtype
    for found, wanted in ((packed.layers, layers), (packed.transition, transition)):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_transformations() -> None:
    block = Block("small", (2, 6, 6, 20), 2)
    x, layers = on_device(values(block, np.float32, middle=16, growth=16))

    def by(implementation: str | None) -> Any:
        return lambda x: jsc.dense_block(x, layers, implementation=implementation)

    stacked = jnp.stack([x, 2 * x])
    assert calls_of(jax.vmap(by(None)), stacked) == 1
    np.testing.assert_allclose(jax.vmap(by(None))(stacked), jax.vmap(by("xla"))(stacked), rtol=1e-4, atol=1e-4)
    for transform in (lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)), jax.checkpoint, lambda f: jax.jit(f)):
        found, wanted = (transform(by(implementation))(x) for implementation in (None, "xla"))
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)
    by_parameters = jax.grad(lambda layers: jnp.sum(jsc.dense_block(x, layers) ** 2))(layers)
    wanted = jax.grad(lambda layers: jnp.sum(jsc.dense_block(x, layers, implementation="xla") ** 2))(layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), by_parameters, wanted)


def test_infinite_weights_do_not_meet_zeros() -> None:
    """Of a map of zeros, that is: one with few runs a loop that multiplies them, as XLA does."""
    block = Block("small", (1, 5, 5, 16), 1)
    x, layers = values(block, np.float32, middle=16, growth=16)
    layers[0].kernel1[0, 0, 3, 2] = np.inf
    x[...] = 0
    layers[0].shift[...] = -1  # so that every element is clipped
    x, layers = on_device((x, layers))
    out = np.asarray(jax.jit(lambda x: jsc.dense_block(x, layers))(x))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run_layer_by_layer(dtype: str) -> None:
    x, layers = on_device(values(Block("small", (1, 6, 6, 20), 2), jnp.dtype(dtype), middle=16, growth=16))
    with on_cpu(isa="portable"):  # without pairs of bfloat16
        assert calls_of(lambda x: jsc.dense_block(x, layers), x) == 0
        with pytest.raises(ValueError, match=f"cannot run: dtype {dtype} is neither float32 nor, with AVX512-BF16"):
            jsc.dense_block(x, layers, implementation="fused")


def test_a_network_runs_its_blocks_as_one_call_each() -> None:
    model = models.DenseNet((2, 3), growth=16, num_classes=10, rngs=nnx.Rngs(0))
    model.eval()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 64, 3)), jnp.float32)
    function = jsc.nnx.jit_inference(model)
    blocks = {row.block for row in function.report(x).rows if row.block is not None}
    assert len(blocks) == 2
    wanted = model(x)
    assert jnp.linalg.norm(function(x) - wanted) <= 1e-5 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1e-2), ("float16", 1e-3)])
def test_a_network_of_16_bits_runs_its_blocks_as_one_call_each(dtype: str, most: float) -> None:
    model = models.DenseNet((2, 3), growth=16, num_classes=10, rngs=nnx.Rngs(0))
    model.eval()
    graph, state = nnx.split(model)
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 else leaf, state)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == dtype else leaf, narrow)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 64, 3)), dtype)
    function = jsc.nnx.jit_inference(nnx.merge(graph, narrow))
    blocks = {row.block for row in function.report(x).rows if row.block is not None}
    assert len(blocks) == 2
    wanted = nnx.merge(graph, wide)(x.astype(jnp.float32))
    assert "stablehlo.concatenate" not in function.lower(x).as_text()  # parameters are packed once, not in each call
    found = function(x)
    assert found.dtype == dtype
    assert jnp.linalg.norm(found.astype(jnp.float32) - wanted) <= most * jnp.linalg.norm(wanted)


def test_native_code_refuses_what_does_not_fit() -> None:
    if _native.why_missing("dense_block", "cpu", "float32") is not None:
        pytest.skip("the extension for the CPU is not built")
    call = jax.ffi.ffi_call(
        "jsc_dense_block",
        [jax.ShapeDtypeStruct((1, 4, 4, 32), np.float32), jax.ShapeDtypeStruct((1, 4, 4, 16), np.float32)],
    )
    x = jnp.ones((1, 4, 4, 16))
    sizes: dict[str, Any] = {"layers": np.int64(1), "middle": np.int64(16), "growth": np.int64(16)}
    for count, offsets in ((64, (0, 64, 128, 10**6, 192)), (64, (0, 64)), (64, (-64, 0, 0, 0, 0))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a parameter does not lie in the array"):
            call(x, jnp.ones(count), out_channels=np.int64(0), offsets=np.array(offsets, np.int64), **sizes)
    narrow = jax.ffi.ffi_call(
        "jsc_dense_block",
        [jax.ShapeDtypeStruct((1, 4, 4, channels), jnp.bfloat16) for channels in (32, 16, 32)],
    )
    halves, parameters = x.astype(jnp.bfloat16), jnp.ones(3 * 2304, jnp.bfloat16)
    of_pairs: dict[str, Any] = {**sizes, "out_channels": np.int64(0)}
    for offsets in ((0, 64, 128, 10**6, 192), (3 * 2304 - 16, 64, 128, 384, 448), (0, 64, 128, 384, 3 * 2304 - 64)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a parameter does not lie in the array"):
            narrow(halves, parameters, offsets=np.array(offsets, np.int64), **of_pairs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="offsets must be even"):
        narrow(halves, parameters, offsets=np.array((0, 64, 128, 385, 448), np.int64), **of_pairs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be even"):
        narrow(halves[..., 1:], parameters, offsets=np.zeros(5, np.int64), **of_pairs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="of its dtype"):
        narrow(halves, jnp.ones(64), offsets=np.zeros(5, np.int64), **of_pairs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must not be negative"):
        call(x, jnp.ones(64), out_channels=np.int64(-1), offsets=np.zeros(5, np.int64), **sizes)
