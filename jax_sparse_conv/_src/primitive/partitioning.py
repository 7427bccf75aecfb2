"""How the primitive runs on several devices under `jit`, as `split` decides.

A custom call that the partitioner knows nothing of is right on sharded operands, but gathers them first. Here the
partitioner learns what can be split. Each device then runs the same custom call on its part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_sparse_conv._src.primitive import reference
from jax_sparse_conv._src.primitive.primitives import Config, Operands, bias_per_image
from jax_sparse_conv._src.primitive.split import Split, within

Function = Callable[..., jax.Array]
Run = Callable[..., jax.Array]  # (*operands, config=), of one device


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
def partitioned(run: Run, config: Config, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> Function:
    """`run(*operands, config=)` with the rule of how it is split; operands as in `primitives`, packed left out."""

    def split(mesh: Any, arguments: Any, result: Any) -> Split:
        specs = (_entries(arguments[0]), _entries(arguments[1]), _entries(result))
        return Split.of(config.geometry, (x_shape, kernel_shape), specs, mesh.shape)

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        found = split(mesh, arguments, result)
        operands = tuple(NamedSharding(mesh, spec) for spec in _specs(found, config))
        in_parts = found.in_channels or found.pads(config.geometry.pool)
        local = functools.partial(_in_parts if in_parts else _at_once, split=found, run=run, config=config)
        return mesh, _as_wide(local), NamedSharding(mesh, found.result), operands

    def infer(mesh: Any, arguments: Any, result: Any) -> NamedSharding:
        """For GSPMD, which knows no rules."""
        return NamedSharding(mesh, split(mesh, arguments, result).result)

    wrapped = custom_partitioning(lambda *operands: run(*operands, config=config))
    batch, counts = _batch(x_shape[0], kernel_shape[0]), ["u v"] * config.has_nonzeros
    terms = [f"{batch} h w c", _window(config), *["s k"] * config.has_bias]
    terms += [f"{batch} h w k"] * config.has_residual + counts
    rule = _rule(f"{', '.join(terms)} -> {batch} h w k", config, x_shape[0], kernel_shape[0])
    wrapped.def_partition(partition=partition, infer_sharding_from_operands=infer, **rule)
    return wrapped


@functools.lru_cache(maxsize=4096)
def partitioned_gradient(gradient: Function, config: Config, x_shape: tuple[int, ...], kernel: Any) -> Function:
    """`gradient(x, cotangent, config=, kernel=)` of a kernel of that type, with the rule of how it is split."""

    def split(mesh: Any, arguments: Any, result: Any) -> Split:
        specs = (_entries(arguments[0]), _entries(result), _entries(arguments[1]))
        return Split.of(config.geometry, (x_shape, kernel.shape), specs, mesh.shape)

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        found = split(mesh, arguments, result)
        operands = NamedSharding(mesh, found.x), NamedSharding(mesh, found.result)
        local = functools.partial(
            _gradient_in_parts, split=found, gradient=gradient, config=config, kernel=kernel, sizes=arguments[1].shape
        )
        return mesh, _as_wide(local), NamedSharding(mesh, found.kernel), operands

    def infer(mesh: Any, arguments: Any, result: Any) -> NamedSharding:
        return NamedSharding(mesh, split(mesh, arguments, result).kernel)

    wrapped = custom_partitioning(lambda x, cotangent: gradient(x, cotangent, config=config, kernel=kernel))
    batch, window = _batch(x_shape[0], kernel.shape[0]), _window(config)
    rule = _rule(f"{batch} h w c, {batch} h w k -> {window}", config, x_shape[0], kernel.shape[0])
    wrapped.def_partition(partition=partition, infer_sharding_from_operands=infer, **rule)
    return wrapped


def _gradient_in_parts(
    x: jax.Array, cotangent: jax.Array, *, split: Split, gradient: Function, config: Config, kernel: Any, sizes: Any
) -> jax.Array:
    """What this device's part of the result gives, then the sum over devices, in float32 at least."""
    here = dataclasses.replace(config.geometry, padding=split.unpadded(config.geometry.padding))
    for dimension, names in enumerate((split.images, *split.pixels)):
        cotangent = within(cotangent, dimension, names, sizes[dimension])
    x = split.read(within(x, 0, split.images, sizes[0]))
    stacks = kernel.shape[0] // lax.axis_size(split.kernels)
    shape = (stacks, *kernel.shape[1:3], x.shape[3] // config.geometry.groups, cotangent.shape[3])
    part = gradient(
        x,
        cotangent,
        config=dataclasses.replace(config, geometry=here),
        kernel=jax.ShapeDtypeStruct(shape, kernel.dtype),
    )
    wide = part.astype(jnp.promote_types(part.dtype, jnp.float32))
    return lax.psum(wide, split.sums).astype(part.dtype)


def _as_wide(local: Function) -> Function:
    """`local` where float64 is float64: the compiler's threads, which trace it, do not have the caller's settings."""

    def run(*operands: jax.Array) -> jax.Array:
        with jax.enable_x64(operands[0].dtype.itemsize == 8):
            return local(*operands)

    return run


def _entries(array: Any) -> tuple[Any, ...]:
    """How an array of a callback is split, along each axis; not at all where that is not known yet."""
    rank = len(array.shape)
    spec = () if array.sharding is None else tuple(array.sharding.spec)
    return (*spec, *[None] * (rank - len(spec)))


def _specs(split: Split, config: Config) -> list[PartitionSpec]:
    """Of the operands that there are."""
    operands = Operands(
        split.x,
        split.kernel,
        bias=split.bias if config.has_bias else None,
        residual=split.result if config.has_residual else None,
        nonzeros=PartitionSpec(None, None) if config.has_nonzeros else None,
    )
    return operands.present(config)[1]


def _at_once(*values: jax.Array, split: Split, run: Run, config: Config) -> jax.Array:
    """The whole call, of what this device reads."""
    here = dataclasses.replace(config.geometry, padding=split.unpadded(config.geometry.padding))
    return run(split.read(values[0]), *values[1:], config=dataclasses.replace(config, geometry=here))


def _in_parts(*values: jax.Array, split: Split, run: Run, config: Config) -> jax.Array:
    """The convolution alone; then the sum over devices and what follows it, in float32 at least."""
    operands, pool = Operands.of(values, config), config.geometry.pool
    bare, present = Operands(operands.x, operands.kernel, nonzeros=operands.nonzeros).present(
        dataclasses.replace(config.bare(), may_be_dense=config.may_be_dense)
    )
    y = _at_once(*present, split=split, run=run, config=bare)
    dtype = y.dtype
    y = split.summed(y.astype(jnp.promote_types(dtype, jnp.float32)))
    added = (bias_per_image(operands.bias, y.shape[0]), operands.residual)
    bias, residual = (None if value is None else value.astype(y.dtype) for value in added)
    y = reference.epilogue(y, bias, residual, config.activation)
    if pool is not None:
        y = split.padded(y, config.geometry, reference.pool_padding(pool, y.dtype))
        y = reference.pool(y, dataclasses.replace(pool, padding=split.unpadded(pool.padding)))
    return y.astype(dtype)


def _rule(rule: str, config: Config, images: int, stacks: int) -> dict[str, Any]:
    """What `def_partition` wants for Shardy, which moves splits along factors; one of two sizes stands for both.

    Factors of a kind are in order of appearance.
    """
    split = {"n" if stacks == 1 else "s", "h", "w"} | ({"c", "k"} if config.geometry.groups == 1 else set())
    factors = dict.fromkeys(letter for letter in rule if letter.isalpha())
    kept = rule.split("->")[1]
    given: dict[str, Any] = {
        "sharding_rule": rule,
        "reduction_factors": tuple(factor for factor in factors if factor in split and factor not in kept),
        "need_replication_factors": tuple(factor for factor in factors if factor not in split),
    }
    return given | ({"n": images // stacks} if "(s n)" in rule else {})


def _batch(images: int, stacks: int) -> str:
    """The factors of N in a rule; one of size 1 must not be part of a product."""
    return "n" if stacks == 1 else "s" if images == stacks else "(s n)"


def _window(config: Config) -> str:
    """The factors of a kernel in a rule, whose input channels are x's with one group alone."""
    return "s i j c k" if config.geometry.groups == 1 else "s i j d k"
