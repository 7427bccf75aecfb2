"""Windows larger than their map, of which taps that meet nothing but padding are left out, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_checks import TOLERANCE, inputs_and_gradients, inputs_and_result, run
from platforms import require

import jax_sparse_conv as jsc
from jax_sparse_conv._src.problem import taps

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small kernels are copied, too."""
    monkeypatch.setattr(taps, "_LEAST", 0)


CASES = (
    Case("3x3 on a pixel", (3, 1, 1, 40), 24, bias=True, residual=True, activation="relu"),
    Case("stride 2 on two pixels", (2, 2, 2, 24), 32, strides=2, bias=True, activation="relu"),
    Case("5x5 on two pixels", (2, 2, 2, 16), 16, kernel=(5, 5), bias=True),
    Case("9x9 on 2x4", (1, 2, 4, 12), 8, kernel=(9, 9), strides=(1, 2)),
    Case("dilation beyond the map", (2, 3, 3, 16), 16, dilation=4, padding=4),
    Case("groups", (2, 1, 1, 32), 32, groups=4, bias=True),
    Case("a pool behind", (2, 2, 2, 16), 16, kernel=(5, 5), activation="relu", pool="max"),
    Case("an image", (2, 1, 2, 3), 16, kernel=(7, 7), padding=3, zeros=0.0),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", [None, "ecr", "pecr", "direct", "coo", "adaptive", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case: Case, implementation: str | None, dtype: str) -> None:
    require("ecr" if implementation in (None, "xla") else implementation, dtype)
    if (case.pool is None) == (implementation == "pecr"):
        pytest.skip("pecr is with a pool alone, and others have it, too")
    if implementation == "coo" and (case.dilation != 1 or max(case.kernel) > 7):
        pytest.skip("coo has no kernels for these windows")
    inputs, wanted = inputs_and_result(case, dtype)
    assert oracle.relative_error(run(case, inputs, implementation), wanted) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: Case) -> None:
    require("ecr", "float32")
    inputs, wanted = inputs_and_gradients(case, "float32")

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        operands = dataclasses.replace(case, name="")
        operation: Any = jsc.conv if case.pool is None else jsc.conv_pool
        rest = {} if inputs.residual is None else {"residual": inputs.residual}
        y: jax.Array = operation(x, kernel, inputs.bias, precision="highest", **rest, **operands.arguments)
        return jnp.sum(y**2)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs.x, inputs.kernel)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert oracle.relative_error(one, other) <= 5 * TOLERANCE["float32"]


def test_what_the_kernel_may_be() -> None:
    """A constant, an argument, packed, one for each example, of a layer whose weights are fixed."""
    x = jax.random.normal(jax.random.key(0), (4, 1, 1, 32))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 32, 32)) / 8
    wanted = jnp.einsum("nhwc,ck->nhwk", x, kernel[1, 1], precision="highest")
    conv = lambda x, kernel: jsc.conv(x, kernel, precision="highest")  # noqa: E731
    found = {
        "argument": jax.jit(conv)(x, kernel),
        "constant": jax.jit(lambda x: conv(x, kernel))(x),
        "packed": jax.jit(conv)(x, jsc.pack(kernel)),
        "eager": conv(x, kernel),
        "kernels": jax.vmap(conv)(x[:, None], jnp.stack([kernel] * 4))[:, 0],
        "fixed weights": jsc.jit_inference(lambda kernel, x: conv(x, kernel), kernel)(x),
        "lax": jsc.accelerate(
            lambda x: jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
            )
        )(x),
    }
    for name, each in found.items():
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def test_constants_are_cut_once_and_stay_on_the_device() -> None:
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 32, 32))
    predict = jsc.jit_inference(lambda scale, x: jsc.conv(x, kernel) * scale, jnp.float32(2))
    for images in (1, 2, 3):
        predict(jnp.ones((images, 1, 1, 32)))
    prepared = [predict.prepared(jnp.ones((images, 1, 1, 32))) for images in (1, 2, 3)]
    assert len({id(each) for arrays in prepared for each in arrays}) == len(prepared[0])
    x = jnp.ones((1, 1, 1, 32))
    with jax.transfer_guard("disallow"):
        eager, constant = jsc.conv(x, kernel), jax.jit(lambda x: jsc.conv(x, kernel))(x)
    np.testing.assert_allclose(eager, constant, rtol=1e-5, atol=1e-5)
    (transposed,) = jax.linear_transpose(lambda x: jsc.conv(x, kernel), x)(eager)
    wanted = jnp.einsum("nhwk,ck->nhwc", eager, kernel[1, 1], precision="highest")
    np.testing.assert_allclose(transposed, wanted, rtol=1e-4, atol=1e-4)


def test_fewer_weights_are_read() -> None:
    x, kernel = jnp.ones((1, 1, 1, 32)), jnp.ones((3, 3, 32, 32))
    text = jax.jit(jsc.conv).lower(x, kernel).as_text()
    assert "tensor<1x1x32x32xf32>" in text
    whole = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation="xla")).lower(x, kernel).as_text()
    assert "tensor<1x1x32x32xf32>" not in whole
