"""Calls of "adaptive" with a threshold and counts of our own, so that either side can be had."""

from __future__ import annotations

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
from cases import Case
from jax import lax
from kernel_checks import call, poison

from jax_sparse_conv._src.primitive import counting, primitives
from jax_sparse_conv._src.problem import geometry as geo

HALF = 0.5
SPARSE, DENSE = [[1, 4], [0, 0], [2, 2]], [[3, 4], [0, 0], [1, 2]]  # at the threshold of a half, and above
CONV = Case("adaptive conv", (2, 9, 9, 40), 48, bias=True, residual=True, activation="relu")
POOL = Case("adaptive pool", (2, 10, 9, 24), 40, bias=True, activation="relu", pool="max")
AVERAGE = Case("adaptive average", (1, 12, 12, 16), 20, pool="avg", window=(3, 3), window_strides=(2, 2))
DEPTHWISE = Case("adaptive depthwise", (2, 9, 9, 33), 33, groups=33, activation="relu")
GROUPS = Case("adaptive groups", (1, 8, 8, 32), 48, groups=2, bias=True)
LARGE = Case("adaptive large", (1, 40, 41, 64), 96, activation="relu", zeros=0.4)
BOTH = [CONV, POOL, AVERAGE, DEPTHWISE, GROUPS, LARGE]


def adaptive(
    case: Case,
    inputs: cases.Inputs,
    nonzeros: Any,
    below: float = HALF,
    counted: bool = False,
    precision: Any = "highest",
) -> Any:
    """The case with a threshold of our own."""
    x, kernel, bias, residual = (cases.on_device(v) for v in inputs)
    arguments = dict(case.arguments)
    pool = {name: arguments.pop(name) for name in [*arguments] if name == "pool" or name.startswith("window")}
    activation = arguments.pop("activation")
    geometry = geo.resolve(x.shape, kernel.shape, **arguments)
    if case.pool:
        size = geometry.conv_size(x.shape[1:3], kernel.shape[:2])
        geometry = geo.with_pool(geometry, size, kind=pool.pop("pool"), **pool)
    exact = None if precision is None else (lax.Precision.HIGHEST,) * 2
    config = primitives.Config(geometry, "adaptive", activation, precision=exact, below=below)
    poison(jax.eval_shape(lambda: call(case, x, kernel, bias, residual, "xla")).shape, x.dtype)
    return _run(
        x, kernel, bias, residual, None if nonzeros is None else jnp.asarray(nonzeros, jnp.int32), config, counted
    )


@functools.partial(jax.jit, static_argnums=(5, 6))
def _run(x: Any, kernel: Any, bias: Any, residual: Any, nonzeros: Any, config: Any, counted: bool) -> Any:
    kernel, bias = kernel[None], None if bias is None else bias[None]
    if counted:
        return counting.bind(primitives.Operands(x, kernel, bias, residual, nonzeros=nonzeros), config)
    return primitives.bind(x, kernel, bias, residual, config, nonzeros=nonzeros)
