"""ECR and PECR against the papers' worked example and plain numpy loops in float64."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jax_sparse_conv as jsc
from jax_sparse_conv._src.formats.formats import ECR, PECR

PAPER_MAP = np.array(
    [[0, 0, 15, 8, 0], [22, 0, 0, 23, 0], [0, 8, 0, 0, 0], [0, 0, 19, 0, 0], [10, 4, 0, 0, 22]], np.float32
)


def feature_map(shape: tuple[int, ...], density: float = 0.4, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * (rng.random(shape) < density)).astype(np.float32)


def lists_of(values: Any, indices: Any, counts: Any) -> list[tuple[list[float], list[int]]]:
    """The used slots of every window, in order."""
    capacity = values.shape[-1]
    rows = zip(
        np.asarray(values).reshape(-1, capacity),
        np.asarray(indices).reshape(-1, capacity),
        np.asarray(counts).reshape(-1),
        strict=True,
    )
    return [(v[: max(c, 0)].tolist(), i[: max(c, 0)].tolist()) for v, i, c in rows]


def numpy_window(
    x: np.ndarray, row: int, column: int, size: Any, strides: Any, pads: Any, dilation: Any
) -> list[float]:
    """Pixels [kh * kw * C] of the window of convolution result (row, column) of one image."""
    pixels = []
    for i, j, c in itertools.product(range(size[0]), range(size[1]), range(x.shape[2])):
        h = row * strides[0] - pads[0][0] + i * dilation[0]
        w = column * strides[1] - pads[1][0] + j * dilation[1]
        inside = 0 <= h < x.shape[0] and 0 <= w < x.shape[1]
        pixels.append(float(x[h, w, c]) if inside else 0.0)
    return pixels


def numpy_conv(x: np.ndarray, kernel: np.ndarray, strides: Any, pads: Any, dilation: Any) -> np.ndarray:
    size = kernel.shape[:2]
    height, width = (
        (x.shape[1 + a] + sum(pads[a]) - (size[a] - 1) * dilation[a] - 1) // strides[a] + 1 for a in range(2)
    )
    out = np.zeros((x.shape[0], max(height, 0), max(width, 0), kernel.shape[3]))
    flat = kernel.astype(np.float64).reshape(-1, kernel.shape[3])
    for n, row, column in itertools.product(*map(range, out.shape[:3])):
        out[n, row, column] = np.asarray(numpy_window(x[n], row, column, size, strides, pads, dilation)) @ flat
    return out


def test_paper_example_ecr() -> None:
    kernel = jnp.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], jnp.float32)[:, :, None, None]
    block_row = ECR.fromdense(PAPER_MAP[None, :3, :, None], 3, padding="VALID")
    assert block_row.values.shape == (1, 1, 3, 9)
    assert [values for values, _ in lists_of(block_row.values, block_row.indices, block_row.counts)] == [
        [15, 22, 8],
        [15, 8, 23, 8],
        [15, 8, 23],
    ]
    assert block_row.counts[0, 0].tolist() == [3, 4, 3]
    assert (int(block_row.multiplications), int(block_row.additions)) == (10, 7)
    assert (block_row.dense_multiplications, block_row.dense_additions) == (27, 24)
    assert block_row.conv(kernel)[0, 0, :, 0].tolist() == [30, 38, 8]


def test_paper_example_pecr() -> None:
    kernel = jnp.array([[0, 1, 1], [1, 0, 1], [0, 1, 0]], jnp.float32)[:, :, None, None]
    packed = PECR.fromdense(PAPER_MAP[None, :, :, None], (3, 3), padding="VALID", window_shape=(2, 2), window_strides=1)
    assert packed.values.shape == (1, 2, 2, 4, 9)
    first = lists_of(packed.values[0, 0, 0], packed.indices[0, 0, 0], packed.counts[0, 0, 0])
    assert [v for values, _ in first for v in values] == [15, 22, 8, 15, 8, 23, 8, 22, 8, 19, 23, 8, 19]
    assert [i for _, indices in first for i in indices] == [2, 3, 7, 1, 2, 5, 6, 0, 4, 8, 2, 3, 7]
    assert packed.counts[0, 0, 0].tolist() == [3, 4, 3, 3]
    assert packed.conv(kernel)[0, 0, 0, :, 0].tolist() == [45, 46, 0, 50]
    assert float(packed.conv_pool(kernel)[0, 0, 0, 0]) == 50
    np.testing.assert_array_equal(packed.todense(), PAPER_MAP[None, :, :, None])


def test_slots_are_in_order_of_row_column_channel() -> None:
    x = feature_map((2, 6, 5, 3))
    ecr = ECR.fromdense(x, (3, 2), strides=(2, 1), padding=((1, 0), (0, 2)), kernel_dilation=(1, 2))
    assert ecr.values.shape == (2, 3, 5, 18)
    assert ecr.indices.dtype == ecr.counts.dtype == jnp.int32
    stored = lists_of(ecr.values, ecr.indices, ecr.counts)
    places = itertools.product(range(2), range(3), range(5))
    for (values, indices), (n, row, column) in zip(stored, places, strict=True):
        pixels = numpy_window(x[n], row, column, (3, 2), (2, 1), ((1, 0), (0, 2)), (1, 2))
        assert indices == [i for i, pixel in enumerate(pixels) if pixel]
        assert values == [pixel for pixel in pixels if pixel]
    unused = np.arange(18) >= np.maximum(np.asarray(ecr.counts), 0)[..., None]
    assert (np.asarray(ecr.indices)[unused] == -1).all()
    assert (np.asarray(ecr.values)[unused] == 0).all()


def test_empty_windows_are_marked() -> None:
    ecr = ECR.fromdense(jnp.zeros((1, 4, 4, 2)), 3)
    assert (np.asarray(ecr.counts) == -1).all()
    assert (int(ecr.multiplications), int(ecr.additions)) == (0, 0)
    assert not np.asarray(ecr.conv(jnp.ones((3, 3, 2, 5)))).any()


@settings(max_examples=8, deadline=None)
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    channels=st.integers(1, 3),
    kernel_size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.tuples(st.integers(-1, 3), st.integers(-1, 3))] * 2),
    seed=st.integers(0, 99),
)
def test_conv_and_round_trip(
    size: Any, channels: int, kernel_size: Any, strides: Any, dilation: Any, pads: Any, seed: int
) -> None:
    assume(all(extent + low + high >= 0 for extent, (low, high) in zip(size, pads, strict=True)))  # else refused
    x = feature_map((2, *size, channels), 0.5, seed)
    kernel = np.random.default_rng(seed).normal(size=(*kernel_size, channels, 2)).astype(np.float32)

    @jax.jit
    def compress(x: jax.Array, kernel: jax.Array) -> tuple[ECR, jax.Array, jax.Array]:
        ecr = ECR.fromdense(x, kernel_size, strides=strides, padding=pads, kernel_dilation=dilation)
        return ecr, ecr.conv(kernel), ecr.todense()

    ecr, y, dense = compress(x, kernel)
    np.testing.assert_allclose(y, numpy_conv(x, kernel, strides, pads, dilation), rtol=1e-5, atol=1e-5)
    covered = np.zeros(x.shape, bool)
    for row, column in itertools.product(*map(range, ecr.counts.shape[1:])):
        for i, j in itertools.product(*map(range, kernel_size)):
            h = row * strides[0] - pads[0][0] + i * dilation[0]
            w = column * strides[1] - pads[1][0] + j * dilation[1]
            if 0 <= h < size[0] and 0 <= w < size[1]:
                covered[:, h, w] = True
    np.testing.assert_array_equal(dense, np.where(covered, x, 0))


@settings(max_examples=6, deadline=None)
@given(
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    window_strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    window_pads=st.tuples(*[st.tuples(st.integers(0, 1), st.integers(0, 1))] * 2),
    pool=st.sampled_from(["max", "avg"]),
    activation=st.sampled_from([None, "relu"]),
)
def test_conv_pool(window: Any, window_strides: Any, window_pads: Any, pool: str, activation: str | None) -> None:
    x = feature_map((2, 5, 6, 2))
    kernel = np.random.default_rng(1).normal(size=(3, 3, 2, 3)).astype(np.float32)

    @jax.jit
    def pooled(x: jax.Array, kernel: jax.Array) -> jax.Array:
        packed = PECR.fromdense(
            x, 3, padding=1, window_shape=window, window_strides=window_strides, window_padding=window_pads
        )
        return packed.conv_pool(kernel, pool=pool, activation=activation)

    y = numpy_conv(x, kernel, (1, 1), ((1, 1), (1, 1)), (1, 1))
    y = np.maximum(y, 0) if activation == "relu" else y
    fill = -np.inf if pool == "max" else 0.0
    y = np.pad(y, ((0, 0), *window_pads, (0, 0)), constant_values=fill)
    expected = np.stack(
        [
            np.stack(
                [
                    getattr(y[:, p : p + window[0], q : q + window[1]], "max" if pool == "max" else "mean")((1, 2))
                    for q in range(0, y.shape[2] - window[1] + 1, window_strides[1])
                ],
                1,
            )
            for p in range(0, y.shape[1] - window[0] + 1, window_strides[0])
        ],
        1,
    )
    np.testing.assert_allclose(pooled(x, kernel), expected, 1e-5, 1e-5)


def test_pool_padding_is_not_counted() -> None:
    x = np.ones((1, 2, 2, 1), np.float32)
    packed = PECR.fromdense(x, 1, window_shape=2, window_padding=((1, 1), (0, 0)))
    assert packed.counts.tolist() == [[[[-2, -2, 1, 1]], [[1, 1, -2, -2]]]]
    assert (int(packed.multiplications), int(packed.additions)) == (4, 0)
    assert (packed.dense_multiplications, packed.dense_additions) == (4, 0)
    np.testing.assert_array_equal(packed.todense(), x)


def test_overlapping_pool_windows_count_their_work_again() -> None:
    x = feature_map((1, 4, 4, 2), 0.5)
    once = ECR.fromdense(x, 1)
    again = PECR.fromdense(x, 1, window_shape=2, window_strides=1)
    reads = np.array([1, 2, 2, 1])  # pooling windows that hold each row or column
    expected = np.einsum("h,w,hwc->", reads, reads, x[0] != 0)
    assert int(once.multiplications) == np.count_nonzero(x)
    assert int(again.multiplications) == expected
    np.testing.assert_array_equal(again.todense(), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_special_values(dtype: str) -> None:
    tiny = jnp.finfo(dtype).smallest_subnormal
    x = jnp.array([-0.0, 0.0, np.nan, np.inf, tiny, -tiny, 1.0], dtype).reshape(1, 1, 7, 1)
    ecr = ECR.fromdense(x, 1)
    assert ecr.dtype == x.dtype
    assert ecr.counts[0, 0].tolist() == [-1, -1, 1, 1, 1, 1, 1]
    bits = np.uint32 if dtype == "float32" else np.uint16
    expected = np.asarray(x).copy()
    expected[0, 0, 0] = 0
    np.testing.assert_array_equal(np.asarray(ecr.todense()).view(bits), expected.view(bits))


def test_zero_times_infinity_is_skipped() -> None:
    x = jnp.array([0.0, 2.0]).reshape(1, 1, 2, 1)
    kernel = jnp.array([np.inf, 3.0]).reshape(1, 2, 1, 1)
    assert ECR.fromdense(x, (1, 2), padding="VALID").conv(kernel).tolist() == [[[[6.0]]]]


def test_explicit_nse() -> None:
    x = feature_map((2, 5, 5, 4), 0.2)
    worst = ECR.fromdense(x, 3)
    need = int(jnp.max(worst.counts))
    tight = ECR.fromdense(x, 3, nse=need)
    assert (tight.capacity, worst.capacity) == (need, 36)
    assert tight.nbytes < worst.nbytes
    assert tight.nbytes == 2 * 5 * 5 * (need * (4 + 4) + 4)
    np.testing.assert_array_equal(tight.todense(), x)
    with pytest.raises(ValueError, match=rf"nse={need - 1} .* nse={need} or None works"):
        ECR.fromdense(x, 3, nse=need - 1)


@pytest.mark.parametrize("cls", [ECR, PECR])
@pytest.mark.parametrize("nse", [0, -1, 40.0, (40, 2), "40"])
def test_nse_is_an_int(cls: Any, nse: Any) -> None:
    with pytest.raises(ValueError, match=rf"^nse={re.escape(repr(nse))} is not an int of at least 1 or None$"):
        cls.fromdense(jnp.ones((1, 4, 4, 2)), 3, nse=nse)


@pytest.mark.parametrize("cls", [ECR, PECR])
def test_overflow_under_jit_is_poisoned(cls: Any) -> None:
    x = np.zeros((2, 4, 4, 1), np.float32)
    x[0, :2, :2] = 1.0
    x[1, 0, 0] = 5.0
    small = jax.jit(lambda x: cls.fromdense(x, 2, padding="VALID", nse=2))(x)
    dense = np.asarray(small.todense())
    assert np.isnan(dense[0]).all()
    np.testing.assert_array_equal(dense[1], x[1])
    y = np.asarray(small.conv(jnp.ones((2, 2, 1, 1))))[..., 0].reshape(2, -1)
    assert np.isnan(y[0, 0])
    assert np.nanmax(y[1]) == 5
    assert not np.isnan(y[1]).any()
    assert int(jnp.max(small.counts)) == 4  # what nse must be


@pytest.mark.parametrize("cls", [ECR, PECR])
def test_gradients_reach_stored_non_zeros_only(cls: Any) -> None:
    """As the docstrings say; `jax_sparse_conv.conv` has the dense gradients."""
    x, kernel = feature_map((1, 4, 4, 2)), feature_map((3, 3, 2, 3), 1.0, 1)
    found = np.asarray(jax.grad(lambda x: cls.fromdense(x, 3).conv(kernel).sum())(x))
    dense = np.asarray(jax.grad(lambda x: jsc.conv(x, kernel).sum())(jnp.asarray(x)))
    np.testing.assert_allclose(found, np.where(x == 0, 0, dense), rtol=1e-5, atol=1e-5)


def test_pytree_round_trips() -> None:
    x = feature_map((2, 4, 5, 3))
    kernel = feature_map((3, 3, 3, 2), 1.0, 1)
    for cls in (ECR, PECR):
        made = cls.fromdense(x, 3)
        jitted = jax.jit(lambda x, cls=cls: cls.fromdense(x, 3))(x)
        assert jax.tree.structure(jitted) == jax.tree.structure(made)
        jax.tree.map(np.testing.assert_array_equal, jitted, made)
        doubled = jax.tree.map(lambda leaf: leaf * 2 if leaf.dtype == jnp.float32 else leaf, made)
        np.testing.assert_array_equal(doubled.todense(), 2 * x)
        np.testing.assert_allclose(jax.jit(lambda f: f.conv(kernel))(jitted), made.conv(kernel), rtol=1e-6, atol=1e-6)
        assert made.shape == x.shape
        leaves, structure = jax.tree.flatten(made)
        assert len(leaves) == 3
        assert isinstance(jax.tree.unflatten(structure, leaves), cls)


def test_vmap() -> None:
    x = feature_map((3, 2, 4, 4, 2))
    kernel = feature_map((3, 3, 2, 2), 1.0, 1)
    for cls in (ECR, PECR):
        mapped = jax.jit(jax.vmap(lambda x, cls=cls: cls.fromdense(x, 3)))(x)
        assert mapped.shape == x.shape
        np.testing.assert_array_equal(mapped.todense(), x)
        np.testing.assert_array_equal(jax.jit(jax.vmap(lambda f: f.todense()))(mapped), x)
        one = jax.jit(lambda x, cls=cls: cls.fromdense(x, 3).conv(kernel))(x[1])
        np.testing.assert_allclose(mapped.conv(kernel)[1], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (1, 0, 4, 2), (2, 4, 4, 0)])
def test_nothing_to_compress(shape: tuple[int, ...]) -> None:
    for cls in (ECR, PECR):
        made = cls.fromdense(jnp.zeros(shape), 3)
        assert made.shape == shape
        assert made.todense().shape == shape
        assert int(made.multiplications) == 0
        assert not np.asarray(made.conv(jnp.ones((3, 3, shape[3], 5)))).any()


def test_no_window_fits() -> None:
    ecr = ECR.fromdense(jnp.ones((1, 2, 2, 1)), 3, padding="VALID")
    assert ecr.values.shape == (1, 0, 0, 9)
    assert not np.asarray(ecr.todense()).any()


def test_bad_arguments() -> None:
    x = jnp.ones((1, 4, 4, 2))
    ecr = ECR.fromdense(x, 3)
    with pytest.raises(TypeError, match=r"x\.dtype=int32"):
        ECR.fromdense(jnp.ones((1, 4, 4, 2), jnp.int32), 3)
    with pytest.raises(ValueError, match=r"x\.shape=\(4, 4\)"):
        ECR.fromdense(jnp.ones((4, 4)), 3)
    with pytest.raises(ValueError, match="kernel_size=0"):
        ECR.fromdense(x, 0)
    with pytest.raises(ValueError, match="SAMEE"):
        ECR.fromdense(x, 3, padding="SAMEE")
    with pytest.raises(ValueError, match=r"kernel\.shape=\(3, 3, 1, 4\)"):
        ecr.conv(jnp.ones((3, 3, 1, 4)))
    with pytest.raises(TypeError, match=r"kernel\.dtype=bfloat16"):
        ecr.conv(jnp.ones((3, 3, 2, 4), jnp.bfloat16))
    with pytest.raises(ValueError, match="pool='median'"):
        PECR.fromdense(x, 3).conv_pool(jnp.ones((3, 3, 2, 4)), pool="median")
    with pytest.raises(ValueError, match="activation='gelu'"):
        PECR.fromdense(x, 3).conv_pool(jnp.ones((3, 3, 2, 4)), activation="gelu")
