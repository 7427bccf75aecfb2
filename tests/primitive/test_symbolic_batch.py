"""Programs exported for any number of images: what each platform runs, and what is said of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Inputs
from jax import export
from oracle import expected, relative_error

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch.coo import cost_model
from jax_sparse_conv._src.primitive import custom_call
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry

Function = Callable[..., Any]
KERNEL = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 16, 32))
MATRIX = jnp.ones((16, 8))
ANY = jax.ShapeDtypeStruct(export.symbolic_shape("n,8,8,16"), jnp.float32)
CALLS: dict[str, tuple[Function, Sequence[str]]] = {
    "conv": (lambda x, i: jsc.conv(x, KERNEL, activation="relu", implementation=i), ("ecr", "coo", "direct")),
    "conv_pool": (lambda x, i: jsc.conv_pool(x, KERNEL, implementation=i), ("ecr", "pecr", "coo", "direct")),
    "dense": (lambda x, i: jsc.dense(x[:, 0, 0], MATRIX, implementation=i), ("ecr",)),
    "lax's signature": (
        lambda x, i: jsc.conv_general_dilated(
            x, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation=i
        ),
        ("ecr", "coo", "direct"),
    ),
    "counted": (lambda x, i: jsc.conv(x, KERNEL, count_nonzeros=True, implementation=i), ("ecr", "direct")),
    "many kernels": (
        lambda x, i: jax.vmap(lambda x: jsc.conv(jnp.ones((1, 8, 8, 16)), KERNEL * x[0, 0, 0], implementation=i))(x),
        ("ecr", "direct"),
    ),
}

OF_LAX = [name for name in CALLS if name != "many kernels"]  # whose number lax must know


def conv(x: jax.Array, kernel: jax.Array = KERNEL) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def targets(function: Function, *types: Any, platform: str = "cuda") -> list[str]:
    """The custom calls of this package in a program that is exported for a platform."""
    found = export.export(jax.jit(function), platforms=[platform], disabled_checks=jsc.export_checks())(*types)
    return re.findall(r"@(jsc_\w+)", found.mlir_module())


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As if the CUDA kernels were built; the x that workspace is asked for."""
    asked = []

    def workspace_bytes(method: str, *sizes: Any) -> int:
        for size in sizes[:4]:
            assert all(type(each) is int for each in size), sizes  # as the extension takes them
        asked.append(sizes[0])
        return 100 if sizes[0][0] == 8 else 10

    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    monkeypatch.setattr(_native, "missing_reasons", dict)
    monkeypatch.setattr(_native, "workspace_bytes", workspace_bytes)
    return asked


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were not."""
    monkeypatch.delitem(_native._modules, "cuda", raising=False)
    monkeypatch.setitem(_native._reasons, "cuda", "nvcc was not found")


@pytest.mark.parametrize(("name", "implementation"), [(name, i) for name in CALLS for i in CALLS[name][1]])
def test_a_name_runs_its_kernel_on_a_gpu(with_cuda: list[tuple[int, ...]], name: str, implementation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = targets(lambda x: CALLS[name][0](x, implementation), ANY)
    assert found == ["jsc_dense" if name == "dense" else f"jsc_{implementation}"]


def test_what_is_dense_of_a_derivative_says_nothing(with_cuda: list[tuple[int, ...]]) -> None:
    def tangent(x: jax.Array) -> Any:
        return jax.jvp(lambda x: jsc.conv(x, KERNEL, implementation="ecr"), (x,), (x,))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert targets(tangent, ANY) == ["jsc_ecr"]


@pytest.mark.parametrize("name", OF_LAX)
def test_none_is_xlas_on_a_gpu_and_says_so_once(with_cuda: list[tuple[int, ...]], name: str) -> None:
    def twice(x: jax.Array) -> Any:
        return CALLS[name][0](x, None), CALLS[name][0](x + 1, None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert targets(twice, ANY) == []
    (warning,) = caught
    assert "on a GPU where the number of images is symbolic" in str(warning.message)


def test_a_function_of_a_user_on_a_gpu(with_cuda: list[tuple[int, ...]]) -> None:
    for function in (jsc.accelerate(conv), jsc.jit_inference(lambda kernel, x: conv(x, kernel), KERNEL)):
        with pytest.warns(UserWarning, match="on a GPU where the number of images is symbolic"):
            assert targets(function, ANY) == []


def test_a_fixed_batch_is_chosen_for(with_cuda: list[tuple[int, ...]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert targets(lambda x: jsc.conv(x, KERNEL), jax.ShapeDtypeStruct((1, 8, 8, 16), jnp.float32))


def test_workspace_is_that_of_the_batch_that_has_most(with_cuda: list[tuple[int, ...]]) -> None:
    function = jax.jit(lambda x: jsc.conv(x, KERNEL, implementation="direct"))
    found = export.export(function, platforms=["cuda"], disabled_checks=jsc.export_checks())(ANY)
    assert re.search(r"-> \(tensor<\?x8x8x32xf32>, tensor<100xui8>\)", found.mlir_module())
    assert {each[0] for each in with_cuda} == {2**i for i in range(16)}


def test_coo_has_workspace_for_each_image() -> None:
    x, kernel = (jax.core.ShapedArray(shape, jnp.float32) for shape in (ANY.shape, (1, *KERNEL.shape)))
    geometry = Geometry(padding=((1, 1), (1, 1)))
    found = cost_model.workspace_bytes(x.shape, kernel.shape, geometry, [(0, 1, 1, 4)])
    assert found == ANY.shape[0] * 4 * 4 * 8 * 8 * 32
    one = jax.core.ShapedArray((1, 8, 8, 16), jnp.float32)
    any_number, of_one = (custom_call.variants(each, kernel, Config(geometry, "coo")) for each in (x, one))
    assert any_number == of_one


@pytest.mark.parametrize("name", OF_LAX)
def test_an_installation_without_the_kernels(without_cuda: None, name: str) -> None:
    """One rule for everything that is exported: None is XLA's and says so, a name is an error."""
    function, implementations = CALLS[name]
    x = jax.ShapeDtypeStruct((2, 8, 8, 16), jnp.float32)
    for types in (ANY, x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            assert targets(lambda x: function(x, None), types) == []
        (warning,) = caught
        assert "exports XLA's own operation for 'cuda'" in str(warning.message)
        assert "nvcc was not found" in str(warning.message)
        with pytest.raises(ValueError, match=r"cannot run here: the cuda extension is missing: nvcc was not found"):
            targets(lambda x: function(x, implementations[0]), types)


def test_a_program_for_this_machine_says_nothing(without_cuda: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for platform in ("cpu", "tpu"):
            targets(lambda x: jsc.conv(x, KERNEL), ANY, platform=platform)


@pytest.mark.parametrize("implementation", [None, "ecr", "coo", "direct"])
def test_any_number_of_kernels(implementation: str | None) -> None:
    x = jax.nn.relu(jax.random.normal(jax.random.key(0), (2, 8, 8, 16)))
    scales = jnp.arange(1.0, 4)

    def scaled(scales: jax.Array) -> jax.Array:
        each = lambda s: jsc.conv(x, s * KERNEL, precision="highest", implementation=implementation)  # noqa: E731
        return jax.vmap(each)(scales)

    unknown = jax.ShapeDtypeStruct(export.symbolic_shape("n"), jnp.float32)
    if implementation is None and jax.default_backend() == "gpu":
        with pytest.raises(NotImplementedError, match="non-static"):  # lax's own, whose None is on a GPU
            export.export(jax.jit(scaled), disabled_checks=jsc.export_checks())(unknown)
        return
    found = export.export(jax.jit(scaled), disabled_checks=jsc.export_checks())(unknown).call(scales)
    case = Case("any number of kernels", (2, 8, 8, 16), 32)
    for scale, each in zip(scales, np.asarray(found), strict=True):
        assert relative_error(each, expected(case, Inputs(x, scale * KERNEL, None, None))) < 2e-6
