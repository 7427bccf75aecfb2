"""Kernels packed once, at trace time, for the CPU's pixel loop.

The loop (`cpu/pixel_kernel.h`) reads slices of [channels, kh * kw, block] weights. From a kernel as it lies it packs
them in every call, which is a third to a half of a sparse layer with few pixels. A kernel that is a constant of the
traced program, as a model's weights are in `jax.jit(lambda x: model(x))`, is packed while it is traced and goes along
with the call; JAX arrays do not change, so the copy is right for as long as the program is.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_sparse_conv import _native
from jax_sparse_conv.geometry import Geometry

_MAX_BLOCK = 128
_LEAST_BLOCK = 16

# By id, for as long as the kernel is alive: arrays do not hash.
_made: dict[int, tuple[weakref.ref[jax.Array], dict[int, jax.Array]]] = {}


def block_features(kernel_shape: tuple[int, ...], groups: int) -> int:
    """Output channels of a block, as `PackedBlock` of `cpu/conv_args.cc`; kernel_shape is [kh, kw, C / groups, K]."""
    block = _LEAST_BLOCK
    while kernel_shape[0] == 1 and block < min(_MAX_BLOCK, kernel_shape[3] // groups):
        block *= 2
    return block


def pack(kernel: Any, groups: int) -> npt.NDArray[Any]:
    """[kh, kw, C / groups, K] -> [1, groups, blocks, C / groups, kh * kw, block], the last block filled with zeros."""
    values = np.asarray(kernel)
    height, width, channels, features = values.shape
    block, each = block_features(values.shape, groups), features // groups
    blocks = -(-each // block)
    split = values.reshape(height * width, channels, groups, each)
    padded = np.pad(split, ((0, 0), (0, 0), (0, 0), (0, blocks * block - each)))
    cut = padded.reshape(height * width, channels, groups, blocks, block)
    return np.ascontiguousarray(cut.transpose(2, 3, 1, 0, 4)[None])


def of_constant(x: Any, kernel: Any, geometry: Geometry) -> jax.Array | None:
    """The packed kernel where a call is traced with a constant kernel that the pixel loop could run, else None."""
    if not isinstance(x, jax.core.Tracer) or isinstance(kernel, jax.core.Tracer) or not isinstance(kernel, jax.Array):
        return None
    if not _is_worth_it(kernel, geometry):
        return None
    known = _made.get(id(kernel))
    if known is None or known[0]() is not kernel:
        key = id(kernel)
        known = (weakref.ref(kernel, lambda _: _made.pop(key, None)), {})
        _made[key] = known
    if geometry.groups not in known[1]:
        with jax.ensure_compile_time_eval():
            known[1][geometry.groups] = jnp.asarray(pack(kernel, geometry.groups))
    return known[1][geometry.groups]


def _is_worth_it(kernel: jax.Array, geometry: Geometry) -> bool:
    if jax.default_backend() != "cpu" or not _native.cpu_isas() or kernel.dtype != jnp.float32:
        return False
    if not kernel.is_fully_addressable or kernel.ndim != 4 or len(kernel.devices()) != 1:
        return False
    taps = kernel.shape[:2] in ((3, 3), (1, 1)) and geometry.dilation[1] == 1
    return taps and tuple(geometry.strides) == (1, 1) and kernel.shape[3] // geometry.groups >= _LEAST_BLOCK
