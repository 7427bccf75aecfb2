"""CooStar against numpy loops: order, extremes, transformations, and the native kernels against the definition."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coo_star_checks import SHAPES_AND_TILES, check, feature_map
from hypothesis import given, settings
from hypothesis import strategies as st
from platforms import PLATFORM

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import coo_star
from jax_sparse_conv._src.primitive.coo_star import CooStar


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("shape", "tile"), SHAPES_AND_TILES, ids=str)
def test_lists_are_in_order_of_position(shape: Any, tile: Any, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        x = feature_map(shape, dtype=jnp.dtype(dtype))
        made = CooStar.fromdense(x, tile)
        assert made.positions.dtype == (jnp.uint8 if np.prod(tile) <= 256 else jnp.uint16)
        assert made.counts.dtype == jnp.int32
        check(made, x, tile)
        dense = np.asarray(made.todense())
    assert dense.dtype == x.dtype
    np.testing.assert_array_equal(dense, x)
    assert not np.signbit(dense[x == 0].astype(np.float32)).any()
    assert made.shape == shape
    assert int(made.multiplications) == int(made.additions) == np.count_nonzero(x)
    assert made.dense_multiplications == made.dense_additions == x.size


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_nothing_and_everything(density: float) -> None:
    x = feature_map((2, 6, 7, 9), density)
    made = CooStar.fromdense(x, (4, 4, 8))
    check(made, x, (4, 4, 8))
    np.testing.assert_array_equal(made.todense(), x)


def test_bytes_are_those_of_the_paper() -> None:
    whole = CooStar.fromdense(jnp.ones((1, 16, 16, 8)), (4, 4, 1))
    assert whole.nbytes == 1.25 * 4 * 16 * 16 * 8
    ragged = CooStar.fromdense(jnp.ones((1, 7, 9, 5)), (4, 4, 2))
    assert ragged.nbytes == 2 * 3 * 3 * (4 * 4 * 2) * (4 + 1)
    wide = CooStar.fromdense(jnp.ones((1, 16, 16, 8), jnp.bfloat16), (16, 16, 8))
    assert wide.nbytes == 16 * 16 * 8 * (2 + 2)


def test_extreme_values_are_kept_bit_for_bit() -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x00000001, 0x80000001, 0x80000000, 0], np.uint32)
    x = bits.view(np.float32).reshape(1, 1, 7, 1)
    made = CooStar.fromdense(x, (1, 7, 1))
    assert int(made.counts[0, 0, 0, 0]) == 5
    assert np.asarray(made.positions)[0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0]
    np.testing.assert_array_equal(np.asarray(made.todense()).view(np.uint32).reshape(-1)[:5], bits[:5])


reference_fromdense = jax.jit(coo_star._reference_fromdense, static_argnums=1)
reference_todense = jax.jit(coo_star._reference_todense, static_argnums=(3, 4))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_native_kernels_equal_the_definition(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), *(data.draw(st.integers(1, 20)) for _ in range(3)))
    tile = tuple(data.draw(st.integers(1, 9)) for _ in range(3))
    x = jnp.asarray(feature_map(shape, data.draw(st.sampled_from([0.0, 0.2, 0.9])), seed=data.draw(st.integers(0, 99))))
    made = CooStar.fromdense(x, tile)
    arrays = (made.values, made.positions, made.counts)
    wanted = reference_fromdense(x, tile)
    for array, reference in zip(arrays, wanted, strict=True):
        assert array.dtype == reference.dtype
        np.testing.assert_array_equal(array, reference)
    np.testing.assert_array_equal(made.todense(), reference_todense(*arrays, shape[1:], tile))


def test_the_custom_calls_run_where_they_are() -> None:
    if _native.why_missing("coo_fromdense", PLATFORM, "float32") is not None:
        pytest.skip(str(_native.why_missing("coo_fromdense", PLATFORM, "float32")))
    text = jax.jit(lambda x: CooStar.fromdense(x, (2, 2, 2)).todense()).lower(jnp.ones((1, 4, 4, 4))).as_text()
    assert "jsc_coo_fromdense" in text
    assert "jsc_coo_todense" in text


def test_a_missing_extension_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: "gone")
    x = feature_map((1, 5, 5, 3))
    made = jax.jit(lambda x: CooStar.fromdense(x, (3, 3, 2)))(x)
    check(made, x, (3, 3, 2))
    np.testing.assert_array_equal(made.todense(), x)


def test_jit_vmap_and_pytree() -> None:
    x = feature_map((3, 2, 6, 5, 4))
    mapped = jax.vmap(lambda x: CooStar.fromdense(x, (4, 4, 2)))(x)
    assert mapped.shape == x.shape
    np.testing.assert_array_equal(mapped.todense(), x)
    np.testing.assert_array_equal(jax.vmap(lambda made: made.todense())(mapped), x)
    inner = jax.jit(jax.vmap(lambda x: CooStar.fromdense(x, (4, 4, 2)), in_axes=2))(np.moveaxis(x, 0, 2))
    jax.tree.map(np.testing.assert_array_equal, inner, mapped)
    leaves, structure = jax.tree.flatten(CooStar.fromdense(x[0], (4, 4, 2)))
    assert len(leaves) == 3
    doubled = jax.tree.unflatten(structure, [2 * leaves[0], *leaves[1:]])
    np.testing.assert_array_equal(doubled.todense(), 2 * x[0])


def test_gradients_reach_stored_non_zeros_only() -> None:
    x = jnp.asarray(feature_map((1, 5, 6, 3)))
    weights = jnp.asarray(feature_map((1, 5, 6, 3), 1.0, seed=1))
    found = jax.grad(lambda x: jnp.sum(CooStar.fromdense(x, (2, 4, 2)).todense() * weights))(x)
    np.testing.assert_allclose(found, np.where(x == 0, 0, weights), rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (1, 0, 4, 2), (2, 4, 4, 0)])
def test_nothing_to_compress(shape: tuple[int, ...]) -> None:
    made = CooStar.fromdense(jnp.zeros(shape), (2, 2, 2))
    assert made.shape == shape
    assert made.todense().shape == shape
    assert int(made.multiplications) == 0


def test_bad_arguments() -> None:
    x = jnp.ones((1, 4, 4, 2))
    with pytest.raises(TypeError, match=r"x\.dtype=int32 is not one of float32"):
        CooStar.fromdense(jnp.ones((1, 4, 4, 2), jnp.int32), (2, 2, 2))
    with pytest.raises(ValueError, match=re.escape("x.shape=(4, 4) has 2 dimensions")):
        CooStar.fromdense(jnp.ones((4, 4)), (2, 2, 2))
    for tile in [(2, 2), (2, 2, 0), 4, (2, 2.0, 1)]:
        with pytest.raises(ValueError, match=re.escape(f"tile={tile!r} is not three ints of at least 1")):
            CooStar.fromdense(x, tile)
    with pytest.raises(ValueError, match="has 65792 elements; at most 65536"):
        CooStar.fromdense(x, (256, 257, 1))
    assert jsc.CooStar is CooStar
