"""Gradients in float32 at HIGHEST on a GPU whose tensor cores take float32 in parts much faster than FFMA takes it.

Of x: convolutions of the cotangent (`gradient_of_x`), where `implementation=None` would run them by a kernel of ours.

Of the kernel: the convolution of x with the cotangent as its kernel, images and channels in each other's place. It is
dense, by the tensor cores in parts (3xTF32), and its sums are split, which XLA's are not.

XLA has the rest. That is also large 3x3 windows of many channels, which cuDNN transforms, and 1x1 windows of so many
elements that to transpose them takes longer, by "gpu gradients" of `dispatch/model.json` (`benchmarks gradients`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import choice, model
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.primitive import custom_call, gradient_of_x, lowering
from jax_sparse_conv._src.primitive.primitives import Config, bind
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

_METHOD = "direct"
_MOST_PHASES = 4  # of the gradient of x, each a call and a pass over the result


def takes(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient is computed here, on the GPU that is lowered for."""
    if not custom_call.is_highest(config.precision):
        return False
    if any(geo.is_symbolic(*each.shape) or 0 in each.shape or each.dtype != jnp.float32 for each in (other, cotangent)):
        return False
    device = devices.known()
    if device is None or not device.has_fast_tf32 or _native.why_missing(_METHOD, "cuda", like.dtype) is not None:
        return False
    if by_kernel:  # whose rule knows XLA's times on one kind of GPU
        return device.capability == choice.MEASURED and _takes_kernel(other, cotangent, config, like)
    if not gradient_of_x.has_simple_phases(config) or math.prod(config.geometry.strides) > _MOST_PHASES:
        return False
    pairs = gradient_of_x.phases(other, cotangent, config, like)
    return all(_is_ours(cotangent, other, config, *pair) for pair in pairs)


def _is_ours(cotangent: Any, kernel: Any, config: Config, rows: Any, columns: Any) -> bool:
    """Whether `implementation=None` runs a phase of the gradient of x by a kernel of ours."""
    part = gradient_of_x.part_of(config, rows, columns)
    turned = kernel.update(shape=gradient_of_x.kernel_shape_of(kernel, config, rows, columns))
    return choice.on_gpu(lowering.workload_of(cotangent, turned, part)).method != "xla"


def _takes_kernel(x: Any, cotangent: Any, config: Config, like: Any) -> bool:
    limits = model.shipped("gpu gradients")
    if config.geometry.groups > 1 or like.shape[0] > 1 or min(like.shape[3:]) < limits["channels, least"]:
        return False
    if x.shape[0] < limits["images, least"] or _is_transformed(cotangent, config, like):
        return False
    is_product = like.shape[1:3] == (1, 1)
    if is_product and max(math.prod(x.shape), math.prod(cotangent.shape)) > limits["elements, transposed"]:
        return False
    images, height, width, channels = x.shape
    _, rows, columns, out_channels = cotangent.shape
    turned = x.update(shape=(channels, height, width, images))
    by = like.update(shape=(1, rows, columns, images, out_channels))
    workload = lowering.workload_of(turned, by, _turned(x, cotangent, config, like))
    return Layer.of(workload).dense(devices.current()).candidate.family in ("wgmma", "mma")


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
    x, kernel = jnp.transpose(other, (3, 1, 2, 0)), jnp.transpose(cotangent, (1, 2, 0, 3))[None]
    return jnp.transpose(bind(x, kernel, None, None, _turned(other, cotangent, config, like)), (1, 2, 0, 3))[None]


def _turned(x: Any, cotangent: Any, config: Config, like: Any) -> Config:
    """The convolution of x [C, H, W, N] with the cotangent [1, Ho, Wo, N, K] that makes [C, kh, kw, K]."""
    geometry, pads = config.geometry, []
    for axis, (low, _) in enumerate(geometry.padding):
        last = (like.shape[1 + axis] - 1) * geometry.dilation[axis]
        last += (cotangent.shape[1 + axis] - 1) * geometry.strides[axis]
        pads.append((low, last + 1 - low - x.shape[1 + axis]))
    turned = Geometry(geometry.dilation, (pads[0], pads[1]), geometry.strides, 1)
    return Config(turned, _METHOD, precision=config.precision)
