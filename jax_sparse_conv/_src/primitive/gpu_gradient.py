"""Gradients in float32 at HIGHEST on a GPU whose tensor cores take float32 in parts much faster than FFMA takes it.

Of x: convolutions of the cotangent (`gradient_of_x`), where `implementation=None` would run them by a kernel of ours.

Of the kernel: a kernel for Hopper's warpgroup products (`cuda/training/kernel_gradient.cu`). It is dense, by the tensor
cores in parts (3xTF32), and its sums are split, which XLA's are not.

XLA has the rest. Which of them is faster says a row of a table (`dispatch/gradient_table.py`). Without one of x it is
the forward choice, and of the kernel the planner's model with "gpu gradients" of `dispatch/model.json`: XLA has few
products, and 3x3 windows of very many channels, which cuDNN transforms (`benchmarks gradients`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch import choice, gradient_table, model, planner
from jax_sparse_conv._src.primitive import custom_call, gradient_of_x, lowering
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.workload import Workload

_METHOD = "kernel_gradient"
_MOST_PHASES = 4  # of the gradient of x, each a call and a pass over the result


def takes(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient is computed here, on the GPU that is lowered for, and not by XLA."""
    if not supports(other, cotangent, config, like, by_kernel):
        return False
    device = devices.known()
    assert device is not None  # `supports` says so
    workload = _workload(other, config, like, by_kernel)
    row = gradient_table.on_gpu(workload, by_kernel, device)
    if row is not None:
        return row.is_ours
    if by_kernel:  # whose rule knows XLA's times on one kind of GPU
        return device.capability == choice.MEASURED and _suits_kernel(workload)
    return all(
        _is_ours(cotangent, other, config, *pair) for pair in gradient_of_x.phases(other, cotangent, config, like)
    )


def supports(other: Any, cotangent: Any, config: Config, like: Any, by_kernel: bool) -> bool:
    """Whether a gradient may be computed here: at HIGHEST, of known sizes, on a GPU that has the kernels."""
    if not custom_call.is_highest(config.precision):
        return False
    if any(geo.is_symbolic(*each.shape) or 0 in each.shape or each.dtype != jnp.float32 for each in (other, cotangent)):
        return False
    device, method = devices.known(), _METHOD if by_kernel else "direct"
    if device is None or not device.has_fast_tf32 or _native.why_missing(method, "cuda", like.dtype) is not None:
        return False
    if by_kernel:
        layer = planner.Layer.of(_workload(other, config, like, by_kernel))
        return like.shape[0] == 1 and bool(layer.kernel_gradients(device))
    return gradient_of_x.has_simple_phases(config) and math.prod(config.geometry.strides) <= _MOST_PHASES


def _workload(other: Any, config: Config, like: Any, by_kernel: bool) -> Workload:
    """The convolution that is differentiated."""
    return lowering.workload_of(*((other, like) if by_kernel else (like, other)), config)


def _is_ours(cotangent: Any, kernel: Any, config: Config, rows: Any, columns: Any) -> bool:
    """Whether `implementation=None` runs a phase of the gradient of x by a kernel of ours."""
    part = gradient_of_x.part_of(config, rows, columns)
    turned = kernel.update(shape=gradient_of_x.kernel_shape_of(kernel, config, rows, columns))
    return choice.on_gpu(lowering.workload_of(cotangent, turned, part)).method != "xla"


def _suits_kernel(workload: Workload) -> bool:
    """Whether the kernel's gradient is expected to be faster here than XLA's."""
    limits = model.shipped("gpu gradients")
    if min(workload.kernel_shape[3:]) < limits["channels, least"] or _is_transformed(workload):
        return False
    return workload.pixels >= limits["pixels, least"]


def _is_transformed(workload: Workload) -> bool:
    """Whether cuDNN computes it by transforms, with fewer products than there are."""
    limits = model.shipped("gpu gradients")
    _, *window, channels, out_channels = workload.kernel_shape
    is_plain = window == [3, 3] and workload.geometry.strides == workload.geometry.dilation == (1, 1)
    is_wide = min(channels, out_channels) >= limits["channels, transforms"]
    is_wide &= channels * out_channels >= limits["weights of a tap, transforms"]
    return is_plain and is_wide and workload.flops >= limits["operations, transforms"]


def gradient(other: jax.Array, cotangent: jax.Array, *, config: Config, like: Any, by_kernel: bool) -> jax.Array:
    """As `differentiation.gradient`, of what `takes` takes."""
    if not by_kernel:
        return gradient_of_x.gradient(other, cotangent, config, like)
    workload, device = _workload(other, config, like, by_kernel), devices.current()
    row = gradient_table.on_gpu(workload, by_kernel, device)
    plan = gradient_table.plan_of(row, planner.Layer.of(workload), device)
    assert plan is not None  # `supports` says so
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
