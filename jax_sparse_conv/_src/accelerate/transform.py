"""`accelerate`: the public transformation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.accelerate import (
    by_numpy,
    dense_blocks,
    equations,
    hoist,
    micro_batches,
    module_state,
    recognise,
)
from jax_sparse_conv._src.accelerate.report import Report, report_of
from jax_sparse_conv._src.accelerate.rows import UNKNOWN_SIZES, Row
from jax_sparse_conv._src.fusion import rewrite
from jax_sparse_conv._src.fusion.jaxprs import traced
from jax_sparse_conv._src.primitive import explicit, jax_internals
from jax_sparse_conv._src.problem import geometry as geo

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

HIDDEN_64_BITS = "it has arrays of 64 bits, and jax.enable_x64 is on only inside of it"


class Accelerated(Protocol[P, R_co]):
    """What `accelerate` returns: a function of the same arguments and results, and its report."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @property
    def report(self) -> Callable[..., Report]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of arrays, rewritten.

    Attributes:
      split: what depends on weights alone, and the rest.
      rows: its layers.
      results: how the results are nested.
    """

    split: hoist.Split
    rows: Sequence[Row]
    results: Any


def accelerate(function: Callable[P, R_co]) -> Accelerated[P, R_co]:
    """Run the convolutions of any function by the kernels of this package.

    The function stays as its author wrote it, with Flax, Haiku, Equinox, Keras or plain JAX. Its trace is rewritten:

    - Every two-dimensional `lax.conv_general_dilated` becomes `jsc.conv` under `implementation=None`, whatever its
      order of axes, strides, padding, dilation and groups. Products of up to 16 rows with a matrix become `jsc.dense`.
      Calls of this package under `implementation=None` are taken in as well. Those under a name, `"xla"` too, stay.
    - What follows joins the call: a bias, batch norm at inference in any spelling, a residual, ReLU, and a max or
      average pool. So does a `pad` in front. A batch norm is folded into the kernel.
    - Feature maps lie as [N, H, W, C] between the layers. What a function with channels first transposes is its first
      map and its last.
    - Layers that feed each other run as fused chains, where that is expected to be faster, and layers that append to a
      map as dense blocks (Huang et al. 2017), where the device has them. A CPU has them in float32 and, with
      AVX512-BF16, in bfloat16; others of 16 bits are computed in float32 there.
    - Max pools of height and width that join nothing, as in training, have derivatives that are fast on a CPU. So have
      gradients of max pools that the function computes itself.
    - Inside of `jit` a CPU takes a batch through the first layers in micro-batches, where each image is taken by
      itself. Their maps then stay in the caches. Derivatives, `vmap` and exported programs take it as one.
    - Layers in the bodies of `scan`, `while_loop`, `cond`, `checkpoint` and functions with derivatives of their own are
      rewritten there.

    Weights that `function` holds itself are constants of its trace. What depends on them alone, such as folded batch
    norms, is computed while it is traced. Weights that are arguments are folded in every call, where that is cheap;
    `jit_inference` does it once.

    It composes with `jit`, `vmap`, `grad` and `scan`, as `jax.checkpoint` does. Values are those of `function` but for
    the rounding of folded batch norms and of maps within a dense block, and but for zeros that meet infinite weights
    (see `conv`). Every spelling of a ReLU is `jax.nn.relu`: `maximum(x, 0)` has the derivative 0 at 0, and `where(x >
    0, x, 0)` keeps NaN. A pool that joins a call keeps NaN, too, as lax defines it; on a CPU XLA's own loses it in
    places. Outside of `jit` the function is traced at every call. What it writes into the variables of an nnx module
    among its arguments, such as the running statistics of a batch norm, is written there. What it adds to a module, as
    `sow` does, is lost.

    Args:
      function: of arrays and anything else. Leaves of its arguments that are no arrays are taken as they are.

    Returns:
      A function of the same arguments and results. Its attribute `report(*args, **kwargs)` returns a `Report` of what
      became of every convolution. Arguments may be `jax.ShapeDtypeStruct`s there.

    Raises:
      TypeError: `function` cannot be called.
      ValueError: when called, if it writes into a variable that its arguments hold several times, such as tied weights.

    Warns:
      UserWarning: when called, if there is no convolution or dense layer to rewrite, if arguments are references or
        have types that say how they are split, or if `jax.enable_x64` is on only inside of it; then the function runs
        as it is.
    """
    if not callable(function):
        raise TypeError(f"function={function!r} cannot be called")

    def accelerated(*args: Any, **kwargs: Any) -> Any:
        out, written = called(*args, **kwargs)
        module_state.write(args, kwargs, written)
        return out

    def called(*args: Any, **kwargs: Any) -> Any:
        closed, arrays, results = traced(module_state.with_written(function), args, kwargs)
        given = [*closed.consts, *arrays]
        if (reason := _why_not(given, closed)) is not None:
            warnings.warn(_untouched(function, reason), stacklevel=3)
            return jax.tree.unflatten(results, hoist.evaluate(closed, *arrays))
        fixed = _fixed(closed)
        program = of_jaxpr(closed, fixed, results)
        if all(row.reason is not None for row in program.rows):
            warnings.warn(_nothing(function, program.rows), stacklevel=3)
            return jax.tree.unflatten(results, hoist.evaluate(closed, *arrays))
        warn_of_unknown_sizes(program)
        once = prepared(program.split.once, list(itertools.compress(given, fixed)))
        others = itertools.compress(given, (not each for each in fixed))
        every = program.split.every
        if jax_internals.is_tracing():  # what is not compiled has nothing of it
            every = micro_batches.with_micro_batches(every, len(once))
        if every is program.split.every:
            out, _ = rewrite.evaluate(every, [*once, *others])
        else:
            out = hoist.evaluate(every, *once, *others)
        return jax.tree.unflatten(results, out)

    def report(*args: Any, **kwargs: Any) -> Report:
        closed, arrays, results = traced(function, args, kwargs)
        reason = _why_not([*closed.consts, *arrays], closed)
        if reason is not None:
            return Report((), reason)
        program = of_jaxpr(closed, _fixed(closed), results)
        return report_of(program.split.every, program.rows)

    functools.update_wrapper(accelerated, function, updated=())
    accelerated.report = report  # type: ignore[attr-defined]
    return cast(Accelerated[P, R_co], accelerated)


def of_jaxpr(closed: Any, fixed: Sequence[bool], results: Any) -> Program:
    """Rewrite a closed jaxpr, whose constants and arguments are fixed or not."""
    program, rows = recognise.rewritten(_opened(closed), fixed)
    program = dense_blocks.rewritten(program, fixed, rows)
    return Program(hoist.split(program, fixed), tuple(rows), results)


def warn_of_unknown_sizes(program: Program) -> None:
    """Warn of layers that are left because their sizes are symbolic."""
    if any(row.reason == UNKNOWN_SIZES for row in program.rows):
        geo.warn_of_unknown_sizes()


def prepared(once: Any, weights: Sequence[Any]) -> list[jax.Array]:
    """The results of the part of a program that depends on weights alone, computed now."""
    if not once.jaxpr.outvars:
        return []
    with jax.ensure_compile_time_eval():
        if by_numpy.suits(weights):
            return by_numpy.evaluate(once, weights)
        out: list[jax.Array] = jax.jit(hoist.evaluate, static_argnums=0)(once, *weights)
    return out


def _opened(closed: Any) -> Any:
    """The jaxpr with its constants as its first arguments."""
    types = [jax.typeof(value) for value in closed.consts]
    count = len(types)

    def function(*values: Any) -> list[Any]:
        out: list[Any] = jax.core.eval_jaxpr(closed.jaxpr, values[:count], *values[count:])
        return out

    return jax.make_jaxpr(function)(*types, *closed.in_avals)


def _fixed(closed: Any) -> list[bool]:
    """Of the constants and arguments of a trace, which depend on weights alone: the constants that are known."""
    known = [not isinstance(value, jax.core.Tracer) for value in closed.consts]
    return known + [False] * len(closed.in_avals)


def _why_not(values: Sequence[Any], closed: Any) -> str | None:
    """Why a function of these constants and arguments is left as it is, or None."""
    if equations.has_hidden_64_bits(closed.jaxpr):
        return HIDDEN_64_BITS
    if any(isinstance(value, jax.Ref) for value in values):
        return "it reads or writes a reference (jax.new_ref)"
    arrays = [jnp.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value for value in values]
    return "its arrays say how they are split over devices (explicit sharding)" if explicit.is_split(arrays) else None


def _untouched(function: Callable[..., Any], reason: str) -> str:
    return f"accelerate left {_name_of(function)} as it is: {reason}"


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _nothing(function: Callable[..., Any], rows: Sequence[Row]) -> str:
    name = _name_of(function)
    if not rows:
        return f"accelerate found no convolution in {name}, which runs as it is"
    return f"accelerate left all {len(rows)} convolutions of {name}, which runs as it is: {rows[0].reason}"
