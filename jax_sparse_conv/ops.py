"""The public operations: argument checks and the choice of implementation.

`implementation` follows `jax.nn.dot_product_attention`: `None` chooses and always works, a name runs that one or raises
a `ValueError` that says what would work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_conv import _native, coo_configurations, counting, packing, primitives, reference
from jax_sparse_conv import geometry as geo
from jax_sparse_conv.geometry import Geometry, Padding
from jax_sparse_conv.packing import PackedKernel

CONV_IMPLEMENTATIONS = ("xla", "ecr", "coo", "direct", "adaptive")
CONV_POOL_IMPLEMENTATIONS = ("xla", "ecr", "coo", "pecr", "direct", "adaptive")
DENSE_IMPLEMENTATIONS = ("xla", "ecr")
IMPLEMENTATIONS = {
    "conv": CONV_IMPLEMENTATIONS,
    "conv_pool": CONV_POOL_IMPLEMENTATIONS,
    "dense": DENSE_IMPLEMENTATIONS,
}
READS_NONZEROS = (None, "adaptive")  # implementations that take `nonzeros`
ACTIVATIONS = (None, "relu")
_KERNEL_DTYPES = _native.DTYPES["cpu"]  # a superset of every platform's; lowering knows the platform
_NHWC = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def conv(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    residual: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
    nonzeros: jax.typing.ArrayLike | None = None,
    count_nonzeros: bool = False,
) -> Any:
    """Two-dimensional convolution that skips the zeros of `x`: `activation(conv(x, kernel) + bias + residual)`.

    Equal to `jax.lax.conv_general_dilated` with NHWC and HWIO, with one difference: a skipped zero of x drops `0 * inf`
    and `0 * nan`. Both zeros are skipped, NaN, infinities and subnormals of x are not. On a GPU zeros are skipped where
    four neighbouring results share them, so whether a lone zero meets a non-finite weight is not defined.

    Args:
      x: [N, H, W, C], float32, bfloat16, float16 or float64 (float64 natively on CPU only).
      kernel: [kh, kw, C / feature_group_count, K], x's dtype; or what `jax_sparse_conv.pack` made of it.
      bias: [K], x's dtype, or None.
      strides: rows and columns between windows, an int or two.
      padding: "SAME", "SAME_LOWER", "VALID", an int, or two entries, each an int or (low, high); may be negative.
      kernel_dilation: distance between the kernel's taps, an int or two.
      feature_group_count: groups of channels convolved separately; C for a depthwise convolution.
      residual: [N, Ho, Wo, K], x's dtype, added before the activation, or None.
      activation: None or "relu".
      precision: as in lax; the sparse kernels compute float32 exactly and sum 16-bit types in float32 whatever it says.
        "direct" on a GPU multiplies float32 as TF32 unless it is HIGHEST; values below 2^-113 lose digits even then.
      implementation: "ecr" (windows compressed on the fly; Xu et al. 2023, section 5, made multi-channel and batched),
        "coo" (tiled lists, sums in registers; Xiang et al. 2022: square kernels of 1, 3, 5 or 7, strides 1 and 2, no
        dilation), "direct" (dense, skips nothing, tuned for small batches; Cheng et al. 2018), "xla" (dense),
        "adaptive" (ECR up to the density of x that `jax_sparse_conv.choice` expects it to win at, beyond it "direct" on
        a GPU and XLA's dense on a CPU, decided while the program runs, without the host), or None: ECR, "direct" or
        XLA's dense, as `jax_sparse_conv.choice` expects of sizes, dtype, precision and device, on a CPU also by the
        zeros of x while the program runs; XLA's where there is no kernel for the platform and dtype.
      nonzeros: int32 [parts, 2], rows of (non-zeros, elements) of parts of x whose sums give its density, such as
        `count_nonzeros` returns or [[count, x.size]]; for "adaptive" and None. Without them they sample x where they
        need its density. Under `vmap` one decision is made for all.
      count_nonzeros: whether to return such counts of the result, for the next layer: on a GPU of what up to 64 blocks
        of the kernel have written, elsewhere of a sample, or of everything where there are several devices.

    Returns:
      [N, Ho, Wo, K] in x's dtype; with `count_nonzeros` a pair of that and int32 [64, 2].

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ.
    """
    operands = _Operands.of(x, kernel, bias, residual, nonzeros)
    geometry = geo.resolve(
        operands.x.shape,
        operands.kernel.shape,
        strides=strides,
        padding=padding,
        kernel_dilation=kernel_dilation,
        feature_group_count=feature_group_count,
    )
    operands.check(geometry, activation)
    _check_implementation(implementation, CONV_IMPLEMENTATIONS, "conv", operands.x.dtype)
    _check_nonzeros(operands.nonzeros, implementation)
    return _run(operands, geometry, activation, precision, implementation, "ecr", count_nonzeros)


def conv_pool(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    activation: str | None = "relu",
    pool: str = "max",
    window_shape: int | Sequence[int] = (2, 2),
    window_strides: int | Sequence[int] | None = None,
    window_padding: Padding = "VALID",
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
    nonzeros: jax.typing.ArrayLike | None = None,
    count_nonzeros: bool = False,
) -> Any:
    """Convolution, bias, activation and pooling in one operation that skips the zeros of `x`.

    Args:
      x: [N, H, W, C], float32, bfloat16, float16 or float64 (float64 natively on CPU only).
      kernel: as in `conv`.
      bias: [K], x's dtype, or None.
      strides: of the convolution, an int or two.
      padding: of the convolution, as in `conv`.
      kernel_dilation: as in `conv`.
      feature_group_count: as in `conv`.
      activation: None or "relu", applied before the pool.
      pool: "max" (padded with -inf) or "avg" (padded with zeros that count in the mean, as `flax.linen.avg_pool`).
      window_shape: rows and columns of a pooling window, an int or two.
      window_strides: between pooling windows, an int or two; None is `window_shape` (Flax's pools have 1 there).
      window_padding: of the pool, as `padding` but not negative.
      precision: as in `conv`.
      implementation: "pecr" (all convolutions of a pooling window in one kernel; Xu et al. 2023, section 6), "ecr",
        "coo" or "direct" (that convolution, then XLA's pool; "direct" takes 2x2 windows side by side into its kernel
        for convolutions of stride 1 on Hopper GPUs), "xla" (dense), "adaptive" (on a CPU PECR or dense while the
        program runs; on a GPU the convolution as in `conv`, then XLA's pool), or None: PECR, dense or "direct", chosen
        as in `conv`. To name PECR here and ECR in `conv` is the paper's OCPA rule (section 7).
      nonzeros: of x, as in `conv`.
      count_nonzeros: as in `conv`, of the pooled result.

    Returns:
      [N, Po, Qo, K] in x's dtype; with `count_nonzeros` a pair of that and int32 [64, 2].

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ.
    """
    operands = _Operands.of(x, kernel, bias, None, nonzeros)
    geometry = geo.resolve(
        operands.x.shape,
        operands.kernel.shape,
        strides=strides,
        padding=padding,
        kernel_dilation=kernel_dilation,
        feature_group_count=feature_group_count,
    )
    geometry = geo.with_pool(
        geometry,
        geometry.conv_size(operands.x.shape[1:3], operands.kernel.shape[:2]),
        kind=pool,
        window_shape=window_shape,
        window_strides=window_strides,
        window_padding=window_padding,
    )
    operands.check(geometry, activation)
    _check_implementation(implementation, CONV_POOL_IMPLEMENTATIONS, "conv_pool", operands.x.dtype)
    _check_nonzeros(operands.nonzeros, implementation)
    if implementation in ("ecr", "coo"):
        y = _run(operands, geometry.without_pool(), activation, precision, implementation, implementation, False)
        return _with_counts(reference.pool(y, geometry.pool), count_nonzeros)
    method = "direct" if implementation == "direct" else "pecr"
    return _run(operands, geometry, activation, precision, implementation, method, count_nonzeros)


def dense(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = None,
    *,
    activation: str | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """Matrix product that reads only the rows of `kernel` that meet a non-zero of `x`: `activation(x @ kernel + bias)`.

    After a ReLU and at a small batch a fully connected layer is a stream of its weights, and rows that meet zeros need
    not be read. As in `conv`, a skipped zero drops `0 * inf` and `0 * nan`.

    Args:
      x: [..., C], float32, bfloat16, float16 or float64 (float64 natively on CPU only).
      kernel: [C, K], x's dtype; or what `jax_sparse_conv.pack` made of it.
      bias: [K], x's dtype, or None.
      activation: None or "relu".
      precision: as in `conv`.
      implementation: "ecr" (each row of x is one compressed window), "xla" (dense), or None: dense for more than 16
        rows (those that `vmap` adds are counted), on a CPU for more than one if the kernel is small, or without a
        kernel for the platform and dtype, else ECR; on a CPU several rows also by the zeros of x as the program runs.

    Returns:
      [..., K] in x's dtype.

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ.
    """
    given = _Operands.of(x, kernel, bias)
    shape, features = given.x.shape, given.kernel.shape
    if len(shape) < 1 or len(features) != 2 or shape[-1] != features[0]:
        raise ValueError(f"x.shape={shape} and kernel.shape={features} are not [..., C] and [C, K]")
    _check_implementation(implementation, DENSE_IMPLEMENTATIONS, "dense", given.x.dtype)
    # A row of x is a one-pixel map and the kernel a 1x1 window.
    rows = given.x.reshape(math.prod(shape[:-1]), 1, 1, shape[-1])
    operands = _Operands(rows, given.kernel[None, None], given.bias, packed=given.packed)
    geometry = geo.resolve(operands.x.shape, operands.kernel.shape, padding="VALID")
    operands.check(geometry, activation)
    if implementation == "xla" or (implementation is None and str(given.x.dtype) not in _KERNEL_DTYPES):
        y = jnp.matmul(given.x, given.kernel, precision=precision)
        return reference.epilogue(y, given.bias, None, activation)
    method = None if implementation is None else "dense"
    out = _run(operands, geometry, activation, precision, method, "dense", False)
    return out.reshape(*shape[:-1], features[1])


def conv_general_dilated(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` that skips the zeros of `lhs` where it can, to pass to a Flax layer.

    Takes lax's arguments. Two-dimensional convolutions with NHWC input and output and HWIO kernel, without input
    dilation, batch groups or another result dtype, run as `conv`; anything else runs as lax's own convolution under
    `implementation=None` and raises under a name. Array arguments are as in lax; `out_sharding` is passed on.

    Raises:
      ValueError: a convolution that the named implementation does not have; and whatever lax raises, by its names.
    """
    _check_implementation(implementation, CONV_IMPLEMENTATIONS, "conv_general_dilated", jnp.asarray(lhs).dtype)
    reason = _why_not_conv(lhs, rhs, lhs_dilation, dimension_numbers, batch_group_count, preferred_element_type)
    if reason is not None and implementation not in (None, "xla"):
        raise ValueError(f"implementation={implementation!r} cannot run this convolution: {reason}; None or 'xla' can")
    dense = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if reason is not None or implementation == "xla":
        return dense(jnp.asarray(lhs), jnp.asarray(rhs), out_sharding=out_sharding)
    # Lax's own errors, which name the arguments as this caller knows them.
    jax.eval_shape(dense, *(jax.ShapeDtypeStruct(jnp.shape(a), jnp.asarray(a).dtype) for a in (lhs, rhs)))
    out = conv(
        lhs,
        rhs,
        strides=tuple(window_strides),
        padding=padding,
        kernel_dilation=1 if rhs_dilation is None else tuple(rhs_dilation),
        feature_group_count=feature_group_count,
        precision=precision,
        implementation=implementation,
    )
    return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)


def density(x: jax.typing.ArrayLike, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Fraction of non-zeros of `x` over `axis` (all axes for None), float32; 1 minus the sparsity.

    -0.0 counts as zero; NaN, infinities and subnormals count as non-zero, as in every kernel of this package.
    """
    return reference.density(jnp.asarray(x), axis)


class _Operands(NamedTuple):
    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None = None
    residual: jax.Array | None = None
    nonzeros: jax.Array | None = None
    packed: PackedKernel | None = None  # what `kernel` was given as

    @classmethod
    def of(cls, *values: Any) -> _Operands:
        for name, value in zip(("x", "kernel"), values[:2], strict=True):
            if value is None:
                raise TypeError(f"{name}=None is not an array")
        packed = values[1] if isinstance(values[1], PackedKernel) else None
        arrays: Any = (None if value is None else jnp.asarray(value) for value in values)
        return cls(*arrays)._replace(packed=packed)

    def check(self, geometry: Geometry, activation: str | None) -> None:
        """Shapes and dtypes of what follows the convolution, and that all dtypes agree."""
        features = self.kernel.shape[-1]
        conv_size = geometry.conv_size(self.x.shape[1:3], self.kernel.shape[:2])
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
        result = (self.x.shape[0], *conv_size, features)
        for name, value, shape in (("bias", self.bias, (features,)), ("residual", self.residual, result)):
            if value is not None and value.shape != shape:
                raise ValueError(f"{name}.shape={value.shape} must be {shape}")
        for name, value in zip(("kernel", "bias", "residual"), self[1:4], strict=True):
            if value is not None and value.dtype != self.x.dtype:
                raise TypeError(f"{name}.dtype={value.dtype} must equal x.dtype={self.x.dtype}")


def _run(
    operands: _Operands,
    geometry: Geometry,
    activation: str | None,
    precision: lax.PrecisionLike,
    implementation: str | None,
    sparse: str,
    count_nonzeros: bool,
) -> Any:
    """One call by `implementation`; under None `sparse` is the native method that may be chosen."""
    method, fallback = implementation or sparse, implementation is None
    packed = packing.for_call(operands.x, operands.kernel, operands.packed, geometry, method)
    precision = _canonical_precision(precision)
    reason = geo.too_large(geometry, operands.x.shape, operands.kernel.shape)
    if reason is not None and not fallback and method != "xla":
        raise ValueError(f"implementation={method!r} cannot run: {reason}; implementation=None or 'xla' can")
    if method == "coo" and (missing := coo_configurations.why_not(operands.kernel.shape, geometry)):
        raise ValueError(f"{missing}: implementation='coo' cannot run; None, 'ecr' or 'xla' can")
    nothing_to_skip = operands.x.shape[3] == 0
    if method == "xla" or reason is not None or nothing_to_skip or str(operands.x.dtype) not in _KERNEL_DTYPES:
        return _with_counts(reference.conv_pool(*operands[:4], geometry, activation, precision), count_nonzeros)
    config = primitives.Config(geometry, method, activation, fallback=fallback, precision=precision)
    return _sparse(operands._replace(packed=None), packed, config, count_nonzeros)


@functools.partial(jax.jit, static_argnames=("config", "count_nonzeros"))
def _sparse(operands: _Operands, packed: jax.Array | None, config: primitives.Config, count_nonzeros: bool) -> Any:
    # Jitted so that an eager call does not copy the kernel to give it the stack axis.
    x, kernel, bias, residual, nonzeros, _ = operands
    kernel, bias, packed = kernel[None], None if bias is None else bias[None], None if packed is None else packed[None]
    if count_nonzeros:
        return counting.bind(primitives.Operands(x, kernel, bias, residual, packed, nonzeros), config)
    return primitives.bind(x, kernel, bias, residual, config, packed, nonzeros)


def _with_counts(y: jax.Array, count_nonzeros: bool) -> Any:
    return (y, counting.counted(y)) if count_nonzeros else y


def _check_nonzeros(nonzeros: jax.Array | None, implementation: str | None) -> None:
    if nonzeros is None:
        return
    if implementation not in READS_NONZEROS:
        names = " and ".join(map(repr, READS_NONZEROS))
        raise ValueError(f"nonzeros is given, but implementation={implementation!r} does not read it; {names} do")
    if nonzeros.ndim != 2 or nonzeros.shape[0] < 1 or nonzeros.shape[1] != 2:
        raise ValueError(
            f"nonzeros.shape={nonzeros.shape} must be [parts, 2]: rows of (non-zeros, elements) of parts of x"
        )
    if nonzeros.dtype != jnp.int32:
        raise TypeError(f"nonzeros.dtype={nonzeros.dtype} must be int32")


def _check_implementation(implementation: str | None, names: tuple[str, ...], op: str, dtype: Any) -> None:
    choices = ", ".join(map(repr, (None, *names)))
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation={implementation!r} is not one that {op} has: {choices}")
    if implementation not in (None, "xla") and str(dtype) not in _KERNEL_DTYPES:
        raise ValueError(
            f"implementation={implementation!r} cannot run with x.dtype={dtype}; it takes "
            f"{', '.join(_KERNEL_DTYPES)}, and implementation=None or 'xla' whatever lax takes"
        )


def _canonical_precision(precision: lax.PrecisionLike) -> Any:
    """None, a pair of `lax.Precision` or a dot algorithm, as lax has it now (`jax.default_matmul_precision` counts).

    Checked at trace time also where no kernel needs the answer.
    """
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        product = jax.make_jaxpr(functools.partial(lax.dot, precision=precision))(one, one)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision={precision!r} is not None, 'default', 'high', 'highest', a jax.lax.Precision, a pair of them "
            "or another that lax takes"
        ) from error
    return product.eqns[0].params["precision"]


def _why_not_conv(
    lhs: Any,
    rhs: Any,
    lhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    batch_group_count: int,
    preferred_element_type: Any,
) -> str | None:
    """Why a call of lax's signature is not one of `conv`, or None."""
    lhs_shape, rhs_shape = jnp.shape(lhs), jnp.shape(rhs)
    if len(lhs_shape) != 4 or len(rhs_shape) != 4:
        return f"lhs.shape={lhs_shape} is not two-dimensional (four axes)"
    if lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers) != _NHWC:
        return f"dimension_numbers={dimension_numbers!r} is not ('NHWC', 'HWIO', 'NHWC')"
    if lhs_dilation is not None and any(d != 1 for d in lhs_dilation):
        return f"lhs_dilation={tuple(lhs_dilation)} is not 1"
    if batch_group_count != 1:
        return f"batch_group_count={batch_group_count} is not 1"
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) != jnp.asarray(lhs).dtype:
        return f"preferred_element_type={preferred_element_type!r} is not lhs's dtype"
    if 0 in rhs_shape[:2]:
        return f"rhs.shape={rhs_shape} has an empty window"
    return None
