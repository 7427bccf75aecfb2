"""The part of `sharded.py` for arrays whose types say how they are split (`AxisType.Explicit`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_sparse_conv as jsc

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def check_explicit_derivatives(values: Any) -> None:
    """By all operands, split as they are; groups too, whose gradients XLA's partitioner doubles on such a mesh."""

    def gradients(implementation: str | None, groups: int, arguments: Any) -> Any:
        def loss(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
            y = jsc.conv(
                x,
                kernel,
                bias,
                residual=residual,
                feature_group_count=groups,
                activation="relu",
                precision="highest",
                implementation=implementation,
            )
            return (y**2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arguments)

    channels = P(None, None, None, "channels")
    layouts: tuple[tuple[P, P, P, P], ...] = (
        (P("batch"), channels, P("channels"), P("batch", None, None, "channels")),
        (P("batch"), channels, P("batch"), P(None, "channels")),
        (P("batch", "channels"), P(), P(), P("batch")),
        (P("batch", None, None, "channels"), P(None, None, "channels"), P(), P()),
    )
    for groups in (1, 2):
        arguments = [values[0], values[1][:, :, : 8 // groups], *values[2:]]
        with jax.set_mesh(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("one",))):
            wanted = gradients("xla", groups, arguments)
        for specs in layouts[: 4 if groups == 1 else 3]:
            placed = [jax.device_put(v, s) for v, s in zip(arguments, specs, strict=True)]
            for implementation in ("ecr", None):
                for ours, theirs, given in zip(gradients(implementation, groups, placed), wanted, placed, strict=True):
                    assert jax.typeof(ours) == jax.typeof(given)
                    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-3, atol=1e-2)
    print("explicit sharding, derivatives")


def check_explicit_layouts(values: Any) -> None:
    """One axis of the mesh for images and output channels; sums left open; a kernel split for lax."""
    x, kernel = jax.device_put(values[0], P("batch")), values[1]
    same = jax.device_put(kernel, P(None, None, None, "batch"))
    for implementation in ("ecr", "xla", None):
        with pytest.raises(
            ValueError, match=r"P\('batch', .*P\(None, None, None, 'batch'\).*jax.sharding.reshard\(kernel"
        ):
            jsc.conv(x, same, implementation=implementation)
    reduced = jax.sharding.reshard(same, P(reduced={"channels"}))
    with pytest.raises(ValueError, match=r"kernel is split as .*reduced"):
        jsc.conv(x, reduced, implementation="ecr")
    split = jax.device_put(kernel, P(None, None, None, "channels"))
    result = jsc.conv(x, split, precision="highest", implementation="xla")
    assert tuple(jax.typeof(result).sharding.spec) == ("batch", None, None, "channels")
    wanted = jsc.conv(values[0], kernel, precision="highest", implementation="xla")
    np.testing.assert_allclose(np.asarray(result), np.asarray(wanted), rtol=1e-4, atol=1e-4)
    print("explicit sharding, layouts")


def check_explicit_rows(values: Any) -> None:
    """Rows of every leading axis, where they lie."""
    x, kernel = values[0], values[1][0, 0]

    def product(x: Any, kernel: Any, implementation: str | None) -> jax.Array:
        return jsc.dense(x, kernel, activation="relu", precision="highest", implementation=implementation)

    wanted = np.maximum(np.einsum("nhwc,cd->nhwd", x, kernel), 0)
    by_x, by_kernel = jax.jit(jax.grad(lambda x, k: (product(x, k, "xla") ** 2).sum(), (0, 1)))(x, kernel)
    for rows, columns in (
        (P("batch", "channels"), P()),
        (P(None, "channels", "batch"), P()),
        (P(("batch", "channels")), P()),
        (P(None, "batch"), P(None, "channels")),
        (P(), P(None, "channels")),
        (P("batch", None, None, "channels"), P("channels")),  # gathered
    ):
        placed = jax.device_put(x, rows), jax.device_put(kernel, columns)
        for implementation in ("ecr", None, "xla"):
            function = jax.jit(functools.partial(product, implementation=implementation))
            compiled = function.lower(*placed).compile()
            np.testing.assert_allclose(np.asarray(compiled(*placed)), wanted, rtol=1e-4, atol=1e-4)
            split = (*jax.typeof(placed[0]).sharding.spec[:3], jax.typeof(placed[1]).sharding.spec[1])
            assert tuple(jax.typeof(compiled(*placed)).sharding.spec) == split
            text = compiled.as_text()
            assert columns == P("channels") or not [c for c in COLLECTIVES if c in text], text
            loss = lambda x, k: (product(x, k, implementation) ** 2).sum()  # noqa: B023, E731
            for ours, theirs in zip(jax.jit(jax.grad(loss, (0, 1)))(*placed), (by_x, by_kernel), strict=True):
                np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"P\(None, 'batch', None, None\) and kernel as P\(None, 'batch'\)"):
        product(jax.device_put(x, P(None, "batch")), jax.device_put(kernel, P(None, "batch")), "ecr")
    print("explicit sharding, dense")


def check_explicit_mapped(values: Any) -> None:
    """`vmap` over an axis that one axis of the mesh splits, of images that the other splits: both stay as they are."""
    x, kernel, bias = np.stack([values[0], -2 * values[0]]), values[1], values[2]

    def mapped(x: Any, kernel: Any, bias: Any, implementation: str | None) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            y = jsc.conv(x, kernel[..., :8], bias[:8], residual=x, precision="highest", implementation=implementation)
            pool = "pecr" if implementation == "ecr" else implementation
            return x + y, jsc.conv_pool(x, kernel, bias, precision="highest", implementation=pool)

        return jax.vmap(one)(x)

    wanted = jax.jit(functools.partial(mapped, implementation="xla"))(x, kernel, bias)
    for spec in (P("batch", "channels"), P("channels", "batch")):
        placed = jax.device_put(x, spec)
        for implementation in ("ecr", None, "xla"):
            found = jax.jit(functools.partial(mapped, implementation=implementation))(placed, kernel, bias)
            for ours, theirs in zip(found, wanted, strict=True):
                assert tuple(jax.typeof(ours).sharding.spec)[:2] == tuple(spec)
                np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-4)
    print("explicit sharding, mapped")


def _calls(implementation: str | None) -> dict[str, Callable[..., Any]]:
    """Of x [N, H, W, C], kernel [3, 3, C, K], bias [K] and residual [N, H, W, K], all of which a case may take."""
    settings: Any = {"implementation": implementation}
    pooled: Any = {"implementation": "pecr" if implementation == "ecr" else implementation}
    numbers = ("NHWC", "HWIO", "NHWC")

    def conv(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
        return jsc.conv(x, kernel, bias, residual=residual, activation="relu", **settings)

    def like_lax(x: Any, kernel: Any, *_: Any) -> jax.Array:
        return jsc.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)

    def second(*values: Any) -> jax.Array:
        return jax.grad(lambda *values: (conv(*values) ** 3).sum())(*values)

    def mapped_twice(x: Any, kernel: Any, *rest: Any) -> jax.Array:
        return jax.vmap(lambda x: second(x, kernel, *rest))(jax.numpy.stack([x, 2 * x]))

    return {
        "conv": conv,
        "pool": lambda x, kernel, bias, _: jsc.conv_pool(x, kernel, bias, **pooled),
        "like lax": like_lax,
        "dense": lambda x, kernel, bias, _: jsc.dense(x, kernel[0, 0], bias, activation="relu", **settings),
        "rows mapped": lambda x, kernel, bias, _: jax.vmap(lambda x: jsc.dense(x, kernel[0, 0], bias, **settings))(x),
        "kernels mapped": lambda x, kernel, *rest: jax.vmap(lambda kernel: conv(x, kernel, *rest))(
            jax.numpy.stack([kernel, -kernel])
        ),
        "second": second,
        "mapped twice": mapped_twice,
    }


def check_inside_shard_map() -> None:
    """`shard_map` over one axis of a mesh of two: values and gradients by all operands, in float64."""
    rng = np.random.default_rng(2)
    shapes = ((4, 4, 8, 4), (3, 3, 4, 8), (8,), (4, 4, 8, 8))
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    by_hand = (P("rows"), P(), P(), P("rows"))
    layouts = {
        "images": (P(("rows", "more")), P(), P(), P(("rows", "more"))),
        "columns": (P("rows", None, "more"), P(), P(), P("rows")),
        "input channels": (P("rows", None, None, "more"), P(None, None, "more"), P(), P("rows")),
        "output channels": (P("rows"), P(None, None, None, "more"), P("more"), P("rows")),
    }

    def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *values: (call(*values) ** 2).sum(), (0, 1, 2, 3))

    @functools.cache
    def wanted(name: str) -> Any:
        return jax.jit(with_gradients(_calls("xla")[name]))(*values)

    def check(name: str, layout: str, kind: AxisType, implementation: str | None = "ecr", jit: bool = True) -> None:
        wanted(name)  # outside of the mesh
        with jax.set_mesh(jax.sharding.Mesh(devices, ("rows", "more"), axis_types=(AxisType.Explicit, kind))):
            shardings = [NamedSharding(jax.sharding.get_mesh(), spec) for spec in layouts[layout]]
            placed = jax.device_put(values, shardings)
            function = jax.shard_map(
                with_gradients(_calls(implementation)[name]), in_specs=by_hand, out_specs=by_hand, axis_names={"rows"}
            )
            for ours, theirs in zip((jax.jit(function) if jit else function)(*placed), wanted(name), strict=True):
                error = np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) / max(np.linalg.norm(theirs), 1e-300)
                assert error < 1e-13, (name, layout, kind, implementation, error)

    with jax.enable_x64(True):
        values = [rng.standard_normal(shape) for shape in shapes]
        values[0] = np.maximum(values[0], 0)
        for layout in layouts:
            check("conv", layout, AxisType.Explicit)
        for name in ("pool", "like lax", "dense", "second", "mapped twice"):
            check(name, "columns", AxisType.Explicit)
        for name in ("rows mapped", "kernels mapped"):
            check(name, "images", AxisType.Explicit)
        for name in ("conv", "second"):
            check(name, "columns", AxisType.Explicit, "xla")
        check("pool", "output channels", AxisType.Explicit, None)
        check("conv", "columns", AxisType.Explicit, jit=False)
        check("conv", "columns", AxisType.Auto)
    print("inside shard_map")
