"""Transformations: jit, vmap over anything, derivatives, scan, checkpoint, sharding; and what the compiler sees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from platforms import PLATFORM, require

import jax_sparse_conv as jsc

Function = Callable[..., jax.Array]
GROUPS = 2


def operands(batch: int = 2) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(3)
    x = np.maximum(rng.standard_normal((batch, 6, 5, 4)), 0)
    kernel, bias = rng.standard_normal((3, 3, 2, 6)), rng.standard_normal(6)
    residual = rng.standard_normal((batch, 6, 5, 6))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, kernel, bias, residual))


def sparse_conv(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
    return jsc.conv(
        x, kernel, bias, residual=residual, feature_group_count=GROUPS, activation="relu", implementation="ecr"
    )


def dense_conv(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
    return jsc.conv(
        x,
        kernel,
        bias,
        residual=residual,
        feature_group_count=GROUPS,
        activation="relu",
        precision="highest",
        implementation="xla",
    )


def sparse_pool(x: Any, kernel: Any, bias: Any) -> jax.Array:
    return jsc.conv_pool(x, kernel, bias, feature_group_count=GROUPS, implementation="pecr")


def dense_pool(x: Any, kernel: Any, bias: Any) -> jax.Array:
    return jsc.conv_pool(x, kernel, bias, feature_group_count=GROUPS, precision="highest", implementation="xla")


def close(actual: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=2e-4, atol=2e-4), actual, wanted)


def stacked(values: tuple[jax.Array, ...], axes: tuple[int | None, ...], size: int = 3) -> list[jax.Array]:
    """Each value with a batch axis at its place, filled with different multiples of it."""
    return [
        value if axis is None else jnp.stack([value * (1 - 0.4 * i) for i in range(size)], axis)
        for value, axis in zip(values, axes, strict=True)
    ]


@pytest.mark.parametrize("which", [w for w in itertools.product([False, True], repeat=4) if any(w)], ids=str)
def test_vmap_over_every_combination(which: tuple[bool, ...]) -> None:
    require("ecr", "float32")
    axes = tuple((0, 2, 1, -1)[i] if batched else None for i, batched in enumerate(which))
    arguments = stacked(operands(), axes)
    close(jax.vmap(sparse_conv, axes)(*arguments), jax.vmap(dense_conv, axes)(*arguments))


@pytest.mark.parametrize("which", [w for w in itertools.product([False, True], repeat=3) if any(w)], ids=str)
def test_vmap_of_conv_pool(which: tuple[bool, ...]) -> None:
    require("pecr", "float32")
    axes = tuple(0 if batched else None for batched in which)
    arguments = stacked(operands()[:3], axes)
    close(jax.vmap(sparse_pool, axes)(*arguments), jax.vmap(dense_pool, axes)(*arguments))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 1, 0), (1, 0, None)], ids=str)
def test_vmap_of_dense(axes: tuple[int | None, ...]) -> None:
    require("dense", "float32")
    x, kernel, bias = operands()[0][0, 0], jnp.ones((4, 3)) * jnp.arange(3.0), jnp.arange(3.0)
    arguments = stacked((x, kernel, bias), axes)
    close(
        jax.vmap(lambda *a: jsc.dense(*a, implementation="ecr"), axes)(*arguments),
        jax.vmap(lambda *a: jsc.dense(*a, implementation="xla", precision="highest"), axes)(*arguments),
    )


@pytest.mark.parametrize(
    ("inner", "outer"),
    list(itertools.product([(0, None), (None, 0), (0, 0)], repeat=2)),
    ids=str,
)
def test_nested_vmap(inner: tuple[int | None, ...], outer: tuple[int | None, ...]) -> None:
    require("ecr", "float32")
    x, kernel, bias, residual = operands()
    arguments = stacked(tuple(stacked((x, kernel), inner, 2)), outer, 3)

    def nested(function: Function) -> jax.Array:
        once = jax.vmap(lambda x, kernel: function(x, kernel, bias, residual), inner)
        return jax.vmap(once, outer)(*arguments)  # type: ignore[no-any-return]

    close(nested(sparse_conv), nested(dense_conv))


def test_vmap_is_one_call_and_of_size_zero_none() -> None:
    require("ecr", "float32")
    arguments = stacked(operands(), (0, 0, 0, 0))
    text = jax.jit(jax.vmap(sparse_conv)).lower(*arguments).as_text()
    assert text.count("@jsc_ecr") == 1
    empty = jax.vmap(sparse_conv, (0, None, None, None))(arguments[0][:0], *operands()[1:])
    assert empty.shape == (0, 2, 6, 5, 6)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f], ids=["jit", "checkpoint", "eager"])
def test_gradients_are_those_of_lax(wrap: Callable[[Function], Function]) -> None:
    require("ecr", "float32")
    require("pecr", "float32")

    def loss(function: Function) -> Function:
        return lambda *a: (wrap(function)(*a) ** 2).sum()

    every = operands()
    close(jax.grad(loss(sparse_conv), (0, 1, 2, 3))(*every), jax.grad(loss(dense_conv), (0, 1, 2, 3))(*every))
    close(jax.grad(loss(sparse_pool), (0, 1, 2))(*every[:3]), jax.grad(loss(dense_pool), (0, 1, 2))(*every[:3]))


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_check_grads(mode: str) -> None:
    """Numerically, to second order, away from the kinks of ReLU and max: no activation, average pool."""
    require("ecr", "float32")
    x, kernel, bias, residual = operands(1)
    settings: dict[str, Any] = {"modes": [mode], "order": 2, "eps": 1e-2, "rtol": 2e-2, "atol": 2e-2}

    def conv(kernel: Any, bias: Any, residual: Any) -> jax.Array:
        return jsc.conv(x, kernel, bias, residual=residual, feature_group_count=GROUPS, strides=1, implementation="ecr")

    def conv_pool(kernel: Any, bias: Any) -> jax.Array:
        return jsc.conv_pool(
            x, kernel, bias, feature_group_count=GROUPS, activation=None, pool="avg", implementation="pecr"
        )

    def dense(x: Any, kernel: Any, bias: Any) -> jax.Array:
        return jsc.dense(x, kernel, bias, implementation="ecr", precision="highest")

    def conv_of_x(x: Any) -> jax.Array:
        return jsc.conv(x, kernel, bias, feature_group_count=GROUPS, precision="highest", implementation="ecr")

    check_grads(conv, (kernel, bias, residual), **settings)
    check_grads(conv_of_x, (x + 1.0,), **settings)
    check_grads(conv_pool, (kernel, bias), **settings)
    check_grads(dense, (x[0, 0] + 1.0, jnp.ones((4, 3)), jnp.ones(3)), **settings)


def test_jacfwd_hessian_and_vmap_of_grad() -> None:
    require("pecr", "float32")
    x, kernel, bias, _ = operands(1)

    def scalar(function: Function) -> Function:
        return lambda kernel: (function(x, kernel, bias) ** 2).sum()

    def same(transform: Callable[[Function], Function], argument: jax.Array, functions: list[Function]) -> None:
        close(*(jax.jit(transform(function))(argument) for function in functions))

    pools = [sparse_pool, dense_pool]
    same(jax.jacfwd, bias, [lambda b, pool=pool: pool(x, kernel, b) for pool in pools])
    same(jax.hessian, kernel[:1, :1], [scalar(pool) for pool in pools])
    same(lambda f: jax.vmap(jax.grad(f)), jnp.stack([kernel, 2 * kernel]), [scalar(pool) for pool in pools])


def test_scan_and_linear_transpose() -> None:
    require("ecr", "float32")
    x, kernel, bias, residual = operands()
    kernels = jnp.stack([kernel, -kernel, 0.5 * kernel])

    def summed(function: Function) -> jax.Array:
        return jax.lax.scan(lambda c, k: (c + function(x, k, bias, residual), c.sum()), residual, kernels)[0]  # type: ignore[no-any-return]

    close(summed(sparse_conv), summed(dense_conv))

    def transposed(implementation: str) -> Any:
        linear = lambda k: jsc.conv(  # noqa: E731
            x, k, feature_group_count=GROUPS, precision="highest", implementation=implementation
        )
        return jax.linear_transpose(linear, kernel)(residual)

    close(transposed("ecr"), transposed("xla"))


@pytest.mark.parametrize("name", ["ecr", "pecr", "dense"])
def test_compiled_program_holds_the_custom_call_and_nothing_dense(name: str) -> None:
    require(name, "float32")
    x, kernel, bias, residual = operands()
    if name == "ecr":
        lowered = jax.jit(sparse_conv).lower(x, kernel, bias, residual)
    elif name == "pecr":
        lowered = jax.jit(sparse_pool).lower(x, kernel, bias)
    else:
        dense = jax.jit(lambda *a: jsc.dense(*a, implementation="ecr"))
        lowered = dense.lower(x[:, 0, 0], kernel[0, 0, :].T[:4], bias[:2])
    text = lowered.compile().as_text()
    assert text.count(f'"jsc_{name}"') == 1
    # No dense arithmetic, no pool beside the kernel, and no copy of an operand.
    for instruction in ("convolution(", " dot(", "reduce-window(", "__cudnn", "__cublas", " copy(", "maximum("):
        assert instruction not in text


def test_a_named_implementation_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_sparse_conv._src import _native

    x, kernel, bias, residual = operands(7)  # of which no other test has programs
    monkeypatch.setitem(_native._registered, PLATFORM, [])
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run here: .*no target 'jsc_ecr'.*None or"):
        jax.jit(sparse_conv)(x, kernel, bias, residual)
    result = jsc.conv(x, kernel, bias, residual=residual, feature_group_count=GROUPS, activation="relu")
    close(result, dense_conv(x, kernel, bias, residual))


def test_weak_types_and_shapes_of_the_abstract_value() -> None:
    x, kernel, bias, residual = operands()
    shape = jax.eval_shape(sparse_conv, x, kernel, bias, residual)
    assert (shape.shape, shape.dtype, shape.weak_type) == ((2, 6, 5, 6), jnp.float32, False)
    assert jax.eval_shape(sparse_pool, x, kernel, bias).shape == (2, 3, 2, 6)


def test_export_and_other_platforms() -> None:
    """An exported program keeps the custom call; a platform without kernels gets the dense program or a reason."""
    require("ecr", "float32")
    arguments = operands()
    allowed = [jax.export.DisabledSafetyCheck.custom_call("jsc_ecr")]
    exported = jax.export.export(jax.jit(sparse_conv), disabled_checks=allowed)(*arguments)
    assert "jsc_ecr" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(*arguments), sparse_conv(*arguments))

    automatic = jax.jit(lambda x, kernel: jsc.conv(x, kernel, feature_group_count=GROUPS))
    text = jax.export.export(automatic, platforms=["tpu"])(*arguments[:2]).mlir_module()
    assert "stablehlo.convolution" in text
    assert "jsc_ecr" not in text
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run here: .*no kernels for platform 'tpu'"):
        jax.export.export(jax.jit(sparse_conv), platforms=["tpu"])(*arguments)


def test_a_call_without_kernel_for_its_dtype_runs_densely_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_sparse_conv._src import _native

    x, kernel, bias, _ = operands(9)  # of which no other test has programs
    monkeypatch.setitem(_native.DTYPES, PLATFORM, ("bfloat16",))
    with pytest.raises(ValueError, match=r"implementation='pecr' cannot run here: dtype float32 is not supported on"):
        sparse_pool(x, kernel, bias)
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot run here: dtype float32 is not supported on"):
        jsc.dense(x, jnp.ones((4, 2)), implementation="ecr")
    automatic = jsc.conv_pool(x, kernel, bias, feature_group_count=GROUPS, precision="highest")
    close(automatic, dense_pool(x, kernel, bias))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0)])
def test_direct_convolution_batches_and_differentiates_as_xla(axes: tuple[int | None, ...]) -> None:
    require("direct", "float32")
    rng = np.random.default_rng(0)
    shapes = ((3, 2, 7, 8, 12), (3, 3, 3, 12, 20), (3, 20))
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    arguments = [value if axis == 0 else value[0] for value, axis in zip(arrays, axes, strict=True)]

    def loss(implementation: str, *values: jax.Array) -> jax.Array:
        def one(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
            return jsc.conv(x, kernel, bias, activation="relu", precision="highest", implementation=implementation)

        return (jax.vmap(one, axes)(*values) ** 2).sum()

    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, name), (0, 1, 2)))(*arguments) for name in ("direct", "xla")
    ]
    for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("which", [(True, False, False, False), (False, True, True, False), (True, True, False, True)])
def test_coo_transforms_as_the_others_do(which: tuple[bool, ...]) -> None:
    """vmap into images, output channels and stacks; derivatives; one call each."""
    require("coo", "float32")

    def sparse(*arguments: Any) -> jax.Array:
        return jsc.conv(
            arguments[0], arguments[1], arguments[2], residual=arguments[3], feature_group_count=GROUPS,
            activation="relu", implementation="coo",
        )  # fmt: skip

    axes = tuple((0, 2, 1, -1)[i] if batched else None for i, batched in enumerate(which))
    arguments = stacked(operands(), axes)
    close(jax.vmap(sparse, axes)(*arguments), jax.vmap(dense_conv, axes)(*arguments))
    assert jax.jit(jax.vmap(sparse, axes)).lower(*arguments).as_text().count("@jsc_coo") == 1
    found, wanted = (jax.vjp(function, *operands())[1] for function in (sparse, dense_conv))
    cotangent = operands()[3]
    close(found(cotangent), wanted(cotangent))
