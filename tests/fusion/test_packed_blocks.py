"""Dense blocks whose parameters are one array: `pack_dense_block` and `dense_block`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from blocks import (
    BLOCKS,
    KIND_IDS,
    KINDS,
    TOLERANCE,
    Block,
    check,
    check_transition,
    transition_values,
    values,
)
from dense_block_checks import check_same, require_kernel
from flax import nnx
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.fusion import block_limits
from jax_sparse_conv._src.fusion.block_parameters import DenseBlockLayer, DenseTransition, PackedDenseBlock
from jax_sparse_conv._src.fusion.dense_blocks import dense_block_p

SMALL = (
    Block("small", (2, 6, 5, 32), 2),
    Block("one layer", (1, 9, 8, 160), 1),
    Block("odd sizes", (3, 7, 5, 96), 3),
)
HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def parameters(
    block: Block, dtype: Any = np.float32, **sizes: int
) -> tuple[jax.Array, list[DenseBlockLayer], DenseTransition]:
    """x, layers and a transition, on the device."""
    x, layers = values(block, dtype, **sizes)
    transition = transition_values(block, dtype, growth=sizes.get("growth", 32))
    found: tuple[Any, Any, Any] = jax.tree.map(cases.on_device, (x, layers, transition))
    return found


def bound(x: Any, packed: PackedDenseBlock) -> Any:
    """The primitive itself, which `dense_block` passes by where no kernel is installed."""
    return dense_block_p.bind(x, packed.values, precision=HIGHEST, must=False, packed=packed.sizes)


# --- one array -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("block", [*SMALL, Block("narrow", (1, 3, 3, 12), 3)], ids=lambda block: block.name)
def test_the_parts_come_back(block: Block, dtype: str) -> None:
    sizes = {"middle": 10, "growth": 6} if block.name == "narrow" else {}
    with jax.enable_x64(dtype == "float64"):
        _, layers, transition = parameters(block, jnp.dtype(dtype), **sizes)
        for behind in (None, transition):
            packed = jsc.pack_dense_block(layers, behind)
            assert jax.tree.leaves(packed)[0] is packed.values
            assert (packed.values.ndim, packed.dtype) == (1, jnp.dtype(dtype))
            assert packed.sizes[0] == block.x[3]
            assert packed.sizes[4] == (None if behind is None else behind.kernel.shape[3])
            check_same(packed.layers, layers)
            assert (packed.transition is None) == (behind is None)
            check_same(packed.transition, behind)
            assert not any(offset * 2 % 128 for offset in packed.sizes.offsets())  # of 16-bit types
            check_same(jax.jit(jsc.pack_dense_block)(layers, behind).values, packed.values)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("block", SMALL, ids=lambda block: block.name)
def test_packed_layers_compute_the_same(block: Block, dtype: str, precision: str, implementation: str | None) -> None:
    x, layers, transition = parameters(block, jnp.dtype(dtype))
    options: Any = {"precision": precision, "implementation": implementation}
    for behind in (None, transition):
        separate = jax.jit(lambda x, layers, behind: jsc.dense_block(x, layers, transition=behind, **options))
        packed = jax.jit(lambda x, packed: jsc.dense_block(x, packed, **options))
        given = jsc.pack_dense_block(layers, behind)
        assert packed.eval_shape(x, given).shape == separate.eval_shape(x, layers, behind).shape
        found, wanted = packed(x, given), separate(x, layers, behind)
        if PLATFORM == "cpu":
            check_same(found, wanted)
        else:  # cuDNN's algorithms are chosen for each program
            tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
            assert oracle.relative_error(np.asarray(found), np.asarray(wanted).astype(np.float64)) <= tolerance


def test_transformations() -> None:
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    plain = jax.jit(functools.partial(jsc.dense_block, precision="highest", implementation="xla"))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    wanted = plain(x, layers, transition=transition)
    close(bound(x, packed), wanted)
    close(jax.jit(bound)(x, packed), wanted)
    assert jax.eval_shape(bound, x, packed).shape == wanted.shape
    images = jnp.stack([x, -x, 2 * x])
    mapped = jnp.stack([plain(each, layers, transition=transition) for each in images])
    for function in (bound, plain):
        close(jax.vmap(function, (0, None))(images, packed), mapped)
        close(jax.vmap(function, (2, None))(jnp.moveaxis(images, 0, 2), packed), mapped)
        halved = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), packed)
        each = jnp.stack([wanted, plain(x, *(jax.tree.map(lambda leaf: 0.5 * leaf, (packed,))))])
        close(jax.vmap(function, (None, 0))(x, halved), each)
        tangent = jax.jit(lambda x, f=function: jax.jvp(lambda x: f(x, packed), (x,), (jnp.ones_like(x),))[1])
        close(tangent(x), jax.jvp(lambda x: plain(x, layers, transition=transition), (x,), (jnp.ones_like(x),))[1])


def test_derivatives_go_through_the_parts() -> None:
    x, layers, transition = parameters(SMALL[0])

    def loss(function: Callable[..., Any], *arguments: Any) -> Any:
        return jnp.sum(function(*arguments) ** 2)

    def separate(x: Any, layers: Any, transition: Any) -> Any:
        return jsc.dense_block(x, layers, transition=transition, precision="highest", implementation="xla")

    by_x, *by_parts = jax.jit(jax.grad(functools.partial(loss, separate), (0, 1, 2)))(x, layers, transition)
    packed = jsc.pack_dense_block(layers, transition)
    found_x, found = jax.jit(jax.grad(functools.partial(loss, bound), (0, 1)))(x, packed)
    np.testing.assert_allclose(found_x, by_x, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(*map(jax.tree.leaves, ((found.layers, found.transition), by_parts)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_cast_keeps_the_places() -> None:
    x, layers, transition = parameters(SMALL[0])
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jsc.pack_dense_block(layers, transition))
    check_same(cast.layers, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layers))
    assert jsc.dense_block(x.astype(jnp.bfloat16), cast).dtype == jnp.bfloat16


def test_it_is_exported() -> None:
    pytest.importorskip("flatbuffers")
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    function = jax.jit(functools.partial(jsc.dense_block, precision="highest", implementation="xla"))
    exported = jax.export.export(function)(x, packed)
    check_same(jax.export.deserialize(exported.serialize()).call(x, packed), function(x, packed))


def test_what_does_not_fit_is_named() -> None:
    x, layers, transition = parameters(SMALL[0])
    packed = jsc.pack_dense_block(layers, transition)
    with pytest.raises(ValueError, match=r"transition must be None where layers are packed; pack_dense_block\(layers"):
        jsc.dense_block(x, packed, transition=transition)
    with pytest.raises(ValueError, match=r"x.shape=\(2, 6, 5, 64\) must be \[N, H, W, 32\], as layers are packed for"):
        jsc.dense_block(jnp.concatenate([x, x], -1), packed)
    with pytest.raises(TypeError, match=r"layers.values.dtype=float32 must equal x.dtype=bfloat16"):
        jsc.dense_block(x.astype(jnp.bfloat16), packed)
    size = packed.sizes.size()
    for wrong in (packed.values[:-1], packed.values.reshape(2, -1)):
        with pytest.raises(ValueError, match=rf"layers.values.shape=\(.*\) must be \({size},\) or longer; make it by"):
            jsc.dense_block(x, PackedDenseBlock(wrong, packed.sizes))
    with pytest.raises(ValueError, match="implementation='ecr' is not one"):
        jsc.dense_block(x, packed, implementation="ecr")
    with pytest.raises(ValueError, match="implementation='fused' cannot run"):
        jsc.dense_block(x[..., :0], jsc.pack_dense_block(*narrow()), implementation="fused")


def narrow() -> tuple[list[DenseBlockLayer], DenseTransition]:
    return parameters(Block("nothing", (1, 2, 2, 0), 1))[1:]


def test_what_cannot_be_packed_is_named() -> None:
    x, layers, transition = parameters(SMALL[0])
    pack: Any = jsc.pack_dense_block
    with pytest.raises(ValueError, match=r"layers=\[\] must be one DenseBlockLayer or more"):
        pack([])
    with pytest.raises(TypeError, match=r"layers\[1\] is tuple, not DenseBlockLayer"):
        pack([layers[0], tuple(layers[1])])
    with pytest.raises(TypeError, match="layers is PackedDenseBlock, not a sequence of DenseBlockLayer"):
        pack(pack(layers))
    with pytest.raises(TypeError, match="layers is Param, not a sequence of DenseBlockLayer"):
        jsc.dense_block(x, nnx.Param(pack(layers)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers\[0\].scale.shape=\(1, 32\) must be \(C0,\)"):
        pack([layers[0]._replace(scale=layers[0].scale[None])])
    with pytest.raises(ValueError, match=r"layers\[1\].scale.shape=\(32,\) must be \(64,\)"):
        pack([layers[0], layers[0]])
    with pytest.raises(TypeError, match=r"layers\[1\].bias1.dtype=float16 must equal layers\[0\].scale.dtype=float32"):
        pack([layers[0], layers[1]._replace(bias1=layers[1].bias1.astype(np.float16))])
    with pytest.raises(ValueError, match=r"transition.scale.shape=\(64,\) must be \(96,\)"):
        pack(layers, transition._replace(scale=transition.scale[:64]))
    with pytest.raises(TypeError, match="transition is tuple, not DenseTransition"):
        pack(layers, tuple(transition))
    wider = DenseBlockLayer(*(jnp.zeros(shape) for shape in ((64,), (64,), (1, 1, 64, 96), (96,), (3, 3, 96, 32))))
    with pytest.raises(ValueError, match=r"layers\[1\] has M=96 and G=32, and layers\[0\] M=128 and G=32"):
        pack([layers[0], wider])


@pytest.mark.parametrize("images", [1, 9])
def test_a_call_has_one_operand_and_its_places(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    for name, value in (("why_missing", None), ("has_warpgroups", True), ("dense_layers_bytes", 4096)):
        monkeypatch.setattr(_native, name, lambda *_, value=value: value)
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, ordinal: Device(capability=(9, 0))))
    x, layers, transition = parameters(Block("few or many", (images, 6, 6, 64), 2))
    packed = jsc.pack_dense_block(layers, transition)
    traced = jax.jit(lambda x, packed: jsc.dense_block(x, packed)).trace(x, packed)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in lowered.splitlines() if "@jsc_dense_block" in line)
    assert f"(tensor<{images}x6x6x64xf32>, tensor<{packed.values.size}xf32>) ->" in line
    offsets = packed.sizes.offsets()[: 10 if images > 1 else None]  # many images have the transition behind their call
    assert f"offsets = dense<[{', '.join(map(str, offsets))}]>" in line


def test_whether_it_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: False)
    x, layers, transition = parameters(SMALL[0])
    assert block_limits.is_one_call(x, layers, None, transition)
    assert not block_limits.is_one_call(jnp.concatenate([x] * 5), layers, None, transition)
    row = x[:, :1]
    assert not block_limits.is_one_call(row, layers, None, transition)
    assert block_limits.is_one_call(row, layers)


# --- the kernel ------------------------------------------------------------------------------------------------------

FUSED: Any = {"implementation": "fused"}
_PIXELS = 2000  # of all layers


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_the_kernel_reads_one_array_as_it_reads_many(block: Block, dtype: str, precision: str, gpu: jax.Device) -> None:
    require_kernel(dtype)
    x, layers, transition = parameters(block, jnp.dtype(dtype))
    for behind in (None, transition) if min(block.x[1:3]) > 1 else (None,):
        separate = jax.jit(lambda x, layers, behind: jsc.dense_block(x, layers, transition=behind, **FUSED))
        packed = jax.jit(functools.partial(jsc.dense_block, precision=None, **FUSED))
        given = jsc.pack_dense_block(layers, behind)
        with jax.default_matmul_precision(precision):
            assert packed.lower(x, given).as_text().count("offsets = dense") == 1
            out, wanted = packed(x, given), separate(x, layers, behind)
        check_same(out.astype(jnp.float32), wanted.astype(jnp.float32))
        tolerance = TOLERANCE[precision if dtype == "float32" else dtype]
        if np.prod(block.x[:3]) * block.layers > _PIXELS:  # against float64 test_dense_blocks has them
            continue
        if behind is None:
            check(out, x, layers, tolerance)
            map_before = out
        else:
            check_transition(out, map_before, behind, tolerance)


@pytest.mark.parametrize("images", [1, 9])
def test_a_call_with_nonsense_is_refused(images: int, gpu: jax.Device) -> None:
    """By the native code, with the reason."""
    require_kernel("float32")
    block = Block("nonsense", (images, 14, 14, 64), 2)
    x, layers, _ = parameters(block)
    packed = jsc.pack_dense_block(layers)
    results = [jax.ShapeDtypeStruct((images, 14, 14, 128), np.float32), jax.ShapeDtypeStruct((0,), np.uint8)]

    def refused(match: str, offsets: list[int], *operands: Any, precision: Any = 2, dtype: Any = np.int64) -> None:
        attributes = {"precision": np.int64(precision), "offsets": np.array(offsets, dtype)}
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            jax.block_until_ready(jax.ffi.ffi_call("jsc_dense_block", results)(x, *operands, **attributes))

    offsets, values = packed.sizes.offsets(), packed.values
    for wrong in (-64, values.size, values.size - 64, 2**62):
        refused(rf"layer 1: offset {wrong} is not a multiple", [*offsets[:-1], wrong], values)
    refused("layer 0: offset 1 is not a multiple of 128 bytes", [0, 1, *offsets[2:]], values)
    refused("layer 1: offset .* leaves the packed parameters", offsets, values[: values.size // 2])
    refused("five parameters a layer", offsets[:-1], values)
    refused("five parameters a layer", [0], values)
    refused("only parameter must be one array", offsets, values, values)
    refused("only parameter must be one array", offsets, values[None])
    refused("only parameter must be one array", offsets, values.astype(jnp.bfloat16))
    refused("offsets must be an array of int64", offsets, values, dtype=np.int32)
    refused("precision must be 0, 1 or 2", offsets, values, precision=3)
