"""Gradients of a convolution on a CPU.

Of x: convolutions of the cotangent (`gradient_of_x`), which skip the zeros that a ReLU behind the convolution left in
it. Of x of a dense layer: XLA's product.

Of the kernel: a native call that skips the zeros of x, or of the cotangent where that has more of them
(`cpu/ffi/kernel_gradient.cc`). Of a depthwise kernel of few taps: a product and a sum for each tap, as there a vector
of a group's channels has one.

XLA has the rest. Which of them is faster says a row of a table (`dispatch/gradient_table.py`). Without one XLA has the
windows, strides and channels that these do not suit, by "cpu gradients" of `dispatch/model.json`. In groups no channels
are too few, since XLA's gradients are slowest there (`benchmarks gradients`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch import gradient_table, model
from jax_sparse_conv._src.primitive import custom_call, gradient_of_x, lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

_METHOD = "kernel_gradient"
_MOST_COLUMNS = 1 << 12  # of x: with those and _MOST_REACH what the native call copies is small (`native/call.cc`)
_MOST_ELEMENTS = 1 << 31
_MOST_REACH = 128  # results that a window reaches over
# The rows of all images are cut in chunks that have sums of their own: where there are few channels, threads have
# nothing else to share, and sums of fewer pixels have smaller errors (`benchmarks gradients`). So many at most, with so
# many elements of all sums, of so many pixels each.
_MOST_CHUNKS, _SUMS, _PIXELS = 16, 1 << 19, 1 << 8


def takes(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient is computed here, and not by XLA."""
    if not supports(other, cotangent, config, like, by_kernel):
        return False
    x, kernel = (other, like) if by_kernel else (like, other)
    row = gradient_table.on_cpu(lowering.workload_of(x, kernel, config), by_kernel)
    return _suits(cotangent, kernel.shape, config.geometry, by_kernel) if row is None else row.is_ours


def supports(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient may be computed here: of known sizes and one dtype, and by windows that the calls take."""
    shapes = (other.shape, cotangent.shape, like.shape)
    if any(geo.is_symbolic(*shape) or 0 in shape for shape in shapes):
        return False
    if _native.why_missing(_METHOD, "cpu", like.dtype) is not None or cotangent.dtype != like.dtype:
        return False
    if max(_reaches((like if by_kernel else other).shape, config.geometry)) > _MOST_REACH:
        return False
    if not by_kernel:
        return gradient_of_x.has_simple_phases(config)
    sizes = [math.prod(shape[1:]) for shape in shapes]
    return other.shape[2] <= _MOST_COLUMNS and max(sizes) < _MOST_ELEMENTS


def _reaches(kernel_shape: tuple[int, ...], geometry: Geometry) -> list[int]:
    """How many results a window reaches over, in rows and columns."""
    triples = zip(kernel_shape[1:3], geometry.dilation, geometry.strides, strict=True)
    return [(n - 1) * d // s for n, d, s in triples]


def _suits(cotangent: Any, kernel_shape: tuple[int, ...], geometry: Geometry, by_kernel: bool) -> bool:
    """Whether vectors of a group's channels are full, and windows reach over results rather than padding."""
    _, *taps, in_channels, out_channels = kernel_shape
    limits = model.shipped("cpu gradients")
    if geometry.groups == 1 and (out_channels if by_kernel else in_channels) < limits["channels, least"]:
        return False
    if math.prod(geometry.strides) > limits["phases, most"]:
        return False
    return geometry.groups > 1 or math.prod(taps) <= max(limits["taps, few"], math.prod(cotangent.shape[1:3]))


def gradient(other: jax.Array, cotangent: jax.Array, *, config: Config, like: Any, by_kernel: bool) -> jax.Array:
    """As `differentiation.gradient`."""
    if not by_kernel and _is_dense_layer(other, cotangent, like):
        return _of_x_of_dense_layer(other, cotangent, config, like)
    if not by_kernel:
        return gradient_of_x.gradient(other, cotangent, config, like)
    stacks, *rest = like.shape
    one = like.update(shape=(1, *rest))
    function = _of_depthwise_kernel if _is_depthwise(like.shape, config.geometry) else _of_kernel
    if stacks == 1:
        return function(other, cotangent, config.geometry, one)
    parts = [array.reshape(stacks, -1, *array.shape[1:]) for array in (other, cotangent)]
    return lax.map(lambda pair: function(pair[0], pair[1], config.geometry, one)[0], parts)


def _is_dense_layer(kernel: Any, cotangent: Any, like: Any) -> bool:
    """Whether kernels of one tap and one group meet maps of one pixel."""
    one = (*kernel.shape[1:3], *cotangent.shape[1:3], *like.shape[1:3])
    return max(one) == 1 and kernel.shape[3] == like.shape[3]


def _of_x_of_dense_layer(kernel: jax.Array, cotangent: jax.Array, config: Config, like: Any) -> jax.Array:
    """By XLA's product, which reads a large kernel as it is: turning one takes longer than all products of a batch."""
    stacks, _, _, channels, out_channels = kernel.shape
    rows, kernels = cotangent.reshape(stacks, -1, out_channels), kernel.reshape(stacks, channels, out_channels)
    found = lax.dot_general(rows, kernels, (((2,), (2,)), ((0,), (0,))), precision=config.precision)
    return found.reshape(like.shape)


def _is_depthwise(kernel_shape: tuple[int, ...], geometry: Geometry) -> bool:
    _, *taps, in_channels, out_channels = kernel_shape
    is_small = math.prod(taps) <= model.shipped("cpu gradients")["taps, depthwise"]
    return is_small and in_channels == 1 and out_channels == geometry.groups


def _of_depthwise_kernel(x: jax.Array, cotangent: jax.Array, geometry: Geometry, like: Any) -> jax.Array:
    """x [N, H, W, C], cotangent [N, Ho, Wo, C] -> [1, kh, kw, 1, C]."""
    wide = jnp.promote_types(like.dtype, jnp.float32)
    x, cotangent = x.astype(wide), cotangent.astype(wide)
    x = lax.pad(x, np.zeros((), wide), ((0, 0, 0), *((*pads, 0) for pads in geometry.padding), (0, 0, 0)))
    (down, right), (rows, columns) = geometry.strides, cotangent.shape[1:3]
    sums = []
    for row, column in np.ndindex(like.shape[1:3]):
        top, left = row * geometry.dilation[0], column * geometry.dilation[1]
        met = x[:, top : top + (rows - 1) * down + 1 : down, left : left + (columns - 1) * right + 1 : right]
        sums.append((met * cotangent).sum(2))
    # Sums of rows first: XLA adds up what one reduction has in one chain.
    return jnp.stack(sums).sum((1, 2)).reshape(like.shape).astype(like.dtype)


def _of_kernel(x: jax.Array, cotangent: jax.Array, geometry: Geometry, like: Any) -> jax.Array:
    """x [N, H, W, C], cotangent [N, Ho, Wo, K] -> [1, kh, kw, C / groups, K]."""
    dtype = np.float64 if like.dtype == np.float64 else np.float32
    images, height, width, _ = x.shape
    most = (_MOST_CHUNKS, _SUMS // math.prod(like.shape), images * height * width // _PIXELS, images * height)
    chunks = max(1, min(most))
    call = jax.ffi.ffi_call(_native.target_name(_METHOD), jax.ShapeDtypeStruct((chunks, *like.shape[1:]), dtype))
    found = call(x, cotangent, **custom_call.geometry_attributes(geometry))
    # By additions, as XLA's reduction over the first axis takes longer than the call.
    return functools.reduce(jnp.add, (found[i : i + 1] for i in range(chunks))).astype(like.dtype)
