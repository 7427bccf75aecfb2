"""A case as a function of JAX: the package's call, or a function in lax that `accelerate` takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_sparse_conv as jsc
from benchmarks.fuzz.case import GRADIENTS, Case
from benchmarks.fuzz.operands import Inputs, Operands
from jax_sparse_conv._src import _native, devices

Function = Callable[..., Any]
_NHWC = ("NHWC", "HWIO", "NHWC")


def why_not(case: Case) -> str | None:
    """Why this machine cannot run a case, or None."""
    if (case.dtype, case.transform, case.pool, devices.default_platform()) == ("float64", "jacfwd", "max", "gpu"):
        return "JAX compares and rounds forward derivatives of float64 max pools on a GPU as float32"
    if math.prod(case.split) > jax.device_count():
        return f"a mesh of {math.prod(case.split)} devices is more than there are"
    if case.implementation == "xla" and _is_wrong_in_lax(case):
        return "lax itself is wrong on this mesh: gradients of groups or of max pools, or groups split over channels"
    named = {"conv": "ecr", "conv_pool": "pecr", "dense": "dense"}.get(case.operation, "ecr")
    method = named if case.implementation in ("ecr", "adaptive") else case.implementation
    if method in (None, "xla"):
        return None
    return _native.why_missing(
        method, devices.default_platform(), np.dtype(case.dtype if case.dtype != "bfloat16" else jnp.bfloat16)
    )


def _is_wrong_in_lax(case: Case) -> bool:
    """Whether "xla", which is lax's own, is split in a way that XLA is wrong for (JAX 0.10.2)."""
    _, *pixels, channels, out_channels = case.split
    axes, is_gradient = sum(parts > 1 for parts in case.split), case.transform in GRADIENTS
    if case.groups > 1 and (channels > 1 or out_channels > 1 or (is_gradient and axes > 1)):
        return True
    along = zip(pixels, case.window, case.window_strides or case.window, strict=True)
    overlaps = any(parts > 1 and window >= 2 * stride for parts, window, stride in along)
    return is_gradient and case.pool == "max" and overlaps


def transformed(case: Case, inputs: Inputs) -> tuple[Function, tuple[Any, ...]]:
    """What is called, and its arguments; the result is an array, a tuple of gradients, or a pair with counts."""
    present = [name for name in Operands._fields if getattr(inputs.operands, name) is not None]
    places = _places(case)
    values = [jax.device_put(getattr(inputs.operands, name), places.get(name)) for name in present]
    axes = tuple(0 if getattr(inputs.mapped, name) else None for name in present)
    arguments: tuple[Any, ...] = tuple(values)
    if case.transform in ("grad", "shard grad"):
        arguments = (jax.device_put(inputs.weights, places.get("residual")), *values)
    elif case.transform == "vmap grad":
        arguments = (jax.device_put(inputs.weights), *values)
    elif case.transform == "jacfwd":
        arguments = (tuple(jax.device_put(getattr(inputs.directions, name)) for name in present), *values)
    return _program(dataclasses.replace(case, zeros=0.0, values="positive", seed=0), tuple(present), axes), arguments


@functools.lru_cache(maxsize=1)
def _program(case: Case, present: tuple[str, ...], axes: tuple[int | None, ...]) -> Function:
    """What is called, one program for all cases that differ in their values alone."""
    function = _function(case)

    def call(*given: Any) -> Any:
        return function(**dict(zip(present, given, strict=True)))

    def pulled(weights: Any, *given: Any) -> Any:
        return jax.vjp(call, *given)[1](weights)

    def pushed(directions: Any, *given: Any) -> Any:
        def along(amounts: jax.Array) -> Any:
            return call(
                *(v + jnp.tensordot(amounts, d, 1, precision="highest") for v, d in zip(given, directions, strict=True))
            )

        return jax.jacfwd(along)(jnp.zeros(directions[0].shape[0], given[0].dtype))

    chosen: Function = call
    if case.transform.startswith("vmap ") and case.transform not in GRADIENTS:
        chosen = jax.vmap(call, in_axes=axes)
    elif case.transform in ("grad", "shard grad"):
        chosen = pulled
    elif case.transform == "vmap grad":
        chosen = jax.vmap(pulled, in_axes=(None, *axes))
    elif case.transform == "jacfwd":
        chosen = pushed
    return jax.jit(chosen) if case.jit else chosen


def _places(case: Case) -> dict[str, NamedSharding]:
    """Where a mesh has each operand; none where nothing is split."""
    parts = math.prod(case.split)
    if parts == 1:
        return {}
    mesh = Mesh(np.array(jax.devices()[:parts]).reshape(case.split), ("n", "h", "w", "c", "k"))
    inner = "c" if case.groups == 1 else None  # of a group's channels the kernel has all
    axes = {
        "x": ("n", "h", "w", "c"),
        "kernel": (None, None, inner, "k"),
        "bias": ("k",),
        "residual": ("n", None, None, "k"),  # as the result
    }
    return {name: NamedSharding(mesh, PartitionSpec(*names)) for name, names in axes.items()}


def _function(case: Case) -> Function:
    functions = {"dense": _dense, "conv_general_dilated": _lax, "accelerate": _accelerated}
    return functions.get(case.operation, _conv)(case)


def _conv(case: Case) -> Function:
    common: dict[str, Any] = {
        "strides": case.strides,
        "padding": case.padding,
        "kernel_dilation": case.dilation,
        "feature_group_count": case.groups,
        "activation": case.activation,
        "precision": "highest",
        "implementation": case.implementation,
        "count_nonzeros": case.counts,
    }
    if case.pool is not None:
        common |= {"pool": case.pool, "window_shape": case.window, "window_strides": case.window_strides}
        common |= {"window_padding": case.window_padding}

    def call(x: Any, kernel: Any, bias: Any = None, residual: Any = None) -> Any:
        nonzeros = jnp.asarray([[jnp.sum(x != 0), x.size]], jnp.int32) if case.given else None
        kernel = jsc.pack(kernel, feature_group_count=case.groups) if case.packed else kernel
        if case.operation == "conv_pool":
            return jsc.conv_pool(x, kernel, bias, nonzeros=nonzeros, **common)
        return jsc.conv(x, kernel, bias, residual=residual, nonzeros=nonzeros, **common)

    return call


def _dense(case: Case) -> Function:
    settings = {"activation": case.activation, "precision": "highest", "implementation": case.implementation}

    def call(x: Any, kernel: Any, bias: Any = None) -> Any:
        return jsc.dense(x[:, 0, 0], kernel[0, 0], bias, **settings)[:, None, None]

    return call


def _lax(case: Case) -> Function:
    def call(x: Any, kernel: Any) -> Any:
        return jsc.conv_general_dilated(
            x,
            kernel,
            case.strides,
            case.padding,
            rhs_dilation=case.dilation,
            dimension_numbers=_NHWC,
            feature_group_count=case.groups,
            precision="highest",
            implementation=case.implementation,
        )

    return call


def _accelerated(case: Case) -> Function:
    """A user's function in lax, with channels first or last, rewritten."""
    layout = "NCHW" if case.channels_first else "NHWC"

    def plain(x: Any, kernel: Any, bias: Any = None, residual: Any = None) -> Any:
        y = lax.conv_general_dilated(
            x,
            kernel,
            case.strides,
            case.padding,
            rhs_dilation=case.dilation,
            dimension_numbers=(layout, "HWIO", layout),
            feature_group_count=case.groups,
            precision="highest",
        )
        if bias is not None:
            y = y + (bias[:, None, None] if case.channels_first else bias)
        y = y if residual is None else y + residual
        y = jax.nn.relu(y) if case.activation == "relu" else y
        return y if case.pool is None else _pool(case, y)

    fast = jsc.accelerate(plain)

    def call(x: Any, kernel: Any, bias: Any = None, residual: Any = None) -> Any:
        if not case.channels_first:
            return fast(x, kernel, bias, residual)
        residual = None if residual is None else jnp.moveaxis(residual, -1, 1)
        return jnp.moveaxis(fast(jnp.moveaxis(x, -1, 1), kernel, bias, residual), 1, -1)

    return call


def _pool(case: Case, y: jax.Array) -> jax.Array:
    """Of a map with channels first or last."""

    def on_map(values: Any, others: Any) -> tuple[Any, ...]:
        return (others, others, *values) if case.channels_first else (others, *values, others)

    window, strides = on_map(case.window, 1), on_map(case.window_strides or case.window, 1)
    padding = case.window_padding if isinstance(case.window_padding, str) else on_map(case.window_padding, (0, 0))
    if case.pool == "max":
        return lax.reduce_window(y, np.asarray(-np.inf, y.dtype), lax.max, window, strides, padding)
    total = lax.reduce_window(y, np.zeros((), y.dtype), lax.add, window, strides, padding)
    return total / np.asarray(case.window[0] * case.window[1], y.dtype)
