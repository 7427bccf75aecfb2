"""The arguments of the public operations: their names, and the checks that say what would have been right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.primitive.packing import PackedKernel
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem.arrays import as_array
from jax_sparse_conv._src.problem.geometry import Padding, PoolKind

ConvImplementation: TypeAlias = Literal["xla", "ecr", "coo", "direct", "adaptive"]
ConvPoolImplementation: TypeAlias = Literal["xla", "ecr", "coo", "pecr", "direct", "adaptive"]
DenseImplementation: TypeAlias = Literal["xla", "ecr"]
CONV_IMPLEMENTATIONS: tuple[ConvImplementation, ...] = get_args(ConvImplementation)
CONV_POOL_IMPLEMENTATIONS: tuple[ConvPoolImplementation, ...] = get_args(ConvPoolImplementation)
DENSE_IMPLEMENTATIONS: tuple[DenseImplementation, ...] = get_args(DenseImplementation)
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "conv": CONV_IMPLEMENTATIONS,
    "conv_pool": CONV_POOL_IMPLEMENTATIONS,
    "dense": DENSE_IMPLEMENTATIONS,
}
READS_LISTS = (None, "coo", "xla")  # implementations that take a `CooStar` for x
READS_NONZEROS = (None, "adaptive", "coo")  # implementations that take `nonzeros`
ACTIVATIONS = (None, "relu")
Activation: TypeAlias = ActivationName | Callable[..., Any] | None
"""None, or "relu" or `jax.nn.relu`."""
KERNEL_DTYPES = _native.DTYPES["cpu"]  # a superset of every platform's; lowering knows the platform

_ARRAYS = ("x", "kernel", "bias", "residual", "nonzeros")


class ConvOptions(TypedDict, total=False):
    """Arguments of `ops.conv` that its overloads share."""

    strides: int | Sequence[int]
    padding: Padding
    kernel_dilation: int | Sequence[int]
    feature_group_count: int
    residual: jax.typing.ArrayLike | None
    activation: Activation
    precision: lax.PrecisionLike
    implementation: ConvImplementation | None
    nonzeros: jax.typing.ArrayLike | None


class ConvPoolOptions(TypedDict, total=False):
    """Arguments of `ops.conv_pool` that its overloads share."""

    strides: int | Sequence[int]
    padding: Padding
    kernel_dilation: int | Sequence[int]
    feature_group_count: int
    activation: Activation
    pool: PoolKind
    window_shape: int | Sequence[int]
    window_strides: int | Sequence[int] | None
    window_padding: Padding
    precision: lax.PrecisionLike
    implementation: ConvPoolImplementation | None
    nonzeros: jax.typing.ArrayLike | None


class Operands(NamedTuple):
    """The arrays of a call; shapes as in `ops.conv`."""

    x: Any  # or a `CooStar`
    kernel: jax.Array
    bias: jax.Array | None = None
    residual: jax.Array | None = None
    nonzeros: jax.Array | None = None
    packed: PackedKernel | None = None  # what `kernel` was given as

    @classmethod
    def of(cls, *values: Any) -> Operands:
        for name, value in zip(("x", "kernel"), values[:2], strict=True):
            if value is None:
                raise TypeError(f"{name}=None is not an array")
        packed = values[1] if isinstance(values[1], PackedKernel) else None
        arrays: Any = (_array(name, value) for name, value in zip(_ARRAYS, values, strict=False))
        return cls(*arrays)._replace(packed=packed)

    def check(self, result: tuple[int, ...]) -> None:
        """Shapes and dtypes of what is added to a convolution's or product's result, and that all dtypes agree."""
        for name, value, shape in (("bias", self.bias, result[-1:]), ("residual", self.residual, result)):
            if value is not None and value.shape != shape:
                raise ValueError(f"{name}.shape={value.shape} must be {shape}")
        for name, value in zip(("kernel", "bias", "residual"), self[1:4], strict=True):
            if value is not None and value.dtype != self.x.dtype:
                is_cast = jnp.issubdtype(value.dtype, jnp.floating) and not jnp.issubdtype(self.x.dtype, jnp.floating)
                advice = f"; x.astype({str(value.dtype)!r}) makes x that" if is_cast else ""
                raise TypeError(f"{name}.dtype={value.dtype} must equal x.dtype={self.x.dtype}{advice}")


def _array(name: str, value: Any) -> jax.Array | CooStar | None:
    """An array whose dtype is its own, as a kernel's result has it: promotion is not to depend on what ran."""
    if value is None:
        return None
    if isinstance(value, CooStar):
        if name != "x":
            raise TypeError(f"{name} is a CooStar, and only x may be one; {name}.todense() is an array")
        value.check()
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} is a ShapeDtypeStruct, which has no values; jax.eval_shape takes those")
    array = as_array(name, value)
    return lax.convert_element_type(array, array.dtype) if jax.typeof(array).weak_type else array


def is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    """Whether `value` is among the choices, also for an array, which compares with nothing."""
    return any(isinstance(value, type(choice)) and value == choice for choice in choices)


def canonical_activation(activation: Activation) -> ActivationName | None:
    """The name of an activation; `jax.nn.relu` is "relu", and so is `flax.nnx.relu`.

    Raises:
      ValueError: any other.
    """
    if activation is jax.nn.relu:
        return "relu"
    if not is_one_of(activation, ACTIVATIONS) or callable(activation):
        raise ValueError(
            f"activation={activation!r} is not one of {', '.join(map(repr, ACTIVATIONS))}, or jax.nn.relu; apply any "
            "other behind the call"
        )
    return None if activation is None else "relu"


def check_positive(name: str, value: Any) -> None:
    """Raise a ValueError for a number that is no int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r} must be an int of at least 1")


def is_dtype(name: str) -> bool:
    """Whether `name` is how an array's dtype is written, such as "float32"."""
    scalar = getattr(jnp, name, None)
    return isinstance(scalar, type(jnp.float32)) and str(jnp.dtype(scalar)) == name


def check_flag(name: str, value: Any) -> None:
    """Raise for a flag that is no bool; it decides what is returned, so it cannot be traced."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is not True or False")


def check_nonzeros(nonzeros: jax.Array | None, implementation: str | None) -> None:
    """Raise for counts that nothing would read, or of another shape or dtype."""
    if nonzeros is None:
        return
    if implementation not in READS_NONZEROS:
        names = ", ".join(map(repr, READS_NONZEROS))
        raise ValueError(f"nonzeros is given, but implementation={implementation!r} does not read it; {names} do")
    if nonzeros.ndim != 2 or nonzeros.shape[0] < 1 or nonzeros.shape[1] != 2:
        raise ValueError(
            f"nonzeros.shape={nonzeros.shape} must be [parts, 2]: rows of (non-zeros, elements) of parts of x"
        )
    if nonzeros.dtype != jnp.int32:
        raise TypeError(f"nonzeros.dtype={nonzeros.dtype} must be int32")


def check_lists(x: Any, implementation: str | None) -> None:
    """Raise a ValueError for an implementation that does not read a `CooStar`, where x is one."""
    if isinstance(x, CooStar) and implementation not in READS_LISTS:
        raise ValueError(
            f"x is a CooStar, which implementation={implementation!r} does not read; "
            f"{', '.join(map(repr, READS_LISTS))} do, and x.todense() is an array for all"
        )


def check_implementation(implementation: str | None, names: tuple[str, ...], op: str, dtype: Any) -> None:
    """Raise a ValueError for an implementation that `op` does not have, or not for this dtype."""
    choices = ", ".join(map(repr, (None, *names)))
    if not is_one_of(implementation, (None, *names)):
        raise ValueError(f"implementation={implementation!r} is not one that {op} has: {choices}")
    if implementation not in (None, "xla") and str(dtype) not in KERNEL_DTYPES:
        raise ValueError(
            f"implementation={implementation!r} cannot run with x.dtype={dtype}; it takes "
            f"{', '.join(KERNEL_DTYPES)}, and implementation=None or 'xla' whatever lax takes"
        )


def canonical_precision(precision: lax.PrecisionLike) -> Any:
    """None, a pair of `lax.Precision` or a dot algorithm, as lax has it now (`jax.default_matmul_precision` counts).

    Checked at trace time also where no kernel needs the answer.
    """
    try:
        hash(precision)
    except TypeError:  # of a list
        return _traced_precision(precision)
    return _known_precision(precision, default_precision())


def default_precision() -> Any:
    """`jax.default_matmul_precision` as it is set here and now."""
    return getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  # jax's types do not know it


@functools.lru_cache(maxsize=64)
def _known_precision(precision: lax.PrecisionLike, default: Any) -> Any:
    del default  # which lax reads by itself
    return _traced_precision(precision)


def _traced_precision(precision: lax.PrecisionLike) -> Any:
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        product = jax.make_jaxpr(functools.partial(lax.dot, precision=precision))(one, one)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision={precision!r} is not None, 'default', 'high', 'highest', a jax.lax.Precision, a pair of them "
            "or another that lax takes"
        ) from error
    return product.eqns[0].params["precision"]
