"""The CPU's loops that multiply pairs of bfloat16 channels, against float64, and where `None` takes them."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE, call, inputs_and_result, run
from packed_checks import LAYERS
from platforms import PLATFORM, on_cpu

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch import cpu_choice
from jax_sparse_conv._src.primitive import packing
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.workload import Workload

pytestmark = pytest.mark.skipif(
    PLATFORM != "cpu" or not _native.cpu_multiplies_pairs(), reason="this processor has no AVX512-BF16"
)

LOOPS: tuple[str, ...] = ("auto", "pixels of pairs", "direct of pairs", "phases of pairs", "emulated amx of pairs")
if _native.cpu_multiplies_tiles():
    LOOPS += ("amx of pairs",)
CASES = [case for case, name in cases.runs() if name in ("ecr", "pecr")]
ODD = [
    Case("one channel", (2, 9, 8, 1), 20, kernel=(5, 5), bias=True),
    Case("an image", (1, 23, 20, 3), 37, kernel=(7, 7), strides=2, padding="SAME", bias=True, activation="relu"),
    Case("an odd number of chunks", (1, 12, 12, 5), 64, kernel=(11, 11), strides=3),
    Case("many, odd", (1, 7, 6, 131), 40, padding="SAME"),
    Case("odd, pooled", (2, 16, 16, 3), 24, padding="SAME", bias=True, activation="relu", pool="max"),
]
STRIDED = [
    Case("strides of 2", (2, 15, 12, 40), 72, strides=2, padding="SAME", bias=True, activation="relu"),
    Case("strides of 2, groups", (1, 14, 14, 64), 64, strides=2, groups=2, padding="SAME"),
    Case("strides of 2, one block", (1, 11, 14, 48), 128, strides=2, padding="SAME", pool="max"),
    *(Case(f"strides of 2, {n}", (1, 9, 14, 32), n, strides=2, padding="SAME", bias=True) for n in (16, 17, 48)),
]
# Rows of windows around the 16 of a tile, several chunks of channels, and all ways to read pixels.
TILES = [
    *(Case(f"{n} columns", (2, 5, n, 32), 40, padding="SAME", bias=True) for n in (1, 15, 16, 17, 33)),
    Case("chunks, pooled", (3, 6, 10, 200), 48, padding="SAME", bias=True, activation="relu", pool="max"),
    Case("chunks, residual", (2, 7, 7, 320), 64, padding="SAME", bias=True, residual=True, activation="relu"),
    Case("chunks of 1x1", (3, 7, 7, 1100), 72, kernel=(1, 1), bias=True, activation="relu"),
    Case("1x1, pooled", (3, 6, 9, 64), 33, kernel=(1, 1), bias=True, pool="max"),
    Case("1x1, strides", (2, 9, 11, 64), 40, kernel=(1, 1), strides=2, bias=True, activation="relu"),
    Case("dilated far", (1, 20, 20, 32), 24, dilation=6, padding="SAME"),
    Case("groups of 28", (2, 9, 20, 56), 56, groups=2, padding="SAME", bias=True),
    Case("no common divisor", (1, 8, 9, 38), 20, kernel=(1, 1)),
    Case("windows of 1x5", (1, 6, 19, 32), 24, kernel=(1, 5), padding="SAME"),
]
# Around the width of a packed block, which is 16 for 16 output channels and else 32.
BLOCKS = [Case(f"{n} of a block", (2, 9, 11, 24), n, padding="SAME", bias=True) for n in (16, 17, 31, 32, 33, 65, 160)]


@pytest.mark.parametrize("loop", LOOPS)
def test_against_float64(loop: str) -> None:
    with on_cpu(loop=loop):
        for case in (*CASES, *ODD, *STRIDED, *BLOCKS, *TILES):
            inputs, wanted = inputs_and_result(case, "bfloat16")
            result = run(case, inputs, None)
            assert result.dtype == jnp.bfloat16
            assert oracle.relative_error(result, wanted) <= TOLERANCE["bfloat16"], case


@pytest.mark.parametrize("loop", LOOPS)
def test_constant_kernels_are_packed(loop: str) -> None:
    with on_cpu(loop=loop):
        for case in (*LAYERS, *STRIDED, *BLOCKS, *TILES):
            inputs, wanted = inputs_and_result(case, "bfloat16")
            function = of_x(case, inputs)
            is_packed = "has_packed = 1" in function.lower(cases.on_device(inputs.x)).as_text()
            has_copy = jsc.pack(inputs.kernel, feature_group_count=case.groups).packed is not None
            assert is_packed == (has_copy and packing.reads(inputs.kernel.shape, geometry_of(case))), case
            assert oracle.relative_error(function(inputs.x), wanted) <= TOLERANCE["bfloat16"], case


def of_x(case: Case, inputs: cases.Inputs) -> Any:
    kernel, bias, residual = (cases.on_device(v) for v in inputs[1:])
    return jax.jit(lambda x: call(case, x, kernel, bias, residual, None))


def geometry_of(case: Case) -> Geometry:
    dilation = case.dilation if isinstance(case.dilation, tuple) else (case.dilation, case.dilation)
    return Geometry(strides=(case.strides, case.strides), dilation=dilation, groups=case.groups)


def test_a_named_implementation_multiplies_no_zero() -> None:
    """The zero of a pair meets its weight under None alone, so that "ecr" drops 0 * inf."""
    x, kernel = jnp.zeros((1, 4, 4, 16), jnp.bfloat16).at[..., 1].set(1), jnp.ones((3, 3, 16, 32), jnp.bfloat16)
    kernel = kernel.at[:, :, 0].set(jnp.inf)
    for weights in (kernel, jsc.pack(kernel)):
        assert bool((jsc.conv(x, weights, padding="VALID", implementation="ecr") == 9).all())
    text = jax.jit(lambda x: jsc.conv(x, kernel, implementation="ecr")).lower(x).as_text()
    assert "has_packed = 0" in text


def test_infinities_and_nan_pass() -> None:
    x = np.zeros((1, 5, 5, 16))
    x[0, 2, 2, 3], x[0, 4, 4, 9] = np.inf, np.nan
    for loop in LOOPS:
        with on_cpu(loop=loop):
            result = np.asarray(jsc.conv(jnp.asarray(x, jnp.bfloat16), jnp.ones((3, 3, 16, 32), jnp.bfloat16)))
        result = result.astype(np.float64)
        assert np.isposinf(result[0, 1, 1]).all()
        assert np.isnan(result[0, 4, 4]).all()
        assert not result[0, 0, 4].any()


def test_a_packed_kernel_lies_in_pairs() -> None:
    kernel = np.arange(2 * 6 * 20).reshape(1, 2, 6, 20).astype(jnp.bfloat16)
    packed = packing.reordered(kernel, groups=1)
    assert packed.shape == packing.packed_shape(kernel.shape, 1, kernel.dtype) == (1, 1, 3, 2, 64)
    for pair, tap, k, half in np.ndindex(3, 2, 20, 2):
        assert packed[0, 0, pair, tap, 2 * k + half] == kernel[0, tap, 2 * pair + half, k]
    assert not packed[..., 40:].any()


def test_blocks_of_3x3_pairs_have_32_output_channels() -> None:
    for out_channels, shape in ((16, (1, 1, 4, 9, 32)), (17, (1, 1, 4, 9, 64)), (65, (1, 3, 4, 9, 64))):
        assert packing.packed_shape((3, 3, 8, out_channels), 1, jnp.bfloat16) == shape
    assert packing.packed_shape((3, 3, 8, 64), 2, jnp.bfloat16) == (2, 1, 4, 9, 64)
    assert packing.packed_shape((3, 3, 8, 65), 1, jnp.float32) == (1, 5, 8, 9, 16)


def test_a_cast_copy_is_none() -> None:
    """A copy of the other dtype is in another order."""
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 16, 32))
    for dtype, other in ((jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)):
        cast = jax.tree.map(lambda leaf: leaf.astype(other), jsc.pack(kernel.astype(dtype)))  # noqa: B023
        x = jax.random.normal(jax.random.key(1), (1, 6, 6, 16)).astype(other)
        np.testing.assert_array_equal(jsc.conv(x, cast), jsc.conv(x, cast.kernel))


def test_plans_of_one_dtype_are_not_another_s() -> None:
    """Where nothing multiplies pairs a copy of them is not read, but one of float32 in the same shape is."""
    x = jax.random.normal(jax.random.key(0), (2, 9, 8, 16)).astype(jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 16, 32)).astype(jnp.bfloat16)
    pairs = jsc.pack(kernel)
    compiled = jax.jit(lambda x, kernel: jsc.conv(x, kernel)).lower(x, pairs).compile()
    wide = [each.astype(jnp.float32) for each in (x, kernel)]
    wanted = np.asarray(jsc.conv(*wide, implementation="xla"), np.float64)
    for isa in ("avx2", "portable"):
        with on_cpu(isa=isa, loop="auto"):
            assert oracle.relative_error(compiled(x, pairs), wanted) <= TOLERANCE["bfloat16"]
            assert oracle.relative_error(jsc.conv(wide[0], jsc.pack(wide[1])), wanted) <= TOLERANCE["float32"]


@pytest.mark.parametrize("transform", ["vmap", "grad", "vmap of kernels"])
def test_transforms(transform: str) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(3, 2, 8, 8, 16)), rng.normal(size=(3, 3, 3, 16, 32)) / 12
    wide = [jnp.asarray(each, jnp.bfloat16).astype(jnp.float32) for each in (x, kernel)]
    functions = {
        "vmap": lambda x, kernel, by: jax.vmap(lambda x: jsc.conv(x, kernel[0], implementation=by))(x),
        "vmap of kernels": lambda x, kernel, by: jax.vmap(lambda x, k: jsc.conv(x, k, implementation=by))(x, kernel),
        "grad": lambda x, kernel, by: jax.grad(
            lambda x: (jsc.conv(x[0], kernel[0], activation="relu", implementation=by) ** 2).sum()
        )(x),
    }
    found = functions[transform](*(each.astype(jnp.bfloat16) for each in wide), None)
    wanted = functions[transform](*wide, "xla")
    assert found.dtype == jnp.bfloat16
    assert oracle.relative_error(found, np.asarray(wanted, np.float64)) <= 3 * TOLERANCE["bfloat16"]


def test_which_calls_have_pairs() -> None:
    def has(dtype: str, channels: int, groups: int = 1, method: str = "ecr") -> bool:
        kernel = (1, 3, 3, channels, 32)
        return cpu_choice.has_pairs(
            Workload(method, (1, 9, 9, channels * groups), kernel, Geometry(groups=groups), dtype, exact=False)
        )

    assert has("bfloat16", 16)
    assert has("bfloat16", 16, groups=2)
    assert has("bfloat16", 3)
    assert not has("bfloat16", 3, groups=2)
    assert not has("float16", 16)
    assert not has("float32", 16)
    assert not has("bfloat16", 16, method="coo")
    with on_cpu(isa="avx2"):
        assert not has("bfloat16", 16)
