"""Packed kernels, made at trace time and by `pack`: which calls read one, and that results are those of any other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from test_kernels import TOLERANCE, call

import jax_sparse_conv as jsc
from jax_sparse_conv import _native, packing
from jax_sparse_conv.geometry import Geometry

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_isas(), reason="kernels are packed for the CPU extension only"
)

CASE = Case("packed", (2, 14, 11, 72), 80, bias=True, activation="relu")
LAYERS = [
    *(case for case in cases.CONV_CASES if case.strides == 1 and case.kernel in ((3, 3), (1, 1))),
    CASE,
    Case("packed, an incomplete block", (1, 9, 9, 130), 50, bias=True, residual=True, activation="relu"),
    Case("packed, groups", (2, 8, 8, 64), 96, groups=2),
    Case("packed, rows apart", (1, 12, 12, 40), 48, dilation=(2, 1), padding="VALID"),
    Case("packed 5x5", (2, 9, 10, 40), 50, kernel=(5, 5), bias=True, activation="relu"),
    Case("packed 1x1", (2, 7, 7, 200), 272, kernel=(1, 1), bias=True),
    Case("packed 1x1, one block", (2, 7, 7, 200), 32, kernel=(1, 1), zeros=0.2),
    Case("packed pool", (2, 12, 12, 64), 64, bias=True, activation="relu", pool="max"),
    Case("packed, nothing in x", (1, 6, 6, 64), 64, zeros=1.0, bias=True),
]


@pytest.fixture(params=["portable", "avx2", "avx512"])
def pixels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The pixel loop, on each instruction set that this machine has."""
    if request.param not in _native.cpu_isas():
        pytest.skip(f"{request.param} is not one of {_native.cpu_isas()}")
    chosen = _native.cpu_isa()
    _native.set_cpu_isa(request.param)
    _native.set_cpu_loop("pixels")
    yield request.param
    _native.set_cpu_loop("auto")
    _native.set_cpu_isa(chosen)


def constants(case: Case, inputs: cases.Inputs, implementation: str | None = None) -> Any:
    """The case as a jitted function of x alone."""
    kernel, bias, residual = (None if v is None else jnp.asarray(v) for v in inputs[1:])
    named = implementation or ("ecr" if case.pool is None else "pecr")
    return jax.jit(lambda x: call(case, x, kernel, bias, residual, named))


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
    strided = Case("strided", (1, 9, 9, 16), 32, strides=2)
    assert not packed_operands(constants(strided, cases.inputs(strided)), cases.inputs(strided).x)
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
    assert key in packing._made
    kernels.clear()
    assert key not in packing._made


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
    kernel = jnp.asarray(inputs.kernel)

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
    assert len(one.splitlines()) == 12
    assert one == some


# --- kernels that carry their copy -----------------------------------------------------------------------------------


def arguments(case: Case, implementation: str | None = None) -> Any:
    """The case as a jitted function of x and kernel."""
    named = implementation or ("ecr" if case.pool is None else "pecr")
    return jax.jit(lambda x, kernel, bias=None, residual=None: call(case, x, kernel, bias, residual, named))


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_packed_arguments_against_float64(case: Case, pixels: str) -> None:
    inputs = cases.inputs(case)
    kernel = jsc.pack(inputs.kernel, feature_group_count=case.groups)
    assert isinstance(kernel.kernel, jax.Array)
    function = arguments(case)
    operands = (inputs.x, kernel, *inputs[2:])
    columns_apart = case.dilation if isinstance(case.dilation, int) else case.dilation[1]
    reads = packing.is_read(inputs.kernel.shape, (1, 1), (1, columns_apart)) and kernel.packed is not None
    assert ("has_packed = 1" in function.lower(*operands).as_text()) is reads
    expected = oracle.expected(case, inputs)
    for result in (function(*operands), constants(case, inputs._replace(kernel=kernel))(inputs.x)):
        if expected.any():
            assert oracle.relative_error(result, expected) <= TOLERANCE["float32"]
        else:
            assert not np.asarray(result).any()


@pytest.mark.parametrize("implementation", [None, "xla", "ecr", "coo", "direct", "adaptive"])
def test_every_implementation_takes_a_packed_kernel(implementation: str | None) -> None:
    inputs = cases.inputs(CASE)
    result = call(CASE, inputs.x, jsc.pack(inputs.kernel), inputs.bias, None, implementation)
    assert oracle.relative_error(result, oracle.expected(CASE, inputs)) <= TOLERANCE["float32"]


def test_a_packed_kernel_stands_for_its_kernel() -> None:
    kernel = jnp.asarray(cases.inputs(CASE).kernel)
    packed = jsc.pack(kernel)
    assert (packed.shape, packed.dtype, packed.ndim, packed.size) == (kernel.shape, kernel.dtype, 4, kernel.size)
    assert packed.packed is not None
    assert packed.nbytes == kernel.nbytes + packed.packed.nbytes
    np.testing.assert_array_equal(np.asarray(packed), kernel)
    np.testing.assert_array_equal(jnp.flip(packed), jnp.flip(kernel))
    np.testing.assert_array_equal(packed[1], kernel[1])
    np.testing.assert_array_equal(jsc.pack(packed).packed, packed.packed)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, packed)
    np.testing.assert_array_equal(doubled.packed, jsc.pack(2 * kernel).packed)


def test_kernels_without_a_copy_run_as_they_are() -> None:
    x = jnp.ones((2, 6, 6, 16))
    for shape, arguments in (((7, 7, 16, 32), {}), ((3, 3, 16, 8), {}), ((3, 3, 4, 32), {"feature_group_count": 4})):
        kernel = jnp.ones(shape)
        packed = jsc.pack(kernel, **arguments)
        assert packed.packed is None
        np.testing.assert_array_equal(jsc.conv(x, packed, **arguments), jsc.conv(x, kernel, **arguments))
    half = jsc.pack(jnp.ones((3, 3, 16, 32), jnp.bfloat16))
    assert half.packed is None
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jsc.pack(jnp.ones((3, 3, 16, 32))))
    for kernel in (half, cast):
        assert jsc.conv(x.astype(jnp.bfloat16), kernel, implementation="ecr").dtype == jnp.bfloat16
    rows = jsc.pack(jnp.ones((16, 8)))
    np.testing.assert_array_equal(jsc.dense(x, rows), jsc.dense(x, jnp.ones((16, 8))))
    strided = arguments_of_a_stride(jsc.pack(jnp.ones((3, 3, 16, 32))))
    assert "has_packed = 1" not in strided


def arguments_of_a_stride(kernel: jsc.PackedKernel) -> str:
    function = jax.jit(lambda x, kernel: jsc.conv(x, kernel, strides=2, implementation="ecr"))
    return str(function.lower(jnp.ones((1, 6, 6, 16)), kernel).as_text())


def test_packed_kernels_that_do_not_fit_are_refused() -> None:
    x = jnp.ones((1, 6, 6, 32))
    kernel = jsc.pack(jnp.ones((3, 3, 16, 64)), feature_group_count=2)
    assert jsc.conv(x, kernel, feature_group_count=2).shape == (1, 6, 6, 64)
    with pytest.raises(ValueError, match=r"packed for feature_group_count=2, not 1; .*pack\(kernel, feature_group_"):
        jsc.conv(x[..., :16], kernel)
    with pytest.raises(ValueError, match=r"copy of kernel.shape=.* has shape"):
        jsc.conv(x, jax.tree.map(lambda leaf: leaf[..., :1], jsc.pack(jnp.ones((3, 3, 32, 32)))), implementation="ecr")
    with pytest.raises(ValueError, match="feature_group_count=3 does not divide K"):
        jsc.pack(jnp.ones((3, 3, 16, 64)), feature_group_count=3)


def test_transformations_of_packed_arguments(pixels: str) -> None:
    case = Case("bare", (2, 8, 8, 32), 32)
    inputs = cases.inputs(case)
    kernels = jnp.stack([jnp.asarray(inputs.kernel), -jnp.asarray(inputs.kernel)])
    packed = jax.vmap(jsc.pack)(kernels)

    def one(x: jax.Array, kernel: Any) -> jax.Array:
        return jsc.conv(x[None], kernel, implementation="ecr")[0]

    for axes, reads in (((0, None), True), ((0, 0), True), ((None, 0), False)):
        function = jax.jit(jax.vmap(one, in_axes=axes))
        x = inputs.x[0] if axes[0] is None else inputs.x
        first = axes[1] is None
        kernel, plain = (jsc.pack(kernels[0]), kernels[0]) if first else (packed, kernels)
        assert ("has_packed = 1" in function.lower(x, kernel).as_text()) is reads
        np.testing.assert_allclose(function(x, kernel), function(x, plain), rtol=1e-5, atol=1e-4)

    def layers(x: jax.Array, kernels: Any) -> jax.Array:
        def layer(x: jax.Array, kernel: Any) -> tuple[jax.Array, None]:
            return jsc.conv(x, kernel, activation="relu", implementation="ecr"), None

        return jax.lax.scan(layer, x, kernels)[0]

    assert "has_packed = 1" in jax.jit(layers).lower(inputs.x, packed).as_text()
    np.testing.assert_allclose(jax.jit(layers)(inputs.x, packed), layers(inputs.x, kernels), rtol=1e-5, atol=1e-4)


def test_a_copy_that_is_batched_alone_is_not_read() -> None:
    case = Case("bare", (2, 8, 8, 32), 32)
    inputs = cases.inputs(case)
    packed = jsc.pack(inputs.kernel)

    def one(kernel: Any) -> jax.Array:
        return jsc.conv(inputs.x, kernel, implementation="ecr")

    axes = jsc.PackedKernel(None, 0)  # type: ignore[arg-type]
    stray = jsc.PackedKernel(packed.kernel, jnp.zeros((3, *packed.packed.shape)))  # type: ignore[union-attr]
    result = jax.vmap(one, in_axes=(axes,))(stray)
    assert oracle.relative_error(result[2], oracle.expected(case, inputs)) <= TOLERANCE["float32"]


def test_packed_kernels_may_be_donated() -> None:
    inputs = cases.inputs(CASE)
    function = jax.jit(
        lambda x, kernel: (jsc.conv(x, kernel, inputs.bias, activation="relu"), kernel), donate_argnums=1
    )
    kernel = jsc.pack(inputs.kernel)
    for _ in range(2):
        result, kernel = function(inputs.x, kernel)
        assert oracle.relative_error(result, oracle.expected(CASE, inputs)) <= TOLERANCE["float32"]
    np.testing.assert_array_equal(kernel.packed, jsc.pack(inputs.kernel).packed)


def test_derivatives_by_a_copy_are_refused() -> None:
    x, kernel = jnp.ones((1, 6, 6, 16)), jnp.ones((3, 3, 16, 32))
    packed = jsc.pack(kernel)

    def loss(kernel: Any, implementation: str | None = None, strides: int = 1) -> jax.Array:
        return (jsc.conv(x, kernel, implementation=implementation, strides=strides) ** 2).sum()

    for function in (loss, jax.jit(loss), jax.checkpoint(loss), lambda k: loss(k, "xla"), lambda k: loss(k, strides=2)):
        with pytest.raises(TypeError, match="derivative by a packed kernel"):
            jax.grad(function)(packed)
    # Through `pack` there is one, and by x.
    by_kernel = jax.grad(lambda kernel: loss(jsc.pack(kernel)))
    for function in (by_kernel, jax.jit(by_kernel)):
        np.testing.assert_allclose(function(kernel), jax.grad(loss)(kernel), rtol=1e-5)
    by_x = jax.grad(lambda x, kernel: jsc.conv(x, kernel, activation="relu", implementation="ecr").sum())
    np.testing.assert_allclose(by_x(x, packed), by_x(x, kernel), rtol=1e-5)


def test_exported_programs_take_packed_kernels() -> None:
    inputs = cases.inputs(CASE)
    packed = jsc.pack(inputs.kernel)
    function = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation="ecr"))
    allowed = jax.export.DisabledSafetyCheck.custom_call("jsc_ecr")
    exported = jax.export.export(function, disabled_checks=[allowed])(inputs.x, packed)
    np.testing.assert_array_equal(exported.call(inputs.x, packed), function(inputs.x, packed))
