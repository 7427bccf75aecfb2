"""How the primitive runs on several devices under `jit`, as `split` decides.

A custom call that the partitioner knows nothing of is right on sharded operands, but gathers them first. Here the
partitioner learns what can be split. Each device then runs the same custom call on its part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, reshard

from jax_sparse_conv._src.primitive import explicit, reference
from jax_sparse_conv._src.primitive.primitives import Config, Operands, bias_per_image, same_varying_axes
from jax_sparse_conv._src.primitive.split import Split, within
from jax_sparse_conv._src.problem.geometry import Pool

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
        x, kernel, out = map(_entries, (*arguments[:2], result))
        return Split.of(config.geometry, (x_shape, kernel_shape), (x, kernel, out), mesh.shape)

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        found = split(mesh, arguments, result)
        operands = tuple(NamedSharding(mesh, spec) for spec in _specs(found, config))
        in_parts = found.in_channels or found.pads(config.geometry.pool)
        local = functools.partial(_in_parts if in_parts else _at_once, split=found, run=run, config=config)
        return mesh, _on_one_device(local), NamedSharding(mesh, found.result), operands

    def infer(mesh: Any, arguments: Any, result: Any) -> NamedSharding:
        """For GSPMD, which knows no rules."""
        return NamedSharding(mesh, split(mesh, arguments, result).result)

    wrapped = custom_partitioning(lambda *operands: run(*operands, config=config))
    batch, counts = _batch(x_shape[0], kernel_shape[0]), ["u v"] * config.has_nonzeros
    terms = [f"{batch} h w c", _window(config), *["s k"] * config.has_bias]
    out = f"{batch} h w k"
    terms += [out] * config.has_residual + counts
    rule = _rule(f"{', '.join(terms)} -> {out}", config, x_shape[0], kernel_shape[0])
    wrapped.def_partition(partition=partition, infer_sharding_from_operands=infer, **rule)
    return wrapped


@functools.lru_cache(maxsize=4096)
def partitioned_gradient(
    gradient: Function, other: tuple[int, ...], *, config: Config, like: Any, by_kernel: bool
) -> Function:
    """`gradient(other, cotangent)` of `differentiation` with the rule of how it is split; `other` is a shape."""
    x_shape, kernel_shape = (other, like.shape) if by_kernel else (like.shape, other)

    def split(mesh: Any, arguments: Any, result: Any) -> Split:
        given, cotangent = map(_entries, arguments)
        pair = (given, _entries(result)) if by_kernel else (_entries(result), given)
        return Split.of(config.geometry, (x_shape, kernel_shape), (*pair, cotangent), mesh.shape)

    def specs(found: Split) -> tuple[PartitionSpec, PartitionSpec]:
        return (found.x, found.kernel) if by_kernel else (found.kernel, found.x)

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        found = split(mesh, arguments, result)
        given, wanted = specs(found)
        local = _local_gradient(gradient, found, arguments[1].shape, config=config, like=like, by_kernel=by_kernel)
        operands = NamedSharding(mesh, given), NamedSharding(mesh, found.result)
        return mesh, _on_one_device(local), NamedSharding(mesh, wanted), operands

    def infer(mesh: Any, arguments: Any, result: Any) -> NamedSharding:
        return NamedSharding(mesh, specs(split(mesh, arguments, result))[1])

    wrapped = custom_partitioning(
        lambda other, cotangent: gradient(other, cotangent, config=config, like=like, by_kernel=by_kernel)
    )
    batch, window = _batch(x_shape[0], kernel_shape[0]), _window(config)
    given, wanted = (f"{batch} h w c", window) if by_kernel else (window, f"{batch} h w c")
    rule = _rule(f"{given}, {batch} h w k -> {wanted}", config, x_shape[0], kernel_shape[0])
    wrapped.def_partition(partition=partition, infer_sharding_from_operands=infer, **rule)
    return wrapped


@functools.lru_cache(maxsize=4096)
def partitioned_pool(run: Run, spec: Pool, **parameters: Any) -> Function:
    """`run(x, linear, spec=)`, a derivative of a pool of x [N, H, W, C], with the rule of how it is split.

    H and W are split where windows lie apart and none is cut.
    """
    is_apart = spec.window == spec.strides and not any(map(any, spec.padding))

    def split(mesh: Any, arguments: Any) -> NamedSharding:
        x, linear = map(_entries, arguments)
        images, *pixels, channels = x if any(x) else linear
        along = zip(pixels, arguments[0].shape[1:3], spec.window, strict=True)
        whole = [
            entry if is_apart and size % (window * _devices(mesh, entry)) == 0 else None
            for entry, size, window in along
        ]
        return NamedSharding(mesh, PartitionSpec(images, *whole, channels))

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        placed = split(mesh, arguments)
        return mesh, _on_one_device(functools.partial(run, spec=spec, **parameters)), placed, (placed, placed)

    def infer(mesh: Any, arguments: Any, result: Any) -> NamedSharding:
        return split(mesh, arguments)

    wrapped = custom_partitioning(lambda x, linear: run(x, linear, spec=spec, **parameters))
    rule = "n h w c, n h w c -> n h w c" if is_apart else "n h w c, n p q c -> n i j c"
    whole = () if is_apart else ("h", "w", "p", "q", "i", "j")
    wrapped.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, need_replication_factors=whole
    )
    return wrapped


def _devices(mesh: Any, entry: Any) -> int:
    """Over how many devices an axis is split."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def explicit_gradient(
    gradient: Function, other: jax.Array, cotangent: jax.Array, *, config: Config, like: Any, by_kernel: bool
) -> jax.Array:
    """`gradient(other, cotangent)` of `differentiation` where types say how arrays are split."""
    x, kernel = (other, like) if by_kernel else (like, other)
    found = explicit.split_of(x, kernel, config.geometry)
    given, wanted = (found.x, found.kernel) if by_kernel else (found.kernel, found.x)
    local = _local_gradient(gradient, found, cotangent.shape, config=config, like=like, by_kernel=by_kernel)
    out: jax.Array = explicit.on_devices(local, [other, cotangent], [given, found.result], wanted)
    return reshard(out, like.sharding)


def _local_gradient(
    gradient: Function, split: Split, sizes: tuple[int, ...], *, config: Config, like: Any, by_kernel: bool
) -> Function:
    """What each device computes of its parts; `sizes` are those of the whole cotangent."""
    here = dataclasses.replace(config, geometry=split.here(config.geometry))
    run = functools.partial(gradient, config=here, by_kernel=by_kernel)
    local = _gradient_of_kernel if by_kernel else _gradient_of_x
    return functools.partial(local, split=split, run=run, whole=like, sizes=sizes)


def _gradient_of_kernel(
    x: jax.Array, cotangent: jax.Array, *, split: Split, run: Run, whole: Any, sizes: tuple[int, ...]
) -> jax.Array:
    """What this device's part of the result adds to it, and the sum over devices, in float32 at least."""
    x, cotangent = same_varying_axes([within(x, 0, split.images, sizes[0]), _known(cotangent, split, sizes)])
    stacks, *window, _, _ = whole.shape
    channels = whole.shape[3] // lax.axis_size(split.in_channels), cotangent.shape[3]
    shape = (stacks // lax.axis_size(split.kernels), *window, *channels)
    part = run(split.read(x), cotangent, like=_like(x, shape))
    return _sum(part, split.sums)


def _gradient_of_x(
    kernel: jax.Array, cotangent: jax.Array, *, split: Split, run: Run, whole: Any, sizes: tuple[int, ...]
) -> jax.Array:
    """Of what this device reads; the neighbours' rows go back to them. Then the sum over output channels' devices."""
    kernel = within(kernel, 4, split.out_channels, sizes[3])
    kernel, cotangent = same_varying_axes([kernel, _known(cotangent, split, sizes)])
    rows = (size if strip is None else strip.has for size, strip in zip(whole.shape[1:3], split.strips, strict=True))
    channels = whole.shape[3] // lax.axis_size(split.in_channels)
    has = _like(cotangent, (cotangent.shape[0], *rows, channels))
    part = run(kernel, cotangent, like=_like(cotangent, jax.eval_shape(split.read, has).shape))
    (back,) = jax.linear_transpose(split.read, has)(part)
    return _sum(back, split.out_channels)


def _like(array: jax.Array, shape: tuple[int, ...]) -> Any:
    """The type of an array of this shape that varies over the devices as `array` does."""
    found = jax.typeof(array)
    whole = NamedSharding(found.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return found.update(shape=shape, sharding=whole)


def _known(cotangent: jax.Array, split: Split, sizes: tuple[int, ...]) -> jax.Array:
    """With zeros where the last device has nothing."""
    for dimension, names in enumerate((split.images, *split.pixels, split.out_channels)):
        cotangent = within(cotangent, dimension, names, sizes[dimension])
    return cotangent


def _sum(part: jax.Array, names: tuple[str, ...]) -> jax.Array:
    return lax.psum(part.astype(jnp.promote_types(part.dtype, jnp.float32)), names).astype(part.dtype)


_NO_MESH = AbstractMesh((), ())


def _on_one_device(local: Function) -> Function:
    """`local` as the compiler is to trace it.

    Its threads lack the caller's settings, so float64 is float64 here. Under the caller's mesh JAX would say of values
    how they are split, which nothing reads any more.
    """

    def run(*operands: jax.Array) -> jax.Array:
        with jax.enable_x64(operands[0].dtype.itemsize == 8), jax.sharding.use_abstract_mesh(_NO_MESH):
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
    here = dataclasses.replace(config, geometry=split.here(config.geometry))
    return run(split.read(values[0]), *values[1:], config=here)


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
    split = {"n" if stacks == 1 else "s", "h", "w"}
    split |= {"c", "k"} if config.geometry.groups == 1 else set()
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
