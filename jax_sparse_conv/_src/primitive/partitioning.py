"""How the primitive runs on several devices under `jit`: images and output channels are split, nothing else.

A custom call that the partitioner knows nothing of is right on sharded operands, but gathers them first. Here the
partitioner learns that images N (with their kernels S) and output channels K are independent. Each device then runs
the same custom call on its part, without communication.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

Function = Callable[..., jax.Array]


def is_partitioned(ctx: Any) -> bool:
    """Whether a lowering is for several devices that the compiler splits work over (not inside `shard_map`)."""
    axes = ctx.module_context.axis_context
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1


def is_exported(ctx: Any) -> bool:
    """Whether a lowering is for `jax.export`, which keeps no callbacks, such as the ones that `partitioned` has."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def with_mesh(ctx: Any) -> Any:
    """A lowering's context that names the axes of a mesh, which `partitioned` has to know.

    JAX names none where no operand lies on a mesh, as under `jax.set_mesh` with arrays of one device.
    """
    axes = ctx.module_context.axis_context
    if axes.abstract_mesh is not None and not axes.abstract_mesh.empty:
        return ctx
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size != axes.num_devices:
        sizes = _factors(axes.num_devices)  # so that any split is one over some of the axes
        mesh = AbstractMesh(sizes, tuple(f"axis{index}" for index in range(len(sizes))))
    named = dataclasses.replace(axes, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=named))


def _factors(number: int) -> tuple[int, ...]:
    """Primes whose product it is."""
    least = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return () if least is None else (least, *_factors(number // least))


@functools.lru_cache(maxsize=4096)
def partitioned(
    function: Function,
    *,
    stacks: int,
    images: int,
    one_group: bool,
    has_bias: bool,
    has_residual: bool,
    has_nonzeros: bool,
) -> Function:
    """`function` on x [N, H, W, C], kernel [S, kh, kw, C/g, K], bias [S, K], residual [N, Ho, Wo, K], with a rule.

    Counts of non-zeros [parts, 2] come last and stay whole.

    With one kernel, N is split; with S of them, S is split and the images of each go along. Groups tie K to C, so K is
    split only where there is one group.
    """

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del arg_shapes
        spec = tuple(result_shape.sharding.spec) + (None,) * 4
        kernels, batch = _split_images(mesh, spec[0], stacks, images)
        out_channels = spec[3] if one_group else None
        operands = [PartitionSpec(batch, None, None, None), PartitionSpec(kernels, None, None, None, out_channels)]
        operands += [PartitionSpec(kernels, out_channels)] * has_bias
        operands += [PartitionSpec(batch, None, None, out_channels)] * has_residual
        operands += [PartitionSpec(None, None)] * has_nonzeros
        result = PartitionSpec(batch, None, None, out_channels)
        return mesh, function, NamedSharding(mesh, result), tuple(NamedSharding(mesh, o) for o in operands)

    per_stack = images // stacks
    # A factor of size 1 must not be part of a product.
    batch_factors = "n" if stacks == 1 else "s" if per_stack == 1 else "(s n)"
    terms = [f"{batch_factors} h w c", "s i j d k"] + ["s k"] * has_bias + [f"{batch_factors} p q k"] * has_residual
    terms += ["u v"] * has_nonzeros
    rule = f"{', '.join(terms)} -> {batch_factors} p q k"
    # Factors that stay whole, in order of appearance, as the rule's verifier wants them.
    appearance = dict.fromkeys(letter for letter in rule if letter.isalpha())
    split = {"n" if stacks == 1 else "s"} | ({"k"} if one_group else set())
    wrapped = custom_partitioning(function)
    wrapped.def_partition(
        partition=partition,
        sharding_rule=rule,
        need_replication_factors=tuple(factor for factor in appearance if factor not in split),
        **({"n": per_stack} if batch_factors == "(s n)" else {}),
    )
    return wrapped


def _split_images(mesh: Any, wanted: Any, stacks: int, images: int) -> tuple[Any, Any]:
    """Mesh axes over the kernels and over the images, of those `wanted` over the images.

    Images lie kernel by kernel, so leading axes split the kernels; once each part has one kernel, further axes split
    that kernel's images. An axis that divides neither is dropped, and the images are gathered along it.
    """
    if stacks == 1 or wanted is None:
        return None, wanted
    names = wanted if isinstance(wanted, tuple) else (wanted,)
    over_stacks: list[Any] = []
    over_images: list[Any] = []
    parts = 1
    for name in names:
        size = mesh.shape[name]
        whole = stacks if parts < stacks else images
        if whole % (parts * size):
            break
        (over_stacks if parts < stacks else over_images).append(name)
        parts *= size
    return tuple(over_stacks) or None, tuple(over_stacks + over_images) or None
