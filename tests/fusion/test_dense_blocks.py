"""`dense_block`: its meaning against float64, arguments, transformations, and the kernel on DenseNet's sizes."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import (
    BLOCKS,
    EXTREMES,
    KIND_IDS,
    KINDS,
    TOLERANCE,
    Block,
    check,
    check_transition,
    transition_values,
    values,
)
from dense_block_checks import require_kernel, run
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.fusion import block_limits, dense_blocks
from jax_sparse_conv._src.fusion.block_parameters import DenseBlockLayer
from jax_sparse_conv._src.fusion.dense_blocks import dense_block_p

# --- meaning and arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_its_meaning_against_float64(dtype: str, precision: str, implementation: str | None) -> None:
    x, layers = values(Block("small", (2, 9, 7, 12), 3), jnp.dtype(dtype), middle=10, growth=6)
    out = jsc.dense_block(x, layers, precision=precision, implementation=implementation)
    assert out.dtype == jnp.dtype(dtype)
    tolerance = {"float32": TOLERANCE[precision], "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    check(out, x, layers, tolerance)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
def test_a_transition_against_float64(dtype: str, precision: str, implementation: str | None) -> None:
    block = Block("small", (2, 9, 7, 12), 2)
    x, layers = values(block, jnp.dtype(dtype), middle=10, growth=6)
    transition = transition_values(block, jnp.dtype(dtype), out_channels=14, growth=6)
    options: Any = {"precision": precision, "implementation": implementation}
    out = jsc.dense_block(x, layers, transition=transition, **options)
    assert out.dtype == jnp.dtype(dtype)
    tolerance = {"float32": TOLERANCE[precision], "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    check_transition(out, jsc.dense_block(x, layers, **options), transition, tolerance)


def test_transitions_that_do_not_fit_are_named() -> None:
    block = Block("small", (1, 5, 5, 32), 2)
    x, layers = values(block, np.float32)
    transition = transition_values(block, np.float32)
    with pytest.raises(TypeError, match="transition is tuple, not DenseTransition"):
        jsc.dense_block(x, layers, transition=tuple(transition))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"transition.scale.shape=\(64,\) must be \(96,\)"):
        jsc.dense_block(x, layers, transition=transition._replace(scale=transition.scale[:64]))
    with pytest.raises(ValueError, match=r"transition.kernel.shape=\(1, 96, 48\) must be \(1, 1, 96, K\)"):
        jsc.dense_block(x, layers, transition=transition._replace(kernel=transition.kernel[0]))
    with pytest.raises(TypeError, match=r"transition.shift.dtype=float16 must equal x.dtype=float32"):
        jsc.dense_block(x, layers, transition=transition._replace(shift=transition.shift.astype(np.float16)))


def test_nothing_to_compute() -> None:
    for shape in ((0, 7, 7, 64), (1, 0, 7, 64)):
        x, layers = values(Block("empty", shape, 2), np.float32)
        assert jsc.dense_block(x, layers).shape == (*shape[:3], 128)


def test_arguments_that_do_not_fit_are_named() -> None:
    x, layers = values(Block("small", (1, 5, 5, 32), 2), np.float32)
    with pytest.raises(ValueError, match=r"x.shape=\(5, 5, 32\) must be \[N, H, W, C\]"):
        jsc.dense_block(x[0], layers)
    with pytest.raises(ValueError, match=r"layers=\[\] must be one DenseBlockLayer or more"):
        jsc.dense_block(x, [])
    with pytest.raises(TypeError, match=r"layers\[1\] is tuple, not DenseBlockLayer"):
        jsc.dense_block(x, [layers[0], tuple(layers[1])])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"layers\[0\].scale.shape=\(64,\) must be \(32,\)"):
        jsc.dense_block(x, layers[1:])
    with pytest.raises(ValueError, match=r"layers\[1\].kernel2.shape=\(1, 3, 128, 32\) must be \(3, 3, M, G\)"):
        jsc.dense_block(x, [layers[0], layers[1]._replace(kernel2=layers[1].kernel2[:1])])
    with pytest.raises(ValueError, match=r"layers\[0\].bias1.shape=\(64,\) must be \(M,\)"):
        jsc.dense_block(x, [layers[0]._replace(bias1=layers[0].bias1[:64])])
    with pytest.raises(TypeError, match=r"layers\[0\].shift.dtype=float16 must equal x.dtype=float32"):
        jsc.dense_block(x, [layers[0]._replace(shift=layers[0].shift.astype(np.float16))])
    with pytest.raises(ValueError, match=r"implementation='ecr' is not one that dense_block has: None, 'xla', 'fused'"):
        jsc.dense_block(x, layers, implementation="ecr")
    with pytest.raises(ValueError, match="precision='exact' is not None"):
        jsc.dense_block(x, layers, precision="exact")  # type: ignore[arg-type]


def test_a_named_call_says_why_it_cannot_run() -> None:
    x, layers = values(Block("small", (1, 5, 5, 12), 1), np.float32, middle=16, growth=8)
    with pytest.raises(ValueError, match="implementation='fused' cannot run"):
        jsc.dense_block(x, layers, implementation="fused")
    operands = [v for layer in layers for v in layer]
    if PLATFORM == "cpu":
        with pytest.raises(ValueError, match="'fused' cannot run here: M=16 or G=8 of its layers is below 16"):
            jax.jit(lambda x: dense_block_p.bind(x, *operands, precision=None, must=True, packed=None))(x)


# --- the primitive, by whatever runs here ----------------------------------------------------------------------------


def bound(x: Any, layers: Any, transition: Any = None) -> Any:
    """The primitive itself, which `dense_block` passes by where no kernel is installed."""
    precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    operands = [x, *(v for layer in layers for v in layer), *(transition or ())]
    return dense_block_p.bind(*operands, precision=precision, must=False, packed=None)


@jax.jit
def plain(x: Any, layers: Any, transition: Any = None) -> Any:
    return jsc.dense_block(x, layers, transition=transition, precision="highest", implementation="xla")


def arrays(block: Block) -> tuple[jax.Array, list[DenseBlockLayer]]:
    x, layers = values(block, np.float32)
    return jax.tree.map(cases.on_device, (x, layers))


def test_transformations() -> None:
    x, layers = arrays(Block("small", (2, 6, 5, 32), 2))
    wanted = plain(x, layers)
    np.testing.assert_allclose(bound(x, layers), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(bound)(x, layers), wanted, rtol=1e-5, atol=1e-5)
    images = jnp.stack([x, -x, 2 * x])
    mapped = jnp.stack([plain(each, layers) for each in images])
    for batch, axis in ((images, 0), (jnp.moveaxis(images, 0, 2), 2)):
        found = jax.vmap(bound, (axis, None))(batch, layers)
        np.testing.assert_allclose(found, mapped, rtol=1e-5, atol=1e-5)
    assert jax.vmap(bound, (0, None))(images[:0], layers).shape == (0, *wanted.shape)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), layers)
    each = jnp.stack([wanted, plain(x, jax.tree.map(lambda leaf: 0.5 * leaf, layers))])
    np.testing.assert_allclose(jax.vmap(bound, (None, 0))(x, stacked), each, rtol=1e-5, atol=1e-5)


def test_transformations_of_a_transition() -> None:
    block = Block("small", (2, 6, 5, 32), 2)
    x, layers = arrays(block)
    transition = jax.tree.map(cases.on_device, transition_values(block, np.float32))
    wanted = plain(x, layers, transition)
    assert wanted.shape == jax.eval_shape(bound, x, layers, transition).shape == (2, 3, 2, 48)
    np.testing.assert_allclose(jax.jit(bound)(x, layers, transition), wanted, rtol=1e-5, atol=1e-5)
    images = jnp.stack([x, -x, 2 * x])
    mapped = jnp.stack([plain(each, layers, transition) for each in images])
    found = jax.vmap(bound, (0, None, None))(images, layers, transition)
    np.testing.assert_allclose(found, mapped, rtol=1e-5, atol=1e-5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), transition)
    each = jnp.stack([wanted, plain(x, layers, jax.tree.map(lambda leaf: 0.5 * leaf, transition))])
    np.testing.assert_allclose(jax.vmap(bound, (None, None, 0))(x, layers, stacked), each, rtol=1e-5, atol=1e-5)
    derivative = jax.jit(lambda f, *v: jax.grad(lambda *v: jnp.sum(f(*v) ** 2), (0, 1, 2))(*v), static_argnums=0)
    gradients = [derivative(f, x, layers, transition) for f in (bound, plain)]
    for ours, theirs in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_derivatives() -> None:
    x, layers = arrays(Block("small", (1, 5, 6, 32), 2))
    derivative = jax.jit(lambda f, *v: jax.grad(lambda *v: jnp.sum(f(*v) ** 2), (0, 1))(*v), static_argnums=0)
    gradients = [derivative(f, x, layers) for f in (bound, plain)]
    for ours, theirs in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    forward = jax.jit(lambda f, x: jax.jvp(lambda x: f(x, layers), (x,), (jnp.ones_like(x),))[1], static_argnums=0)
    np.testing.assert_allclose(forward(bound, x), forward(plain, x), rtol=1e-4, atol=1e-4)
    mapped = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(bound(x, layers) ** 2))))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(mapped[0], gradients[1][0], rtol=1e-3, atol=1e-3)


def test_shapes_are_abstract(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layers = arrays(Block("small", (2, 6, 5, 32), 2))
    assert jax.eval_shape(bound, x, layers).shape == (2, 6, 5, 96)
    symbolic = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), 6, 5, 32), np.float32)
    operands = [symbolic, *(v for layer in layers for v in layer)]
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    assert block_limits.why_not(operands) == "its sizes are not known yet"
    assert not block_limits.is_one_call(symbolic, layers)  # type: ignore[arg-type]
    assert jax.eval_shape(bound, symbolic, layers).shape[1:] == (6, 5, 96)


@pytest.mark.parametrize("many", [False, True])
def test_few_images_are_one_call(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: many)
    for (dtype, precision), most in zip(KINDS, (2, 8, 4, 4), strict=True):
        for images in (1, most, most + 1):
            x, layers = values(Block("few", (images, 2, 2, 32), 1), jnp.dtype(dtype))
            assert block_limits.is_one_call(x, layers, precision) == (many or images <= most)


def test_many_images_have_the_transition_behind_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("why_missing", None), ("has_warpgroups", True), ("dense_layers_bytes", 4096)):
        monkeypatch.setattr(_native, name, lambda *_, value=value: value)
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(capability=(9, 0))))
    block = Block("many", (9, 6, 6, 64), 2)
    x, layers = arrays(block)
    transition = jax.tree.map(cases.on_device, transition_values(block, np.float32))
    function = jax.jit(lambda x: jsc.dense_block(x, layers, transition=transition))
    calls = []
    for images in (9, 1):
        lowered = function.trace(x[:images]).lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in lowered.splitlines() if "@jsc_dense_block" in line)
        calls.append(line)
    assert "tensor<9x6x6x128xf32>, tensor<4096xui8>)" in calls[0]  # the block's map, and scratch memory
    assert f"tensor<1x3x3x{transition.kernel.shape[-1]}xf32>, tensor<0xui8>, tensor<1x6x6x128xf32>)" in calls[1]


def test_what_the_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)

    def why(block: Block, dtype: Any = np.float32, **sizes: int) -> str | None:
        x, layers = values(block, dtype, **sizes)
        return block_limits.why_not([x, *(v for layer in layers for v in layer)])

    assert why(Block("fits", (1, 7, 7, 64), 2)) is None
    assert "dtype float64 is not one of" in str(why(Block("wide", (1, 7, 7, 64), 1), np.float64))
    assert "M=64 and G=32 of its layers are not 128 and 32" in str(why(Block("m", (1, 7, 7, 64), 1), middle=64))
    assert "M=128 and G=16" in str(why(Block("g", (1, 7, 7, 64), 1), growth=16))
    assert "C0=40 is not a multiple of 32" in str(why(Block("c", (1, 7, 7, 40), 1)))
    assert why(Block("empty", (1, 7, 0, 64), 1)) == "it has nothing to compute"

    def why_transition(block: Block, out_channels: int) -> str | None:
        x, layers = values(block, np.float32)
        parameters = transition_values(block, np.float32, out_channels)
        return block_limits.why_not([x, *(v for layer in layers for v in layer), *parameters])

    assert why_transition(Block("fits", (1, 7, 7, 64), 2), 64) is None
    assert "from C=128 to K=60 channels is not" in str(why_transition(Block("k", (1, 7, 7, 64), 2), 60))
    assert "from C=2080 to K=64 channels is not" in str(why_transition(Block("c", (1, 2, 2, 2048), 1), 64))
    assert why_transition(Block("row", (1, 1, 7, 64), 1), 64) == "its map is too small for a pool"
    assert why(Block("tall", (1, 9000, 1, 32), 1)) == "its map is too large"


# --- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_the_kernel_against_float64(block: Block, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    x, layers = values(block, jnp.dtype(dtype))
    check(run(x, layers, precision), x, layers, TOLERANCE[precision if dtype == "float32" else dtype])


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("block", [b for b in BLOCKS if min(b.x[1:3]) > 1], ids=lambda block: block.name)
def test_the_transition_against_float64(block: Block, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    x, layers = values(block, jnp.dtype(dtype))
    transition = transition_values(block, jnp.dtype(dtype), out_channels=(block.x[3] + 32 * block.layers) // 16 * 8)
    map_before = run(x, layers, precision)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    check_transition(run(x, layers, precision, transition), map_before, transition, tolerance)
    if block.layers == 1:  # an infinite weight times an average is not NaN where only some of the window are 0
        for name, place, extremes in (
            ("scale", 5, EXTREMES),
            ("shift", 6, EXTREMES),
            ("kernel", (0, 0, 9, 5), [np.nan]),
        ):
            for value in extremes:
                extreme = transition_values(block, jnp.dtype(dtype))
                getattr(extreme, name)[place] = value
                check_transition(run(x, layers, precision, extreme), map_before, extreme, tolerance)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("images", [1, 9])
@pytest.mark.parametrize("value", EXTREMES)
def test_what_is_not_finite(value: float, images: int, dtype: str, precision: str, gpu: jax.Device) -> None:
    """It goes where lax's goes, in x and in the parameters: nothing is skipped."""
    require_kernel(dtype)
    tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
    block = Block("extreme", (images, 14, 14, 64), 2)
    x, layers = values(block, jnp.dtype(dtype))
    x[0, 3, 5, 7] = value
    check(run(x, layers, precision), x, layers, tolerance)
    for name, place in (("scale", 5), ("shift", 6), ("kernel1", (0, 0, 9, 5)), ("kernel2", (1, 1, 60, 3))):
        x, layers = values(block, jnp.dtype(dtype))
        getattr(layers[1], name)[place] = value
        check(run(x, layers, precision), x, layers, tolerance)


def test_none_takes_the_kernel_and_vmap_keeps_one_call(gpu: jax.Device) -> None:
    require_kernel("float32")
    x, layers = arrays(Block("small", (1, 14, 14, 64), 2))
    function = jax.jit(lambda x: jsc.dense_block(x, layers, precision="highest"))
    assert function.lower(x).as_text().count("@jsc_dense_block") == 1
    np.testing.assert_allclose(function(x), plain(x, layers), rtol=1e-4, atol=1e-4)
    images = jnp.stack([x, -x])
    mapped = jax.jit(jax.vmap(lambda x: jsc.dense_block(x, layers, precision="highest")))
    assert mapped.lower(images).as_text().count("@jsc_dense_block") == 1
    np.testing.assert_allclose(mapped(images), jnp.stack([plain(v, layers) for v in images]), rtol=1e-4, atol=1e-4)
    many = jnp.concatenate([x * (1 + image) for image in range(9)])
    assert ("jsc_dense_block" in function.lower(many).as_text()) == dense_blocks._has_warpgroups()
    transition = transition_values(Block("small", (1, 14, 14, 64), 2), np.float32)
    found = jsc.dense_block(many, layers, transition=jax.tree.map(cases.on_device, transition), precision="highest")
    check_transition(np.asarray(found), np.asarray(plain(many, layers)), transition, 1e-5)
