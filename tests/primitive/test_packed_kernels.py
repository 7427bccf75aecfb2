"""`jax_sparse_conv.pack`: kernels that carry their packed copy, as arguments of operations and of JAX's functions."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE, call
from packed_checks import CASE, LAYERS, constants

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import packing

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_isas(), reason="kernels are packed for the CPU extension only"
)


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


@pytest.mark.parametrize("out_channels", [32, 520])  # one block of 128 reads its values from x, five read a copy
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_channel_is_found(out_channels: int, dtype: str, pixels: str) -> None:
    channels = 130  # more than two words have bits; each pixel has another one
    values = np.arange(1, channels + 1).astype(dtype)
    values[[3, 63, 64, 129]] = 1e-40, np.inf, -1e-40, np.nan
    values[5] = -0.0
    kernel = np.random.default_rng(0).uniform(1, 2, (1, 1, channels, out_channels)).astype(dtype)
    x = np.diag(values).reshape(1, 10, 13, channels)
    with jax.enable_x64(dtype == "float64"):
        packed = jsc.pack(cases.on_device(kernel))
        result = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation="ecr"))(x, packed)
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.asarray(result)[0].reshape(channels, out_channels), values[:, None] * kernel[0, 0])


@pytest.mark.parametrize("implementation", [None, "xla", "ecr", "coo", "direct", "adaptive"])
def test_every_implementation_takes_a_packed_kernel(implementation: str | None) -> None:
    inputs = cases.inputs(CASE)
    result = call(CASE, inputs.x, jsc.pack(inputs.kernel), inputs.bias, None, implementation)
    assert oracle.relative_error(result, oracle.expected(CASE, inputs)) <= TOLERANCE["float32"]


def test_a_packed_kernel_stands_for_its_kernel() -> None:
    kernel = cases.on_device(cases.inputs(CASE).kernel)
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
    half = jsc.pack(jnp.ones((3, 3, 16, 32), jnp.float16))
    assert half.packed is None
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jsc.pack(jnp.ones((3, 3, 16, 32))))
    for kernel in (half, cast):
        assert jsc.conv(x.astype(kernel.dtype), kernel, implementation="ecr").dtype == kernel.dtype
    rows = jsc.pack(jnp.ones((16, 8)))
    np.testing.assert_array_equal(jsc.dense(x, rows), jsc.dense(x, jnp.ones((16, 8))))
    strided = arguments_of_a_stride(jsc.pack(jnp.ones((3, 3, 16, 32))))
    assert "has_packed = 1" not in strided


def arguments_of_a_stride(kernel: jsc.PackedKernel) -> str:
    function = jax.jit(lambda x, kernel: jsc.conv(x, kernel, strides=3, implementation="ecr"))
    return str(function.lower(jnp.ones((1, 6, 6, 16)), kernel).as_text())


def test_packed_kernels_that_do_not_fit_are_refused() -> None:
    x = jnp.ones((1, 6, 6, 32))
    kernel = jsc.pack(jnp.ones((3, 3, 16, 64)), feature_group_count=2)
    assert jsc.conv(x, kernel, feature_group_count=2).shape == (1, 6, 6, 64)
    with pytest.raises(ValueError, match=r"packed for feature_group_count=2, not 1; .*pack\(kernel, feature_group_"):
        jsc.conv(x[..., :16], kernel)
    with pytest.raises(ValueError, match=r"copy of kernel.shape=.* has shape"):
        jsc.conv(x, jax.tree.map(lambda leaf: leaf[..., :1], jsc.pack(jnp.ones((3, 3, 32, 32)))), implementation="ecr")
    for wrong in (0, 2.0, "2", None):
        with pytest.raises(ValueError, match=f"feature_group_count={wrong!r} is not an int of 1 to 2"):
            jsc.pack(jnp.ones((3, 3, 16, 64)), feature_group_count=wrong)  # type: ignore[arg-type]
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


def test_it_is_iterated_as_the_kernel() -> None:
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 16, 64))
    packed = jsc.pack(kernel)
    assert len(packed) == 3
    rows = list(packed)
    assert len(rows) == 3
    np.testing.assert_array_equal(np.stack(rows), kernel)
