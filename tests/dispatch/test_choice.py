"""Programs under `implementation=None`: they follow the zeros of x, and are XLA's own where nothing else gains."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import sampling


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
        (jsc.conv, (128, 28, 28, 128), (3, 3, 128, 128), {"padding": "SAME", "activation": "relu"}),
        (jsc.conv, (256, 28, 28, 128), (3, 3, 16, 128), {"strides": 2, "feature_group_count": 8}),
        (jsc.conv, (128, 56, 56, 64), (1, 1, 64, 256), {}),
        (jsc.conv_pool, (128, 56, 56, 64), (1, 1, 64, 256), {}),
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
    x, kernel = jnp.ones((32, 1, 512)), jnp.ones((512, 1000))
    alone = jax.jit(jsc.dense).lower(x[0], kernel).compile().as_text()
    mapped = jax.jit(jax.vmap(jsc.dense, (0, None))).lower(x, kernel).compile().as_text()
    require("dense", "float32")
    assert "jsc_dense" in alone
    assert "jsc_dense" not in mapped
    np.testing.assert_allclose(jax.vmap(jsc.dense, (0, None))(x, kernel), jnp.full((32, 1, 1000), 512.0))
