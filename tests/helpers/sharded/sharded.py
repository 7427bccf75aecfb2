"""Run by test_partitioning.py in a process of its own with several devices; asserts, and prints what it checked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_explicit import (
    COLLECTIVES,
    check_explicit_derivatives,
    check_explicit_layouts,
    check_explicit_mapped,
    check_explicit_rows,
)

import jax_sparse_conv as jsc
from jax_sparse_conv._src.fusion import block_parameters, dense_blocks
from jax_sparse_conv._src.primitive import primitives


def operands() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((4, 6, 6, 8)), 0).astype(np.float32)
    return x, *(rng.standard_normal(s).astype(np.float32) for s in ((3, 3, 8, 16), (16,), (4, 6, 6, 16)))


def sparse(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
    return jsc.conv(x, kernel, bias, residual=residual, activation="relu", implementation="ecr")


def check(name: str, function: Callable[..., jax.Array], arguments: Any, wanted: Any, no_gather: bool = True) -> None:
    compiled = jax.jit(function).lower(*arguments).compile()
    result = compiled(*arguments)
    np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-4, atol=1e-4)
    text = compiled.as_text()
    assert "jsc_" in text
    if no_gather:
        assert not [c for c in COLLECTIVES if c in text], text
    print(name)


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    """Two devices over the batch and, with four, two over the channels."""
    channels = 2 if jax.device_count() >= 4 else 1
    devices = np.asarray(jax.devices()[: 2 * channels]).reshape(2, channels)
    return jax.sharding.Mesh(devices, ("batch", "channels"), axis_types=(kind,) * 2)


def check_stacked_placements(auto: jax.sharding.Mesh) -> None:
    """vmap over x and kernels, with the images of each kernel split too, or instead: right wherever they lie."""
    rng = np.random.default_rng(1)
    for stacks in (2, 4):
        shapes = ((stacks, 4, 5, 5, 4), (stacks, 3, 3, 4, 8), (stacks, 8), (stacks, 4, 5, 5, 8))
        values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        values[0] = np.maximum(values[0], 0)
        function = jax.jit(jax.vmap(sparse))
        wanted = function(*values)
        for images in (P(None, "batch"), P("batch", "channels"), P(None, ("batch", "channels")), P(("batch",), None)):
            for kernels in (P(), P("batch"), P("channels"), P("batch", None, None, None, "channels")):
                placed = [jax.device_put(v, NamedSharding(auto, P())) for v in values]
                placed[0] = jax.device_put(values[0], NamedSharding(auto, images))
                placed[1] = jax.device_put(values[1], NamedSharding(auto, kernels))
                result = function(*placed)
                np.testing.assert_allclose(
                    np.asarray(result), wanted, rtol=1e-4, atol=1e-4, err_msg=f"{images} {kernels}"
                )
    print("vmap over x and kernel, images split every way")


def check_kernels_split_by_hand(auto: jax.sharding.Mesh) -> None:
    """shard_map with the kernel split and the images not: the gradient of x sums over the devices."""
    x, kernel, _, _ = operands()
    split, columns = P(None, None, None, "channels"), P(None, None, None, "channels")

    def apply(implementation: str) -> Callable[..., jax.Array]:
        local = lambda x, k: jsc.conv(x, k, precision="highest", implementation=implementation)  # noqa: E731
        return jax.shard_map(local, mesh=auto, in_specs=(P(), split), out_specs=columns)

    def gradients(implementation: str) -> Any:
        loss = lambda x, k: (apply(implementation)(x, k) ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(x, kernel)

    for ours, wanted in zip(gradients("ecr"), gradients("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=1e-3, atol=1e-2)
    local = lambda x, k: jsc.conv(x, k, implementation="ecr")  # noqa: E731
    with pytest.raises(ValueError, match="out_specs"):  # the result varies over devices
        jax.shard_map(local, mesh=auto, in_specs=(P(), split), out_specs=P())(x, kernel)
    print("shard_map, kernel split")


def two_layers(x: Any, kernel: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
    """The second takes a side by the counts of the first; the counts are complete, or local under shard_map."""
    y, counts = jsc.conv(x, kernel, bias, activation="relu", implementation="ecr", count_nonzeros=True)
    second = jnp.swapaxes(kernel, 2, 3)
    return jsc.conv(y, second, implementation="adaptive", precision="highest", nonzeros=counts), counts


def check_counts(auto: jax.sharding.Mesh, values: Any, placed: Any) -> None:
    x, kernel, bias, _ = values
    first = jsc.conv(x, kernel, bias, activation="relu", precision="highest", implementation="xla")
    wanted = np.asarray(jsc.conv(first, jnp.swapaxes(kernel, 2, 3), precision="highest", implementation="xla"))
    total = [np.count_nonzero(first), first.size]
    result, counts = jax.jit(two_layers)(*placed[:3])
    np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(np.asarray(counts).sum(0), total)
    manual = jax.shard_map(two_layers, mesh=auto, in_specs=(P("batch"), P(), P()), out_specs=(P("batch"), P("batch")))
    result, counts = jax.jit(manual)(x, kernel, bias)
    np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-4, atol=1e-3)
    nonzeros, elements = np.asarray(counts).sum(0)
    assert abs(nonzeros / elements - total[0] / total[1]) < 0.1
    print("counts and adaptive")


def check_packed_kernels(auto: jax.sharding.Mesh, values: Any, placed: Any, wanted: Any) -> None:
    """The compiler splits the kernel alone; shard_map takes the copy along; a kernel on several devices has none."""
    x, kernel, bias, residual = values
    packed = jax.device_put(jsc.pack(kernel), NamedSharding(auto, P()))
    check("jit, packed kernel", sparse, [placed[0], packed, *placed[2:]], wanted)
    manual = jax.shard_map(sparse, mesh=auto, in_specs=(P("batch"), P(), P(), P("batch")), out_specs=P("batch"))
    check("shard_map, packed kernel", manual, [x, packed, bias, residual], wanted)
    assert jsc.pack(placed[1]).packed is None


def check_arrays_of_no_mesh(auto: jax.sharding.Mesh, values: Any, wanted: Any) -> None:
    """Under `jax.set_mesh` with arrays of one device; a constraint inside splits the images, without gathering."""

    def split(*values: Any) -> jax.Array:
        return sparse(jax.lax.with_sharding_constraint(values[0], P("batch")), *values[1:])

    def accelerated(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jax.nn.relu(y + bias + residual)

    with jax.set_mesh(auto):
        check("set_mesh, arrays of no mesh", sparse, values, wanted)
        check("set_mesh, a constraint inside", split, values, wanted)
        check("set_mesh, accelerate", jsc.accelerate(accelerated), values, wanted, no_gather=False)


def check_dense_block(auto: jax.sharding.Mesh) -> None:
    """Split by the compiler a block and the transition behind it run layer by layer, by hand as one call a device."""
    rng = np.random.default_rng(3)
    shapes = [shape for c in (32, 64) for shape in ((c,), (c,), (1, 1, c, 128), (128,), (3, 3, 128, 32))]
    shapes += [(96,), (96,), (1, 1, 96, 64)]
    parameters = [(rng.standard_normal(s) / np.sqrt(s[-1] * len(s))).astype(np.float32) for s in shapes]
    x = rng.standard_normal((4, 6, 6, 32)).astype(np.float32)
    precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    wanted = np.asarray(dense_blocks.separate(x, *parameters, precision=precision, packed=None, implementation="xla"))

    def block(x: Any, *parameters: Any) -> jax.Array:
        operands = primitives.same_varying_axes([x, *parameters])
        out: jax.Array = dense_blocks.dense_block_p.bind(*operands, precision=precision, must=False, packed=None)
        return out

    placed = [jax.device_put(x, NamedSharding(auto, P("batch"))), *parameters]
    check("jit, dense block", block, placed, wanted)
    manual = jax.shard_map(block, mesh=auto, in_specs=(P("batch"), *[P()] * len(parameters)), out_specs=P("batch"))
    check("shard_map, dense block", manual, [x, *parameters], wanted)
    packed = jsc.pack_dense_block(*block_parameters.parts_of(parameters))

    def packed_block(x: Any, packed: Any) -> jax.Array:
        operands = primitives.same_varying_axes([x, packed.values])
        out: jax.Array = dense_blocks.dense_block_p.bind(
            *operands, precision=precision, must=False, packed=packed.sizes
        )
        return out

    check("jit, packed dense block", packed_block, [placed[0], packed], wanted)
    manual = jax.shard_map(packed_block, mesh=auto, in_specs=(P("batch"), P()), out_specs=P("batch"))
    check("shard_map, packed dense block", manual, [x, packed], wanted)


def check_formats(explicit: jax.sharding.Mesh, values: Any) -> None:
    """Compressed maps of each device's images, of explicit types and by hand."""
    x, kernel, _, _ = values
    tiles = functools.partial(jsc.CooStar.fromdense, tile=(2, 2, 4))
    windows = jax.jit(lambda x, k: jsc.ECR.fromdense(x, 3).conv(k))
    pooled = jax.jit(lambda x, k: jsc.PECR.fromdense(x, 3).conv_pool(k))
    loss = lambda x: (tiles(x).values ** 2).sum() + (tiles(x).todense() ** 3).sum()  # noqa: E731
    derivative = jax.jit(jax.grad(loss))
    gradient = np.asarray(derivative(x))
    wanted = tiles(x), np.asarray(windows(x, kernel)), np.asarray(pooled(x, kernel))
    with jax.set_mesh(explicit):
        for spec in (P("batch"), P("batch", "channels"), P(("batch", "channels"))):
            placed = jax.device_put(x, spec)
            ours = tiles(placed)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours, wanted[0])
            assert jax.typeof(ours.values).sharding.spec[0] == spec[0]
            assert jax.typeof(ours.todense()).sharding.spec[0] == spec[0]
            np.testing.assert_array_equal(np.asarray(ours.todense()), x)
            np.testing.assert_allclose(np.asarray(derivative(placed)), gradient, rtol=1e-5)
        placed = jax.device_put(x, P("batch")), jax.device_put(kernel, P(None, None, None, "channels"))
        text = jax.jit(tiles).lower(placed[0]).compile().as_text()
        assert "jsc_coo_fromdense" in text
        assert not [c for c in COLLECTIVES if c in text], text
        for function, expected in zip((windows, pooled), wanted[1:], strict=True):
            result = function(*placed)
            assert tuple(jax.typeof(result).sharding.spec) == ("batch", None, None, "channels")
            np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="'batch' cannot split the result's output channels"):
            windows(placed[0], jax.device_put(kernel, P(None, None, None, "batch")))
    auto = mesh(AxisType.Auto)
    by_hand = functools.partial(jax.shard_map, mesh=auto, out_specs=P("batch"))
    result = jax.jit(by_hand(lambda x: tiles(x).todense(), in_specs=P("batch")))(x)
    np.testing.assert_array_equal(np.asarray(result), x)
    result = by_hand(windows, in_specs=(P("batch"), P()))(x, kernel)
    np.testing.assert_allclose(np.asarray(result), wanted[1], rtol=1e-4, atol=1e-4)
    print("compressed maps")


def check_export(auto: jax.sharding.Mesh, values: Any, placed: Any) -> None:
    """What `jit` splits is exported as lax computes it; calls by hand, and on one device, are native ones."""
    checks = [jax.export.DisabledSafetyCheck.custom_call("jsc_ecr")]
    wanted = np.asarray(jsc.conv(*values[:3], precision="highest", implementation="xla"))
    shardings = [value.sharding for value in placed[:3]]

    def exported(function: Callable[..., jax.Array]) -> str:
        program = jax.export.export(jax.jit(function, in_shardings=shardings), disabled_checks=checks)(*placed[:3])
        assert program.nr_devices == auto.size
        result = jax.jit(program.call)(*placed[:3])
        np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-4, atol=1e-4)
        return program.mlir_module()

    text = exported(lambda *v: jsc.conv(*v, precision="highest"))
    assert "@jsc_" not in text
    assert "CustomSPMDPartitioning" not in text
    native = lambda *v: jsc.conv(*v, precision="highest", implementation="ecr")  # noqa: E731
    with pytest.raises(ValueError, match=r"implementation='ecr' cannot be exported .* jax.shard_map"):
        exported(native)
    manual = jax.shard_map(native, mesh=auto, in_specs=(P("batch"), P(), P()), out_specs=P("batch"))
    assert "@jsc_ecr" in exported(manual)
    alone = jax.export.export(jax.jit(native), disabled_checks=checks)(*values[:3])
    assert "@jsc_ecr" in alone.mlir_module()
    print("export")


def main() -> None:
    values = operands()
    x, kernel, bias, residual = values
    wanted = np.asarray(
        jsc.conv(x, kernel, bias, residual=residual, activation="relu", precision="highest", implementation="xla")
    )
    auto = mesh(AxisType.Auto)
    specs = (P("batch"), P(None, None, None, "channels"), P("channels"), P("batch", None, None, "channels"))
    placed = [jax.device_put(v, NamedSharding(auto, s)) for v, s in zip(values, specs, strict=True)]
    check("jit, images and channels split", sparse, placed, wanted)

    chosen = lambda x, k, b, r: jsc.conv(x, k, b, residual=r, activation="relu", precision="highest")  # noqa: E731
    check("jit, implementation=None", chosen, placed, wanted)

    groups = jsc.conv(x, kernel[:, :, :4], feature_group_count=2, precision="highest", implementation="xla")
    grouped = lambda x, k: jsc.conv(x, k, feature_group_count=2, implementation="ecr")  # noqa: E731
    check("jit, groups", grouped, [placed[0], kernel[:, :, :4]], groups)

    pooled = np.asarray(jsc.conv_pool(x, kernel, bias, precision="highest", implementation="xla"))
    pool = lambda x, k, b: jsc.conv_pool(x, k, b, implementation="pecr")  # noqa: E731
    check("jit, conv_pool", pool, placed[:3], pooled)

    stacks = np.stack([kernel, -kernel])
    stack_sharding = NamedSharding(auto, P("batch"))
    both = [jax.device_put(v, stack_sharding) for v in (np.stack([x, 2 * x]), stacks)]
    mapped = jax.vmap(lambda x, k: jsc.conv(x, k, implementation="ecr"))
    both_wanted = jax.vmap(lambda x, k: jsc.conv(x, k, precision="highest", implementation="xla"))(*both)
    check("vmap over x and kernel, both split", mapped, both, np.asarray(both_wanted))
    ones = [jax.device_put(v, stack_sharding) for v in (x[:2, None], stacks)]
    one_wanted = jnp.concatenate([both_wanted[0, :1], both_wanted[1, 1:2] / 2])[:, None]
    check("vmap over x and kernel, one image each", mapped, ones, np.asarray(one_wanted))

    check_stacked_placements(auto)

    gradient = lambda k: jax.grad(lambda k: (sparse(placed[0], k, bias, residual) ** 2).sum())(k)  # noqa: E731
    dense_gradient = jax.grad(
        lambda k: (
            jnp.maximum(jsc.conv(x, k, bias, precision="highest", implementation="xla") + residual, 0) ** 2
        ).sum()
    )(kernel)
    check("grad", gradient, [kernel], np.asarray(dense_gradient), no_gather=False)

    manual = jax.shard_map(sparse, mesh=auto, in_specs=(P("batch"), P(), P(), P("batch")), out_specs=P("batch"))
    check("shard_map", manual, values, wanted)

    def loss(kernel: Any, x: Any, residual: Any) -> jax.Array:
        return jax.lax.psum((sparse(x, kernel, bias, residual) ** 2).sum(), ("batch",))

    manual_loss = jax.shard_map(loss, mesh=auto, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    check("grad through shard_map", jax.grad(manual_loss), (kernel, x, residual), dense_gradient, no_gather=False)

    check_kernels_split_by_hand(auto)

    check_counts(auto, values, placed)

    check_packed_kernels(auto, values, placed, wanted)

    check_dense_block(auto)

    check_arrays_of_no_mesh(auto, values, wanted)

    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        typed = [jax.device_put(v, s) for v, s in zip(values, specs, strict=True)]
        result = jax.jit(sparse)(*typed)
        assert tuple(jax.typeof(result).sharding.spec) == ("batch", None, None, "channels"), jax.typeof(result)
        np.testing.assert_allclose(np.asarray(result), wanted, rtol=1e-4, atol=1e-4)
        y, counts = jax.jit(lambda *v: jsc.conv(*v, count_nonzeros=True, implementation="ecr"))(*typed[:3])
        assert np.asarray(counts).sum(0).tolist() == [np.count_nonzero(y), y.size]
        print("explicit sharding")
        check_explicit_derivatives(values)
        check_explicit_layouts(values)
        check_explicit_rows(values)
        check_explicit_mapped(values)

    check_formats(explicit, values)

    check_export(auto, values, placed)


if __name__ == "__main__":
    sys.exit(main())
