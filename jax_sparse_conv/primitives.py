"""The primitive `jsc_conv`: one operation with native lowerings; its rules for `vmap` and derivatives are elsewhere.

Operands (bias and residual only where the flags say so):

    x         [N, H, W, C]
    kernel    [S, kh, kw, C / groups, K]   S kernels; image n uses kernel n // (N // S)
    bias      [S, K]
    residual  [N, Ho, Wo, K]               only without a pool
    packed    the kernel as the CPU's pixel loop reads it (`packing`), beside it; other platforms drop it

The stack axis S is what `vmap` over kernels becomes (`batching.py`; derivatives are in `differentiation.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_sparse_conv import _native, choice, cost_model, partitioning, reference
from jax_sparse_conv.geometry import Geometry

_POOL_CODES = {None: 0, "max": 1, "avg": 2}
_ACTIVATION_CODES = {None: 0, "relu": 1}
_PRECISION_CODES = {lax.Precision.DEFAULT: 0, lax.Precision.HIGH: 1, lax.Precision.HIGHEST: 2}
# Algorithms of lax that promise no more than TF32 does.
_COARSE_ALGORITHMS = ("DEFAULT", "TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_BF16", "F16_F16_F16", "F16_F16_F32")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about a call that is not an array.

    Attributes:
      method: native target: "ecr", "pecr", "coo", "direct" or "dense".
      fallback: `implementation=None`: lower to the reference where the method has no kernel (platform, dtype), instead
        of raising, and where `choice` expects that to be faster.
      may_be_dense: the native code may skip nothing where that is expected to be faster (CPU, no pool).
      below: run the method only where a sample of x is of at most this density, the reference elsewhere; None always.
      precision: None, a pair of `lax.Precision`, or one of lax's dot algorithms.
      coo: `cost_model.Configuration.attribute` of a COO* call; None lets the cost model choose.
    """

    geometry: Geometry
    method: str
    activation: str | None = None
    has_bias: bool = False
    has_residual: bool = False
    has_packed: bool = False
    fallback: bool = False
    precision: Any = None
    coo: cost_model.Attribute | None = None
    may_be_dense: bool = False
    below: float | None = None

    @property
    def implementation(self) -> str:
        """The method's name in the public API."""
        return "ecr" if self.method == "dense" else self.method

    @property
    def is_bare(self) -> bool:
        """A convolution with nothing after it: bilinear in x and kernel."""
        return not (self.has_bias or self.has_residual or self.activation or self.geometry.pool)

    def bare(self) -> Config:
        method = "ecr" if self.method == "pecr" else self.method
        return Config(
            self.geometry.without_pool(), method, fallback=self.fallback, precision=self.precision, coo=self.coo
        )


@dataclasses.dataclass
class Operands:
    """The operands by name; also used for their batch axes and shapes."""

    x: Any
    kernel: Any
    bias: Any = None
    residual: Any = None
    packed: Any = None

    @classmethod
    def of(cls, values: Sequence[Any], config: Config) -> Operands:
        named = cls(values[0], values[1])
        rest = list(values[2:])
        if config.has_bias:
            named.bias = rest.pop(0)
        if config.has_residual:
            named.residual = rest.pop(0)
        if config.has_packed:
            named.packed = rest.pop(0)
        return named


conv_p = jex_core.Primitive("jsc_conv")
conv_on_device_p = jex_core.Primitive("jsc_conv_on_device")  # the part that one device computes
partitioning.needs_devices(conv_p)


def bind(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    config: Config,
    packed: jax.Array | None = None,
) -> jax.Array:
    """Call the primitive with the operands that are there; shapes as in the module's docstring."""
    config = dataclasses.replace(
        config, has_bias=bias is not None, has_residual=residual is not None, has_packed=packed is not None
    )
    present = [operand for operand in (x, kernel, bias, residual, packed) if operand is not None]
    return conv_p.bind(*_same_varying_axes(present), config=config)


def _same_varying_axes(operands: list[jax.Array]) -> list[jax.Array]:
    """Under `shard_map`, mark every operand as varying over the axes that any of them varies over."""
    axes = [_varying_axes(jax.typeof(operand)) for operand in operands]
    union = frozenset().union(*axes)
    return [
        lax.pcast(operand, tuple(union - have), to="varying") if union - have else operand
        for operand, have in zip(operands, axes, strict=True)
    ]


def _varying_axes(aval: Any) -> frozenset[Any]:
    return frozenset(aval.mat.varying)


# --- shapes ----------------------------------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, config: Config) -> Any:
    operands = Operands.of(avals, config)
    x, kernel = operands.x, operands.kernel
    height, width = config.geometry.out_size(x.shape[1:3], kernel.shape[1:3])
    shape = (x.shape[0], height, width, kernel.shape[4])
    features = kernel.sharding.spec[4] if config.geometry.groups == 1 else None
    sharding = x.sharding.update(spec=PartitionSpec(x.sharding.spec[0], None, None, features))
    return x.update(shape=shape, sharding=sharding, weak_type=False)


conv_p.def_abstract_eval(_abstract_eval)
conv_on_device_p.def_abstract_eval(_abstract_eval)


@functools.lru_cache(maxsize=4096)
def _compiled(config: Config) -> Any:
    return jax.jit(functools.partial(conv_p.bind, config=config))


def _impl(*operands: jax.Array, config: Config) -> jax.Array:
    return _compiled(config)(*operands)


conv_p.def_impl(_impl)


# --- the same operation in lax ---------------------------------------------------------------------------------------


def reference_conv(*values: jax.Array, config: Config) -> jax.Array:
    """The primitive's meaning in lax: the fallback lowering and what is differentiated densely."""
    operands = Operands.of(values, config)
    stacks = operands.kernel.shape[0]
    images = operands.x.shape[0]

    def one(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
        if config.method == "dense":  # rows of a matrix as maps of one pixel
            y = jnp.matmul(x[:, 0, 0], kernel[0, 0], precision=config.precision)
            return reference.epilogue(y[:, None, None], bias, residual, config.activation)
        return reference.conv_pool(x, kernel, bias, residual, config.geometry, config.activation, config.precision)

    if stacks == 1:
        bias = None if operands.bias is None else operands.bias[0]
        return one(operands.x, operands.kernel[0], bias, operands.residual)
    per_stack = (stacks, images // stacks)
    x = operands.x.reshape(per_stack + operands.x.shape[1:])
    residual = None if operands.residual is None else operands.residual.reshape(per_stack + operands.residual.shape[1:])
    out = jax.vmap(one)(x, operands.kernel, operands.bias, residual)
    return out.reshape((images, *out.shape[2:]))


def bias_per_image(bias: Any, images: int) -> Any:
    """bias [S, K] as [N, 1, 1, K]."""
    return None if bias is None else jnp.repeat(bias, images // bias.shape[0], axis=0)[:, None, None, :]


# --- lowering --------------------------------------------------------------------------------------------------------


def attributes(config: Config) -> dict[str, np.ndarray | np.int64]:
    """The custom call's attributes, as `cpu/conv_args.h` reads them."""
    geometry, pool = config.geometry, config.geometry.pool

    def ints(values: Any) -> np.ndarray:
        return np.asarray(values, np.int64).reshape(-1)

    return {
        "stride": ints(geometry.strides),
        "padding": ints(geometry.padding),
        "dilation": ints(geometry.dilation),
        "groups": np.int64(geometry.groups),
        "activation": np.int64(_ACTIVATION_CODES[config.activation]),
        "has_bias": np.int64(config.has_bias),
        "has_residual": np.int64(config.has_residual),
        "has_packed": np.int64(config.has_packed),
        "may_be_dense": np.int64(config.may_be_dense),
        "pool": np.int64(_POOL_CODES[pool.kind if pool else None]),
        "window": ints(pool.window if pool else (1, 1)),
        "window_stride": ints(pool.strides if pool else (1, 1)),
        "window_padding": ints(pool.padding if pool else ((0, 0), (0, 0))),
        "precision": np.int64(_precision_code(config.precision)),
    }


def _precision_code(precision: Any) -> int:
    """0 default, 1 high, 2 highest; of a pair the higher one."""
    if precision is None:
        return 0
    if isinstance(precision, tuple):
        return max(_PRECISION_CODES[each] for each in precision)
    return 0 if getattr(precision, "name", None) in _COARSE_ALGORITHMS else 2


def _lower(ctx: Any, *operands: Any, config: Config, platform: str | None) -> Any:
    if config.has_packed and (platform != "cpu" or partitioning.is_partitioned(ctx)):
        ctx, operands = ctx.replace(avals_in=ctx.avals_in[:-1]), operands[:-1]
        config = dataclasses.replace(config, has_packed=False)
    x, kernel = ctx.avals_in[:2]
    # The rule without a platform serves those that no kernel is registered for.
    name = platform or next((p for p in ctx.module_context.platforms if p not in _native.PLATFORMS), "unknown")
    reason = _native.why_missing(config.method, name, x.dtype)
    if reason is not None:
        if config.fallback:
            lower = mlir.lower_fun(functools.partial(reference_conv, config=config), multiple_results=False)
            return lower(ctx, *operands)
        raise ValueError(
            f"implementation={config.implementation!r} cannot run here: {reason}. "
            'implementation=None or "xla" works everywhere.'
        )
    if config.fallback:
        work = _work(x, kernel, config)
        if choice.prefers_direct(work, name) and _native.why_missing("direct", name, x.dtype) is None:
            config = dataclasses.replace(config, method="direct")
            below = math.inf
        else:
            below = choice.threshold(work, name)
        if below <= 0:
            lower = mlir.lower_fun(functools.partial(reference_conv, config=config), multiple_results=False)
            return lower(ctx, *operands)
        native = choice.chooses_natively(work, name)
        config = dataclasses.replace(config, below=None if below >= 1 or native else below, may_be_dense=native)
    if partitioning.is_partitioned(ctx):
        return mlir.lower_fun(_partitioned(x, kernel, config), multiple_results=False)(ctx, *operands)
    return _lower_on_device(ctx, *operands, config=config, platform=platform)


def _work(x: Any, kernel: Any, config: Config) -> choice.Work:
    exact = _precision_code(config.precision) == _PRECISION_CODES[lax.Precision.HIGHEST]
    return choice.Work(config.method, x.shape, kernel.shape, config.geometry, str(x.dtype), exact)


def _partitioned(x: Any, kernel: Any, config: Config) -> Any:
    return partitioning.partitioned(
        _on_device(config),
        stacks=kernel.shape[0],
        images=x.shape[0],
        one_group=config.geometry.groups == 1,
        has_bias=config.has_bias,
        has_residual=config.has_residual,
    )


@functools.lru_cache(maxsize=4096)
def _on_device(config: Config) -> Any:
    return functools.partial(conv_on_device_p.bind, config=config)


def _lower_on_device(ctx: Any, *operands: Any, config: Config, platform: str | None) -> Any:
    x, kernel = ctx.avals_in[:2]
    if config.below is not None:
        return mlir.lower_fun(functools.partial(_by_density, config=config), multiple_results=False)(ctx, *operands)
    extra: dict[str, np.ndarray] = {}
    if platform == "cuda" and config.method == "coo":
        chosen, scratch = cost_model.attribute_and_workspace(x, kernel, config.geometry, config.coo)
        extra["coo"] = np.asarray(chosen, np.int64)
        ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((scratch,), np.uint8)])
    elif platform == "cuda":
        conv_size = config.geometry.conv_size(x.shape[1:3], kernel.shape[1:3])
        out_size = config.geometry.out_size(x.shape[1:3], kernel.shape[1:3])
        scratch = _native.workspace_bytes(config.method, x.shape, kernel.shape, conv_size, out_size)
        ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((scratch,), np.uint8)])
    call = jax.ffi.ffi_lowering(_native.target_name(config.method))
    return call(ctx, *operands, **attributes(config), **extra)[:1]


def _by_density(*operands: jax.Array, config: Config) -> jax.Array:
    """The method where x has few non-zeros, dense convolution elsewhere, decided while the program runs."""
    assert config.below is not None
    return lax.cond(
        choice.sampled_density(operands[0]) <= config.below,
        functools.partial(conv_on_device_p.bind, config=dataclasses.replace(config, below=None)),
        functools.partial(reference_conv, config=config),
        *operands,
    )


for _platform in (None, *_native.PLATFORMS):
    mlir.register_lowering(conv_p, functools.partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(
        conv_on_device_p, functools.partial(_lower_on_device, platform=_platform), platform=_platform
    )
