"""The primitive `jsc_conv`: one operation, called by the kernels or computed by lax.

Operands (bias, residual and nonzeros only where the flags say so):

    x         [N, H, W, C]
    kernel    [S, kh, kw, C / groups, K]   S kernels; image n uses kernel n // (N // S)
    bias      [S, K]
    residual  [N, Ho, Wo, K]               only without a pool
    packed    the kernel as the CPU's pixel loop reads it (`packing`), beside it; other platforms drop it
    lists     values, positions, counts    of x as a `CooStar` stores it, beside it; where they are read, x is not
    nonzeros  [parts, 2] int32             (non-zeros, elements) of parts of x, whose sums give its density

The stack axis S is what `vmap` over kernels becomes (`batching.py`). What runs where is in `lowering.py`, derivatives
are in `differentiation.py`, and the primitive that counts the non-zeros of its result as well is in `counting.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from jax_sparse_conv._src.dispatch import planner
from jax_sparse_conv._src.dispatch.coo import configurations
from jax_sparse_conv._src.primitive import explicit, jax_internals, reference
from jax_sparse_conv._src.problem.geometry import Geometry


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about a call that is not an array.

    Attributes:
      method: native target: "ecr", "pecr", "coo", "direct" or "dense"; or "adaptive": `sparse_method` or a dense one.
      fallback: `implementation=None`: lower to the reference where the method has no kernel (platform, dtype), instead
        of raising, and where `choice` expects that to be faster.
      by_lax: computed by lax, whatever the method: what is dense of a derivative.
      may_be_dense: the native code may skip nothing where that is expected to be faster (CPU, no pool).
      below: run the method (its sparse side) only where x is of at most this density; None always, and for "adaptive"
        what `choice` finds. Benchmarks and tests set it to force a side.
      precision: None, a pair of `lax.Precision`, or one of lax's dot algorithms.
      coo: `configurations.Configuration.attribute` of a COO* call; None lets the cost model choose.
      tile: of the `CooStar` whose lists go along with x, None without one.
      candidate: the kernel family and tile that a CUDA call is told, of the method's; None lets the models choose.
    """

    geometry: Geometry
    method: str
    activation: reference.ActivationName | None = None
    has_bias: bool = False
    has_residual: bool = False
    has_packed: bool = False
    has_nonzeros: bool = False
    fallback: bool = False
    by_lax: bool = False
    precision: Any = None
    coo: configurations.Attribute | None = None
    tile: tuple[int, int, int] | None = None
    may_be_dense: bool = False
    below: float | None = None
    candidate: planner.Candidate | None = None

    @property
    def implementation(self) -> str:
        """The method's name in the public API."""
        return "ecr" if self.method == "dense" else self.method

    @property
    def sparse_method(self) -> str:
        """The native target that skips zeros."""
        return sparse_method(self.geometry) if self.method == "adaptive" else self.method

    @property
    def is_bare(self) -> bool:
        """A convolution with nothing after it: bilinear in x and kernel."""
        return not (self.has_bias or self.has_residual or self.activation or self.geometry.pool)

    def bare(self) -> Config:
        method = "ecr" if self.method == "pecr" else self.method
        return Config(
            self.geometry.without_pool(),
            method,
            fallback=self.fallback,
            by_lax=self.by_lax,
            precision=self.precision,
            coo=self.coo,
            tile=self.tile,
            below=self.below,
        )


def sparse_method(geometry: Geometry) -> str:
    """The native target of `implementation=None` for a convolution."""
    return "pecr" if geometry.pool else "ecr"


@dataclasses.dataclass
class Operands:
    """The operands by name; also used for their batch axes and shapes."""

    x: Any
    kernel: Any
    bias: Any = None
    residual: Any = None
    packed: Any = None
    nonzeros: Any = None
    lists: tuple[Any, Any, Any] | None = None

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
        if config.tile is not None:
            named.lists = (rest.pop(0), rest.pop(0), rest.pop(0))
        if config.has_nonzeros:
            named.nonzeros = rest.pop(0)
        return named

    def present(self, config: Config) -> tuple[Config, list[Any]]:
        """The operands that are there, in order, and `config` with its flags set to them."""
        config = dataclasses.replace(
            config,
            has_bias=self.bias is not None,
            has_residual=self.residual is not None,
            has_packed=self.packed is not None,
            has_nonzeros=self.nonzeros is not None,
            tile=None if self.lists is None else config.tile,
        )
        values = (self.x, self.kernel, self.bias, self.residual, self.packed, *(self.lists or ()), self.nonzeros)
        return config, [value for value in values if value is not None]


conv_p = jex_core.Primitive("jsc_conv")
conv_on_device_p = jex_core.Primitive("jsc_conv_on_device")  # the part that one device computes
jax_internals.needs_devices(conv_p)
jax_internals.runs_alone(conv_p)
jax_internals.checks_nans(conv_p)


def bind(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    config: Config,
    packed: jax.Array | None = None,
    nonzeros: jax.Array | None = None,
    lists: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Call the primitive with the operands that are there; shapes as in the module's docstring."""
    config, present = Operands(x, kernel, bias, residual, packed, nonzeros, lists).present(config)
    return conv_p.bind(*same_varying_axes(present), config=config)


def same_varying_axes(operands: list[jax.Array]) -> list[jax.Array]:
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


def result_aval(*avals: Any, config: Config) -> Any:
    """The result's shape, dtype and sharding from those of the operands."""
    operands = Operands.of(avals, config)
    x, kernel = operands.x, operands.kernel
    height, width = config.geometry.out_size(x.shape[1:3], kernel.shape[1:3])
    shape = (x.shape[0], height, width, kernel.shape[4])
    sharding = explicit.result_sharding(x, kernel, config.geometry)
    return x.update(shape=shape, sharding=sharding, weak_type=False)


conv_p.def_abstract_eval(result_aval)
conv_on_device_p.def_abstract_eval(result_aval)


# --- the same operation in lax ---------------------------------------------------------------------------------------


def reference_conv(*values: jax.Array, config: Config) -> jax.Array:
    """The primitive's meaning in lax: the fallback lowering and what is differentiated densely."""
    operands = Operands.of(values, config)
    given = (operands.x, operands.kernel, operands.bias, operands.residual)
    if not explicit.is_split(*given):
        return _reference_conv(*given, config=config)

    def local(x: jax.Array, kernel: jax.Array, geometry: Geometry) -> jax.Array:
        return _reference_conv(x, kernel, None, None, dataclasses.replace(config.bare(), geometry=geometry))

    y = explicit.convolved(local, operands.x, operands.kernel, config.geometry.without_pool())
    return after(y, operands.bias, operands.residual, config)


def after(
    y: jax.Array, bias: Any, residual: Any, config: Config, pool: Callable[..., jax.Array] = reference.pool
) -> jax.Array:
    """What follows the convolution, whose result y is; operands as in the module's docstring."""
    added = (bias_per_image(bias, y.shape[0]), residual)
    bias, residual = (None if value is None else explicit.as_split(value, y) for value in added)
    return pool(reference.epilogue(y, bias, residual, config.activation), config.geometry.pool)


def _reference_conv(x: Any, kernel: Any, bias: Any, residual: Any, config: Config) -> jax.Array:
    stacks, images = kernel.shape[0], x.shape[0]

    def one(x: Any, kernel: Any, bias: Any, residual: Any) -> jax.Array:
        if config.method == "dense":  # rows of a matrix as maps of one pixel
            y = reference.dense(x[:, 0, 0], kernel[0, 0], config.precision)
            rest = None if residual is None else residual[:, 0, 0]
            return reference.epilogue(y, bias, rest, config.activation)[:, None, None]
        return reference.conv_pool(x, kernel, bias, residual, config.geometry, config.activation, config.precision)

    if stacks == 1:
        return one(x, kernel[0], None if bias is None else bias[0], residual)
    per_stack = (stacks, images // stacks)
    x = x.reshape(per_stack + x.shape[1:])
    residual = None if residual is None else residual.reshape(per_stack + residual.shape[1:])
    out = jax.vmap(one)(x, kernel, bias, residual)
    return out.reshape((images, *out.shape[2:]))


def bias_per_image(bias: Any, images: int) -> Any:
    """bias [S, K] as [N, 1, 1, K]."""
    return None if bias is None else jnp.repeat(bias, images // bias.shape[0], axis=0)[:, None, None, :]
