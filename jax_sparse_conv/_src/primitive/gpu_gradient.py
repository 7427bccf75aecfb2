"""Gradients in float32 at HIGHEST on a GPU whose tensor cores take float32 in parts much faster than FFMA takes it.

Of x: convolutions of the cotangent (`gradient_of_x`), where `implementation=None` would run them by a kernel of ours.

Of the kernel: a kernel for Hopper's warpgroup products (`cuda/training/kernel_gradient.cu`). It is dense, by the tensor
cores in parts (3xTF32), and its sums are split, which XLA's are not.

XLA has the rest. That is also 3x3 windows of very many channels, which cuDNN transforms, by "gpu gradients" of
`dispatch/model.json` (`benchmarks gradients`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import choice, model, planner
from jax_sparse_conv._src.primitive import custom_call, gradient_of_x, lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

_METHOD = "kernel_gradient"
_MOST_PHASES = 4  # of the gradient of x, each a call and a pass over the result


def takes(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient is computed here, on the GPU that is lowered for."""
    if not custom_call.is_highest(config.precision):
        return False
    if any(geo.is_symbolic(*each.shape) or 0 in each.shape or each.dtype != jnp.float32 for each in (other, cotangent)):
        return False
    device, method = devices.known(), _METHOD if by_kernel else "direct"
    if device is None or not device.has_fast_tf32 or _native.why_missing(method, "cuda", like.dtype) is not None:
        return False
    if by_kernel:  # whose rule knows XLA's times on one kind of GPU
        return device.capability == choice.MEASURED and _takes_kernel(other, cotangent, config, like, device)
    if not gradient_of_x.has_simple_phases(config) or math.prod(config.geometry.strides) > _MOST_PHASES:
        return False
    pairs = gradient_of_x.phases(other, cotangent, config, like)
    return all(_is_ours(cotangent, other, config, *pair) for pair in pairs)


def _is_ours(cotangent: Any, kernel: Any, config: Config, rows: Any, columns: Any) -> bool:
    """Whether `implementation=None` runs a phase of the gradient of x by a kernel of ours."""
    part = gradient_of_x.part_of(config, rows, columns)
    turned = kernel.update(shape=gradient_of_x.kernel_shape_of(kernel, config, rows, columns))
    return choice.on_gpu(lowering.workload_of(cotangent, turned, part)).method != "xla"


def _takes_kernel(x: Any, cotangent: Any, config: Config, like: Any, device: devices.Device) -> bool:
    limits = model.shipped("gpu gradients")
    if like.shape[0] > 1 or min(like.shape[3:]) < limits["channels, least"] or _is_transformed(cotangent, config, like):
        return False
    plan = _plan(x, config, like, device)
    operations = 2.0 * math.prod(cotangent.shape[:3]) * math.prod(like.shape)
    return plan is not None and operations >= limits["operations of a microsecond, least"] * plan.us


def _plan(x: Any, config: Config, like: Any, device: devices.Device) -> planner.KernelGradient | None:
    return next(iter(planner.Layer.of(lowering.workload_of(x, like, config)).kernel_gradients(device)), None)


def _is_transformed(cotangent: Any, config: Config, like: Any) -> bool:
    """Whether cuDNN computes it by transforms, with fewer products than there are."""
    limits = model.shipped("gpu gradients")
    is_plain = like.shape[1:3] == (3, 3) and config.geometry.strides == config.geometry.dilation == (1, 1)
    flops = 2.0 * math.prod(cotangent.shape[:3]) * math.prod(like.shape)
    is_wide = min(like.shape[3:]) >= limits["channels, transforms"]
    is_wide &= math.prod(like.shape[3:]) >= limits["weights of a tap, transforms"]
    return is_plain and is_wide and flops >= limits["operations, transforms"]


def gradient(other: jax.Array, cotangent: jax.Array, *, config: Config, like: Any, by_kernel: bool) -> jax.Array:
    """As `differentiation.gradient`, of what `takes` takes."""
    if not by_kernel:
        return gradient_of_x.gradient(other, cotangent, config, like)
    plan = _plan(other, config, like, devices.current())
    assert plan is not None  # `takes` says so
    return of_kernel(other, cotangent, geometry=config.geometry, like=like, plan=plan)


def of_kernel(
    x: jax.Array, cotangent: jax.Array, *, geometry: Geometry, like: Any, plan: planner.KernelGradient
) -> jax.Array:
    """x [N, H, W, C], cotangent [N, Ho, Wo, K] -> [1, kh, kw, C, K], by this plan."""
    results = [jax.ShapeDtypeStruct(like.shape, like.dtype), jax.ShapeDtypeStruct((plan.workspace_bytes,), np.uint8)]
    call = jax.ffi.ffi_call(_native.target_name(_METHOD), results)
    found: jax.Array = call(
        x, cotangent, **custom_call.geometry_attributes(geometry), tile=np.asarray(plan.tile, np.int64)
    )[0]
    return found
