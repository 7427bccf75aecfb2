"""An average pool in front of its 1x1 convolution, with which it commutes: where `None` has it so, and the results."""

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
from cases import Case
from kernel_checks import TOLERANCE, run
from platforms import PLATFORM, on_a_gpu

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native

AVERAGE = Case("average", (2, 9, 7, 40), 24, kernel=(1, 1), pool="avg", window=(2, 2))
CASES = (
    AVERAGE,
    dataclasses.replace(AVERAGE, name="bias", bias=True),
    dataclasses.replace(AVERAGE, name="groups", groups=4, bias=True),
    dataclasses.replace(AVERAGE, name="windows apart", x=(1, 11, 13, 16), window=(2, 3), window_strides=(3, 4)),
    dataclasses.replace(AVERAGE, name="no zeros", zeros=0.0),
    dataclasses.replace(AVERAGE, name="all zeros", zeros=1.0, bias=True),
    dataclasses.replace(AVERAGE, name="a transition", x=(1, 28, 28, 128), out_channels=64),
    dataclasses.replace(AVERAGE, name="no image", x=(0, 8, 8, 16)),
)


def _lowered(
    case: Case, implementation: str | None, dtype: Any = "float32", platform: str = PLATFORM, precision: Any = None
) -> str:
    kernel = jax.ShapeDtypeStruct((*case.kernel, case.x[3] // case.groups, case.out_channels), dtype)
    call = functools.partial(jsc.conv_pool, implementation=implementation, precision=precision, **case.arguments)
    traced = jax.jit(call).trace(jax.ShapeDtypeStruct(case.x, dtype), kernel)
    return str(traced.lower(lowering_platforms=(platform,)).as_text())


def _pools_first(case: Case, text: str) -> bool:
    """Whether the convolution is of a smaller map than x."""
    calls = [line for line in text.splitlines() if "@jsc_" in line or "stablehlo.convolution" in line]
    assert calls
    return not any(f"(tensor<{'x'.join(map(str, case.x))}x" in line for line in calls)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_equals_the_oracle(case: Case, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        inputs = cases.inputs(case)
        typed = cases.Inputs(*(None if v is None else jnp.asarray(v, dtype) for v in inputs))
        assert oracle.relative_error(run(case, typed, None), oracle.expected(case, typed)) <= TOLERANCE[dtype]
        if PLATFORM == "cpu":  # a GPU has it so where its models say
            assert _pools_first(case, _lowered(case, None, dtype))


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_hopper_transitions_of_several_images_are_averaged_first(
    monkeypatch: pytest.MonkeyPatch, dtype: str, precision: str | None
) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "workspace_bytes", lambda *_: 0)
    case = dataclasses.replace(AVERAGE, x=(32, 56, 56, 256), out_channels=128)
    assert _pools_first(case, _lowered(case, None, dtype, "cuda", precision))


def test_float64_is_not_averaged_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)
    with jax.enable_x64(True):
        assert not _pools_first(AVERAGE, _lowered(AVERAGE, None, "float64", "cuda"))


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(AVERAGE, activation="relu"),
        dataclasses.replace(AVERAGE, pool="max"),
        dataclasses.replace(AVERAGE, kernel=(3, 3)),
        dataclasses.replace(AVERAGE, strides=2),
        dataclasses.replace(AVERAGE, padding=1),
        dataclasses.replace(AVERAGE, window_padding=((0, 1), (0, 1))),
        dataclasses.replace(AVERAGE, window=(3, 3), window_strides=(1, 1)),  # averages as many as there are pixels
        dataclasses.replace(AVERAGE, window=(1, 1)),
    ],
)
def test_other_pools_stay_behind(case: Case) -> None:
    assert not _pools_first(case, _lowered(case, None))


@pytest.mark.parametrize("implementation", ["ecr", "pecr", "xla"])
def test_named_implementations_pool_behind(implementation: str) -> None:
    assert not _pools_first(AVERAGE, _lowered(AVERAGE, implementation))


def test_given_counts_are_of_the_whole_map() -> None:
    x, kernel = jnp.ones((1, 8, 8, 16)), jnp.ones((1, 1, 16, 8))
    counts = jsc.conv(jnp.ones((1, 8, 8, 4)), jnp.ones((1, 1, 4, 16)), count_nonzeros=True)[1]
    call = functools.partial(jsc.conv_pool, pool="avg", activation=None)
    text = jax.jit(lambda x, kernel: call(x, kernel, nonzeros=counts)).lower(x, kernel).as_text()
    assert not _pools_first(dataclasses.replace(AVERAGE, x=x.shape), text)
    np.testing.assert_allclose(call(x, kernel, nonzeros=counts), call(x, kernel), rtol=1e-6)


def test_counts_of_the_result_are_its_own() -> None:
    inputs = cases.inputs(AVERAGE)
    inputs.x[0] = 0
    x, kernel = cases.on_device(inputs.x), cases.on_device(inputs.kernel)
    result, counts = jsc.conv_pool(x, kernel, precision="highest", count_nonzeros=True, **AVERAGE.arguments)
    wanted = jsc.conv_pool(x, kernel, precision="highest", implementation="xla", **AVERAGE.arguments)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    assert 0 < np.count_nonzero(result) < result.size
    assert counts.sum(axis=0).tolist() == [np.count_nonzero(result), result.size]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite(value: float) -> None:
    inputs = cases.inputs(AVERAGE)
    inputs.x[0, 3, 3, 5], inputs.x[1, 0, 1, 2], inputs.x[0, -1, -1, 0] = value, -np.inf, -0.0
    assert oracle.relative_error(run(AVERAGE, inputs, None), oracle.expected(AVERAGE, inputs)) <= TOLERANCE["float32"]


def test_packed_kernels_derivatives_and_vmap() -> None:
    inputs = cases.inputs(AVERAGE)
    x, kernel = cases.on_device(inputs.x), cases.on_device(inputs.kernel)
    call = functools.partial(jsc.conv_pool, precision="highest", **AVERAGE.arguments)
    wanted = call(x, kernel, implementation="xla")
    np.testing.assert_allclose(call(x, jsc.pack(kernel)), wanted, rtol=1e-5, atol=1e-5)

    def loss(x: jax.Array, kernel: jax.Array, implementation: str | None) -> jax.Array:
        return jnp.sum(call(x, kernel, implementation=implementation) ** 2)

    ours, xlas = (jax.grad(loss, (0, 1))(x, kernel, implementation) for implementation in (None, "xla"))
    for one, other in zip(ours, xlas, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)

    kernels = jnp.stack([kernel, 2 * kernel, -kernel])
    found = jax.jit(jax.vmap(lambda kernel: call(x, kernel)))(kernels)
    np.testing.assert_allclose(found, jnp.stack([wanted, 2 * wanted, -wanted]), rtol=1e-5, atol=1e-5)
    maps = jnp.stack([x, 3 * x])
    found = jax.vmap(lambda x: call(x, kernel))(maps)
    np.testing.assert_allclose(found, jnp.stack([wanted, 3 * wanted]), rtol=1e-5, atol=1e-5)


def test_exported_for_any_number_of_images() -> None:
    inputs = cases.inputs(AVERAGE)
    x, kernel = cases.on_device(inputs.x), cases.on_device(inputs.kernel)
    unknown = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n,9,7,40"), x.dtype)
    call = jax.jit(functools.partial(jsc.conv_pool, precision="highest", **AVERAGE.arguments))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("jsc_ecr", "jsc_pecr")]
    found = jax.export.export(call, disabled_checks=allowed)(unknown, kernel).call(x, kernel)
    np.testing.assert_allclose(found, call(x, kernel), rtol=1e-5, atol=1e-5)


def test_on_other_platforms_the_pool_is_behind(h200: None) -> None:
    assert not _pools_first(AVERAGE, _lowered(AVERAGE, None, platform="tpu"))
