"""Derivatives of max pools on a CPU: each window's go through one pixel, its last NaN or its first maximum."""

from __future__ import annotations

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax.test_util import check_grads
from kernel_checks import TOLERANCE, call
from platforms import PLATFORM
from pool_checks import derivatives

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import model
from jax_sparse_conv._src.primitive import max_pool, reference
from jax_sparse_conv._src.problem.geometry import Pool, windowed_size

DTYPES = ("float32", "bfloat16", "float16", "float64")
VALUES = ("random", "negative", "ties", "zeros behind a ReLU", "NaN", "infinities", "subnormals")
NONE = ((0, 0), (0, 0))
POOLS = (
    Pool("max", (2, 2), (2, 2), NONE),
    Pool("max", (3, 3), (2, 2), ((1, 1), (1, 1))),
    Pool("max", (3, 3), (1, 1), ((1, 1), (1, 1))),
    Pool("max", (3, 3), (2, 2), ((0, 1), (0, 1))),
    Pool("max", (2, 3), (1, 2), ((1, 0), (0, 2))),
    Pool("max", (1, 2), (3, 3), NONE),  # pixels between windows
    Pool("max", (5, 4), (2, 3), ((2, 3), (1, 0))),
    Pool("max", (9, 11), (1, 1), NONE),  # one window
    Pool("max", (12, 13), (5, 5), ((6, 6), (6, 7))),  # larger than the map
    Pool("max", (2, 2), (2, 2), ((4, 0), (0, 5))),  # windows of padding alone
    Pool("max", (17, 2), (1, 1), ((8, 8), (0, 0))),  # taller than the map
)


@pytest.fixture
def any_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the primitives take what is left to lax because it is little."""
    shipped, least = model.shipped, dict.fromkeys(model.shipped("max pool gradients"), 1.0)
    monkeypatch.setattr(model, "shipped", lambda group: least if group == "max pool gradients" else shipped(group))


def values_of(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(sum(map(ord, name)))
    y = rng.standard_normal(shape)
    if name == "negative":
        y = -np.abs(y) - 1
    elif name == "ties":
        y = rng.integers(-1, 2, shape) * np.where(rng.random(shape) < 0.5, -1.0, 1.0)  # -0.0 and 0.0, too
    elif name == "zeros behind a ReLU":
        y = np.maximum(y - 1.2, 0)
    elif name in ("NaN", "infinities"):
        y[rng.random(shape) < 0.3] = np.nan if name == "NaN" else np.inf
        y[:, :4, :4] = np.nan if name == "NaN" else -np.inf  # whole windows
    elif name == "subnormals":
        y = rng.integers(-2, 3, shape) * float(jnp.finfo(dtype).smallest_subnormal)
    return y.astype(jnp.dtype(dtype))


def sizes_of(shape: tuple[int, ...], pool: Pool) -> tuple[int, ...]:
    along = zip(shape[1:3], pool.window, pool.strides, pool.padding, strict=True)
    return (shape[0], *(windowed_size(n, w, s, pads, 1) for n, w, s, pads in along), shape[3])


def chosen(y: np.ndarray, pool: Pool) -> Any:
    """For each window that has pixels [N, C] which row and column it chooses: yields (row, column) of it, and these."""
    _, height, width, _ = y.shape
    wide = y.astype(np.float64)
    for window in np.ndindex(*sizes_of(y.shape, pool)[1:3]):
        first = [
            place * stride - pads[0] for place, stride, pads in zip(window, pool.strides, pool.padding, strict=True)
        ]
        best: Any = None
        for i, j in np.ndindex(pool.window):
            row, column = first[0] + i, first[1] + j
            if not (0 <= row < height and 0 <= column < width):
                continue
            value = wide[:, row, column]
            here = np.stack([np.full(value.shape, row), np.full(value.shape, column)])
            if best is None:
                best, at = value, here
                continue
            taken = (value > best) | np.isnan(value)
            best, at = np.where(taken, value, best), np.where(taken, here, at)
        if best is not None:
            yield window, at


def expected_gradient(y: np.ndarray, cotangent: np.ndarray, pool: Pool) -> np.ndarray:
    found = np.zeros(y.shape)
    images, channels = np.ogrid[: y.shape[0], : y.shape[3]]
    for (row, column), at in chosen(y, pool):
        found[images, at[0], at[1], channels] += cotangent[:, row, column].astype(np.float64)
    return found


def expected_tangent(y: np.ndarray, tangent: np.ndarray, pool: Pool) -> np.ndarray:
    found = np.zeros(sizes_of(y.shape, pool))
    images, channels = np.ogrid[: y.shape[0], : y.shape[3]]
    for (row, column), at in chosen(y, pool):
        found[:, row, column] = tangent[images, at[0], at[1], channels].astype(np.float64)
    return found


def check(y: np.ndarray, pool: Pool) -> None:
    """Both derivatives, exactly: sums of few whole numbers are exact in every dtype."""
    rng = np.random.default_rng(0)
    cotangent, tangent = (rng.integers(-3, 4, shape).astype(y.dtype) for shape in (sizes_of(y.shape, pool), y.shape))
    with jax.enable_x64(y.dtype == np.float64):
        function = functools.partial(max_pool.pool, spec=pool)
        gradient = jax.jit(lambda y, g: jax.vjp(function, y)[1](g)[0])(y, cotangent)
        moved = jax.jit(lambda y, t: jax.jvp(function, (y,), (t,))[1])(y, tangent)
    assert gradient.dtype == moved.dtype == y.dtype
    for found, wanted in (
        (gradient, expected_gradient(y, cotangent, pool)),
        (moved, expected_tangent(y, tangent, pool)),
    ):
        np.testing.assert_array_equal(np.asarray(found).astype(np.float64), wanted)


needs_cpu = pytest.mark.skipif(PLATFORM != "cpu", reason="these are the CPU's calls")


@needs_cpu
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_one_pixel_of_each_window(name: str, pool: Pool) -> None:
    check(values_of(name, (2, 9, 11, 19)), pool)


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(dtype: str, cpu_isa: str, any_channels: None) -> None:
    """Whole vectors of channels, last ones that lie over others, and fewer than one; channels and rows in parts."""
    for channels in (1, 5, 8, 16, 21, 33):
        for pool in (POOLS[1], POOLS[0], POOLS[2], POOLS[6])[: 2 if channels < 16 else 4]:
            check(values_of("ties", (2, 9, 7, channels), dtype), pool)
    check(values_of("NaN", (1, 12, 30, 200), dtype), POOLS[1])
    check(values_of("ties", (1, 90, 20, 24), dtype), POOLS[2])
    check(values_of("subnormals", (1, 8, 7, 24), dtype), POOLS[1])


@needs_cpu
@pytest.mark.parametrize("pool", POOLS[1:3], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_for_any_tasks(dtype: str, pool: Pool) -> None:
    """One image is cut in bands and many are not, but sums are in the order of the windows."""
    rng = np.random.default_rng(0)
    x, g = (
        rng.standard_normal(shape).astype(jnp.dtype(dtype))
        for shape in ((8, 61, 33, 48), sizes_of((8, 61, 33, 48), pool))
    )
    function = jax.jit(lambda x, g: max_pool.gradient(x, g, pool))
    together = np.asarray(function(x, g))
    for image in range(len(x)):
        alone = function(x[image : image + 1], g[image : image + 1])
        np.testing.assert_array_equal(np.asarray(alone)[0], together[image])


@pytest.mark.parametrize("shape", [(0, 8, 8, 32), (2, 2, 2, 32), (2, 0, 8, 32), (2, 8, 8, 0)], ids=str)
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    """No images, windows, rows or channels."""
    pool = Pool("max", (3, 3), (2, 2), NONE)
    y, t = jnp.ones(shape), jnp.ones(shape)
    function = functools.partial(max_pool.pool, spec=pool)
    out, moved = jax.jvp(function, (y,), (t,))
    assert out.shape == moved.shape == max_pool._tangent_by_taps(y, t, spec=pool).shape == sizes_of(shape, pool)
    assert max_pool._gradient_by_taps(y, out, spec=pool).shape == shape
    np.testing.assert_array_equal(jax.grad(lambda y: function(y).sum())(y), jnp.zeros(shape))


def test_an_empty_batch() -> None:
    pool, y = POOLS[1], jnp.ones((0, 2, 6, 6, 16))
    assert jax.vmap(jax.grad(lambda y: max_pool.pool(y, pool).sum()))(y).shape == y.shape


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("name", ["random", "ties", "NaN", "infinities"])
def test_a_tangent_off_cpus_is_exact(name: str, pool: Pool) -> None:
    """Of both parts all bits: XLA's select_and_gather_add keeps half of them where it reduces no pairs."""
    y, tangent = (values_of(each, (2, 9, 11, 3)) for each in (name, "random"))
    found = jax.jit(functools.partial(max_pool._tangent_by_taps, spec=pool))(y, tangent)
    np.testing.assert_array_equal(found, expected_tangent(y, tangent, pool))


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("name", [name for name in VALUES if name != "subnormals"])  # zeros to XLA on a CPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_off_cpus(dtype: str, name: str, pool: Pool) -> None:
    """Of windows of few pixels, as on a CPU; XLA's of others."""
    if np.prod(pool.window) > 25:
        pytest.skip("the window has more pixels than are added one by one")
    y = values_of(name, (2, 9, 11, 3), dtype)
    cotangent = np.random.default_rng(0).integers(-3, 4, sizes_of(y.shape, pool)).astype(y.dtype)
    found = jax.jit(functools.partial(max_pool._gradient_by_taps, spec=pool))(y, cotangent)
    assert found.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected_gradient(y, cotangent, pool))


@pytest.mark.parametrize("pool", POOLS[:7], ids=str)
def test_numerical_derivatives(pool: Pool) -> None:
    with jax.enable_x64(True):
        apart = np.random.default_rng(0).permutation(6 * 7 * 16).reshape(1, 6, 7, 16) / 8
        check_grads(lambda y: max_pool.pool(y, pool) ** 2, (jnp.asarray(apart),), 2, ["fwd", "rev"])


@pytest.mark.parametrize("pool", [POOLS[1], POOLS[0]], ids=["3x3", "2x2"])
@pytest.mark.parametrize("name", ["random", "ties"])
def test_transformations(name: str, pool: Pool, any_channels: None) -> None:
    y, tangent = (jnp.asarray(values_of(each, (1, 5, 4, 2))) for each in (name, "random"))
    operands = (pool, y, tangent)
    both = derivatives(max_pool.pool, *operands), derivatives(reference.pool, *operands)
    for found, wanted in zip(*both, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    with jax.disable_jit():
        gradient = jax.grad(lambda y: max_pool.pool(y, pool).sum())(y)
    np.testing.assert_array_equal(gradient, jax.grad(lambda y: reference.pool(y, pool).sum())(y))


@pytest.mark.parametrize(
    ("pool", "shape", "is_native"),
    [
        (POOLS[1], (1, 8, 8, 16), True),
        (POOLS[0], (2, 8, 8, 16), True),
        (POOLS[2], (2, 8, 8, 15), False),  # too few channels
        (POOLS[1], (1, 3, 3, 16), False),  # too few elements
        (Pool("max", (1, 1), (2, 2), NONE), (2, 8, 8, 16), False),
        (Pool("avg", (2, 2), (2, 2), NONE), (2, 8, 8, 16), False),
    ],
    ids=str,
)
def test_what_is_a_call(pool: Pool, shape: tuple[int, ...], is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "default_platform", lambda: "cpu")
    gradient = jax.jit(jax.grad(lambda y: (max_pool.pool(y, pool) ** 2).sum()))
    traced = gradient.trace(jnp.ones(shape))
    assert ("jsc_max_pool" in traced.lower(lowering_platforms=("cpu",)).as_text()) is is_native
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "jsc_max_pool" not in text
        assert ("select_and_scatter" in text) is (pool.kind == "max" and max(pool.window) == 1)


def test_large_windows_are_xlas_off_cpus() -> None:
    for window, is_xlas in ((5, False), (6, True)):
        pool = Pool("max", (window, window), (2, 2), NONE)
        gradient = jax.jit(jax.grad(lambda y, pool=pool: (max_pool.pool(y, pool) ** 2).sum()))
        text = gradient.trace(jnp.ones((1, 20, 20, 16))).lower(lowering_platforms=("cuda",)).as_text()
        assert ("select_and_scatter" in text) is is_xlas


def test_a_program_for_a_gpu_keeps_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first device is one, windows that lie apart have no call, which would keep the map."""
    monkeypatch.setattr(devices, "default_platform", lambda: "gpu")
    for pool, is_call in ((POOLS[0], False), (POOLS[1], True)):
        traced = jax.make_jaxpr(jax.grad(lambda y, pool=pool: max_pool.pool(y, pool).sum()))(jnp.ones((1, 8, 8, 16)))
        assert ("jsc_max_pool_gradient" in str(traced)) is is_call


def test_symbolic_sizes_are_left_to_lax() -> None:
    (images,) = jax.export.symbolic_shape("n")
    function = jax.jit(jax.grad(lambda y: max_pool.pool(y, POOLS[1]).sum()))
    exported = jax.export.export(function)(jax.ShapeDtypeStruct((images, 8, 8, 16), np.float32))
    y = values_of("ties", (3, 8, 8, 16))
    np.testing.assert_array_equal(exported.call(y), function(y))


def test_strict_settings() -> None:
    y = jnp.asarray(values_of("ties", (2, 9, 9, 16), jnp.bfloat16))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = jax.grad(lambda y: max_pool.pool(y, POOLS[1]).sum())(y)
        off_cpus = max_pool._gradient_by_taps(y, max_pool.pool(y, POOLS[1]), spec=POOLS[1])
    assert found.dtype == off_cpus.dtype == jnp.bfloat16
    assert float(found.astype(jnp.float32).sum()) == 2 * 5 * 5 * 16


@pytest.mark.parametrize("implementation", ["pecr", "ecr", None, "xla"])
@pytest.mark.parametrize(
    "case",
    [
        Case("2x2", (2, 9, 7, 16), 16, bias=True, activation="relu", pool="max"),
        Case("all-zero windows", (2, 8, 8, 16), 16, activation="relu", pool="max", zeros=1.0),
        Case("3x3", (1, 11, 10, 8), 24, bias=True, activation="relu", pool="max", window=(3, 3)),
        Case("a stem", (1, 20, 18, 3), 16, kernel=(7, 7), strides=2, padding=3, pool="max", window=(3, 3),
             window_strides=(2, 2), window_padding=((1, 1), (1, 1))),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_conv_pool(case: Case, implementation: str | None) -> None:
    inputs = cases.inputs(case)
    loss = lambda x, kernel: (call(case, x, kernel, inputs.bias, None, implementation) ** 2).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    for ours, wanted in zip(gradient(inputs.x, inputs.kernel), oracle.gradients(case, inputs), strict=True):
        assert oracle.relative_error(ours, wanted) <= TOLERANCE["float32"]
    if PLATFORM == "cpu":
        text = gradient.lower(inputs.x, inputs.kernel).as_text()
        assert ("jsc_max_pool_gradient" in text) is (implementation != "xla")
