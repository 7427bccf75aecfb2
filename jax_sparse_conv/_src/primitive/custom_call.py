"""A call as its native target takes it: attributes, the order of operands, the workspace of a GPU.

A COO* call of a GPU has its variant among the attributes, or several of which the device takes one.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.dispatch.coo import cost_model
from jax_sparse_conv._src.primitive.primitives import Config, Operands
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.geometry import Geometry

_ACTIVATION_CODES = {None: 0, "relu": 1}
_PRECISION_CODES = {lax.Precision.DEFAULT: 0, lax.Precision.HIGH: 1, lax.Precision.HIGHEST: 2}
# Algorithms of lax that promise no more than TF32 does.
_COARSE_ALGORITHMS = ("DEFAULT", "TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_BF16", "F16_F16_F16", "F16_F16_F32")
_BATCHES = tuple(2**i for i in range(16))  # of more images no call has workspace


def attributes(config: Config) -> dict[str, np.ndarray | np.int64]:
    """The custom call's attributes, as `native/decode.h` reads them."""
    pool = config.geometry.pool
    return geometry_attributes(config.geometry) | {
        "activation": np.int64(_ACTIVATION_CODES[config.activation]),
        "has_bias": np.int64(config.has_bias),
        "has_residual": np.int64(config.has_residual),
        "has_packed": np.int64(config.has_packed),
        "may_be_dense": np.int64(config.may_be_dense),
        "pool": np.int64(geo.POOL_CODES[pool.kind if pool else None]),
        "window": _ints(pool.window if pool else (1, 1)),
        "window_stride": _ints(pool.strides if pool else (1, 1)),
        "window_padding": _ints(pool.padding if pool else ((0, 0), (0, 0))),
        "precision": np.int64(precision_code(config.precision)),
    }


def geometry_attributes(geometry: Geometry) -> dict[str, np.ndarray | np.int64]:
    """Those of a convolution without its pool, which the gradient of a kernel has, too."""
    return {
        "stride": _ints(geometry.strides),
        "padding": _ints(geometry.padding),
        "dilation": _ints(geometry.dilation),
        "groups": np.int64(geometry.groups),
    }


def _ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int64).reshape(-1)


def precision_code(precision: Any) -> int:
    """0 default, 1 high, 2 highest; of a pair the higher one."""
    if precision is None:
        return 0
    if isinstance(precision, tuple) and not isinstance(precision, lax.DotAlgorithm):
        return max(_PRECISION_CODES[each] for each in precision)
    return 0 if getattr(precision, "name", None) in _COARSE_ALGORITHMS else 2


def is_highest(precision: Any) -> bool:
    """Whether float32 is to be multiplied as float32."""
    return precision_code(precision) == _PRECISION_CODES[lax.Precision.HIGHEST]


def taken(ctx: Any, operands: tuple[Any, ...], config: Config, keep: list[int]) -> tuple[Any, tuple[Any, ...], Config]:
    """The operands of these numbers, with what `ctx` says of them."""
    return ctx.replace(avals_in=[ctx.avals_in[i] for i in keep]), tuple(operands[i] for i in keep), config


def custom_call(ctx: Any, operands: tuple[Any, ...], config: Config, platform: str | None) -> Any:
    """Results of the native target: out, on CUDA the workspace, then the counts where ctx has them."""
    x, kernel = ctx.avals_in[:2]
    extra: dict[str, np.ndarray | np.float32] = {}
    if platform == "cuda":
        scratch = _workspace(x, kernel, config, extra)
        out, *counts = ctx.avals_out
        ctx = ctx.replace(avals_out=[out, jax.core.ShapedArray((scratch,), np.uint8), *counts])
    if platform == "cuda" and config.candidate is not None:
        extra["candidate"] = config.candidate.attribute
    if config.method == "adaptive":
        assert config.below is not None
        extra["threshold"] = np.float32(config.below)
    if config.tile is not None:
        extra |= {"tile": np.asarray(config.tile, np.int64), "map": np.asarray(x.shape[1:], np.int64)}
    method, order = _as_taken(len(operands), config)
    ctx, operands, _ = taken(ctx, operands, config, order)
    call = jax.ffi.ffi_lowering(_native.target_name(method))
    return call(ctx, *operands, **attributes(config), **extra)


def _as_taken(count: int, config: Config) -> tuple[str, list[int]]:
    """The native target of `count` operands, and the order in which it takes them: counts are behind the kernel."""
    named = Operands.of(range(count), config)
    first = [named.x] if named.lists is None else list(named.lists)
    order = [*first, named.kernel, named.nonzeros, named.bias, named.residual, named.packed]
    by_density = "coo_by_density" if config.method == "coo" and config.has_nonzeros else config.method
    return by_density if named.lists is None else "coo_lists", [index for index in order if index is not None]


def _workspace(x: Any, kernel: Any, config: Config, extra: dict[str, Any]) -> int:
    """Bytes of workspace of a CUDA call; COO* has its variants added to the attributes, and what is dense beyond."""
    if config.method != "coo":
        return _bytes_of(config.method, x, kernel, config)
    attributes, densities = variants(x, kernel, config)
    extra["coo"] = np.asarray(attributes, np.int64).reshape(-1)
    if densities:
        extra["densities"] = np.asarray(densities, np.float32)
    scratch = cost_model.workspace_bytes(x.shape, kernel.shape, config.geometry, attributes)
    if config.below is None:
        return scratch
    extra["dense_above"] = np.float32(config.below)
    return scratch + _bytes_of("direct", x, kernel, config)  # enough for either; the images may be symbolic


def _bytes_of(method: str, x: Any, kernel: Any, config: Config) -> int:
    """Bytes of workspace of another method.

    A symbolic number of images has as much as the number that has most, up to 16 MiB. COO* needs so much an image.
    """
    conv_size = config.geometry.conv_size(x.shape[1:3], kernel.shape[1:3])
    out_size = config.geometry.out_size(x.shape[1:3], kernel.shape[1:3])
    stacks = 1 if geo.is_symbolic(kernel.shape[0]) else kernel.shape[0]  # which no size depends on
    sizes = (stacks, *kernel.shape[1:]), conv_size, out_size, devices.ordinal()
    batches = _BATCHES if geo.is_symbolic(x.shape[0]) else (x.shape[0],)
    return max(_native.workspace_bytes(method, (images, *x.shape[1:]), *sizes) for images in batches)


def variants(x: Any, kernel: Any, config: Config) -> tuple[list[Any], tuple[float, ...]]:
    """Attributes of a COO* call's configurations, and the densities at which one follows the other."""
    if config.coo is not None:
        return [config.coo], ()
    is_counted = config.has_nonzeros or config.tile is not None or config.below is not None
    found = cost_model.by_density(x.shape, kernel.shape, config.geometry, x.dtype.itemsize, is_counted=is_counted)
    return found.attributes, found.densities
