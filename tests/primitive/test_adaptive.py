""" "adaptive", which runs its sparse or its dense side by counts of non-zeros: each side exactly, and which it is."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from adaptive_checks import BOTH, CONV, DENSE, HALF, POOL, SPARSE, adaptive
from cases import Case
from kernel_checks import TOLERANCE, call, check_counts
from platforms import PLATFORM, on_a_gpu, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src.dispatch import choice
from jax_sparse_conv._src.primitive import lowering, primitives, sampling
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.workload import Workload


def one_side(case: Case, inputs: cases.Inputs, side: str, precision: Any = "highest") -> np.ndarray:
    operands = (cases.on_device(v) for v in inputs)
    dense = "xla" if PLATFORM == "cpu" else "direct"
    sparse = "pecr" if case.pool and PLATFORM == "cpu" else "ecr"  # on a GPU the pool is XLA's on either side
    return np.asarray(call(case, *operands, sparse if side == "sparse" else dense, precision))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("side", ["sparse", "dense"])
@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.name)
def test_either_side_is_what_it_is_alone(case: Case, side: str, dtype: str) -> None:
    require("adaptive", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    result = np.asarray(adaptive(case, inputs, SPARSE if side == "sparse" else DENSE))
    alone = one_side(case, inputs, side)
    if case.pool:  # one side pools by itself, the other leaves that to XLA: sums and rounding are in other places
        np.testing.assert_allclose(result.astype(np.float32), alone.astype(np.float32), rtol=2e-2, atol=2e-2)
    else:
        np.testing.assert_array_equal(result, alone)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE[dtype]


def test_default_precision_takes_the_same_sides() -> None:
    require("adaptive", "float32")
    inputs = cases.inputs(CONV)
    for side, nonzeros in (("sparse", SPARSE), ("dense", DENSE)):
        result = adaptive(CONV, inputs, nonzeros, precision=None)
        np.testing.assert_array_equal(np.asarray(result), one_side(CONV, inputs, side, None))


def took(x: Any, nonzeros: Any, below: float = HALF) -> str:
    """The side that ran: an infinite weight that meets zeros only is seen by the dense one alone."""
    case = Case("side", x.shape, 32)
    kernel = np.ones((3, 3, x.shape[3], 32), np.float32)
    kernel[:, :, 0] = np.inf
    inputs = cases.Inputs(np.concatenate([np.zeros_like(x[..., :1]), x[..., 1:]], -1), kernel, None, None)
    return "sparse" if np.isfinite(np.asarray(adaptive(case, inputs, nonzeros, below))).all() else "dense"


@pytest.mark.parametrize(
    ("nonzeros", "side"),
    [
        ([[0, 100]], "sparse"),
        ([[50, 100]], "sparse"),  # at the threshold
        ([[51, 100]], "dense"),
        ([[100, 100]], "dense"),
        ([[0, 0]], "sparse"),  # nothing was counted
        ([[2**30 + 2**20, 2**31 - 1]], "dense"),
        ([[2**30 - 2**20, 2**31 - 1]], "sparse"),
        ([[2**30 - 2**20, 2**31 - 1]] * 70, "sparse"),  # sums beyond 2^31
        ([[2**30 + 2**20, 2**31 - 1]] * 70, "dense"),
        ([[1, 1]] * 49 + [[0, 1]] * 51, "sparse"),
        ([[0, 1]] * 130 + [[1, 1]] * 131, "dense"),
        ([[0, 1]] * 300 + [[301, 301]], "dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} parts",
)
def test_threshold(nonzeros: Any, side: str) -> None:
    require("adaptive", "float32")
    assert took(cases.feature_map(np.random.default_rng(0), (1, 6, 6, 16), 0.5).astype(np.float32), nonzeros) == side


@pytest.mark.parametrize(("zeros", "side"), [(0.0, "dense"), (0.2, "dense"), (0.8, "sparse"), (1.0, "sparse")])
def test_without_counts_a_sample_of_x_decides(zeros: float, side: str) -> None:
    require("adaptive", "float32")
    x = cases.feature_map(np.random.default_rng(0), (2, 30, 30, 48), zeros).astype(np.float32)
    assert took(x, None) == side


@pytest.mark.parametrize("below", [0.0, 1.0, 1.5, -1.0])
def test_a_threshold_beyond_every_density(below: float) -> None:
    require("adaptive", "float32")
    x = np.ones((1, 6, 6, 16), np.float32)
    assert took(x, [[1, 2]], below) == ("sparse" if below >= 1 else "dense")
    inputs = cases.inputs(POOL)
    for counted in (False, True):
        result = adaptive(POOL, inputs, [[1, 2]], below, counted)
        result = result[0] if counted else result
        assert oracle.relative_error(result, oracle.expected(POOL, inputs)) <= TOLERANCE["float32"]


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonzeros", [SPARSE, DENSE, None], ids=["sparse", "dense", "sampled"])
@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.name)
def test_adaptive_counts_what_it_writes(case: Case, nonzeros: Any) -> None:
    require("adaptive", "float32")
    inputs = cases.inputs(case)
    y, counts = adaptive(case, inputs, nonzeros, counted=True)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(adaptive(case, inputs, nonzeros)))
    check_counts(y, counts)


# --- two layers and what jax does with them --------------------------------------------------------------------------

KERNELS = [jnp.asarray(np.random.default_rng(i).standard_normal((3, 3, 16, 16)) / 12, jnp.float32) for i in range(2)]
X = jnp.asarray(cases.feature_map(np.random.default_rng(5), (2, 8, 8, 16), 0.6), jnp.float32)


def two_layers(x: jax.Array, first: jax.Array, second: jax.Array, implementation: str | None = "adaptive") -> jax.Array:
    if implementation == "xla":
        y = jsc.conv(x, first, activation="relu", implementation="xla", precision="highest")
        return jsc.conv(y, second, activation="relu", implementation="xla", precision="highest")
    layer = functools.partial(jsc.conv, activation="relu", precision="highest", implementation=implementation)
    y, counts = layer(x, first, count_nonzeros=True)
    out: jax.Array = layer(y, second, nonzeros=counts)
    return out


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, rtol=2e-4, atol=2e-4), found, wanted)


@pytest.mark.parametrize("implementation", ["adaptive", None])
def test_transformations(implementation: str | None) -> None:
    require("adaptive", "float32")
    ours, dense = (functools.partial(two_layers, implementation=name) for name in (implementation, "xla"))
    arguments = (X, *KERNELS)
    close(ours(*arguments), dense(*arguments))
    close(jax.jit(ours)(*arguments), dense(*arguments))
    stacked = tuple(jnp.stack([value, -0.5 * value, 2 * value]) for value in arguments)
    for axes in ((0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)):
        values = [s if axis == 0 else a for s, a, axis in zip(stacked, arguments, axes, strict=True)]
        close(jax.jit(jax.vmap(ours, axes))(*values), jax.vmap(dense, axes)(*values))
    close(jax.grad(lambda *a: (ours(*a) ** 2).sum(), (0, 1, 2))(*arguments),
          jax.grad(lambda *a: (dense(*a) ** 2).sum(), (0, 1, 2))(*arguments))  # fmt: skip
    close(jax.jvp(ours, arguments, arguments), jax.jvp(dense, arguments, arguments))
    close(jax.checkpoint(ours)(*arguments), dense(*arguments))
    empty = jax.vmap(ours, (0, None, None))(jnp.zeros((0, *X.shape)), *KERNELS)
    assert empty.shape == (0, *X.shape)


def test_counts_go_through_scan_and_eval_shape() -> None:
    require("adaptive", "float32")

    def step(carry: Any, kernel: jax.Array) -> Any:
        x, counts = carry
        layer = functools.partial(jsc.conv, activation="relu", precision="highest", implementation="adaptive")
        return layer(x, kernel, nonzeros=counts, count_nonzeros=True), None

    start = (X, sampling.sampled_nonzeros(X))
    (y, counts), _ = jax.lax.scan(step, start, jnp.stack(KERNELS))
    close(y, two_layers(X, *KERNELS, implementation="xla"))
    check_counts(y, counts)
    shapes = jax.eval_shape(lambda x, k: step((x, start[1]), k)[0], X, KERNELS[0])
    assert [(s.shape, s.dtype) for s in shapes] == [(X.shape, X.dtype), ((64, 2), jnp.int32)]


def test_a_batch_makes_one_decision() -> None:
    """Counts of both maps together are above a half, so the one of zeros runs densely too."""
    require("adaptive", "float32")
    kernel = KERNELS[0].at[:, :, 0].set(jnp.inf)[None]
    xs, counts = jnp.stack([X, X]).at[..., 0].set(0), jnp.asarray([[[100, 100]], [[10, 100]]], jnp.int32)
    geometry = geo.resolve(X.shape, kernel.shape[1:])
    config = primitives.Config(geometry, "adaptive", below=HALF)
    run = jax.vmap(lambda x, n: primitives.bind(x, kernel, None, None, config, nonzeros=n))
    assert np.isnan(np.asarray(run(xs, counts))[1]).any()
    assert np.isfinite(np.asarray(run(xs, counts.at[0].set(jnp.asarray([[80, 100]]))))).all()


def test_export() -> None:
    require("adaptive", "float32")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(f"jsc_{name}") for name in ("adaptive", "ecr", "direct")]
    exported = jax.export.export(jax.jit(two_layers), disabled_checks=allowed)(X, *KERNELS)
    close(exported.call(X, *KERNELS), two_layers(X, *KERNELS, implementation="xla"))


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nonzeros", "message"),
    [
        (jnp.zeros((2,), jnp.int32), r"nonzeros.shape=\(2,\) must be \[parts, 2\]"),
        (jnp.zeros((3, 3), jnp.int32), r"nonzeros.shape=\(3, 3\) must be \[parts, 2\]"),
        (jnp.zeros((0, 2), jnp.int32), r"nonzeros.shape=\(0, 2\) must be \[parts, 2\]"),
        (jnp.zeros((1, 2), jnp.float32), r"nonzeros.dtype=float32 must be int32"),
    ],
)
def test_wrong_counts(nonzeros: Any, message: str) -> None:
    for operation in (jsc.conv, jsc.conv_pool):
        with pytest.raises((TypeError, ValueError), match=message):
            operation(X, KERNELS[0], nonzeros=nonzeros)


@pytest.mark.parametrize("implementation", ["ecr", "direct", "xla"])
def test_counts_that_nothing_reads(implementation: str) -> None:
    with pytest.raises(ValueError, match=f"nonzeros is given, but implementation='{implementation}' does not read it"):
        jsc.conv(X, KERNELS[0], nonzeros=[[1, 2]], implementation=implementation)


# --- the model -------------------------------------------------------------------------------------------------------


def workload(size: int, channels: int, out_channels: int, exact: bool, kernel: int = 3) -> Workload:
    padding = ((kernel // 2, kernel // 2),) * 2
    shapes = ((1, size, size, channels), (1, kernel, kernel, channels, out_channels))
    return Workload("ecr", *shapes, geo.Geometry(padding=padding), "float32", exact)


def test_density_of_sparse_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """By warpgroup products "direct" is ahead but for nearly empty maps of layers that leave something to gain."""
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    for size, channels in ((14, 512), (28, 512), (56, 256)):
        assert 0.01 < choice.density_of_sparse(workload(size, channels, channels, exact=True)) < 0.05
    for size, channels in ((28, 128), (14, 256), (7, 512), (56, 64)):
        assert choice.density_of_sparse(workload(size, channels, channels, exact=True)) == 0
    for size, channels, out_channels, kernel in ((14, 256, 256, 3), (28, 512, 512, 3), (56, 256, 64, 1)):
        assert choice.density_of_sparse(workload(size, channels, out_channels, False, kernel)) == 0
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=False)
    by_mma = choice.density_of_sparse(workload(14, 256, 256, exact=True))
    assert 0.02 < by_mma < 0.5
    assert 0.1 < choice.density_of_sparse(workload(28, 512, 512, exact=True)) < 0.5
    assert choice.density_of_sparse(workload(14, 256, 256, exact=False)) < 0.15
    assert choice.density_of_sparse(workload(56, 256, 64, exact=False, kernel=1)) == 0
    on_a_gpu(monkeypatch, (8, 9), has_warpgroups=False)  # "direct" multiplies by FFMA there
    assert choice.density_of_sparse(workload(14, 256, 256, exact=True)) > by_mma


# (images, size, channels, out_channels, density, microseconds of "ecr" and "direct") on an H200 at HIGHEST, of
# benchmarks/results/h200/paper/ (table3.json, fig12.json, size.json); "direct" of one image is of an earlier run.
MEASURED = [
    (1, 14, 256, 256, 0.18, 11.3, 7.7),
    (1, 14, 256, 256, 0.0, 7.9, 7.7),
    (1, 7, 512, 512, 0.1, 12.3, 8.2),
    (1, 14, 512, 512, 0.15, 28.7, 15.5),
    (1, 14, 512, 512, 0.0, 13.2, 15.5),
    (1, 28, 512, 512, 0.25, 99.3, 35.0),
    (1, 28, 512, 512, 0.0, 21.1, 35.0),
    (1, 56, 256, 256, 0.35, 112.4, 33.1),
    (1, 56, 256, 256, 0.0, 21.8, 33.1),
    (8, 14, 256, 256, 0.2, 47.0, 24.6),
    (8, 14, 256, 256, 0.0, 15.3, 24.5),
    (128, 14, 256, 256, 0.18, 494.3, 250.7),
    (128, 14, 256, 256, 0.0, 144.7, 250.0),
]


@pytest.mark.parametrize(("images", "size", "channels", "out_channels", "density", "ecr", "direct"), MEASURED)
def test_the_side_that_is_expected_is_the_faster(
    monkeypatch: pytest.MonkeyPatch,
    images: int,
    size: int,
    channels: int,
    out_channels: int,
    density: float,
    ecr: float,
    direct: float,
) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    one = workload(size, channels, out_channels, exact=True)
    below = choice.density_of_sparse(dataclasses.replace(one, x_shape=(images, *one.x_shape[1:])))
    chosen = ecr if density <= below and below > 0 else direct
    assert chosen <= 1.03 * min(ecr, direct) + 2


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_what_none_does_with_counts(monkeypatch: pytest.MonkeyPatch, platform: str, pool: bool) -> None:
    """Nothing, for a convolution: a CPU's kernels sample for themselves, and a GPU decides beforehand."""
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    monkeypatch.setattr(lowering._native, "why_missing", lambda *_: None)
    x = jax.ShapeDtypeStruct((1, 14, 14, 256), jnp.float32)
    kernel = jax.ShapeDtypeStruct((1, 3, 3, 256, 256), jnp.float32)
    geometry = geo.resolve(x.shape, kernel.shape[1:])
    if pool:
        window: Any = {"window_shape": 2, "window_strides": None, "window_padding": "VALID"}
        geometry = geo.with_pool(geometry, (14, 14), kind="max", **window)
    config = primitives.Config(geometry, "pecr" if pool else "ecr", fallback=True, has_nonzeros=True)
    found = lowering.resolved(x, kernel, config, platform)
    assert found is not None
    wanted = {
        ("cpu", False): ("ecr", None),
        ("cpu", True): ("pecr", None),
        ("cuda", False): ("direct", None),
        ("cuda", True): ("direct", None),
    }
    assert (found.method, found.below) == wanted[platform, pool]
