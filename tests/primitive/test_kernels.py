"""Every native convolution against float64 lax on the CPU: all cases, dtypes and the extremes."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kernel_checks import TOLERANCE, inputs_and_result, poison, run
from platforms import LOOPS, on_cpu, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.api import ops

RUNS = cases.runs()
RUN_IDS = [f"{implementation} {case.name}" for case, implementation in RUNS]
NATIVE = [name for name in ops.CONV_IMPLEMENTATIONS if name != "xla"]
FUSED = {implementation for case, implementation in RUNS if case.pool}
THEN_POOL = [name for name in ops.CONV_POOL_IMPLEMENTATIONS if name not in ("xla", *FUSED)]


@pytest.mark.parametrize(("case", "implementation"), RUNS, ids=RUN_IDS)
def test_float32(case: Case, implementation: str) -> None:
    require(implementation, "float32")
    inputs, wanted = inputs_and_result(case, "float32")
    result = run(case, inputs, implementation)
    assert result.dtype == jnp.float32
    assert oracle.relative_error(result, wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize("case", cases.ACCURACY_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", NATIVE)
def test_float32_accuracy(case: Case, implementation: str) -> None:
    require(implementation, "float32")
    inputs, wanted = inputs_and_result(case, "float32")
    result = run(case, inputs, implementation)
    assert oracle.relative_error(result, wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("case", "implementation"), RUNS, ids=RUN_IDS)
def test_sixteen_bits(case: Case, implementation: str, dtype: str) -> None:
    require(implementation, dtype)
    inputs, wanted = inputs_and_result(case, dtype)
    result = run(case, inputs, implementation)
    assert result.dtype == jnp.dtype(dtype)
    assert oracle.relative_error(result, wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("case", "implementation"), RUNS[::5], ids=RUN_IDS[::5])
def test_float64(case: Case, implementation: str) -> None:
    require(implementation, "float64")
    inputs, wanted = inputs_and_result(case, "float64")
    with jax.enable_x64(True):
        result = run(case, inputs, implementation)
        assert result.dtype == jnp.float64
    assert oracle.relative_error(result, wanted) <= TOLERANCE["float64"]


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("case", [*cases.CONV_CASES, *cases.CONV_POOL_CASES], ids=lambda case: case.name)
def test_definition_and_automatic_choice(case: Case, implementation: str | None) -> None:
    inputs, wanted = inputs_and_result(case, "float32")
    with jax.default_matmul_precision("highest"):
        result = run(case, inputs, implementation)
    assert oracle.relative_error(result, wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize("case", cases.CONV_POOL_CASES[:4], ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", THEN_POOL)
def test_convolution_then_pool(case: Case, implementation: str) -> None:
    require(implementation, "float32")
    inputs, wanted = inputs_and_result(case, "float32")
    error = oracle.relative_error(run(case, inputs, implementation), wanted)
    assert error <= TOLERANCE["float32"]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_geometry(data: st.DataObject) -> None:
    """Shapes nobody chose: sizes, strides, dilations, paddings, groups and pools drawn at random."""
    small = st.integers(1, 4)
    groups = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
    pads = st.integers(-1, 4)
    pool = data.draw(st.sampled_from([None, "max", "avg"]))
    dtype = data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    case = Case(
        name="drawn",
        x=(
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 13)),
            data.draw(st.integers(1, 13)),
            groups * data.draw(st.integers(1, 40)),
        ),
        out_channels=groups * data.draw(st.integers(1, 40)),
        kernel=(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))),
        strides=(data.draw(small), data.draw(small)),
        padding=((data.draw(pads), data.draw(pads)), (data.draw(pads), data.draw(pads))),
        dilation=(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))),
        groups=groups,
        bias=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "relu"])),
        pool=pool,
        window=(data.draw(small), data.draw(small)),
        window_strides=(data.draw(small), data.draw(small)),
        window_padding=((data.draw(small), data.draw(small)), (data.draw(small), data.draw(small))),
        zeros=data.draw(st.sampled_from([0.0, 0.3, 0.8, 0.97, 1.0])),
    )
    assume(all(size + sum(pad) >= 0 for size, pad in zip(case.x[1:3], case.padding, strict=True)))
    implementation = data.draw(st.sampled_from(["ecr", "direct"])) if pool is None else "pecr"
    require(implementation, dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    with on_cpu(data.draw(st.sampled_from(_native.cpu_isas())), data.draw(st.sampled_from(LOOPS))):
        result = run(case, inputs, implementation)
        assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE[dtype]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_residual(data: st.DataObject) -> None:
    """A residual of a drawn shape, with and without what comes around it."""
    dtype = data.draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    case = Case(
        name="drawn residual",
        x=(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 11)), data.draw(st.integers(1, 11)), 19),
        out_channels=data.draw(st.integers(1, 70)),
        kernel=data.draw(st.sampled_from([(1, 1), (3, 3), (2, 4)])),
        bias=data.draw(st.booleans()),
        residual=True,
        activation=data.draw(st.sampled_from([None, "relu"])),
        zeros=data.draw(st.sampled_from([0.0, 0.6, 0.9, 1.0])),
    )
    require("ecr", dtype)
    inputs = cases.inputs(case, jnp.dtype(dtype))
    assert oracle.relative_error(run(case, inputs, "ecr"), oracle.expected(case, inputs)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("pool", "implementation"), [(None, "ecr"), (None, "direct"), ("max", "pecr"), ("avg", "pecr")]
)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_non_finite_and_tiny_values(pool: str | None, implementation: str, activation: str | None) -> None:
    """NaN, infinities and subnormals of x are not zeros: they go through every tap, ReLU and pool as in lax."""
    require(implementation, "float32")
    case = Case("extreme", (1, 9, 9, 12), 20, pool=pool, activation=activation)
    inputs = cases.inputs(case)
    inputs.x[0, 1, 1, 3], inputs.x[0, 4, 7, 0], inputs.x[0, 7, 2, 5] = np.nan, np.inf, -np.inf
    inputs.x[0, 8, 8, 2] = np.float32(1e-41)
    result = run(case, inputs, implementation)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("activation", [None, "relu"])
def test_non_finite_bias_before_a_max_pool(activation: str | None) -> None:
    """A bias that is infinite the other way makes a NaN of a sum that is not the window's largest."""
    require("pecr", "float32")
    case = Case("bias", (1, 4, 4, 3), 16, kernel=(1, 1), bias=True, pool="max", activation=activation, zeros=0.0)
    inputs = cases.inputs(case)
    inputs.x[0, 1, 1, 0] = -np.inf
    inputs.kernel[:] = 1
    inputs.bias[:4] = np.inf, -np.inf, np.nan, 1
    result = np.asarray(run(case, inputs, "pecr"))
    np.testing.assert_array_equal(result[..., :3], np.asarray(run(case, inputs, "xla"))[..., :3])
    assert oracle.relative_error(result[..., 3:], oracle.expected(case, inputs)[..., 3:]) <= TOLERANCE["float32"]


def test_subnormal_input_is_not_a_zero() -> None:
    require("ecr", "float32")
    x = np.full((1, 3, 3, 4), 1e-40, np.float32)
    kernel = np.full((3, 3, 4, 5), 1e30, np.float32)
    result = np.asarray(jsc.conv(x, kernel, padding="VALID", implementation="ecr"))
    np.testing.assert_allclose(result, 36 * float(np.float32(1e-40)) * float(np.float32(1e30)), rtol=1e-5)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_skipped_zero_drops_inf_and_nan_of_the_kernel(zero: float) -> None:
    """The one documented difference from lax."""
    require("ecr", "float32")
    x = np.full((1, 4, 4, 6), zero, np.float32)
    x[..., 0] = 1.0
    kernel = np.ones((3, 3, 6, 8), np.float32)
    kernel[:, :, 1], kernel[:, :, 2] = np.inf, np.nan
    result = np.asarray(jsc.conv(x, kernel, padding="VALID", implementation="ecr"))
    np.testing.assert_array_equal(result, np.full((1, 2, 2, 8), 9.0))
    pooled = np.asarray(jsc.conv_pool(x, kernel, padding="VALID", implementation="pecr"))
    np.testing.assert_array_equal(pooled, np.full((1, 1, 1, 8), 9.0))
    row = np.asarray(jsc.dense(x[:, 0, 0], kernel[0, 0], implementation="ecr"))
    np.testing.assert_array_equal(row, np.full((1, 8), 1.0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_non_finite_kernel_meets_non_zeros_as_in_lax(value: float) -> None:
    """Nothing but zeros of x is dropped, and what fills a list up to its length adds nothing."""
    require("ecr", "float32")
    case = Case("non-finite kernel", (1, 7, 7, 33), 40, padding="VALID", zeros=0.0)
    inputs = cases.inputs(case)
    inputs.kernel[1, 1, 5, 3] = value
    inputs.kernel[0, 2, 32, 39] = value
    result = run(case, inputs, "ecr")
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


LONG_SUMS = {"windows": 7e-7, "pixels": 8e-7, "scatter": 1.6e-6}  # one chain of float32 additions: 2.1e-6


@pytest.mark.parametrize("case", cases.LONG_CASES, ids=lambda case: case.name)
def test_long_sums_are_added_up_in_parts(case: Case, cpu_isa: str, cpu_loop: str) -> None:
    inputs = cases.inputs(case)
    assert oracle.relative_error(run(case, inputs, "ecr"), oracle.expected(case, inputs)) <= LONG_SUMS[cpu_loop]


@pytest.mark.parametrize("implementation", ["direct", "coo"])
@pytest.mark.parametrize("case", cases.LONG_CASES[:2], ids=lambda case: case.name)
def test_long_sums_of_other_kernels(case: Case, implementation: str, cpu_isa: str) -> None:
    inputs = cases.inputs(case)
    assert oracle.relative_error(run(case, inputs, implementation), oracle.expected(case, inputs)) <= 9e-7


REPEATED = [run for run in RUNS if run[0].name in ("85 % zeros", "deep", "VGG conv5_4")]


@pytest.mark.parametrize(("case", "implementation"), REPEATED, ids=[f"{name} {case.name}" for case, name in REPEATED])
def test_bitwise_repeatable(case: Case, implementation: str) -> None:
    require(implementation, "float32")
    inputs = cases.inputs(case)
    first = np.asarray(run(case, inputs, implementation))
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(run(case, inputs, implementation)), first)


@pytest.mark.parametrize("case", [cases.CONV_CASES[0], cases.CONV_CASES[1], cases.CONV_CASES[13]], ids=lambda c: c.name)
def test_scattering_float64(case: Case, cpu_loop: str) -> None:
    inputs = cases.inputs(case, np.float64)
    with jax.enable_x64(True):
        result = run(case, inputs, "ecr")
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float64"]


def test_tiles_strips_and_images_of_a_large_sparse_batch(cpu_loop: str) -> None:
    """More rows than a strip or a tile holds, an incomplete block of channels, and a pool across tiles."""
    for zeros in (0.5, 0.97):
        conv = Case("large batch", (3, 60, 70, 40), 72, zeros=zeros, bias=True, residual=True, activation="relu")
        pooled = Case("large pool", (2, 90, 64, 48), 64, zeros=zeros, pool="max", window=(3, 3), window_strides=(2, 2))
        for case in (conv, pooled):
            inputs = cases.inputs(case)
            result = run(case, inputs, "ecr" if case.pool is None else "pecr")
            assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


def test_dense_and_stacks_are_bitwise_repeatable() -> None:
    require("dense", "float32")
    rng = np.random.default_rng(0)
    x = jnp.asarray(cases.feature_map(rng, (3, 4100), 0.8), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((4100, 257)), jnp.float32)
    maps = jnp.asarray(cases.feature_map(rng, (3, 1, 7, 7, 96), 0.8), jnp.float32)
    kernels = jnp.asarray(rng.standard_normal((3, 3, 3, 96, 64)), jnp.float32)
    for compute in (
        lambda: jsc.dense(x, kernel, implementation="ecr"),
        lambda: jax.vmap(lambda m, k: jsc.conv(m, k, implementation="ecr"))(maps, kernels),
    ):
        first = np.asarray(compute())
        for _ in range(5):
            poison(first.shape, first.dtype)
            np.testing.assert_array_equal(np.asarray(compute()), first)


@pytest.mark.parametrize("implementation", ["ecr", "pecr"])
def test_a_batch_of_more_than_2_to_the_31_elements(gpu: jax.Device, implementation: str) -> None:
    """Offsets of images need 64 bits: the last image of a 5 GiB batch gives what it gives alone."""
    require(implementation, "bfloat16")
    images, size, channels = 41, 1024, 64
    assert images * size * size * channels > 2**31
    key = jax.random.key(0)
    one = jnp.maximum(jax.random.normal(key, (1, size, size, channels), jnp.bfloat16), 0)
    kernel = jax.random.normal(key, (1, 1, channels, 8), jnp.bfloat16)
    batch = jax.jit(lambda x: jnp.zeros((images, size, size, channels), x.dtype).at[-1].set(x[0]))(one)

    def run(x: jax.Array) -> np.ndarray:
        if implementation == "ecr":
            return np.asarray(jsc.conv(x, kernel, strides=8, padding="VALID", implementation="ecr"))
        return np.asarray(jsc.conv_pool(x, kernel, strides=4, padding="VALID", implementation="pecr"))

    result = run(batch)
    alone = run(one)[0]
    np.testing.assert_allclose(result[-1].astype(np.float32), alone.astype(np.float32), rtol=1e-2, atol=1e-2)
    assert not result[:-1].any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_coo_treats_extremes_as_lax_does(value: float) -> None:
    """Non-finite and subnormal values of x go through every tap; a non-finite kernel meets non-zeros only."""
    require("coo", "float32")
    case = Case("extreme", (1, 9, 9, 12), 20, activation="relu")
    inputs = cases.inputs(case)
    inputs.x[0, 1, 1, 3], inputs.x[0, 8, 8, 2], inputs.x[0, 8, 0, 0] = value, np.float32(1e-41), np.float32(3.0)
    assert oracle.relative_error(run(case, inputs, "coo"), oracle.expected(case, inputs)) <= TOLERANCE["float32"]
    x = np.full((1, 4, 4, 6), -0.0, np.float32)
    x[..., 0] = 1.0
    kernel = np.ones((3, 3, 6, 8), np.float32)
    kernel[:, :, 1] = value
    result = np.asarray(jsc.conv(x, kernel, padding="VALID", implementation="coo"))
    np.testing.assert_array_equal(result, np.full((1, 2, 2, 8), 9.0))
    kernel[1, 1, 0, 3] = value
    result = np.asarray(jsc.conv(x, kernel, padding="VALID", implementation="coo"))
    np.testing.assert_array_equal(result[..., 3], np.full((1, 2, 2), value))
