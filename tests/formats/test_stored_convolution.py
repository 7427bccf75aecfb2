"""Convolutions that read a stored `CooStar`, against float64 by numpy and against those of the dense map."""

from __future__ import annotations

import itertools
import re
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from coo_star_checks import assume_costs, feature_map
from flax import nnx
from kernel_checks import TOLERANCE, inputs_and_result
from platforms import PLATFORM, on_a_gpu, require

import jax_sparse_conv as jsc
from jax_sparse_conv import linen as sparse_linen
from jax_sparse_conv import nnx as sparse_nnx
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.api import by_density
from jax_sparse_conv._src.dispatch.coo import cost_model
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.problem.geometry import Geometry

COO_CASES = [case for case, implementation in cases.runs() if implementation == "coo"]
TILES = [(4, 4, 1), (7, 7, 1), (3, 5, 4), (16, 17, 2), (1, 1, 1), (64, 64, 1)]


def by_numpy(x: np.ndarray, kernel: np.ndarray, stride: int = 1, pad: int = 1, groups: int = 1) -> np.ndarray:
    """The convolution in float64, tap by tap, of what is no zero of x."""
    wide = np.pad(x.astype(np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns, channels, out_channels = kernel.shape
    height, width = ((size - k) // stride + 1 for size, k in zip(wide.shape[1:3], (rows, columns), strict=True))
    out = np.zeros((x.shape[0], height, width, out_channels))
    share = out_channels // groups
    for i, j, g, c in itertools.product(range(rows), range(columns), range(groups), range(channels)):
        seen = wide[:, i : i + height * stride : stride, j : j + width * stride : stride, g * channels + c, None]
        weights = kernel[i, j, c, g * share : (g + 1) * share].astype(np.float64)
        with np.errstate(invalid="ignore"):
            out[..., g * share : (g + 1) * share] += np.where(seen == 0, 0, seen * weights)
    return out


@pytest.mark.parametrize("tile", [None, (4, 4, 1), (3, 5, 2)], ids=str)
@pytest.mark.parametrize("case", COO_CASES, ids=lambda case: case.name)
def test_every_case_of_the_dense_map(case: Case, tile: Any) -> None:
    require("coo_lists", "float32")
    (x, kernel, bias, residual), wanted = inputs_and_result(case, "float32")
    stored = CooStar.fromdense(x, (4, 4, 1) if tile is None else tile)
    for implementation in ("coo", None):
        found = jsc.conv(stored, kernel, bias, residual=residual, implementation=implementation, **case.arguments)
        assert found.dtype == jnp.float32
        assert oracle.relative_error(found, wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("case", COO_CASES[::3], ids=lambda case: case.name)
def test_other_dtypes(case: Case, dtype: str) -> None:
    require("coo_lists", dtype)
    with jax.enable_x64(dtype == "float64"):
        (x, kernel, bias, residual), wanted = inputs_and_result(case, dtype)
        stored = CooStar.fromdense(x, (5, 4, 1))
        found = jsc.conv(stored, kernel, bias, residual=residual, implementation="coo", **case.arguments)
        assert found.dtype == jnp.dtype(dtype)
        assert oracle.relative_error(found, wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.05, 0.4, 1.0])
def test_tiles_and_densities_by_numpy(tile: Any, density: float) -> None:
    require("coo_lists", "float32")
    x = feature_map((2, 13, 10, 40), density)
    for size, stride, groups in ((3, 1, 1), (3, 2, 4), (5, 1, 2), (1, 2, 1)):
        kernel = feature_map((size, size, 40 // groups, 12), 1.0, seed=size)
        options = {"strides": stride, "padding": size // 2, "feature_group_count": groups}
        found = jsc.conv(CooStar.fromdense(x, tile), kernel, implementation="coo", **options)
        wanted = by_numpy(x, kernel, stride, size // 2, groups)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5)


def test_instruction_sets(cpu_isa: str) -> None:
    x, kernel = feature_map((1, 11, 9, 21)), feature_map((3, 3, 21, 70), 1.0)
    found = jsc.conv(CooStar.fromdense(x, (4, 4, 1)), kernel, implementation="coo")
    np.testing.assert_allclose(found, by_numpy(x, kernel), rtol=1e-5, atol=2e-5, err_msg=cpu_isa)


def test_results_repeat_bit_for_bit() -> None:
    require("coo_lists", "float32")
    stored, kernel = CooStar.fromdense(feature_map((1, 14, 14, 64))), feature_map((3, 3, 64, 32), 1.0)
    first, *others = (np.asarray(jsc.conv(stored, kernel, implementation="coo")) for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_non_finite_values_and_zeros() -> None:
    """Stored values are multiplied; what is not stored, or stored as a zero, meets nothing."""
    require("coo_lists", "float32")
    x = feature_map((1, 8, 8, 6))
    x[0, 2, 3, 1], x[0, 5, 5, 2], x[0, 6, 1, 3] = np.nan, np.inf, -np.inf
    x[..., 4] = 0
    kernel = feature_map((3, 3, 6, 5), 1.0, seed=1)
    kernel[:, :, 4] = np.inf
    found = np.asarray(jsc.conv(CooStar.fromdense(x, (4, 4, 1)), kernel, implementation="coo"))
    wanted = by_numpy(x, kernel)
    assert np.isfinite(wanted).any()
    assert oracle.relative_error(found, wanted) <= TOLERANCE["float32"]
    stored = CooStar.fromdense(np.ones_like(x), (4, 4, 1))
    nothing = jax.tree.unflatten(
        jax.tree.structure(stored), [jnp.zeros_like(stored.values), stored.positions, stored.counts]
    )
    assert not np.asarray(jsc.conv(nothing, kernel, implementation="coo")).any()


def test_lists_that_say_too_much() -> None:
    """Counts beyond the slots, negative ones and places that are none: nothing outside of a list is touched."""
    require("coo_lists", "float32")
    stored = CooStar.fromdense(feature_map((1, 6, 6, 3)), (3, 3, 1))
    kernel = feature_map((3, 3, 3, 4), 1.0)
    for counts, positions in ((1000, 0), (-1, 0), (9, 255)):
        damaged = jax.tree.unflatten(
            jax.tree.structure(stored),
            [
                jnp.ones_like(stored.values),
                jnp.full_like(stored.positions, positions),
                jnp.full_like(stored.counts, counts),
            ],
        )
        found = jax.block_until_ready(jsc.conv(damaged, kernel, implementation="coo"))
        assert found.shape == (1, 6, 6, 4)
        if counts < 0 or positions == 255:
            assert not np.asarray(found).any()


def test_nothing_is_converted_a_second_time() -> None:
    require("coo_lists", "float32")
    stored, kernel = CooStar.fromdense(feature_map((1, 9, 9, 8))), jnp.ones((3, 3, 8, 8))
    compiled = jax.jit(lambda stored, kernel: jsc.conv(stored, kernel)).lower(stored, kernel).compile().as_text()
    assert "jsc_coo_lists" in compiled
    assert "jsc_coo_todense" not in compiled
    assert "jsc_coo_fromdense" not in compiled


def test_vmap_of_lists_kernels_and_what_is_added() -> None:
    require("coo_lists", "float32")
    maps, kernels = feature_map((3, 2, 9, 7, 6)), feature_map((3, 3, 3, 6, 5), 1.0, seed=1)
    biases = feature_map((3, 5), 1.0, seed=2)
    stored = jax.vmap(lambda x: CooStar.fromdense(x, (4, 4, 1)))(maps)
    one = CooStar.fromdense(maps[0], (4, 4, 1))

    def call(stored: Any, kernel: Any, bias: Any) -> jax.Array:
        return jsc.conv(stored, kernel, bias, activation="relu", implementation="coo")

    for axes in itertools.product((0, None), repeat=3):
        if axes == (None, None, None):
            continue
        pick = [axis == 0 for axis in axes]
        found = jax.jit(jax.vmap(call, in_axes=axes))(
            stored if pick[0] else one, kernels if pick[1] else kernels[0], biases if pick[2] else biases[0]
        )
        for i in range(3):
            x, kernel, bias = (v[i if p else 0] for v, p in zip((maps, kernels, biases), pick, strict=True))
            wanted = np.maximum(by_numpy(x, kernel) + bias, 0)
            np.testing.assert_allclose(found[i], wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_kernel_bias_and_values() -> None:
    require("coo_lists", "float32")
    x, kernel = jnp.asarray(feature_map((1, 7, 6, 4))), jnp.asarray(feature_map((3, 3, 4, 5), 1.0, seed=1))
    bias = jnp.asarray(feature_map((5,), 1.0, seed=2))
    stored = CooStar.fromdense(x, (4, 4, 1))

    def of_lists(kernel: Any, bias: Any) -> jax.Array:
        return jnp.sum(jsc.conv(stored, kernel, bias, activation="relu", implementation="coo") ** 2)

    def of_values(x: Any) -> jax.Array:
        return jnp.sum(jsc.conv(CooStar.fromdense(x, (4, 4, 1)), kernel, bias, implementation="coo") ** 2)

    found, by_bias = jax.jit(jax.grad(of_lists, (0, 1)))(kernel, bias)
    y = np.maximum(by_numpy(np.asarray(x), np.asarray(kernel)) + np.asarray(bias), 0)
    np.testing.assert_allclose(by_bias, 2 * y.sum((0, 1, 2)), rtol=1e-4)
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i, j in itertools.product(range(3), range(3)):
        wanted = 2 * np.einsum("nhwc,nhwk->ck", padded[:, i : i + 7, j : j + 6], y)
        np.testing.assert_allclose(found[i, j], wanted, rtol=1e-4, atol=1e-4)
    by_x = np.asarray(jax.grad(of_values)(x))
    dense = jax.grad(lambda x: jnp.sum(jsc.conv(x, kernel, bias, implementation="xla", precision="highest") ** 2))(x)
    np.testing.assert_allclose(by_x, np.where(x == 0, 0, dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "coo", "xla"])
def test_layers_and_pools(implementation: Any) -> None:
    if implementation == "coo":
        require("coo_lists", "float32")
    x = jnp.asarray(feature_map((2, 8, 8, 6)))
    stored = CooStar.fromdense(x)
    layer = sparse_nnx.SparseConv(6, 5, (3, 3), activation="relu", implementation=implementation, rngs=nnx.Rngs(0))
    pooled = sparse_nnx.SparseConvPool(6, 5, (3, 3), implementation=implementation, rngs=nnx.Rngs(0))
    with jax.default_matmul_precision("highest"):
        for each in (layer, pooled):
            np.testing.assert_allclose(each(stored), each(x), rtol=1e-4, atol=1e-5)
        more = jax.tree.map(lambda leaf: leaf[None], stored)
        np.testing.assert_allclose(layer(more)[0], layer(x), rtol=1e-4, atol=1e-5)
        of_linen = sparse_linen.SparseConv(5, (3, 3), implementation=implementation)
        parameters = of_linen.init(jax.random.key(0), x)
        wanted = of_linen.apply(parameters, x)
        np.testing.assert_allclose(of_linen.apply(parameters, stored), wanted, rtol=1e-4, atol=1e-5)
        kernel = feature_map((3, 3, 6, 5), 1.0)
        average = {"pool": "avg", "window_shape": 2, "implementation": implementation}
        wanted = jsc.conv_pool(x, kernel, **(average | {"implementation": "xla"}))
        np.testing.assert_allclose(jsc.conv_pool(stored, kernel, **average), wanted, rtol=1e-4, atol=1e-5)


def test_none_takes_what_coo_does_not() -> None:
    x, kernel = feature_map((1, 8, 8, 4)), feature_map((2, 2, 4, 5), 1.0)
    stored = CooStar.fromdense(x, (4, 4, 1))
    found = jsc.conv(stored, kernel, padding="VALID", precision="highest")
    np.testing.assert_allclose(found, by_numpy(x, kernel, pad=0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=re.escape("kernel.shape=(2, 2, 4, 5) has a window of 2x2")):
        jsc.conv(stored, kernel, implementation="coo")
    with pytest.raises(ValueError, match=re.escape("strides=(3, 3) is not one of (1, 1), (2, 2)")):
        jsc.conv(stored, jnp.ones((3, 3, 4, 5)), strides=3, implementation="coo")


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (1, 0, 4, 2), (2, 4, 4, 0)])
@pytest.mark.parametrize("implementation", [None, "coo"])
def test_nothing_to_convolve(shape: tuple[int, ...], implementation: Any) -> None:
    stored = CooStar.fromdense(jnp.zeros(shape), (2, 2, 1))
    found = jsc.conv(stored, jnp.ones((3, 3, shape[3], 5)), jnp.ones(5), implementation=implementation)
    assert found.shape == (*shape[:3], 5)
    assert (np.asarray(found) == 1).all()


def test_arguments_that_do_not_fit() -> None:
    stored, kernel = CooStar.fromdense(jnp.ones((1, 6, 6, 3)), (3, 3, 1)), jnp.ones((3, 3, 3, 4))
    for implementation in ("ecr", "direct", "adaptive"):
        with pytest.raises(ValueError, match=f"x is a CooStar, which implementation='{implementation}' does not read"):
            jsc.conv(stored, kernel, implementation=implementation)
    with pytest.raises(ValueError, match="implementation='pecr' does not read; None, 'coo', 'xla' do"):
        jsc.conv_pool(stored, kernel, implementation="pecr")
    with pytest.raises(TypeError, match="kernel is a CooStar, and only x may be one"):
        jsc.conv(jnp.ones((1, 6, 6, 3)), stored)
    with pytest.raises(TypeError, match="x is a CooStar, which conv and conv_pool read; dense takes an array"):
        jsc.dense(stored, jnp.ones((3, 4)))
    with pytest.raises(TypeError, match=re.escape("kernel.dtype=bfloat16 must equal x.dtype=float32")):
        jsc.conv(stored, kernel.astype(jnp.bfloat16))
    part = jax.tree.unflatten(jax.tree.structure(stored), [leaf[:, :1] for leaf in jax.tree.leaves(stored)])
    with pytest.raises(ValueError, match=re.escape("x.values.shape=(1, 1, 2, 3, 9) must be (1, 2, 2, 3, 9)")):
        jsc.conv(part, kernel)
    wide = jax.tree.unflatten(
        jax.tree.structure(stored), [stored.values, stored.positions.astype(jnp.int32), stored.counts]
    )
    with pytest.raises(TypeError, match=re.escape("x.positions.dtype=int32 must be uint8")):
        jsc.conv(wide, kernel)
    if PLATFORM == "cpu" and _native.why_missing("coo_lists", "cpu", "float32") is None:
        with pytest.raises(ValueError, match=re.escape("x.shape=(2, 1, 6, 6, 3)")):
            jsc.conv(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stored), kernel)


# --- the tile that the model picks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 1), (5, 2), (7, 1)])
def test_the_models_tile(size: int, stride: int) -> None:
    x, kernel = jnp.asarray(feature_map((1, 28, 28, 32))), (size, size, 32, 48)
    made = CooStar.fromdense(x, kernel_shape=kernel, strides=stride)
    pads = ((0, size - stride),) * 2 if size > stride else ((0, 0),) * 2
    geometry = Geometry(strides=(stride, stride), padding=pads)
    variant = cost_model.for_operands(x.shape, (1, *kernel), geometry, 4).variant
    assert made.tile == (variant.height * stride, variant.width * stride, 1)
    assert made.positions.dtype == jnp.uint8
    np.testing.assert_array_equal(made.todense(), x)


def test_the_models_tile_without_a_kernel() -> None:
    x = feature_map((1, 14, 14, 16))
    expected = CooStar.fromdense(x, kernel_shape=(3, 3, 16, 16)).tile
    assert CooStar.fromdense(x).tile == expected
    assert jax.jit(CooStar.fromdense)(x).tile == expected
    assert CooStar.fromdense(jnp.zeros((1, 4, 4, 0))).tile[2] == 1
    with pytest.raises(ValueError, match=re.escape("kernel_shape=(2, 2, 16, 8) has a window of 2x2")):
        CooStar.fromdense(x, kernel_shape=(2, 2, 16, 8))
    with pytest.raises(ValueError, match=re.escape("kernel_shape=(3, 3, 5, 8) has 5 input and 8 output channels")):
        CooStar.fromdense(x, kernel_shape=(3, 3, 5, 8))
    with pytest.raises(ValueError, match=re.escape("kernel_shape=(3, 3) is not [kh, kw, C / groups, K]")):
        CooStar.fromdense(x, kernel_shape=(3, 3))
    with pytest.raises(ValueError, match=re.escape("strides=(3, 3)")):
        CooStar.fromdense(x, strides=3)


# --- variants by density ---------------------------------------------------------------------------------------------

LAYER = ((32, 14, 14, 256), (3, 3, 256, 256))  # the model picks other tiles for sparse maps of it than for dense ones


def as_cuda(monkeypatch: pytest.MonkeyPatch, function: Any, *operands: Any) -> str:
    """The program that is lowered for an H200."""
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_a_gpu_has_variants_by_density(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in LAYER)
    found = cost_model.by_density(x.shape, (1, *kernel.shape), Geometry(padding=((1, 1), (1, 1))), 4)
    assert len(found.configurations) == len(found.densities) + 1 > 1
    text = as_cuda(monkeypatch, lambda x, k: jsc.conv(x, k, implementation="coo"), x, kernel)
    assert "jsc_coo_by_density" in text
    assert "densities" in text
    few = jax.ShapeDtypeStruct((1, 14, 14, 256), jnp.float32)
    text = as_cuda(monkeypatch, lambda x, k: jsc.conv(x, k, implementation="coo"), few, kernel)
    assert "@jsc_coo(" in text
    assert "jsc_coo_by_density" not in text
    assert "stablehlo.reduce" not in text  # nothing is sampled


def test_a_gpu_takes_counts_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in LAYER)
    counts = jax.ShapeDtypeStruct((4, 2), jnp.int32)

    def call(x: Any, kernel: Any, counts: Any) -> jax.Array:
        return jsc.conv(x, kernel, implementation="coo", nonzeros=counts)

    text = as_cuda(monkeypatch, call, x, kernel, counts)
    assert re.search(r"@jsc_coo_by_density\(%\w+, %\w+, %\w+\)", text)
    assert "stablehlo.reduce" not in text


def test_a_gpu_is_dense_beyond_a_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    for images in (1, 32):
        x = jax.ShapeDtypeStruct((images, 14, 14, 256), jnp.float32)

        def call(x: Any, kernel: Any) -> jax.Array:
            return by_density.conv_up_to(x, kernel, None, None, sparse="coo", below=0.45)

        text = as_cuda(monkeypatch, call, x, jax.ShapeDtypeStruct(LAYER[1], jnp.float32))
        assert "@jsc_coo_by_density" in text
        assert "dense_above = 4.500000e-01" in text
        assert ("densities" in text) == (images == 32)
        assert "stablehlo.case" not in text


@pytest.mark.parametrize("density", [0.05, 0.3, 0.9])
def test_the_side_of_a_threshold_is_right(density: float) -> None:
    """On a GPU "direct" runs beyond, by its own kernel; on a CPU XLA's."""
    require("coo", "float32")
    x, kernel = feature_map((4, 14, 14, 64), density), feature_map((3, 3, 64, 64), 1.0, seed=1)
    bias, residual = feature_map((64,), 1.0, seed=2), feature_map((4, 14, 14, 64), 1.0, seed=3)
    exact = jnp.array([[np.count_nonzero(x), x.size]], jnp.int32)
    wanted = by_numpy(x, kernel) + bias + residual
    for nonzeros, below in itertools.product((None, exact), (0.1, 0.6)):
        found = by_density.conv_up_to(
            x, kernel, bias, residual, sparse="coo", below=below, nonzeros=nonzeros, precision="highest"
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    stored = by_density.conv_up_to(
        CooStar.fromdense(x), kernel, bias, residual, sparse="coo", below=0.2, precision="highest"
    )
    np.testing.assert_allclose(stored, wanted, rtol=1e-4, atol=1e-4)


def test_a_gpu_reads_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    for images in (1, 32):
        stored = jax.eval_shape(lambda x: CooStar.fromdense(x, (4, 4, 1)), jnp.zeros((images, 14, 14, 256)))
        text = as_cuda(
            monkeypatch, lambda s, k: jsc.conv(s, k, jnp.ones(256)), stored, jax.ShapeDtypeStruct(LAYER[1], jnp.float32)
        )
        assert re.search(r"@jsc_coo_lists\((%\w+, ){5}%\w+\)", text)
        assert ("densities" in text) == (images == 32)


@pytest.mark.parametrize("density", [0.05, 0.2, 0.6, 1.0])
def test_the_variant_that_runs_is_right(monkeypatch: pytest.MonkeyPatch, gpu: jax.Device, density: float) -> None:
    del gpu
    assume_costs(monkeypatch, {"gain, least": 0.0, "seconds, closed kernel": -1.0})
    cost_model._by_density.cache_clear()
    x, kernel = feature_map((8, 28, 28, 64), density), feature_map((3, 3, 64, 64), 1.0, seed=1)
    wanted = by_numpy(x, kernel)
    exact = jnp.array([[np.count_nonzero(x), x.size]], jnp.int32)
    for nonzeros in (None, exact):
        found = jsc.conv(x, kernel, implementation="coo", nonzeros=nonzeros)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    found = jsc.conv(CooStar.fromdense(x), kernel, implementation="coo")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    cost_model._by_density.cache_clear()
