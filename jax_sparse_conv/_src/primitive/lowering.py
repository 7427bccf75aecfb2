"""What the primitive becomes on each platform: a custom call, the same operation in lax, or both and a choice.

`resolved` decides while a program is lowered. Where the density of x is to decide in the running program, a CPU
branches (`lax.cond`), and a GPU runs one custom call, `jsc_adaptive` or `jsc_coo_by_density`, that holds the kernels of
all sides: a branch of XLA's would have the host wait for the device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import choice, cpu_choice
from jax_sparse_conv._src.primitive import packing, partitioning, primitives, reference, sampling
from jax_sparse_conv._src.primitive.custom_call import custom_call, is_highest, taken, variants
from jax_sparse_conv._src.primitive.primitives import Config, Operands, conv_on_device_p, conv_p, reference_conv
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.workload import Workload

_COUNTING = ("ecr", "pecr", "direct", "adaptive")  # methods whose CUDA kernels count the non-zeros of their result


# --- what runs -------------------------------------------------------------------------------------------------------


def resolved(x: Any, kernel: Any, config: Config, platform: str) -> Config | None:
    """The native method for these operands and, in `below`, up to which density it is to run; None for lax.

    Raises:
      ValueError: a named implementation that has no kernel for the platform and dtype.
    """
    if config.by_lax:
        return None
    method = "adaptive" if config.method == "adaptive" and platform == "cuda" else config.sparse_method
    method = method if config.tile is None else "coo_lists"
    reason = _native.why_missing(method, platform, x.dtype)
    if reason is not None:
        if config.fallback:
            return None
        raise ValueError(
            f"implementation={config.implementation!r} cannot run here: {reason}. "
            'implementation=None or "xla" works everywhere.'
        )
    if config.tile is not None:
        return config
    workload = workload_of(x, kernel, config)
    if config.fallback:
        return _chosen_on_gpu(workload, config) if platform == "cuda" else _chosen_on_cpu(workload, config)
    if config.method != "adaptive":
        return config
    if config.below is not None:  # a threshold of the caller's: both sides, whatever the model expects
        return dataclasses.replace(config, method=method)
    side = choice if platform == "cuda" else cpu_choice
    below = side.density_of_sparse(workload)
    return _up_to(below, config, platform)


def _chosen_on_gpu(workload: Workload, config: Config) -> Config | None:
    """`implementation=None` on a GPU: by its table, else by the models."""
    chosen = choice.on_gpu(workload)
    if chosen.method == "xla" or _native.why_missing(chosen.method, "cuda", workload.dtype) is not None:
        return None
    return dataclasses.replace(config, method=chosen.method, candidate=chosen.candidate, below=None)


def _chosen_on_cpu(workload: Workload, config: Config) -> Config | None:
    """The same on a CPU, where the running program may choose by the density of x."""
    chosen = cpu_choice.on_cpu(workload)
    if chosen.below <= 0:
        return None
    below = None if chosen.below >= 1 else chosen.below
    return dataclasses.replace(config, below=below, may_be_dense=chosen.may_be_dense)


def _up_to(below: float, config: Config, platform: str) -> Config | None:
    """The sparse method up to a density of x, and the dense one of the platform beyond."""
    if below >= 1:
        return dataclasses.replace(config, method=config.sparse_method, below=None)
    if platform == "cuda":
        if below <= 0:
            return dataclasses.replace(config, method="direct", below=None)
        return dataclasses.replace(config, method="adaptive", below=below)
    return None if below <= 0 else dataclasses.replace(config, method=config.sparse_method, below=below)


def workload_of(x: Any, kernel: Any, config: Config) -> Workload:
    """The call as the models see it."""
    exact = is_highest(config.precision)
    method, dtype = config.sparse_method, str(x.dtype)
    return Workload(method, x.shape, kernel.shape, config.geometry, dtype, exact, config.has_residual)


# --- lowering --------------------------------------------------------------------------------------------------------


def platform_name(ctx: Any, platform: str | None) -> str:
    """The platform of a rule; the rule without one serves those that no kernel is registered for."""
    return platform or next((p for p in ctx.module_context.platforms if p not in _native.PLATFORMS), "unknown")


@devices.for_lowering
def _lower(ctx: Any, *operands: Any, config: Config, platform: str | None) -> Any:
    if config.tile is not None and partitioning.is_partitioned(ctx):
        ctx, operands, config = _without_lists(ctx, operands, config)
    x, kernel = ctx.avals_in[:2]
    if averages_first(x, kernel, config, platform):
        function: Any = functools.partial(_of_averages, config=config, platform=platform)
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)
    if reads_few_pixels(x, kernel, config, platform):
        return mlir.lower_fun(functools.partial(_of_pixels_read, config=config), multiple_results=False)(ctx, *operands)
    if _pools_apart(x, kernel, config, platform):
        return mlir.lower_fun(functools.partial(_then_pool, config=config), multiple_results=False)(ctx, *operands)
    chosen = resolved(x, kernel, config, platform_name(ctx, platform))
    is_partitioned = partitioning.is_partitioned(ctx)
    if chosen is None and not config.by_lax:
        _say_what_is_xlas(ctx, x, kernel, platform)
    if _is_split_in_export(ctx, config) or (chosen is None and not is_partitioned):
        lower = mlir.lower_fun(functools.partial(reference_conv, config=config), multiple_results=False)
        return lower(ctx, *operands)
    run = reference_conv if chosen is None else conv_on_device_p.bind
    chosen = chosen or dataclasses.replace(config, below=None)
    if is_partitioned or partitioning.is_exported(ctx):
        chosen = dataclasses.replace(chosen, candidate=None)  # sizes of a part, and of another GPU, are not known here
    ctx, operands, chosen = _without_unused(ctx, operands, chosen, platform)
    if is_partitioned:
        function = partitioning.partitioned(run, chosen, x.shape, kernel.shape)
        return mlir.lower_fun(function, multiple_results=False)(partitioning.with_mesh(ctx), *operands)
    return lower_on_device(ctx, *operands, config=chosen, platform=platform)


def _say_what_is_xlas(ctx: Any, x: Any, kernel: Any, platform: str | None) -> None:
    """Warn where `implementation=None` is XLA's for a reason that who exports may not expect; Python shows it once."""
    missing = _native.missing_reasons().get(platform or "")
    if missing is not None and partitioning.is_exported(ctx):
        warnings.warn(
            f"implementation=None exports XLA's own operation for {platform!r}, as this installation has no kernels "
            f"for it: {missing}",
            stacklevel=1,
        )
    elif missing is None and platform == "cuda" and geo.is_symbolic(*x.shape, *kernel.shape):
        warnings.warn(
            "implementation=None is XLA's own operation on a GPU where the number of images is symbolic, as that "
            'decides which kernel is the fastest; a name, such as "direct" or "ecr", runs that kernel for any number, '
            'and "xla" says nothing',
            stacklevel=1,
        )


def _is_split_in_export(ctx: Any, config: Config) -> bool:
    """Whether a call is lax's, because native ones that the compiler splits cannot be exported."""
    if not (partitioning.is_partitioned(ctx) and partitioning.is_exported(ctx)):
        return False
    if not (config.fallback or config.by_lax):
        raise ValueError(
            f"implementation={config.implementation!r} cannot be exported in a program that jit splits over "
            f"{ctx.module_context.axis_context.num_devices} devices, as what splits it is a callback of this process; "
            'implementation=None or "xla" can be, and so can every one inside jax.shard_map.'
        )
    return True


def averages_first(x: Any, kernel: Any, config: Config, platform: str | None) -> bool:
    """Whether `implementation=None` averages x, and multiplies the averages, in a 1x1 convolution with an average pool.

    Both are linear, so that is the same but for rounding, on a quarter of the pixels. A sum of values near the largest
    of their type may be infinite that would not be behind small weights.
    """
    geometry, pool = config.geometry, config.geometry.pool
    if pool is None or pool.kind != "avg" or not config.fallback:
        return False
    if config.activation is not None or config.has_nonzeros:
        return False
    if not all(isinstance(n, int) and n == 0 for n in itertools.chain(*pool.padding, *geometry.padding)):  # or symbolic
        return False
    is_of_pixels = kernel.shape[1:3] == (1, 1) and geometry.strides == (1, 1)
    is_apart = all(w <= s for w, s in zip(pool.window, pool.strides, strict=True)) and max(pool.window) > 1
    return is_of_pixels and is_apart and choice.prefers_averages(workload_of(x, kernel, config), platform)


def _of_averages(x: jax.Array, *others: jax.Array, config: Config, platform: str | None) -> jax.Array:
    """The user may have padded x, which XLA would make the window's padding: see `reference.reduce_window`."""
    x = lax.optimization_barrier(x) if platform == "cpu" else x
    return conv_p.bind(reference.pool(x, config.geometry.pool), *others, config=_unpooled(config))


def reads_few_pixels(x: Any, kernel: Any, config: Config, platform: str | None) -> bool:
    """Whether a 1x1 convolution with strides runs as one without, on the pixels that it reads: its loops are faster.

    Those for few output channels are not: they read the pixels where they lie.
    """
    if platform != "cpu" or config.method != "ecr" or not config.geometry.reads_few_pixels(kernel.shape[1:3]):
        return False
    return not (config.fallback and cpu_choice.suits_few_channels_out(workload_of(x, kernel, config)))


def without_strides(config: Config) -> Config:
    """The convolution of the pixels that it reads."""
    return dataclasses.replace(config, geometry=dataclasses.replace(config.geometry, strides=(1, 1)))


def _of_pixels_read(x: jax.Array, *others: jax.Array, config: Config) -> jax.Array:
    rows, columns = config.geometry.strides
    return conv_p.bind(x[:, ::rows, ::columns], *others, config=without_strides(config))


def _pools_apart(x: Any, kernel: Any, config: Config, platform: str | None) -> bool:
    """Whether a pool is XLA's, because "direct" is faster so; a kernel of ours behind it cost 10 to 27 us more."""
    if config.geometry.pool is None or platform != "cuda":
        return config.geometry.pool is not None and config.method == "direct"
    if config.method == "adaptive":
        return True
    workload = workload_of(x, kernel, config)
    if config.method == "direct":
        return choice.pools_apart(workload)
    return config.fallback and choice.on_gpu(workload).pools_apart


def _then_pool(*values: jax.Array, config: Config) -> jax.Array:
    return reference.pool(conv_p.bind(*values, config=_unpooled(config)), config.geometry.pool)


def _unpooled(config: Config) -> Config:
    """The convolution alone, with its bias and activation."""
    method = "ecr" if config.method == "pecr" else config.method
    return dataclasses.replace(config, method=method, geometry=config.geometry.without_pool())


def _without_unused(
    ctx: Any, operands: tuple[Any, ...], config: Config, platform: str | None
) -> tuple[Any, tuple[Any, ...], Config]:
    """Without counts that are to decide nothing, and without a packed kernel where none is read."""
    named = Operands.of(range(len(operands)), config)
    if not (platform == "cpu" and config.method in packing.READERS and not partitioning.is_partitioned(ctx)):
        named.packed = None
    if config.below is None and not (platform == "cuda" and config.method == "coo"):
        named.nonzeros = None
    return taken(ctx, operands, *named.present(config))


def _without_lists(ctx: Any, operands: tuple[Any, ...], config: Config) -> tuple[Any, tuple[Any, ...], Config]:
    """The call of the dense map alone, which the compiler knows how to split."""
    named = Operands.of(range(len(operands)), config)
    named.lists = None
    config = dataclasses.replace(config, method=primitives.sparse_method(config.geometry) if config.fallback else "coo")
    return taken(ctx, operands, *named.present(config))


@devices.for_lowering
def lower_on_device(ctx: Any, *operands: Any, config: Config, platform: str | None) -> Any:
    """What one device computes; `config` as `resolved` returns it."""
    if config.method == "coo" and platform == "cuda" and (config.below is None or config.tile is None):
        return _by_variant(ctx, operands, config)
    if config.below is None:
        return custom_call(ctx, operands, config, platform)[:1]
    if config.method != "adaptive":
        return mlir.lower_fun(functools.partial(_by_density, config=config), multiple_results=False)(ctx, *operands)
    if not config.has_nonzeros:
        return mlir.lower_fun(functools.partial(_sampling, config=config), multiple_results=False)(ctx, *operands)
    return custom_call(ctx, operands, config, platform)[:1]


@devices.for_lowering
def lower_counted(ctx: Any, *operands: Any, config: Config) -> Any | None:
    """Result and counts by one CUDA call, for one device; None where there is no such call."""
    x, kernel = ctx.avals_in[:2]
    if _pools_apart(x, kernel, config, "cuda"):
        return None
    chosen = resolved(x, kernel, config, "cuda")
    if chosen is None or chosen.method not in _COUNTING or partitioning.is_partitioned(ctx):
        return None
    if chosen.method == "adaptive" and not chosen.has_nonzeros:
        return None  # sampled first
    if partitioning.is_exported(ctx):
        chosen = dataclasses.replace(chosen, candidate=None)
    ctx, operands, chosen = _without_unused(ctx, operands, chosen, "cuda")
    out, _, counts = custom_call(ctx, operands, chosen, "cuda")
    return [out, counts]


def _by_variant(ctx: Any, operands: tuple[Any, ...], config: Config) -> Any:
    """COO* on a GPU: with counts where there are several variants or a dense side, or where the call has a place."""
    x, kernel = ctx.avals_in[:2]
    _, densities = variants(x, kernel, config)
    if not densities and config.tile is None and config.below is None:
        named = Operands.of(range(len(operands)), config)
        named.nonzeros = None
        return custom_call(*taken(ctx, operands, *named.present(config)), "cuda")[:1]
    if config.has_nonzeros:
        return custom_call(ctx, operands, config, "cuda")[:1]
    count = functools.partial(_counting, config=config, are_read=bool(densities) or config.below is not None)
    return mlir.lower_fun(count, multiple_results=False)(ctx, *operands)


def _counting(*values: jax.Array, config: Config, are_read: bool) -> jax.Array:
    operands = Operands.of(values, config)
    if not are_read:
        operands.nonzeros = jnp.zeros((1, 2), jnp.int32)
    elif operands.lists is None:
        operands.nonzeros = sampling.sampled_nonzeros(operands.x)
    else:
        operands.nonzeros = sampling.nonzeros_of_counts(operands.lists[2], operands.x.shape)
    config, present = operands.present(config)
    return conv_on_device_p.bind(*primitives.same_varying_axes(present), config=config)


def _by_density(*values: jax.Array, config: Config) -> jax.Array:
    """The method where x has few non-zeros, dense convolution elsewhere, decided while the program runs."""
    assert config.below is not None
    operands = Operands.of(values, config)
    nonzeros = sampling.sampled_nonzeros(operands.x) if operands.nonzeros is None else operands.nonzeros
    operands.nonzeros = None
    plain, present = operands.present(dataclasses.replace(config, below=None))
    return lax.cond(
        sampling.is_at_most(nonzeros, config.below),
        functools.partial(conv_on_device_p.bind, config=plain),
        functools.partial(reference_conv, config=plain),
        *present,
    )


def _sampling(*values: jax.Array, config: Config) -> jax.Array:
    """ "adaptive" without counts: by those of a sample of x."""
    sampled = dataclasses.replace(config, has_nonzeros=True)
    return conv_on_device_p.bind(*values, sampling.sampled_nonzeros(values[0]), config=sampled)


for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(conv_p, functools.partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(conv_on_device_p, functools.partial(lower_on_device, platform=_platform), platform=_platform)
