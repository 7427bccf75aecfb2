"""Gradients of x and of the kernel as a primitive: vmap, derivatives of them, and what a program has of them."""

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

CASE = Case("3x3", (2, 6, 5, 8), 6, strides=2, groups=2)


def squares(x: Any, kernel: Any, implementation: str = "ecr", case: Case = CASE) -> jax.Array:
    return (call(case, x, kernel, None, None, implementation) ** 2).sum()


gradients = jax.grad(squares, (0, 1))


def test_it_is_what_a_backward_pass_has() -> None:
    inputs = cases.inputs(CASE)
    for index in (0, 1):
        program = str(jax.make_jaxpr(jax.grad(squares, index))(inputs.x, inputs.kernel))
        assert program.count("jsc_gradient[") == 1
        assert f"by_kernel={index == 1}" in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [CASE, Case("depthwise", (1, 7, 6, 4), 4, groups=4), Case("dilation", (2, 9, 8, 3), 5, dilation=2, padding=3)],
    ids=lambda case: case.name,
)
def test_against_float64(case: Case, dtype: str) -> None:
    inputs = cases.inputs(case, dtype)
    tolerance = TOLERANCE[dtype] * (1 if dtype == "float32" else 3)  # the result is rounded, too
    wanted = oracle.gradients(case, inputs)
    for ours, theirs in zip(gradients(inputs.x, inputs.kernel, case=case), wanted, strict=True):
        assert ours.dtype == jnp.dtype(dtype)
        assert oracle.relative_error(ours, theirs) <= tolerance


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("size", [3, 0])
def test_vmap(axes: tuple[int | None, int | None], size: int) -> None:
    """One gradient for each image or each kernel; x and kernel that are not batched are one for all."""
    each = [cases.inputs(CASE, seed=seed) for seed in range(3)]
    values = [np.stack([getattr(inputs, name) for inputs in each])[:size] for name in ("x", "kernel")]
    given = [value if axis == 0 else getattr(each[0], name)
             for value, axis, name in zip(values, axes, ("x", "kernel"), strict=True)]  # fmt: skip
    found = jax.vmap(gradients, axes)(*given)
    assert [array.shape for array in found] == [(size, *each[0].x.shape), (size, *each[0].kernel.shape)]
    for index in range(size):
        chosen = [each[0 if axis is None else index] for axis in axes]
        wanted = oracle.gradients(CASE, cases.Inputs(chosen[0].x, chosen[1].kernel, None, None))
        for ours, theirs in zip(found, wanted, strict=True):
            assert oracle.relative_error(ours[index], theirs) <= TOLERANCE["float32"]


def test_derivatives_of_it() -> None:
    """Forward and backward, by x and by kernel, against the same derivatives of lax in float64."""
    x, kernel, _, _ = cases.inputs(CASE)
    tangents = cases.inputs(CASE, seed=1)[:2]

    def forward(implementation: str, *values: Any) -> Any:
        gradient = lambda *operands: gradients(*operands, implementation)  # noqa: E731
        return jax.jvp(gradient, values[:2], values[2:])[1]

    def backward(implementation: str, *values: Any) -> Any:
        length = lambda *operands: sum((g**2).sum() for g in gradients(*operands, implementation))  # noqa: E731
        return jax.grad(length, (0, 1))(*values[:2])

    with jax.enable_x64(True):
        wide = [np.asarray(value, np.float64) for value in (x, kernel, *tangents)]
        wanted = [*forward("xla", *wide), *backward("xla", *wide)]
        wanted = [np.asarray(value) for value in wanted]
    found = [*forward("ecr", x, kernel, *tangents), *backward("ecr", x, kernel)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert oracle.relative_error(ours, theirs) <= 3 * TOLERANCE["float32"]
