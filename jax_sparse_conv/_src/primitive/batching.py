"""`vmap` of the primitive: every combination of batched operands is one call again."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jax_sparse_conv._src.primitive import explicit, max_pool, reference
from jax_sparse_conv._src.primitive.primitives import Config, Operands, bias_per_image, bind, conv_p
from jax_sparse_conv._src.problem.geometry import MAX_ELEMENTS, is_symbolic


def batch(values: Sequence[Any], axes: Sequence[Any], *, config: Config) -> tuple[jax.Array, int | None]:
    """Every combination of batched operands as one call: fold the new axis into N, into K, or into both N and S."""
    values, axes = _one_decision(values, axes, config)
    values, axes, config = _without_stray_copy(values, axes, config)
    size = next((v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None), None)
    if size is None:
        return conv_p.bind(*values, config=config), None
    if size == 0:
        return _empty_batch(values, axes, config), 0
    moved = [v if a is None else jnp.moveaxis(v, a, 0) for v, a in zip(values, axes, strict=True)]
    batched = Operands.of([a is not None for a in axes], config)
    operands = Operands.of(moved, config)
    if batched.x:
        fold = _fold_into_stacks if batched.kernel or batched.bias else _fold_into_images
    elif batched.kernel:
        fold = _fold_into_out_channels if _fits_in_out_channels(operands, size, config) else _fold_into_stacks
    else:
        return _batch_epilogue(operands, batched, config), 0
    return fold(operands, batched, size, config), 0


def _one_decision(values: Sequence[Any], axes: Sequence[Any], config: Config) -> tuple[Sequence[Any], Sequence[Any]]:
    """Counts of all maps of the batch as one: the call is one, so it takes one side."""
    if not config.has_nonzeros or axes[-1] is None:
        return values, axes
    return [*values[:-1], jnp.sum(values[-1], axes[-1], dtype=jnp.int32)], [*axes[:-1], None]


def _without_stray_copy(
    values: Sequence[Any], axes: Sequence[Any], config: Config
) -> tuple[Sequence[Any], Sequence[Any], Config]:
    """Without a packed kernel that is not batched as its kernel is."""
    named = Operands.of(range(len(values)), config)
    if named.packed is None or (axes[named.packed] is None) is (axes[named.kernel] is None):
        return values, axes, config
    keep = [index for index in range(len(values)) if index != named.packed]
    config = dataclasses.replace(config, has_packed=False)
    return [values[index] for index in keep], [axes[index] for index in keep], config


def _empty_batch(values: Sequence[Any], axes: Sequence[Any], config: Config) -> jax.Array:
    shapes = [v.shape if a is None else v.shape[:a] + v.shape[a + 1 :] for v, a in zip(values, axes, strict=True)]
    out = jax.eval_shape(
        functools.partial(conv_p.bind, config=config),
        *[jax.ShapeDtypeStruct(shape, value.dtype) for shape, value in zip(shapes, values, strict=True)],
    )
    return jnp.zeros((0, *out.shape), out.dtype)


def _every(value: Any, is_batched: Any, size: int) -> Any:
    """`value` with a leading axis of `size`, repeated where it had none."""
    if value is None or is_batched:
        return value
    return jnp.broadcast_to(value, (size, *value.shape))


def _of_lists(function: Callable[[Any, Any], Any], operands: Operands, batched: Operands) -> Any:
    """`function(array, is_batched)` of each array of the lists."""
    assert operands.lists is not None
    assert batched.lists is not None
    return tuple(function(*each) for each in zip(operands.lists, batched.lists, strict=True))


def _fold_into_images(operands: Operands, batched: Operands, size: int, config: Config) -> jax.Array:
    """x (and residual) batched, weights not: more images per kernel."""
    stacks, images = operands.kernel.shape[0], operands.x.shape[1]
    if stacks == 1 and None not in explicit.spec_of(operands.x)[:2]:
        return _join_with_images(operands, batched, size, config)
    apart = [images] if stacks == 1 else [stacks, images // stacks]
    # A kernel's images may come in any order. Those that are split, as types have it, have to come first.
    position = len(apart) - (explicit.spec_of(operands.x)[1] is None)

    def fold(value: Any) -> Any:  # [B, S * n, ...] -> [S * B * n, ...], or [S * n * B, ...]
        if value is None:
            return None
        split = value.reshape(size, *apart, *value.shape[2:])
        return jnp.moveaxis(split, 0, position).reshape(size * images, *value.shape[2:])

    residual = fold(_every(operands.residual, batched.residual, size))
    lists = (
        None
        if operands.lists is None
        else _of_lists(lambda value, is_batched: fold(_every(value, is_batched, size)), operands, batched)
    )
    out = bind(
        fold(operands.x), operands.kernel, operands.bias, residual, config, operands.packed, operands.nonzeros, lists
    )
    split = out.reshape(*apart[:position], size, *apart[position:], *out.shape[1:])
    return jnp.moveaxis(split, position, 0).reshape(size, images, *out.shape[1:])


def _join_with_images(operands: Operands, batched: Operands, size: int, config: Config) -> jax.Array:
    """As `_fold_into_images`, of one kernel, where types split the new axis and the images over different axes."""
    x = operands.x

    def fold(value: Any, is_batched: Any) -> Any:
        every = _every(value, is_batched, size)
        return None if every is None else explicit.joined(explicit.with_leading_split(every, x, 2), 2)

    residual = fold(operands.residual, batched.residual)
    lists = None if operands.lists is None else _of_lists(fold, operands, batched)
    out = bind(
        explicit.joined(x, 2),
        operands.kernel,
        operands.bias,
        residual,
        config,
        operands.packed,
        operands.nonzeros,
        lists,
    )
    return explicit.parted(out, x, 2)


def _fold_into_stacks(operands: Operands, batched: Operands, size: int, config: Config) -> jax.Array:
    """x and weights batched: more images and as many more kernels."""

    def fold(value: Any, is_batched: Any) -> Any:
        every = _every(value, is_batched, size)
        return None if every is None else every.reshape(every.shape[0] * every.shape[1], *every.shape[2:])

    out = bind(
        fold(operands.x, batched.x),
        fold(operands.kernel, batched.kernel),
        fold(operands.bias, batched.bias),
        fold(operands.residual, batched.residual),
        config,
        fold(operands.packed, batched.packed) if batched.packed else None,
        operands.nonzeros,
        None if operands.lists is None else _of_lists(fold, operands, batched),
    )
    return out.reshape(size, out.shape[0] // size, *out.shape[1:])


def _fold_into_out_channels(operands: Operands, batched: Operands, size: int, config: Config) -> jax.Array:
    """Weights batched, x not: more output channels, so that x is compressed once for all of them."""
    groups = config.geometry.groups

    def fold(value: Any, is_batched: Any) -> Any:  # [B, ..., g * k] -> [..., g * B * k]
        every = _every(value, is_batched, size)
        if every is None:
            return None
        split = every.reshape(*every.shape[:-1], groups, every.shape[-1] // groups)
        return jnp.moveaxis(split, 0, -2).reshape(*every.shape[1:-1], size * every.shape[-1])

    out = bind(
        operands.x,
        fold(operands.kernel, batched.kernel),
        fold(operands.bias, batched.bias),
        fold(operands.residual, batched.residual),
        config,
        nonzeros=operands.nonzeros,
        lists=operands.lists,
    )
    out_channels = operands.kernel.shape[-1]
    split = out.reshape(*out.shape[:-1], groups, size, out_channels // groups)
    return jnp.moveaxis(split, -2, 0).reshape(size, *out.shape[:-1], out_channels)


def _fits_in_out_channels(operands: Operands, size: int, config: Config) -> bool:
    """Whether kernels index so many output channels, whose number they must know."""
    if is_symbolic(size):
        return False
    kernel_elements = math.prod(operands.kernel.shape[2:])
    conv_size = config.geometry.conv_size(operands.x.shape[1:3], operands.kernel.shape[2:4])
    result_elements = math.prod(conv_size) * operands.kernel.shape[-1]
    return size * max(kernel_elements, result_elements) <= MAX_ELEMENTS


def _batch_epilogue(operands: Operands, batched: Operands, config: Config) -> jax.Array:
    """Only bias or residual batched: one convolution, then the epilogue for each."""
    y = bind(operands.x, operands.kernel, None, None, config.bare(), operands.packed, operands.nonzeros, operands.lists)

    def finish(bias: Any, residual: Any) -> jax.Array:
        z = reference.epilogue(y, bias_per_image(bias, y.shape[0]), residual, config.activation)
        return max_pool.pool(z, config.geometry.pool)

    axes = (0 if batched.bias else None, 0 if batched.residual else None)
    return jax.vmap(finish, in_axes=axes)(operands.bias, operands.residual)


batching.primitive_batchers[conv_p] = batch
