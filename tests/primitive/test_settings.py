"""JAX's settings and debugging tools: what a user switches on while looking for a mistake elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import small_densenet, small_vgg

import jax_sparse_conv as jsc
from jax_sparse_conv import models
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.fusion import rewrite

pytestmark = pytest.mark.usefixtures("float32_products")

X = jax.nn.relu(jax.random.normal(jax.random.key(0), (2, 6, 7, 16)))
KERNEL = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 16, 32))
POINTWISE = 0.1 * jax.random.normal(jax.random.key(2), (1, 1, 32, 32))
BIAS = jnp.linspace(-1, 1, 32)


def chain(x: jax.Array) -> jax.Array:
    return jsc.conv(jsc.conv(x, KERNEL, BIAS, activation="relu"), POINTWISE)


CALLS: dict[str, Callable[[jax.Array], Any]] = {
    **{
        str(name): lambda x, name=name: jsc.conv(x, KERNEL, BIAS, activation="relu", implementation=name)  # type: ignore[misc]
        for name in (None, "xla", "ecr", "coo", "direct", "adaptive")
    },
    "pool": lambda x: jsc.conv_pool(x, KERNEL, BIAS),
    "dense": lambda x: jsc.dense(x, KERNEL[0, 0], BIAS),
    "many rows": lambda x: jsc.dense(jnp.tile(x, (9, 9, 1, 1)), KERNEL[0, 0], BIAS, implementation="xla"),
    "counted": lambda x: jsc.conv(x, KERNEL, BIAS, count_nonzeros=True),
    "fused": rewrite.fuse(chain),
    "COO*": lambda x: jsc.CooStar.fromdense(x, (4, 4, 8)).todense(),
    # Few channels: without jit each slot of a window is a program of its own.
    "ECR": lambda x: jsc.ECR.fromdense(x[..., :3], (3, 3)).conv(KERNEL[:, :, :3]),
}


def require(name: str) -> None:
    method = {"pool": "pecr", "COO*": "coo"}.get(name, name)
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if method in ("ecr", "coo", "direct", "adaptive") and (reason := _native.why_missing(method, platform, "float32")):
        pytest.skip(reason)


def network(name: str) -> tuple[nnx.Module, jax.Array]:
    model = {"vgg": small_vgg, "densenet": small_densenet}[name]()
    models.fold_batch_norm(model)
    return model, jax.random.normal(jax.random.key(0), (1, 32, 32, 3))


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_without_jit(name: str) -> None:
    require(name)
    wanted = jax.jit(CALLS[name])(X)
    with jax.disable_jit():
        same(CALLS[name](X), wanted)


@pytest.mark.parametrize("name", ["vgg", "densenet"])
def test_networks_without_jit(name: str) -> None:
    model, x = network(name)
    wanted = jax.jit(lambda x: model(x))(x)
    with jax.disable_jit():
        same(model(x), wanted)


@pytest.mark.parametrize("name", ["None", "ecr", "coo", "direct", "fused"])
def test_debug_nans_ends_where_there_is_one(name: str) -> None:
    require(name)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        jax.block_until_ready(jax.jit(CALLS[name])(X.at[0, 0, 0, 0].set(jnp.nan)))


@pytest.mark.parametrize("name", CALLS)
def test_ranks_need_no_promotion(name: str) -> None:
    require(name)
    wanted = CALLS[name](X)
    with jax.numpy_rank_promotion("raise"):
        same(CALLS[name](X), wanted)
        jax.grad(lambda x: jax.tree.leaves(CALLS[name](x))[0].sum())(X)


@pytest.mark.parametrize("name", ["vgg", "densenet"])
def test_ranks_of_networks_need_no_promotion(name: str) -> None:
    model, x = network(name)
    wanted = jax.jit(lambda x: model(x))(x)
    with jax.numpy_rank_promotion("raise"):
        same(jax.jit(lambda x: model(x))(x), wanted)


@pytest.mark.parametrize("name", ["xla", "ecr"])
def test_dtypes_are_not_weak(name: str) -> None:
    require(name)
    weak = jnp.broadcast_to(jnp.asarray(2.0), X.shape)
    assert jax.typeof(weak).weak_type
    for function in (CALLS[name], lambda x: jsc.dense(x, KERNEL[0, 0], implementation=name)):
        assert not jax.typeof(function(weak)).weak_type


@pytest.mark.parametrize("precision", [jax.lax.DotAlgorithm(*[np.dtype("float32")] * 3), "BF16_BF16_F32_X3", "highest"])
@pytest.mark.parametrize("name", [None, "ecr", "direct"])
def test_any_precision_that_lax_takes(name: str | None, precision: Any) -> None:
    require(str(name))
    if precision == "BF16_BF16_F32_X3":
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    lowered = jax.jit(lambda x: jsc.conv(x, KERNEL, precision=precision, implementation=name)).lower(X)
    assert "jsc_" in lowered.as_text() or name is None
    assert lowered.out_info.shape == (2, 6, 7, 32)


def test_precision_is_traced_once() -> None:
    jsc.conv(X, KERNEL)
    with jax.default_matmul_precision("float32"):
        first = jax.make_jaxpr(lambda x: jsc.conv(x, KERNEL, implementation="xla"))(X)
    with jax.default_matmul_precision("bfloat16"):
        second = jax.make_jaxpr(lambda x: jsc.conv(x, KERNEL, implementation="xla"))(X)
    found = [jaxpr.eqns[0].params["precision"][0] for jaxpr in (first, second)]
    assert found == [jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT]


def test_what_a_fused_function_returns_besides_is_as_jit_has_it() -> None:
    function = lambda x: (1, 2.5, jnp.float32(3), np.arange(3), chain(x))  # noqa: E731
    fused, jitted = rewrite.fuse(function)(X), jax.jit(function)(X)
    assert all(isinstance(leaf, jax.Array) for leaf in fused)
    same(fused, jitted)
    assert [leaf.dtype for leaf in fused] == [leaf.dtype for leaf in jitted]


def test_linear_transposes() -> None:
    y = jax.random.normal(jax.random.key(3), (2, 6, 7, 32))
    bare = lambda x: jsc.conv(jsc.conv(x, KERNEL), POINTWISE)  # noqa: E731
    (wanted,) = jax.linear_transpose(bare, X)(y)
    same(jax.linear_transpose(rewrite.fuse(bare), X)(y)[0], wanted)
    counted = lambda x: jsc.conv(jsc.conv(x, KERNEL, count_nonzeros=True)[0], POINTWISE)  # noqa: E731
    same(jax.linear_transpose(counted, X)(y)[0], wanted)


def test_formats_compare_by_identity() -> None:
    first, second = (jsc.CooStar.fromdense(X, (4, 4, 8)) for _ in range(2))
    assert first == first
    assert first != second
    assert second in [first, second]
    assert jsc.ECR.fromdense(X, (3, 3)) not in [first]
