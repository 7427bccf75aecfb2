"""The cost model behind `implementation=None`: what it decides, where, and that the running program follows x."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PLATFORM, require
from jax import lax

import jax_sparse_conv as jsc
from jax_sparse_conv import _native, choice, cost_model, lowering, primitives, sampling
from jax_sparse_conv.choice import Work
from jax_sparse_conv.geometry import Geometry, Pool

SAME = Geometry(padding=((1, 1), (1, 1)))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_device", lambda: (cost_model.Device(), (9, 0)))
    monkeypatch.setattr(_native, "has_warpgroups", lambda: True)


POOLED = Geometry(padding=SAME.padding, pool=Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0))))


def conv3x3(n: int, size: int, channels: int, features: int, **fields: Any) -> Work:
    values = {"geometry": SAME, "dtype": "float32", "exact": True, "method": "ecr"} | fields
    groups = values["geometry"].groups
    return Work(x_shape=(n, size, size, channels), kernel_shape=(1, 3, 3, channels // groups, features), **values)


def conv1x1(n: int, size: int, channels: int, features: int, strides: int = 1) -> Work:
    geometry = Geometry(strides=(strides, strides))
    return Work("ecr", (n, size, size, channels), (1, 1, 1, channels, features), geometry, "float32", False)


def rows(count: int) -> Work:
    return Work("dense", (count, 1, 1, 2048), (1, 1, 1, 2048, 1000), Geometry(), "float32", True)


@pytest.mark.parametrize(
    ("work", "sparse"),
    [
        (conv3x3(1, 14, 256, 256), True),
        (conv3x3(1, 7, 512, 512), True),
        (conv3x3(1, 56, 256, 256), True),
        (conv3x3(64, 28, 512, 512), False),  # cuDNN fills the device
        (conv3x3(1, 56, 256, 256, exact=False), False),  # TF32
        (conv3x3(1, 28, 512, 512, exact=False), False),
        (conv3x3(1, 56, 256, 256, dtype="bfloat16", exact=False), False),
        (conv3x3(1, 224, 3, 64), False),  # an image
        (conv3x3(1, 56, 64, 64, geometry=Geometry(padding=SAME.padding, groups=64)), False),  # depthwise
        (rows(1), True),
        (rows(8), True),
        (rows(9), False),
        (dataclasses.replace(rows(1), exact=False), True),
        (dataclasses.replace(rows(2), exact=False), False),
        (dataclasses.replace(rows(4), exact=False, kernel_shape=(4, 1, 1, 2048, 1000)), True),
        (dataclasses.replace(rows(1), dtype="bfloat16"), True),
        (dataclasses.replace(rows(2), dtype="bfloat16"), False),
        (rows(64), False),
    ],
)
def test_h200(h200: None, work: Work, sparse: bool) -> None:
    assert choice.threshold(work, "cuda") == (math.inf if sparse else 0.0)


@pytest.mark.parametrize(
    "work",
    [
        conv3x3(0, 14, 64, 64),
        conv3x3(0, 14, 64, 64, dtype="bfloat16", exact=False),
        conv3x3(2, 2, 64, 64, geometry=Geometry()),
        conv3x3(2, 14, 64, 0),
    ],
)
def test_nothing_to_compute_is_dense_on_cuda(h200: None, work: Work) -> None:
    assert choice.threshold(work, "cuda") == 0


def test_small_tf32_convolutions_on_h200_are_direct(h200: None) -> None:
    assert choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False), "cuda")
    assert not choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False), "cpu")
    assert not choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False, method="pecr"), "cuda")


@pytest.mark.parametrize("kind", [{"exact": False}, {"exact": True}, {"dtype": "bfloat16", "exact": False}])
def test_images_on_h200_are_direct(h200: None, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]) -> None:
    assert choice.prefers_direct(conv3x3(1, 224, 3, 64, **kind), "cuda")
    assert choice.prefers_direct(conv3x3(8, 224, 3, 64, **kind), "cuda")
    assert choice.prefers_direct(conv3x3(1, 112, 3, 32, **kind), "cuda")
    assert not choice.prefers_direct(conv3x3(32, 224, 3, 64, **kind), "cuda")  # not measured, as those below
    assert not choice.prefers_direct(conv3x3(1, 112, 3, 16, **kind), "cuda")
    dilated = Geometry(padding=SAME.padding, dilation=(2, 2))
    assert not choice.prefers_direct(conv3x3(1, 224, 3, 64, geometry=dilated, **kind), "cuda")
    monkeypatch.setattr(choice, "_device", lambda: (cost_model.Device(), (8, 0)))
    assert not choice.prefers_direct(conv3x3(1, 224, 3, 64, **kind), "cuda")


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"exact": True}, True),
        ({"exact": True, "x_shape": (8, 224, 224, 3)}, False),  # what tiles compute twice costs more
        ({"x_shape": (8, 224, 224, 3)}, True),
        ({"dtype": "float64"}, False),
        ({"kernel_shape": (1, 13, 13, 3, 64)}, False),  # weights too large
    ],
)
def test_pools_of_images_are_inside_direct(h200: None, changes: dict[str, Any], inside: bool) -> None:
    pool = Pool("max", (3, 3), (2, 2), ((1, 1), (1, 1)))
    stem = Geometry(strides=(2, 2), padding=((3, 3), (3, 3)), pool=pool)
    work = Work("ecr", (1, 224, 224, 3), (1, 7, 7, 3, 64), stem, "float32", False)
    work = dataclasses.replace(work, **changes)
    assert choice.pools_in_direct(work) == inside
    for other in (Pool("avg", (3, 3), (2, 2), pool.padding), Pool("max", (5, 5), (2, 2), pool.padding)):
        assert not choice.pools_in_direct(dataclasses.replace(work, geometry=dataclasses.replace(stem, pool=other)))


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(8, 14, 256, 256), True),
        (conv3x3(1, 28, 512, 512), True),
        (conv3x3(1, 224, 64, 64), True),
        (conv3x3(8, 28, 512, 512), True),
        (conv3x3(8, 56, 256, 256), False),  # not faster than cuDNN, as those below
        (conv3x3(8, 112, 128, 128), False),
        (conv3x3(32, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), False),
        (conv3x3(1, 224, 64, 32), False),  # not measured, as those below
        (conv3x3(1, 112, 130, 128), False),
        (conv3x3(1, 112, 128, 130), False),
        (conv3x3(1, 56, 256, 256, geometry=Geometry(padding=SAME.padding, groups=2)), True),
        (conv3x3(8, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), True),
        (conv3x3(8, 28, 360, 360, geometry=Geometry(padding=SAME.padding, groups=3)), False),  # of 120: not measured
        (conv3x3(1, 56, 256, 256, method="pecr"), False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_larger_windows_on_h200_are_direct(
    h200: None, monkeypatch: pytest.MonkeyPatch, work: Work, direct: bool, dtype: str
) -> None:
    work = dataclasses.replace(work, dtype=dtype, exact=False)
    assert choice.prefers_direct(work, "cuda") == direct
    with monkeypatch.context() as build:
        build.setattr(_native, "has_warpgroups", lambda: False)  # compiled for other GPUs
        assert not choice.prefers_direct(work, "cuda")
    monkeypatch.setattr(choice, "_device", lambda: (cost_model.Device(), (8, 0)))
    assert not choice.prefers_direct(work, "cuda")  # has no warpgroup products


@pytest.mark.parametrize(
    ("work", "tf32", "sixteen_bits"),
    [
        (conv1x1(1, 14, 896, 896), True, True),
        (conv1x1(8, 7, 2048, 2048), True, True),
        (conv1x1(1, 28, 128, 512), True, True),
        (conv1x1(1, 28, 448, 128), True, True),
        (conv1x1(1, 28, 352, 128), True, False),
        (conv1x1(1, 56, 128, 128), True, False),
        (conv1x1(1, 56, 64, 256), True, False),
        (conv1x1(1, 112, 32, 256), False, False),
        (conv1x1(1, 112, 32, 256, strides=2), True, True),
        (conv1x1(1, 28, 512, 512), True, False),
        (conv1x1(1, 56, 256, 512), True, False),
        (conv1x1(8, 28, 512, 896, strides=2), True, True),
        (conv1x1(8, 56, 256, 512), False, False),
        (conv1x1(32, 14, 896, 896), False, False),
    ],
)
def test_products_on_h200_are_direct_where_they_are_faster(
    h200: None, work: Work, tf32: bool, sixteen_bits: bool
) -> None:
    for dtype, wanted in (("float32", tf32), ("bfloat16", sixteen_bits), ("float16", sixteen_bits)):
        given = dataclasses.replace(work, dtype=dtype, exact=False)
        assert choice.prefers_direct(given, "cuda") == wanted
        assert choice.threshold(given, "cuda") == 0  # what is not for it is for cuDNN


def test_a_smaller_hopper_takes_direct_for_less(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    work = conv3x3(8, 28, 512, 512, exact=False)
    half = dataclasses.replace(cost_model.Device(), multiprocessors=66)
    monkeypatch.setattr(choice, "_device", lambda: (half, (9, 0)))
    assert not choice.prefers_direct(work, "cuda")
    assert choice.prefers_direct(conv3x3(2, 28, 512, 512, exact=False), "cuda")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(1, 14, 256, 256), True),
        (conv3x3(1, 28, 512, 512), True),
        (conv3x3(1, 224, 64, 64), True),
        (conv3x3(2, 28, 512, 512), True),
        (conv3x3(1, 56, 64, 128, geometry=Geometry(padding=SAME.padding, groups=2)), True),
        (conv3x3(4, 56, 128, 32), True),
        (conv3x3(1, 56, 128, 32), False),
        (conv3x3(64, 14, 512, 512), True),
        (conv3x3(64, 28, 512, 512), False),  # not measured, as those below
        (conv3x3(1, 14, 256, 32), False),
        (conv3x3(1, 14, 255, 256), False),
        (conv3x3(1, 14, 256, 254), False),
        (conv3x3(1, 28, 512, 512, method="pecr"), False),
        (conv3x3(1, 56, 64, 64, geometry=Geometry(padding=SAME.padding, groups=2)), False),
        (conv3x3(1, 224, 3, 64), True),
        (conv3x3(0, 14, 256, 256), False),
    ],
)
def test_small_batches_in_float32_on_h200_are_direct(h200: None, work: Work, direct: bool) -> None:
    assert choice.prefers_direct(work, "cuda") == direct
    assert not choice.prefers_direct(work, "cpu")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(1, 14, 256, 256), True),
        (conv3x3(1, 14, 512, 512), True),
        (conv3x3(1, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), True),
        (conv3x3(1, 14, 260, 256), False),  # copied element by element
        (conv3x3(1, 14, 128, 32), True),
        (conv3x3(1, 14, 256, 16), False),  # not measured
        (conv3x3(1, 224, 3, 64), True),
        (conv3x3(0, 14, 256, 256), False),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_convolutions_in_16_bits_on_h200_are_direct(h200: None, work: Work, direct: bool, dtype: str) -> None:
    assert choice.prefers_direct(dataclasses.replace(work, dtype=dtype, exact=False), "cuda") == direct
    assert choice.prefers_direct(dataclasses.replace(work, dtype=dtype), "cuda") == direct


def test_direct_in_float32_wants_tensor_cores_much_faster_than_ffma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_device", lambda: (cost_model.Device(), (8, 9)))
    assert not choice.prefers_direct(conv3x3(1, 14, 256, 256), "cuda")
    assert choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False), "cuda")


def test_overlapping_pools_cost_the_sparse_kernel_more(h200: None) -> None:
    pool = Pool("max", (3, 3), (1, 1), ((1, 1), (1, 1)))
    pooled = conv3x3(1, 28, 256, 256, method="pecr", geometry=Geometry(padding=SAME.padding, pool=pool))
    assert choice.crossover(pooled, "cuda") < choice.crossover(conv3x3(1, 28, 256, 256), "cuda")


@pytest.mark.parametrize(
    ("work", "threshold"),
    [
        (conv3x3(1, 14, 256, 256), 0.65),
        (conv3x3(1, 7, 512, 512), math.inf),
        (conv3x3(1, 14, 256, 256, dtype="bfloat16"), math.inf),
        (conv3x3(1, 28, 128, 128, geometry=Geometry(padding=SAME.padding, groups=8)), math.inf),
        (conv3x3(1, 224, 3, 64), 0.0),  # an image
        (conv3x3(1, 8, 8, 8), math.inf),  # small
        (rows(1), math.inf),
        (rows(2), 0.0),
        (Work("dense", (8, 1, 1, 4096), (1, 1, 1, 4096, 1000), Geometry(), "float32", True), 0.0),
        (Work("dense", (8, 1, 1, 4096), (1, 1, 1, 4096, 4096), Geometry(), "float32", True), 0.35),
        (Work("dense", (4, 1, 1, 4096), (1, 1, 1, 4096, 1000), Geometry(), "float32", True), 0.35),
        (Work("dense", (4, 1, 1, 4096), (1, 1, 1, 4096, 4096), Geometry(), "float32", True), 0.65),
        (Work("dense", (1, 1, 1, 25088), (1, 1, 1, 25088, 4096), Geometry(), "float32", True), 0.65),
        (rows(16), 0.0),
        (conv3x3(1, 56, 128, 128, method="pecr", geometry=POOLED), 0.65),
        (rows(17), 0.0),
    ],
)
def test_cpu(work: Work, threshold: float) -> None:
    assert choice.threshold(work, "cpu") == threshold


@pytest.mark.parametrize(
    ("images", "size", "channels", "features", "native"),
    [(8, 14, 256, 1024, False), (1, 14, 256, 1024, True), (8, 7, 512, 2048, True), (8, 28, 128, 512, True)],
)
def test_wide_convolutions_of_1x1_branch_to_xlas_on_a_cpu(
    images: int, size: int, channels: int, features: int, native: bool
) -> None:
    x_shape, kernel_shape = (images, size, size, channels), (1, 1, 1, channels, features)
    work = Work("ecr", x_shape, kernel_shape, Geometry(), "float32", True)
    assert choice.chooses_natively(work, "cpu") == native
    assert native or 0 < choice.threshold(work, "cpu") < 1


def test_large_strided_convolutions_of_1x1_branch_to_xlas_on_a_cpu() -> None:
    strided = Geometry(strides=(2, 2))
    for images, native in ((1, True), (8, False)):
        work = Work("ecr", (images, 28, 28, 512), (1, 1, 1, 512, 1024), strided, "float32", True)
        assert choice.chooses_natively(work, "cpu") is native
        assert choice.threshold(work, "cpu") == 0.65


@pytest.mark.parametrize("shape", [(1, 14, 14, 256), (2, 7, 9, 33), (1, 1, 1, 1), (3, 50, 50, 96)])
def test_samples_meet_every_channel_and_estimate_the_density(shape: tuple[int, ...]) -> None:
    step = sampling.sample_step(shape)
    assert math.gcd(step, shape[-1]) == 1
    x = jnp.asarray(np.random.default_rng(0).random(shape) < 0.3, jnp.float32)
    samples = -(-x.size // step)
    assert samples >= min(x.size, 500)
    nonzeros, elements = np.asarray(sampling.sampled_nonzeros(x)).sum(0)
    assert elements == samples
    assert abs(nonzeros / elements - float(jsc.density(x))) < 4 * math.sqrt(0.21 / samples)


def map_of(density: float, shape: tuple[int, ...] = (1, 14, 14, 64), seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.where(rng.random(shape) < density, rng.standard_normal(shape), 0), jnp.float32)


KERNEL = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3, 64, 48)) / 24, jnp.float32)


@pytest.mark.skipif(PLATFORM != "cpu", reason="only a CPU decides while the program runs")
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_the_running_program_follows_the_zeros(density: float) -> None:
    """Zeros hide an infinite weight from the sparse kernel alone, which shows what ran."""
    require("ecr", "float32")
    x = map_of(density).at[..., 0].set(0)
    kernel = KERNEL.at[:, :, 0].set(jnp.inf)
    call = jax.jit(jsc.conv)
    assert bool(jnp.isfinite(call(x, kernel)).all()) == (density < 0.65)
    text = call.lower(x, kernel).compile().as_text()
    assert re.findall(r'custom_call_target="jsc_(\w+)"', text) == ["ecr"]
    assert " conditional(" not in text  # the native call chooses


@pytest.mark.skipif(PLATFORM != "cpu", reason="only a CPU decides while the program runs")
@pytest.mark.parametrize("density", [0.2, 1.0])
@pytest.mark.parametrize("size", [16, 56])
def test_a_call_with_a_pool_does_not_branch(density: float, size: int) -> None:
    require("pecr", "float32")
    x = jnp.asarray(np.random.default_rng(0).random((1, size, size, 64), np.float32))
    x = jnp.where(x < density, x, 0).at[..., 0].set(0)
    kernel = jnp.ones((3, 3, 64, 128)).at[:, :, 0].set(jnp.inf)
    call = jax.jit(functools.partial(jsc.conv_pool, activation=None, pool="avg"))
    assert bool(jnp.isfinite(call(x, kernel)).all()) == (density < 0.65)
    text = call.lower(x, kernel).compile().as_text()
    assert re.findall(r'custom_call_target="jsc_(\w+)"', text) == ["pecr"]
    assert " conditional(" not in text


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_choosing_is_right_under_vmap_and_derivatives(density: float) -> None:
    xs = jnp.stack([map_of(density, seed=seed) for seed in range(3)])
    bias = jnp.ones(48)

    def call(implementation: str | None) -> Any:
        def function(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jsc.conv(x, kernel, bias, activation="relu", precision="highest", implementation=implementation)

        return function

    def results(implementation: str | None) -> Any:
        f = call(implementation)
        loss = lambda x, k: (f(x, k) ** 2).sum()  # noqa: E731
        return (
            jax.jit(jax.vmap(f, (0, None)))(xs, KERNEL),
            jax.jit(jax.vmap(f, (None, 0)))(xs[0], jnp.stack([KERNEL, -KERNEL])),
            jax.jit(jax.grad(loss, (0, 1)))(xs[0], KERNEL),
            jax.jit(lambda x, k: jax.jvp(f, (x, k), (x, k)))(xs[0], KERNEL),
        )

    for found, expected in zip(jax.tree.leaves(results(None)), jax.tree.leaves(results("xla")), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


def test_exported_for_any_number_of_images() -> None:
    x = map_of(0.5, (2, 14, 14, 64))
    unknown = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n,14,14,64"), x.dtype)
    call = jax.jit(functools.partial(jsc.conv, padding="VALID", precision="highest"))
    allowed = [jax.export.DisabledSafetyCheck.custom_call("jsc_ecr")]
    found = jax.export.export(call, disabled_checks=allowed)(unknown, KERNEL).call(x, KERNEL)
    expected = jsc.conv(x, KERNEL, padding="VALID", precision="highest", implementation="xla")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "x_shape", "kernel_shape", "arguments"),
    [
        (jsc.conv, (64, 28, 28, 128), (3, 3, 128, 128), {"padding": "SAME", "activation": "relu"}),
        (jsc.conv, (128, 28, 28, 128), (3, 3, 64, 128), {"strides": 2, "feature_group_count": 2}),
        (jsc.conv, (8, 56, 56, 64), (1, 1, 64, 256), {}),
        (jsc.conv_pool, (64, 56, 56, 64), (3, 3, 64, 64), {}),
        (jsc.dense, (64, 4096), (4096, 1000), {"activation": "relu"}),
    ],
)
def test_what_none_leaves_to_xla_is_xlas_operation(
    h200: None,
    monkeypatch: pytest.MonkeyPatch,
    op: Any,
    x_shape: tuple[int, ...],
    kernel_shape: tuple[int, ...],
    arguments: dict[str, Any],
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    shapes = (x_shape, kernel_shape, kernel_shape[-1:])
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def operations(implementation: str | None) -> list[str]:
        function = jax.jit(functools.partial(op, implementation=implementation, **arguments))
        text = function.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        lines = [re.sub(r"%\w+", "", line).strip() for line in text.splitlines() if " stablehlo." in line]
        shaping = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")  # which XLA folds away
        return [line for line in lines if not any(name in line for name in shaping)]

    assert operations(None) == operations("xla")


def test_vmap_is_counted() -> None:
    x, kernel = jnp.ones((32, 1, 96)), jnp.ones((96, 64))
    alone = jax.jit(jsc.dense).lower(x[0], kernel).compile().as_text()
    mapped = jax.jit(jax.vmap(jsc.dense, (0, None))).lower(x, kernel).compile().as_text()
    require("dense", "float32")
    assert "jsc_dense" in alone
    assert "jsc_dense" not in mapped
    np.testing.assert_allclose(jax.vmap(jsc.dense, (0, None))(x, kernel), jnp.full((32, 1, 64), 96.0))


@pytest.mark.parametrize(
    ("x_shape", "platform", "apart"),
    [
        ((1, 56, 56, 128), "cuda", True),
        ((1, 56, 56, 128), "cpu", False),  # the native call may be direct, with the pool
        ((256, 56, 56, 128), "cuda", False),
    ],
)
def test_a_pool_behind_direct_is_xlas(
    h200: None, monkeypatch: pytest.MonkeyPatch, x_shape: tuple[int, ...], platform: str, apart: bool
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    geometry = Geometry(padding=SAME.padding, pool=Pool("max", (3, 3), (2, 2), ((0, 0), (0, 0))))
    config = primitives.Config(geometry, "pecr", "relu", fallback=True, precision=(lax.Precision.HIGHEST,) * 2)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x_shape, (1, 3, 3, 128, 128))]
    assert lowering._pools_apart(*operands, config, platform) == apart
    named = dataclasses.replace(config, fallback=False)
    assert not lowering._pools_apart(*operands, named, platform)


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"exact": True}, True),
        ({"exact": True, "x_shape": (256, 56, 56, 128)}, False),
        ({"x_shape": (64, 56, 56, 128)}, False),  # cuDNN's
        ({"x_shape": (1, 56, 56, 126), "kernel_shape": (1, 3, 3, 126, 128)}, False),
        ({"kernel_shape": (1, 1, 1, 128, 128)}, False),  # a tile is no patch
        ({"kernel_shape": (1, 11, 11, 128, 128)}, False),  # patches too large
    ],
)
def test_pools_of_pairs_are_inside_direct_on_h200(
    h200: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], inside: bool
) -> None:
    work = dataclasses.replace(conv3x3(1, 56, 128, 128, exact=False, geometry=POOLED), **changes)
    assert choice.pools_in_direct(work) == inside
    for pool in (None, Pool("max", (3, 3), (2, 2), ((0, 0), (0, 0))), Pool("max", (2, 2), (2, 2), ((0, 1), (0, 0)))):
        other = dataclasses.replace(POOLED, pool=pool)
        assert not choice.pools_in_direct(dataclasses.replace(work, geometry=other))
    assert not choice.pools_in_direct(dataclasses.replace(work, geometry=dataclasses.replace(POOLED, strides=(2, 2))))
    monkeypatch.setattr(choice, "_device", lambda: (cost_model.Device(), (8, 0)))
    assert not choice.pools_in_direct(work)


@pytest.mark.parametrize("implementation", ["direct", None])
def test_a_pool_inside_direct_is_lowered_as_one_call(
    h200: None, monkeypatch: pytest.MonkeyPatch, implementation: str | None
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    method = "direct" if implementation else "pecr"
    config = primitives.Config(POOLED, method, "relu", fallback=implementation is None)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 56, 56, 128), (1, 3, 3, 128, 128))]
    assert not lowering._pools_apart(*operands, config, "cuda")
    chosen = lowering.resolved(*operands, config, "cuda")
    assert chosen is not None
    assert (chosen.method, chosen.geometry) == ("direct", POOLED)
    assert lowering._pools_apart(*operands, config, "cpu") == (implementation == "direct")
    large = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 56, 56, 128), (1, 3, 3, 128, 128))]
    assert lowering._pools_apart(*large, config, "cuda") == (implementation == "direct")
