"""An accelerated function inside of what JAX has: meshes, exports, settings, methods, effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_sparse_conv as jsc

pytestmark = pytest.mark.usefixtures("float32_products")

KERNEL = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 16, 16))
MEAN = jnp.linspace(-1, 1, 16)
X = jax.random.normal(jax.random.key(0), (4, 8, 8, 16))


def function(x: jax.Array, kernel: jax.Array = KERNEL) -> jax.Array:
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu((y - MEAN) * 2)


fast = jsc.accelerate(function)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    split = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec()}
    outside = jax.shard_map(lambda x: lax.psum(fast(x).sum(), "i"), **split)
    inside = jax.shard_map(jsc.accelerate(lambda x: lax.psum(function(x), "i")), **split)
    same(jax.jit(outside)(X), function(X).sum())
    same(jax.jit(inside)(X), function(X))


def test_around_shard_map_it_says_what_to_do() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    around = jsc.accelerate(lambda x: split(x))
    with pytest.warns(UserWarning, match="left all 1 convolutions of <lambda>.*it is inside of shard_map"):
        same(around(X), function(X))
    (row,) = around.report(X).rows  # type: ignore[attr-defined]
    assert (row.x_shape, row.kernel_shape, row.result_shape) == (X.shape, KERNEL.shape, X.shape)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_of_arrays_on_a_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("i")))
        same(jax.jit(fast)(x), function(X))
        same(jsc.jit_inference(lambda kernel, x: function(x, kernel), KERNEL)(x), function(X))


@pytest.mark.parametrize("arguments", [1, 2])
def test_exports_of_any_batch(arguments: int) -> None:
    (n,) = jax.export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype), jax.ShapeDtypeStruct(KERNEL.shape, KERNEL.dtype)]
    check = jax.export.DisabledSafetyCheck.custom_call
    exported = jax.export.export(jax.jit(fast), disabled_checks=[check("jsc_ecr")])(*types[:arguments])
    same(exported.call(*(X, KERNEL)[:arguments]), function(X))


def test_sizes_that_are_not_known() -> None:
    (h,) = jax.export.symbolic_shape("h")
    (row,) = fast.report(jax.ShapeDtypeStruct((1, h, 8, 16), jnp.float32)).rows  # type: ignore[attr-defined]
    assert row.reason == "its sizes are not known yet"


def test_effects_stay_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def printing(x: jax.Array) -> jax.Array:
        jax.debug.print("before {}", x.shape[0], ordered=True)
        y = function(x)
        jax.debug.print("after {}", y.shape[0], ordered=True)
        return y

    same(jax.jit(jsc.accelerate(printing))(X), function(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["before", "4", "after", "4"]


def test_keys_and_what_is_no_array() -> None:
    def noisy(key: jax.Array, x: jax.Array, mode: str, rate: float = 0.5) -> Any:
        return {mode: function(x) * jax.random.bernoulli(key, rate, x.shape)}

    wanted = noisy(jax.random.key(0), X, "a")
    found = jsc.accelerate(noisy)(jax.random.key(0), X, "a")
    same(found["a"], wanted["a"])


CALLS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "keywords": lambda: (fast(x=X, kernel=2 * KERNEL), function(X, 2 * KERNEL)),
    "arrays of numpy": lambda: (fast(np.asarray(X)), function(X)),
    "vmap over kernels": lambda: (
        jax.vmap(lambda kernel: fast(X, kernel))(jnp.stack([KERNEL, -KERNEL])),
        jnp.stack([function(X), function(X, -KERNEL)]),
    ),
    "linearize": lambda: (jax.linearize(fast, X)[0], function(X)),
    "a derivative by weights": lambda: (
        jax.grad(lambda kernel: jsc.accelerate(lambda x: function(x, kernel))(X).sum())(KERNEL),
        jax.grad(lambda kernel: function(X, kernel).sum())(KERNEL),
    ),
    "a second derivative": lambda: (
        jax.hessian(lambda x: (fast(x) ** 2).sum())(X[:1, :2, :1]),
        jax.hessian(lambda x: (function(x) ** 2).sum())(X[:1, :2, :1]),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    found, wanted = CALLS[name]()
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_methods() -> None:
    class Model:
        scale = 2

        @jsc.accelerate
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.scale * function(x)

    same(jax.jit(Model())(X), 2 * function(X))


def test_settings() -> None:
    with jax.disable_jit():
        same(fast(X[:1]), function(X[:1]))
    with jax.numpy_rank_promotion("raise"):
        shaped = lambda x: jsc.conv(x, KERNEL) * 2 + MEAN[None, None, None]  # noqa: E731
        same(jax.jit(jsc.accelerate(shaped))(X), shaped(X))
    with jax.checking_leaks():
        same(jax.jit(jsc.accelerate(lambda x: function(x)))(X), function(X))
    with jax.enable_x64(True):
        assert jax.jit(fast)(X.astype(jnp.float64), KERNEL.astype(jnp.float64)).dtype == jnp.float64
