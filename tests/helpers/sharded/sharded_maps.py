"""Run by test_partitioning.py in a process of its own with eight CPU devices; asserts, and prints what it checked.

Maps that are split over height, width and input channels: values against the oracle, and what the program sends.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_checks import call
from sharded_explicit import COLLECTIVES, check_inside_shard_map

import jax_sparse_conv as jsc
from jax_sparse_conv._src.dispatch import cpu_choice

CHANNELS = 6  # of x in what follows; no result has as many
HALO, SUM, WHOLE = "collective-permute", "all-reduce", "all-gather"

GROUPS = Case("groups", (1, 16, 6, CHANNELS), 8, groups=2, bias=True)
BY_DENSITY = Case("few output channels", (4, 16, 14, 96), 7, strides=2, padding=3)  # a branch by the density of x
POOL = Case("pool", (1, 32, 6, CHANNELS), 8, bias=True, activation="relu", pool="max")
ROWS = (
    Case("3x3", (1, 16, 6, CHANNELS), 8),
    Case("after it bias, residual and ReLU", (2, 16, 5, CHANNELS), 8, bias=True, residual=True, activation="relu"),
    Case("stride 2", (1, 32, 6, CHANNELS), 8, strides=2),
    Case("7x7 stride 2", (1, 64, 6, CHANNELS), 8, kernel=(7, 7), strides=2, padding=3),
    Case("dilation 2", (1, 16, 6, CHANNELS), 8, dilation=2),
    Case("padding of one side", (1, 16, 6, CHANNELS), 8, padding=((2, 0), (0, 1))),
    Case("negative padding", (1, 32, 6, CHANNELS), 8, padding=((-1, 3), (0, -1))),
    Case("1x1", (1, 16, 6, CHANNELS), 8, kernel=(1, 1), bias=True),
    GROUPS,
    Case("depthwise x 2", (1, 16, 6, CHANNELS), 2 * CHANNELS, groups=CHANNELS),
    POOL,
    Case("average pool that overlaps", (1, 32, 9, CHANNELS), 8, pool="avg", window=(4, 3), window_strides=(2, 2),
         window_padding=((1, 1), (0, 0))),
    Case("padded pool", (1, 64, 9, CHANNELS), 8, strides=2, bias=True, pool="max", window=(3, 3),
         window_strides=(2, 2), window_padding=((1, 1), (1, 1))),
)  # fmt: skip
ODD_ROWS = (
    Case("3x3", (1, 13, 6, CHANNELS), 8, bias=True),
    Case("stride 2", (1, 29, 6, CHANNELS), 8, strides=2),
    Case("stride 3", (1, 30, 6, CHANNELS), 8, strides=3, padding=1),
    Case("VALID", (1, 16, 6, CHANNELS), 8, padding="VALID"),
    Case("pool", (1, 31, 6, CHANNELS), 8, bias=True, pool="avg"),
    Case("padded pool", (1, 31, 6, CHANNELS), 8, bias=True, pool="max", window=(3, 3), window_strides=(2, 2),
         window_padding="SAME"),
)  # fmt: skip
SUMS = (
    Case("3x3", (2, 5, 6, 16), 8),
    Case("after it bias, residual and ReLU", (2, 5, 6, 16), 8, bias=True, residual=True, activation="relu"),
    Case("pool", (1, 6, 6, 16), 8, strides=2, bias=True, activation="relu", pool="max"),
)


def mesh(*sizes: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """The axes "a", "b" and so on of these sizes, of the first devices."""
    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, tuple("abc"[: len(sizes)]), axis_types=(kind,) * len(sizes))


def collectives(program: str) -> dict[str, int]:
    """How many of each kind a program has."""
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", program)) for kind in COLLECTIVES}
    return {kind: count for kind, count in found.items() if count}


def check(
    case: Case,
    over: jax.sharding.Mesh,
    x_split: P,
    kernel_split: P | None = None,
    dtype: str = "float32",
    tolerance: float = 2e-6,
    implementation: str | None = None,
) -> tuple[str, Any]:
    """The program of a case split so, and its result, which is right."""
    inputs = cases.inputs(case, dtype)

    def function(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
        # The sizes of a program's own arguments have to divide.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(over, x_split))
        kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(over, kernel_split or P()))
        method = implementation or ("pecr" if case.pool else "ecr")
        return call(case, x, kernel, bias, residual, method, "highest")

    compiled = jax.jit(function).lower(*inputs).compile()
    result = compiled(*inputs)
    error = oracle.relative_error(result, oracle.expected(case, inputs))
    text = compiled.as_text()
    assert error <= tolerance, (case.name, x_split, kernel_split, error)
    assert "jsc_" in text, case.name
    return text, result


def turned(case: Case) -> Case:
    """With height and width exchanged."""

    def other(pair: Any) -> Any:
        return pair[::-1] if isinstance(pair, tuple) else pair

    pairs = ("kernel", "strides", "padding", "dilation", "window", "window_strides", "window_padding")
    images, height, width, channels = case.x
    exchanged = {name: other(getattr(case, name)) for name in pairs}
    return dataclasses.replace(case, x=(images, width, height, channels), **exchanged)


def check_rows_and_columns() -> None:
    """Neighbours send rows, or columns, and nothing else is sent; the result stays split."""
    splits = ((mesh(8), P(None, "a")), (mesh(2, 2), P(None, ("a", "b"))), (mesh(2), P(None, "a")))
    for index, case in enumerate(ROWS):
        over, split = splits[index % len(splits)]
        columns = P(None, None, split[1])
        for each, wanted in ((case, split), (turned(case), columns))[: 1 + index % 2]:
            text, result = check(each, over, wanted)
            assert set(collectives(text)) == ({HALO} if case.kernel != (1, 1) else set()), (each, collectives(text))
            assert result.sharding.is_equivalent_to(NamedSharding(over, wanted), 4), (each, result.sharding)
    square = dataclasses.replace(ROWS[0], x=(2, 16, 16, CHANNELS), strides=2, bias=True)
    text, _ = check(square, mesh(2, 4), P(None, "a", "b"))
    assert set(collectives(text)) == {HALO}
    text, _ = check(square, mesh(2, 2, 2), P("c", "a", "b"))
    assert set(collectives(text)) == {HALO}
    text, result = check(square, mesh(4, 2), P(None, "a"), P(None, None, None, "b"))
    assert set(collectives(text)) == {HALO}
    assert tuple(result.sharding.spec) == (None, "a", None, "b")
    print("rows and columns")


def check_odd_sizes() -> None:
    """Sizes that the devices do not divide: x stays where it is; the program's result has to be whole."""
    for index, case in enumerate(ODD_ROWS):
        text, _ = check(case, mesh(2 + 2 * (index % 2)), P(None, "a"))
        found = collectives(text)
        assert HALO in found, (case.name, found)
        assert set(found) <= {HALO, WHOLE}, (case.name, found)
        gathered = re.findall(rf"= \w+\[([\d,]*)\]\S* {WHOLE}", text)
        assert not [shape for shape in gathered if shape.endswith(f",{CHANNELS}")], (case.name, gathered)
    print("sizes that do not divide")


def check_gathered() -> None:
    """Windows that reach beyond the neighbours: x becomes whole."""
    case = Case("7x7", (1, 16, 6, CHANNELS), 8, kernel=(7, 7))
    text, _ = check(case, mesh(8), P(None, "a"))
    assert set(collectives(text)) == {WHOLE}
    print("windows beyond the neighbours")


def check_input_channels() -> None:
    """One sum over the devices, and nothing else is sent; bias, residual, ReLU and pool are behind it."""
    for case, over, entry in zip(SUMS, (mesh(2), mesh(8), mesh(2, 2)), ("a", "a", ("a", "b")), strict=True):
        for kernel in (P(), P(None, None, entry)):
            text, _ = check(case, over, P(None, None, None, entry), kernel)
            assert collectives(text) == {SUM: 1}, (case.name, collectives(text))
    text, result = check(SUMS[1], mesh(2, 2, 2), P("a", None, None, "b"), P(None, None, "b", "c"))
    assert collectives(text) == {SUM: 1}
    assert tuple(result.sharding.spec) == ("a", None, None, "c")
    wide = dataclasses.replace(SUMS[1], x=(2, 8, 6, 16))
    text, _ = check(wide, mesh(2, 4), P(None, "a", None, "b"))
    assert set(collectives(text)) == {HALO, SUM}
    assert collectives(text)[SUM] == 1
    check(SUMS[1], mesh(4), P(None, None, None, "a"), dtype="bfloat16", tolerance=6e-3)
    text, _ = check(dataclasses.replace(SUMS[0], groups=2), mesh(2), P(None, None, None, "a"))
    assert set(collectives(text)) == {WHOLE}  # groups tie output channels to input channels
    print("input channels")


def check_methods() -> None:
    """Every method, also where the density of x decides; float64."""
    case = Case("3x3", (2, 16, 6, 16), 8, bias=True, activation="relu")
    check(case, mesh(4), P(None, "a"), implementation="direct")
    check(case, mesh(4), P(None, None, None, "a"), implementation="direct")
    check(case, mesh(4), P(None, "a"), implementation="coo")
    check(case, mesh(2, 2), P(None, "a", None, "b"), implementation="adaptive")
    with jax.enable_x64(True):  # a setting that the threads of the compiler do not have
        check(POOL, mesh(4), P(None, "a"), dtype="float64", tolerance=1e-14)
        check(SUMS[1], mesh(4), P(None, None, None, "a"), dtype="float64", tolerance=1e-14)
        inputs = cases.inputs(BY_DENSITY, np.dtype("float64"))
        x = jax.device_put(inputs.x, NamedSharding(mesh(2), P("a")))
        for method in (None, "adaptive"):
            found = jax.jit(lambda x, method=method: call(BY_DENSITY, x, inputs.kernel, None, None, method))(x)
            assert oracle.relative_error(found, oracle.expected(BY_DENSITY, inputs)) <= 1e-14
        check_pool_derivatives(mesh(2, 2), P("a", None, "b"))
    print("methods")


def check_pool_derivatives(over: Mesh, spec: P) -> None:
    """Of float64 max pools, few elements and many: lax's would be lowered where there is no float64."""
    for size in (6, 30):
        rng = np.random.default_rng(size)
        x, kernel, tangent = (
            jnp.asarray(rng.standard_normal(shape)) for shape in ((2, size, 16, 32), (3, 3, 32, 4), (2, size, 16, 32))
        )

        def both(x: Any, kernel: Any, tangent: Any) -> Any:
            same = {"padding": "SAME", "window_padding": "SAME"}
            pooled = functools.partial(jsc.conv_pool, kernel=kernel, strides=2, implementation="pecr", **same)
            _, pushed = jax.jvp(pooled, (x,), (tangent,))
            return jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x), pushed

        wanted = jax.jit(both)(x, kernel, tangent)
        placed = (jax.device_put(each, NamedSharding(over, spec)) for each in (x, tangent))
        found = jax.jit(lambda x, tangent, kernel=kernel: both(x, kernel, tangent))(*placed)
        for one, other in zip(found, wanted, strict=True):
            assert oracle.relative_error(one, other) <= 1e-14


def check_other_functions() -> None:
    """`dense` of rows whose channels are split; lax's signature."""
    rng = np.random.default_rng(0)
    rows, weights = rng.standard_normal((4, 32)).astype(np.float32), rng.standard_normal((32, 8)).astype(np.float32)
    over = mesh(2, 4)
    placed = (
        jax.device_put(rows, NamedSharding(over, P("a", "b"))),
        jax.device_put(weights, NamedSharding(over, P("b"))),
    )
    function = jax.jit(functools.partial(jsc.dense, activation="relu", precision="highest", implementation="ecr"))
    compiled = function.lower(*placed).compile()
    wanted = np.maximum(rows.astype(np.float64) @ weights, 0)
    assert oracle.relative_error(compiled(*placed), wanted) <= 2e-6
    assert collectives(compiled.as_text()) == {SUM: 1}
    x, kernel, _, _ = cases.inputs(ROWS[2])
    laid = jax.device_put(x.transpose(0, 3, 1, 2), NamedSharding(over, P(None, None, "a", None)))
    numbers = ("NCHW", "HWIO", "NCHW")
    like_lax = functools.partial(
        jsc.conv_general_dilated, window_strides=(2, 2), padding="SAME", dimension_numbers=numbers
    )
    compiled = jax.jit(functools.partial(like_lax, precision="highest")).lower(laid, kernel).compile()
    wanted = oracle.expected(ROWS[2], cases.inputs(ROWS[2])).transpose(0, 3, 1, 2)
    assert oracle.relative_error(compiled(laid, kernel), wanted) <= 2e-6
    assert set(collectives(compiled.as_text())) == {HALO}
    print("dense and conv_general_dilated")


def check_gradients() -> None:
    """By x and by kernel: nothing is gathered. Right on meshes where XLA's partitioner multiplies those of lax, too."""
    first, strided, groups = ROWS[1], ODD_ROWS[1], dataclasses.replace(GROUPS, x=(4, 16, 6, CHANNELS))
    stepwise = dataclasses.replace(POOL, window=(3, 3), window_strides=(1, 1), window_padding="SAME")
    channels = P(None, None, None, "a"), P(None, None, "a")
    for case, over, x_split, kernel_split in (
        (first, mesh(2, 4), P(None, "a"), P()),
        (first, mesh(2, 2), P("a", "b"), P()),
        (first, mesh(8), P(None, "a"), P()),
        (first, mesh(2, 2), *channels),
        (first, mesh(2, 4), P(None, "a"), P(None, None, None, "b")),
        (dataclasses.replace(first, x=(2, 16, 5, 8)), mesh(2, 4), P(None, "a"), P(None, None, "b", "a")),
        (strided, mesh(4, 2), P(None, "a"), P(None, None, None, "b")),
        (stepwise, mesh(2), P(None, "a"), P()),
        (groups, mesh(2, 2), P("a"), P()),
        (groups, mesh(4, 2), P("b", "a"), P()),
    ):
        inputs = cases.inputs(case, "float32")

        def loss(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(over, x_split))  # noqa: B023
            kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(over, kernel_split))  # noqa: B023
            return (call(case, x, kernel, bias, residual, "pecr" if case.pool else "ecr", "highest") ** 2).sum()  # noqa: B023

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*inputs).compile()
        for ours, wanted in zip(compiled(*inputs), oracle.gradients(case, inputs), strict=True):
            error = oracle.relative_error(ours, wanted)
            assert error <= 2e-6, (case.name, over.shape, x_split, error)
        if case in (first, groups):  # others have sizes that do not divide, or gather a bias
            assert set(collectives(compiled.as_text())) <= {HALO, SUM}, (over.shape, x_split)
    print("gradients")


def check_explicit() -> None:
    """Types say how maps are split: results stay so where their sizes divide and there is no pool."""
    for case, over, split, wanted, sent in (
        (ROWS[1], (2, 4), P("a", "b"), P("a", "b"), {HALO}),
        (ROWS[2], (2, 2), P(None, "a", "b"), P(None, "a"), {HALO, WHOLE}),  # 3 columns of 6
        (GROUPS, (2, 4), P(None, "b"), P(None, "b"), {HALO}),
        (POOL, (4,), P(None, "a"), P(), {HALO, WHOLE}),
        (dataclasses.replace(POOL, x=(2, 32, 6, CHANNELS)), (2, 2), P("a", "b"), P("a"), {HALO, WHOLE}),
        (SUMS[1], (2, 4), P("a", None, None, "b"), P("a"), {SUM}),
    ):
        inputs = cases.inputs(case)
        gradients = oracle.gradients(case, inputs)
        with jax.set_mesh(mesh(*over, kind=AxisType.Explicit)):
            x = jax.device_put(inputs.x, split)
            for method in ("pecr" if case.pool else "ecr", "xla")[: 1 + (case is ROWS[1])]:
                function = lambda x, k: call(case, x, k, *inputs[2:], method, "highest")  # noqa: B023, E731
                compiled = jax.jit(function).lower(x, inputs.kernel).compile()
                result = compiled(x, inputs.kernel)
                assert oracle.relative_error(result, oracle.expected(case, inputs)) <= 2e-6
                assert jax.typeof(result).sharding.spec == P(*wanted, *[None] * (4 - len(wanted))), (case, method)
                assert method == "xla" or set(collectives(compiled.as_text())) <= sent, (case, method)
                derivative = jax.jit(jax.grad(lambda *v: (function(*v) ** 2).sum(), (0, 1)))  # noqa: B023
                for ours, theirs, given in zip(
                    derivative(x, inputs.kernel), gradients, (x, inputs.kernel), strict=True
                ):
                    assert oracle.relative_error(ours, theirs) <= 2e-6, (case, method)
                    assert jax.typeof(ours).sharding.spec == jax.typeof(given).sharding.spec
    print("explicit sharding")


def check_none() -> None:
    """`implementation=None` where that is lax: groups, too, stay where they are, which XLA's partitioner gathers."""
    case = Case("groups", (4, 16, 6, CHANNELS), 8, groups=2, zeros=0.0)
    inputs = cases.inputs(case)
    placed = [jax.device_put(inputs.x, NamedSharding(mesh(2, 4), P("a", "b"))), *inputs[1:]]
    function = jax.jit(lambda *values: call(case, *values, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_choice, "on_cpu", lambda workload: cpu_choice.Choice(below=0.0))
        compiled = function.lower(*placed).compile()
    assert "jsc_" not in compiled.as_text()
    assert set(collectives(compiled.as_text())) == {HALO}
    assert oracle.relative_error(compiled(*placed), oracle.expected(case, inputs)) <= 2e-6
    print("lax")


def check_gspmd() -> None:
    """The same with XLA's former partitioner, which asks another way."""
    jax.config.update("jax_use_shardy_partitioner", False)
    text, _ = check(ROWS[1], mesh(2, 2), P("a", "b"), P())
    assert set(collectives(text)) == {HALO}
    text, _ = check(ROWS[2], mesh(4), P(None, "a"), P())
    assert set(collectives(text)) == {HALO}
    text, _ = check(SUMS[1], mesh(2, 4), P("a", None, None, "b"), P(None, None, "b"))
    assert collectives(text) == {SUM: 1}
    text, _ = check(SUMS[2], mesh(4), P(), P(None, None, None, "a"))
    assert not collectives(text)
    case = dataclasses.replace(GROUPS, x=(4, 16, 6, CHANNELS))
    inputs = cases.inputs(case)
    x = jax.device_put(inputs.x, NamedSharding(mesh(2, 4), P("a")))
    by_kernel = jax.jit(jax.grad(lambda k: (call(case, x, k, inputs.bias, None, "ecr") ** 2).sum()))
    assert oracle.relative_error(by_kernel(inputs.kernel), oracle.gradients(case, inputs)[1]) <= 2e-6
    print("without Shardy")


def main() -> None:
    check_rows_and_columns()
    check_odd_sizes()
    check_gathered()
    check_input_channels()
    check_methods()
    check_other_functions()
    check_gradients()
    check_explicit()
    check_inside_shard_map()
    check_none()
    check_gspmd()


if __name__ == "__main__":
    sys.exit(main())
