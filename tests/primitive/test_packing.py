"""Kernels that are packed while a program is traced: which calls read one, and that results are those of any other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE
from packed_checks import CASE, LAYERS, constants

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv._src.problem.geometry import Geometry

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_isas(), reason="kernels are packed for the CPU extension only"
)


def packed_operands(function: Any, x: Any) -> bool:
    return "has_packed = 1" in function.lower(x).as_text()


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_against_float64(case: Case, pixels: str) -> None:
    inputs = cases.inputs(case)
    result = constants(case, inputs)(inputs.x)
    expected = oracle.expected(case, inputs)
    if expected.any():
        assert oracle.relative_error(result, expected) <= TOLERANCE["float32"]
    else:
        assert not np.asarray(result).any()


def test_which_calls_are_packed() -> None:
    inputs = cases.inputs(CASE)
    assert packed_operands(constants(CASE, inputs), inputs.x)
    arguments = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation="ecr"))
    assert "has_packed = 0" in arguments.lower(inputs.x, inputs.kernel).as_text()
    for strides in (2, 3):  # strides of 2 have a loop with AVX-512
        strided = Case("strided", (1, 9, 9, 16), 32, strides=strides)
        is_packed = packed_operands(constants(strided, cases.inputs(strided)), cases.inputs(strided).x)
        assert is_packed == (strides == 2 and _native.cpu_isa() == "avx512")
    half = cases.inputs(CASE, jnp.dtype("bfloat16"))
    assert not packed_operands(constants(CASE, half), half.x)
    assert not packed_operands(constants(CASE, inputs, "direct"), inputs.x)


def test_layout() -> None:
    kernel = np.arange(3 * 3 * 4 * 40, dtype=np.float32).reshape(3, 3, 4, 40)
    packed = packing.reordered(kernel, groups=2)
    assert packed.shape == packing.packed_shape(kernel.shape, 2) == (2, 2, 4, 9, 16)
    np.testing.assert_array_equal(packed[1, 0, 3, 5], kernel[1, 2, 3, 20:36])
    np.testing.assert_array_equal(packed[1, 1, 3, 5], [*kernel[1, 2, 3, 36:40], *[0] * 12])
    assert packing.reordered(kernel[:1, :1], groups=1).shape == (1, 1, 4, 1, 64)
    traced = jax.jit(lambda kernel: jsc.pack(kernel, feature_group_count=2).packed)(kernel)
    np.testing.assert_array_equal(traced, packed)


def test_a_kernel_is_packed_once_and_forgotten_with_it() -> None:
    made = []

    def trace(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        made.append(packing.of_constant(x, kernels[0], Geometry()))
        return x

    kernels = [jnp.ones((3, 3, 32, 32))]
    for _ in range(2):
        jax.jit(lambda x: trace(x, kernels)).lower(jnp.ones(1))
    assert made[0] is made[1]
    key = id(kernels[0])
    assert key in packing._copies._made
    kernels.clear()
    assert key not in packing._copies._made


TRACES: dict[str, Callable[[Callable[[jax.Array], jax.Array], jax.Array], Any]] = {
    "linear_transpose": lambda function, x: jax.linear_transpose(function, x),
    "vjp": lambda function, x: jax.vjp(function, x),
    "linearize": lambda function, x: jax.linearize(function, x),
    "jvp": lambda function, x: jax.jvp(function, (x,), (x,)),
    "vmap": lambda function, x: jax.vmap(function)(x[None]),
    "checkpoint": lambda function, x: jax.grad(lambda x: jax.checkpoint(function)(x).sum())(x),
    "eval_shape": lambda function, x: jax.eval_shape(function, x),
}


@pytest.mark.parametrize("implementation", [None, "ecr"])
@pytest.mark.parametrize("strides", [(2, 2), (1, 3), (5, 9)])
def test_strides_of_a_pixel_read_a_copy(strides: tuple[int, int], implementation: str | None) -> None:
    kernel = jax.random.normal(jax.random.key(0), (1, 1, 32, 48))
    x = jax.nn.relu(jax.random.normal(jax.random.key(1), (2, 9, 10, 32)))
    function = jax.jit(lambda x: jsc.conv(x, kernel, strides=strides, padding="VALID", implementation=implementation))
    assert packed_operands(function, x)
    wanted = np.einsum("nhwc,ck->nhwk", np.asarray(x[:, :: strides[0], :: strides[1]], np.float64), kernel[0, 0])
    np.testing.assert_allclose(function(x), wanted, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda x: function(x).sum())(x)
    assert float(gradient[0, 0, 0, 0]) == pytest.approx(float(kernel[0, 0, 0].sum()), rel=1e-4)
    assert np.count_nonzero(gradient) == 32 * np.prod(wanted.shape[:3])  # of the pixels that are read


@pytest.mark.parametrize("name", TRACES)
def test_a_copy_outlives_the_trace_that_made_it(name: str) -> None:
    kernel = jax.random.normal(jax.random.key(2), (3, 3, 16, 32))
    x = jax.random.normal(jax.random.key(3), (2, 6, 7, 16))
    function = lambda x: jsc.conv(x, kernel)  # noqa: E731
    TRACES[name](function, x)
    np.testing.assert_allclose(jax.jit(function)(x), jsc.conv(x, kernel, implementation="xla"), rtol=1e-4, atol=1e-4)


def test_new_weights_in_the_same_layer() -> None:
    """A model jitted again after its weights changed runs the new ones."""
    inputs = cases.inputs(CASE)
    for scale in (1.0, -2.0):
        changed = inputs._replace(kernel=inputs.kernel * np.float32(scale))
        result = constants(CASE, changed)(inputs.x)
        assert oracle.relative_error(result, oracle.expected(CASE, changed)) <= TOLERANCE["float32"]


def test_transformations_of_a_packed_call(pixels: str) -> None:
    case = Case("bare", (2, 8, 8, 24), 32)
    inputs = cases.inputs(case)
    kernel = cases.on_device(inputs.kernel)

    def one(x: jax.Array) -> jax.Array:
        return jsc.conv(x[None], kernel, implementation="ecr")[0]

    result = jax.jit(jax.vmap(one))(inputs.x)
    assert oracle.relative_error(result, oracle.expected(case, inputs)) <= TOLERANCE["float32"]

    def loss(x: Any, implementation: str, activation: str | None) -> jax.Array:
        return (jsc.conv(x, kernel, implementation=implementation, activation=activation) ** 2).sum()

    for activation in (None, "relu"):
        gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
        sparse, dense = (gradient(inputs.x, name, activation) for name in ("ecr", "xla"))
        np.testing.assert_allclose(sparse, dense, rtol=2e-5, atol=2e-4)
        moved = jax.jit(lambda x: jax.jvp(lambda y: jsc.conv(y, kernel, implementation="ecr"), (x,), (x,))[1])(inputs.x)
        assert oracle.relative_error(moved, oracle.expected(case, inputs)) <= TOLERANCE["float32"]


def test_a_packed_call_without_its_images() -> None:
    kernel = jnp.ones((3, 3, 16, 32))
    out = jax.jit(lambda x: jsc.conv(x, kernel, implementation="ecr"))(jnp.ones((0, 4, 4, 16)))
    assert out.shape == (0, 4, 4, 32)


def test_results_do_not_depend_on_tiles(pixels: str) -> None:
    """Images alone and in a batch are cut into other tiles and tasks, and give the same bits."""
    case = Case("batch", (5, 21, 19, 80), 96, bias=True, zeros=0.6)
    inputs = cases.inputs(case)
    function = constants(case, inputs)
    whole = np.asarray(function(inputs.x))
    np.testing.assert_array_equal(whole, np.asarray(function(inputs.x)))
    one = np.asarray(function(inputs.x[:1]))
    np.testing.assert_array_equal(whole[:1], one)


ON_SOME_CORES = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import jax, jax.numpy as jnp, numpy as np
import jax_sparse_conv as jsc

rng = np.random.default_rng(0)
kernel = jnp.asarray(rng.standard_normal((3, 3, 96, 128)), jnp.float32)
for zeros in (0.1, 0.5, 0.85, 0.97):
    values = np.where(rng.random((2, 28, 28, 96)) < zeros, 0, rng.standard_normal((2, 28, 28, 96)))
    x = jnp.asarray(values, jnp.float32)
    for compute in (
        jax.jit(lambda x: jsc.conv(x, kernel)),
        lambda x: jsc.conv(x, kernel, implementation="ecr"),
        jax.jit(lambda x: jsc.conv_pool(x, kernel, implementation="pecr")),
        jax.jit(lambda x: jax.grad(lambda kernel: (jsc.conv(x, kernel) ** 2).sum())(kernel)),
        jax.jit(jax.grad(lambda x: (jsc.conv(x, kernel) ** 2).sum())),
    ):
        print(zeros, hashlib.sha1(np.asarray(compute(x)).tobytes()).hexdigest())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """Nor does the loop that is chosen: a process on one core gives the bits of one on all of them."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only")
    one, some = (
        subprocess.run([sys.executable, "-c", ON_SOME_CORES, cores], capture_output=True, text=True, check=True).stdout
        for cores in ("1", "16")
    )
    assert len(one.splitlines()) == 20
    assert one == some
