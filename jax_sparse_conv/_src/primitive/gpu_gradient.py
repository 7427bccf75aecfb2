"""Gradients of a convolution on a GPU whose tensor cores take float32 in parts much faster than FFMA takes it whole.

Of x, in float32: convolutions of the cotangent (`gradient_of_x`), where `implementation=None` would run them by a
kernel of ours. Below HIGHEST those of 1x1 kernels are XLA's, which are products of matrices.

Of the kernel, in float32 at HIGHEST: the convolution of x with the cotangent as its kernel, images and channels in each
other's place. It is dense, by the tensor cores in parts (3xTF32), and its sums are split, which XLA's are not. That of
a 1x1 kernel is a product of matrices, by XLA in three parts likewise.

XLA has the rest. That is also large 3x3 windows of many channels, which cuDNN transforms, by "gpu gradients" of
`dispatch/model.json` (`benchmarks gradients --set large`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import choice, model
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.primitive import custom_call, gradient_of_x, lowering
from jax_sparse_conv._src.primitive.primitives import Config, bind
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

_METHOD = "direct"
_MOST_PHASES = 4  # of the gradient of x, each a call and a pass over the result
_IN_PARTS = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def takes(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient is computed here, on the GPU that is lowered for."""
    shapes = (other.shape, cotangent.shape, like.shape)
    if (
        any(geo.is_symbolic(*shape) or 0 in shape for shape in shapes)
        or not cotangent.dtype == other.dtype == like.dtype
    ):
        return False
    device = devices.known()
    if device is None or not device.has_fast_tf32 or _native.why_missing(_METHOD, "cuda", like.dtype) is not None:
        return False
    if by_kernel:  # whose rule knows XLA's times on one kind of GPU
        return device.capability == choice.MEASURED and _takes_kernel(other, cotangent, config, like)
    if not gradient_of_x.is_known(config) or math.prod(config.geometry.strides) > 4:
        return False
    return all(
        _is_ours(cotangent, other, config, *pair) for pair in gradient_of_x.phases(other, cotangent, config, like)
    )


def _is_ours(cotangent: Any, kernel: Any, config: Config, rows: Any, columns: Any) -> bool:
    """Whether `implementation=None` runs a phase of the gradient of x by a kernel of ours."""
    part = gradient_of_x.part_of(config, rows, columns)
    turned = kernel.update(shape=gradient_of_x.kernel_shape_of(kernel, config, rows, columns))
    return choice.on_gpu(lowering.workload_of(cotangent, turned, part)).method != "xla"


def _takes_kernel(x: Any, cotangent: Any, config: Config, like: Any) -> bool:
    limits = model.shipped("gpu gradients")
    if like.dtype != jnp.float32 or not custom_call.is_highest(config.precision) or config.geometry.groups > 1:
        return False
    if like.shape[0] > 1 or min(like.shape[3:]) < limits["channels, least"]:
        return False
    if _is_product(like, config):
        return True
    if _is_transformed(cotangent, config, like) or x.shape[0] < limits["images, least"]:
        return False
    types = x.update(shape=_swapped_shape(x)), like.update(shape=(1, *_turned_shape(cotangent)))
    workload = lowering.workload_of(*types, _of_kernel_config(x, cotangent, config, like))
    return Layer.of(workload).dense(devices.current()).candidate.family in ("wgmma", "mma")


def _is_product(like: Any, config: Config) -> bool:
    """Whether the gradient of a kernel is one product of matrices."""
    return like.shape[1:3] == (1, 1) and config.geometry.padding == ((0, 0), (0, 0))


def _is_transformed(cotangent: Any, config: Config, like: Any) -> bool:
    """Whether cuDNN computes it by transforms, with fewer products than there are."""
    limits = model.shipped("gpu gradients")
    is_plain = like.shape[1:3] == (3, 3) and config.geometry.strides == config.geometry.dilation == (1, 1)
    flops = 2.0 * math.prod(cotangent.shape[:3]) * math.prod(like.shape)
    is_large = min(like.shape[3:]) >= limits["channels, transforms"] and flops >= limits["operations, transforms"]
    return is_plain and is_large


def gradient(other: jax.Array, cotangent: jax.Array, *, config: Config, like: Any, by_kernel: bool) -> jax.Array:
    """As `differentiation.gradient`."""
    if not by_kernel:
        return gradient_of_x.gradient(other, cotangent, config, like)
    if _is_product(like, config):
        return _product(other, cotangent, config, like)
    x = jnp.transpose(other, (3, 1, 2, 0))
    turned = jnp.transpose(cotangent, (1, 2, 0, 3))[None]
    found = bind(x, turned, None, None, _of_kernel_config(other, cotangent, config, like))
    return jnp.transpose(found, (1, 2, 0, 3))[None]


def _product(x: jax.Array, cotangent: jax.Array, config: Config, like: Any) -> jax.Array:
    """x [N, H, W, C], cotangent [N, Ho, Wo, K] -> [1, 1, 1, C, K]."""
    rows, columns = config.geometry.strides
    pixels = x[:, ::rows, ::columns].reshape(-1, x.shape[3]), cotangent.reshape(-1, cotangent.shape[3])
    return lax.dot_general(*pixels, (((0,), (0,)), ((), ())), precision=_IN_PARTS).reshape(like.shape)


def _of_kernel_config(x: Any, cotangent: Any, config: Config, like: Any) -> Config:
    """The convolution of x [C, H, W, N] with the cotangent [1, Ho, Wo, N, K] that makes [C, kh, kw, K]."""
    geometry, pads = config.geometry, []
    for axis, (low, _) in enumerate(geometry.padding):
        last = (like.shape[1 + axis] - 1) * geometry.dilation[axis]
        last += (cotangent.shape[1 + axis] - 1) * geometry.strides[axis]
        pads.append((low, last + 1 - low - x.shape[1 + axis]))
    turned = Geometry(geometry.dilation, (pads[0], pads[1]), geometry.strides, 1)
    return Config(turned, _METHOD, precision=config.precision)


def _swapped_shape(x: Any) -> tuple[int, ...]:
    images, height, width, channels = x.shape
    return channels, height, width, images


def _turned_shape(cotangent: Any) -> tuple[int, ...]:
    images, rows, columns, channels = cotangent.shape
    return rows, columns, images, channels
