"""Run by test_partitioning.py in a process of its own with two CPU devices; asserts, and prints what it checked.

Derivatives of pools whose maps are split: values against one device's, and what the program sends.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_explicit import COLLECTIVES

import jax_sparse_conv as jsc
from jax_sparse_conv._src.primitive import max_pool, reference
from jax_sparse_conv._src.problem.geometry import Pool

APART = Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)))
OVERLAPPING = Pool("max", (3, 3), (2, 2), ((1, 1), (0, 1)))
X = np.random.default_rng(0).integers(-9, 9, (4, 8, 8, 32)).astype(np.float32)
NHWC: Any = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
CALLS = ("jsc_max_pool_gradient", "jsc_max_pool_tangent")


def loss(x: Any, pool: Pool) -> Any:
    return (max_pool.pool(x, pool) ** 2).sum()


def derivatives(pool: Pool) -> dict[str, Callable[..., Any]]:
    """Backward, forward, and second ones; where one is of the other, XLA keeps no call of the former."""
    gradient = jax.grad(functools.partial(loss, pool=pool))
    return {
        "backward": gradient,
        "forward": lambda x: jax.jvp(lambda x: max_pool.pool(x, pool), (x,), (x,))[1],
        "second": lambda x: jax.grad(lambda x: (gradient(x) ** 2).sum())(x),
        "of each image": lambda x: jax.vmap(lambda x: gradient(x[None])[0])(x),
    }


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((2,), ("a",), axis_types=(kind,))


def check(pool: Pool, split: P, over: Any, *, sends: bool) -> None:
    x = jax.device_put(X, NamedSharding(over, split))
    for name, function in derivatives(pool).items():
        compiled = jax.jit(function).lower(x).compile()
        text = compiled.as_text()
        assert any(call in text for call in CALLS), (pool, split, name)
        assert any(each in text for each in COLLECTIVES) is sends, (pool, split, name)
        found = compiled(x)
        np.testing.assert_array_equal(found, function(X), f"{pool} {split} {name}")
        if not sends:
            assert found.sharding.is_equivalent_to(x.sharding, 4), (pool, split, name)


def check_jit() -> None:
    for pool in (APART, OVERLAPPING):
        for split in (P("a"), P(None, None, None, "a")):
            check(pool, split, mesh(AxisType.Auto), sends=False)
    for split in (P(None, "a"), P(None, None, "a")):
        check(APART, split, mesh(AxisType.Auto), sends=False)
        check(OVERLAPPING, split, mesh(AxisType.Auto), sends=True)
    print("jit")


def check_explicit() -> None:
    over = mesh(AxisType.Explicit)
    wanted = {pool: {name: f(X) for name, f in derivatives(pool).items()} for pool in (APART, OVERLAPPING)}
    with jax.set_mesh(over):
        for pool in (APART, OVERLAPPING):
            for split in (P("a"), P(None, None, None, "a"), P(None, "a")):
                x = jax.device_put(X, split)
                for name, function in derivatives(pool).items():
                    found = jax.jit(function)(x)
                    np.testing.assert_array_equal(found, wanted[pool][name], f"{pool} {split} {name}")
        check_a_loop()
    print("explicit types")


def check_a_loop() -> None:
    """Behind a pool the type is what it was in front of the convolution, as it is in lax."""

    def body(_: Any, x: Any) -> Any:
        y = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **NHWC))
        return lax.reduce_window(y, -np.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    kernel = np.full((3, 3, 16, 16), 0.01, np.float32)
    for split in (P("a"), P(None, "a"), P(None, None, "a")):
        x = jax.device_put(np.ones((4, 8, 8, 16), np.float32), split)
        loop = functools.partial(lax.fori_loop, 0, 2, body)
        fast = jsc.jit_inference(lambda _, x: loop(x), ())  # noqa: B023
        assert jax.typeof(fast(x)) == jax.typeof(jax.jit(loop)(x))
        np.testing.assert_allclose(fast(x), jax.jit(loop)(x), rtol=1e-5)


def check_shard_map() -> None:
    over = mesh(AxisType.Auto)
    for pool in (APART, OVERLAPPING):
        local = jax.shard_map(functools.partial(loss_of_part, pool=pool), mesh=over, in_specs=P("a"), out_specs=P())
        np.testing.assert_array_equal(jax.jit(jax.grad(local))(X), derivatives(pool)["backward"](X))
    print("shard_map")


def loss_of_part(x: Any, pool: Pool) -> Any:
    return jax.lax.psum(loss(x, pool), "a")


def check_conv_pool() -> None:
    """A training step's: the convolution's own gradient is split, too."""
    kernel = np.random.default_rng(1).standard_normal((3, 3, 32, 16)).astype(np.float32)
    options: Any = {"window_shape": 3, "window_strides": 2, "window_padding": 1, "precision": "highest"}

    def step(x: Any, kernel: Any, implementation: str | None) -> Any:
        of = lambda kernel: (jsc.conv_pool(x, kernel, implementation=implementation, **options) ** 2).sum()  # noqa: E731
        return jax.grad(of)(kernel)

    x = jax.device_put(X, NamedSharding(mesh(AxisType.Auto), P("a")))
    found = jax.jit(functools.partial(step, implementation=None))(x, kernel)
    np.testing.assert_allclose(found, step(X, kernel, "xla"), rtol=1e-3, atol=1e-2)
    print("conv_pool")


def check_windows_that_overlap() -> None:
    """Split along height or width, few channels, too: XLA's own gradient of such a pool is wrong there."""
    x = np.random.default_rng(2).standard_normal((1, 6, 14, 5)).astype(np.float32)
    for channels, implementation in itertools.product((1, 16), (None, "ecr")):
        kernel = np.random.default_rng(3).standard_normal((2, 2, 5, channels)).astype(np.float32)
        for window, strides in ((2, 1), ((1, 3), (1, 2))):
            options: Any = {"window_shape": window, "window_strides": strides, "precision": "highest"}

            def loss(x: Any, kernel: Any, of: str | None, options: Any = options) -> Any:
                return (jsc.conv_pool(x, kernel, implementation=of, **options) ** 2).sum()

            wanted = jax.grad(loss, (0, 1))(x, kernel, "xla")
            for split in (P(None, "a"), P(None, None, "a")):
                placed = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), split))
                found = jax.jit(jax.grad(functools.partial(loss, of=implementation), (0, 1)))(placed, kernel)
                for each, other in zip(found, wanted, strict=True):
                    np.testing.assert_allclose(each, other, rtol=1e-4, atol=1e-4)
    print("windows that overlap")


def check_one_row() -> None:
    """A pool whose stride is longer than the map has one row: XLA's partitioner slices another, or raises."""
    x = np.random.default_rng(4).standard_normal((2, 4, 4, 3)).astype(np.float32)
    kernel = np.random.default_rng(5).standard_normal((1, 1, 3, 16)).astype(np.float32)
    for implementation, strides in itertools.product(("xla", None, "ecr"), (1, 2)):
        options: Any = {"strides": strides, "padding": "SAME", "window_shape": 2, "window_strides": 4}

        def call(x: Any, kernel: Any, of: str | None = implementation, options: Any = options) -> Any:
            return jsc.conv_pool(x, kernel, implementation=of, precision="highest", **options)

        wanted = call(x, kernel, "xla")
        for split in (P(None, "a"), P(None, None, "a")):
            placed = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), split))
            np.testing.assert_allclose(jax.jit(call)(placed, kernel), wanted, rtol=1e-5, atol=1e-5)
    print("one row")


def check_averages() -> None:
    """Windows that begin with padding alone, over whose gradients XLA's partitioner ended the process."""
    cotangent = np.random.default_rng(1).integers(-9, 9, (4, 6, 8, 3)).astype(np.float32)
    x, strides, padding = X[..., :3], (2, 1), ((4, 0), (0, 1))
    wanted = np.zeros((4, 12, 9, 3))
    for row, column in np.ndindex(cotangent.shape[1:3]):
        window = wanted[:, 2 * row : 2 * row + 2, column : column + 2]
        window += cotangent[:, row : row + 1, column : column + 1] / 4
    wanted = wanted[:, 4:, :8]

    def of_user(x: Any) -> Any:
        total = lax.reduce_window(x, np.float32(0), lax.add, (1, 2, 2, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0)))
        return total / 4

    of_pool = functools.partial(reference.pool, spec=Pool("avg", (2, 2), strides, padding))
    identity = np.eye(3, dtype=np.float32)[None, None]
    of_map = jsc.accelerate(lambda x: of_user(x + lax.conv_general_dilated(x, identity, (1, 1), "SAME", **NHWC)))
    for function, factor in ((of_pool, 1), (of_map, 2)):
        for split in (P(None, "a"), P("a", None, "b"), P(None, "a", "b")):
            over = jax.make_mesh((2, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
            given = [jax.device_put(value, NamedSharding(over, split)) for value in (x, cotangent)]
            found = jax.jit(lambda x, dy, of=function: jax.vjp(of, x)[1](dy)[0])(*given)
            np.testing.assert_allclose(found, factor * wanted, rtol=1e-6, err_msg=str(split))
    print("averages")


def main() -> None:
    check_jit()
    check_averages()
    check_explicit()
    check_shard_map()
    check_conv_pool()
    check_windows_that_overlap()
    check_one_row()


if __name__ == "__main__":
    sys.exit(main())
