"""The public operations: `conv`, `conv_pool`, `dense` and `density`.

`implementation` is as in `jax.nn.dot_product_attention`. `None` chooses and always works. A name runs that one, or
raises a `ValueError` that says what would work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax
from jax import lax

from jax_sparse_conv._src.api import run
from jax_sparse_conv._src.api.arguments import (
    ACTIVATIONS,
    CONV_IMPLEMENTATIONS,
    CONV_POOL_IMPLEMENTATIONS,
    DENSE_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    KERNEL_DTYPES,
    READS_LISTS,
    READS_NONZEROS,
    Activation,
    ConvImplementation,
    ConvOptions,
    ConvPoolImplementation,
    ConvPoolOptions,
    DenseImplementation,
    Operands,
    canonical_activation,
    canonical_precision,
    check_flag,
    check_implementation,
    check_lists,
    check_nonzeros,
)
from jax_sparse_conv._src.primitive import explicit, max_pool, reference
from jax_sparse_conv._src.primitive.coo_star import CooStar
from jax_sparse_conv._src.primitive.packing import PackedKernel
from jax_sparse_conv._src.primitive.reference import ActivationName
from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem.arrays import as_array
from jax_sparse_conv._src.problem.geometry import Geometry, Padding, PoolKind

__all__ = [
    "ACTIVATIONS",
    "CONV_IMPLEMENTATIONS",
    "CONV_POOL_IMPLEMENTATIONS",
    "DENSE_IMPLEMENTATIONS",
    "IMPLEMENTATIONS",
    "READS_LISTS",
    "READS_NONZEROS",
    "conv",
    "conv_pool",
    "dense",
    "density",
]


@overload
def conv(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = ...,
    *,
    count_nonzeros: Literal[False] = ...,
    **options: Unpack[ConvOptions],
) -> jax.Array: ...
@overload
def conv(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = ...,
    *,
    count_nonzeros: Literal[True],
    **options: Unpack[ConvOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def conv(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = ...,
    *,
    count_nonzeros: bool,
    **options: Unpack[ConvOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def conv(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    residual: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
    precision: lax.PrecisionLike = None,
    implementation: ConvImplementation | None = None,
    nonzeros: jax.typing.ArrayLike | None = None,
    count_nonzeros: bool = False,
) -> Any:
    """Two-dimensional convolution that skips the zeros of `x`: `activation(conv(x, kernel) + bias + residual)`.

    The result is that of `jax.lax.conv_general_dilated` with NHWC and HWIO, with one difference. A skipped zero of x
    drops `0 * inf` and `0 * nan`, on a CPU in gradients, too. 0.0 and -0.0 are skipped. NaN, infinities and subnormals
    of x are not. On a CPU with AVX512-BF16 subnormals of bfloat16 count as 0 under None. The kernels for GPUs skip a
    zero only where four neighbouring results share it. There, a zero may meet a non-finite weight or not.

    Taps of a large kernel that meet nothing but padding are left out: a 3x3 kernel on a map of one pixel is a 1x1 one.
    "xla" and "coo" keep all taps, as does a packed kernel.

    Args:
      x: [N, H, W, C], float32, bfloat16, float16 or float64; or a `CooStar` of such a map, of any tile, so that one
        conversion serves several layers. Native kernels take float64 on a CPU only. N may be symbolic
        (`jax.export.symbolic_shape`), but None is XLA's dense convolution then on a GPU. With a symbolic H or W it is
        so everywhere, and a name is an error.
      kernel: [kh, kw, C / feature_group_count, K], x's dtype; or what `jax_sparse_conv.pack` made of it.
      bias: [K], x's dtype, or None.
      strides: rows and columns between windows, an int or two.
      padding: "SAME", "SAME_LOWER", "VALID", an int, or two entries, each an int or (low, high). It may be negative.
      kernel_dilation: distance between the kernel's taps, an int or two.
      feature_group_count: groups of channels convolved separately; C for a depthwise convolution.
      residual: [N, Ho, Wo, K], x's dtype, added before the activation, or None.
      activation: None, or "relu" or `jax.nn.relu`.
      precision: as in lax. The sparse kernels always compute float32 exactly, and sum 16-bit types in float32. "direct"
        on a GPU multiplies float32 as TF32 unless the precision is HIGHEST. Values below 2^-113 lose digits even then.
      implementation: None chooses ECR, "direct" or XLA's dense convolution by sizes, dtype, precision and device. On a
        CPU the zeros of x decide as well, when the compiled function runs. Without a kernel for the platform and dtype,
        None is XLA's. "ecr" compresses windows on the fly (Xu et al. 2023, section 5, for many channels and images).
        "coo" makes lists of non-zeros per tile and keeps its sums in registers (Xiang et al. 2022). It takes square
        kernels of 1, 3, 5 or 7, strides of 1 and 2, and no dilation. Where its model has other tiles for sparse maps
        than for dense ones, a GPU holds up to four and takes one by the density of x (sections 3.2 and 3.4). "direct"
        is dense, skips nothing, and is tuned for small batches (Cheng et al. 2018). "xla" is XLA's dense convolution.
        "adaptive" is ECR up to the density of x at which it is expected to win. Beyond, it is dense: "direct" on a GPU,
        XLA's on a CPU. The device decides that without the host. A `CooStar` is read by "coo", and by None where "coo"
        has a kernel for the call. "xla" and None elsewhere make a dense map of it. So do derivatives, and a program
        that `jit` splits over devices. The other names do not take one.
      nonzeros: int32 [parts, 2], or None. Each row has the non-zeros and the elements of one part of x, such as
        `count_nonzeros` returns or [[count, x.size]]. Their sums give the density of x for "adaptive", "coo" and
        None. Without them these sample x where they need its density. Under `vmap` one decision is made for all.
      count_nonzeros: whether to return such counts of the result, for the next layer. On a GPU they cover what up to 64
        blocks of the kernel have written. Elsewhere they cover a sample, or with several devices all of the result.
        What a non-zero is says `density`.

    Returns:
      [N, Ho, Wo, K] in x's dtype. With `count_nonzeros` a pair of that and int32 [64, 2].

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run, or that does not read a
        `CooStar`.
      TypeError: dtypes that differ, a count_nonzeros that is no bool, or a `CooStar` in another place than x.
    """
    operands = Operands.of(x, kernel, bias, residual, nonzeros)
    geometry = geo.resolve(
        operands.x.shape,
        operands.kernel.shape,
        strides=strides,
        padding=padding,
        kernel_dilation=kernel_dilation,
        feature_group_count=feature_group_count,
    )
    operands.check(_result_shape(operands, geometry))
    activation = canonical_activation(activation)
    check_flag("count_nonzeros", count_nonzeros)
    check_implementation(implementation, CONV_IMPLEMENTATIONS, "conv", operands.x.dtype)
    check_lists(operands.x, implementation)
    check_nonzeros(operands.nonzeros, implementation)
    return run.run(operands, geometry, activation, precision, implementation, "ecr", count_nonzeros)


@overload
def conv_pool(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = ...,
    *,
    count_nonzeros: Literal[False] = ...,
    **options: Unpack[ConvPoolOptions],
) -> jax.Array: ...
@overload
def conv_pool(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = ...,
    *,
    count_nonzeros: Literal[True],
    **options: Unpack[ConvPoolOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def conv_pool(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = ...,
    *,
    count_nonzeros: bool,
    **options: Unpack[ConvPoolOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def conv_pool(
    x: jax.typing.ArrayLike | CooStar,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    activation: Activation = "relu",
    pool: PoolKind = "max",
    window_shape: int | Sequence[int] = (2, 2),
    window_strides: int | Sequence[int] | None = None,
    window_padding: Padding = "VALID",
    precision: lax.PrecisionLike = None,
    implementation: ConvPoolImplementation | None = None,
    nonzeros: jax.typing.ArrayLike | None = None,
    count_nonzeros: bool = False,
) -> Any:
    """Convolution, bias, activation and pooling in one operation that skips the zeros of `x`.

    The paper's OCPA rule (Xu et al. 2023, section 7) is "pecr" here and "ecr" in `conv`.

    Args:
      x: [N, H, W, C], float32, bfloat16, float16 or float64; or a `CooStar`, as in `conv`, with XLA's pool behind the
        convolution. Native kernels take float64 on a CPU only.
      kernel: as in `conv`.
      bias: [K], x's dtype, or None.
      strides: of the convolution, an int or two.
      padding: of the convolution, as in `conv`.
      kernel_dilation: as in `conv`.
      feature_group_count: as in `conv`.
      activation: None, or "relu" or `jax.nn.relu`, applied before the pool.
      pool: "max" (padded with -inf) or "avg" (padded with zeros that count in the mean, as `flax.linen.avg_pool`).
        NaN in a window is in its result, where XLA's own pools lose it on a CPU. Only `implementation="xla"` with a
        ReLU loses it on a GPU: there cuDNN's convolution with a ReLU takes NaN for 0.
      window_shape: rows and columns of a pooling window, an int or two.
      window_strides: between pooling windows, an int or two. None is `window_shape`; Flax's pools have 1 there.
      window_padding: of the pool, as `padding` but not negative.
      precision: as in `conv`.
      implementation: None chooses PECR, "direct" or dense, as in `conv`. "pecr" computes all convolutions of a pooling
        window in one kernel (Xu et al. 2023, section 6). "ecr", "coo" and "direct" are that convolution with XLA's pool
        behind it. On Hopper GPUs "direct" pools 2x2 windows side by side in its own kernel, for convolutions of stride
        1. "xla" is dense. "adaptive" on a CPU is PECR or dense, decided when the compiled function runs. On a GPU it is
        `conv`'s "adaptive" and then XLA's pool. None may average x first where a 1x1 convolution has an "avg" pool
        behind it, without activation, padding or strides of its own. It does so on a CPU, and on Hopper GPUs in
        float32, or in 16 bits from 8 images on.
      nonzeros: of x, as in `conv`.
      count_nonzeros: as in `conv`, of the pooled result.

    Returns:
      [N, Po, Qo, K] in x's dtype. With `count_nonzeros` a pair of that and int32 [64, 2].

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ, or a count_nonzeros that is no bool.
    """
    operands = Operands.of(x, kernel, bias, None, nonzeros)
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
    operands.check(_result_shape(operands, geometry))
    activation = canonical_activation(activation)
    check_flag("count_nonzeros", count_nonzeros)
    check_implementation(implementation, CONV_POOL_IMPLEMENTATIONS, "conv_pool", operands.x.dtype)
    check_lists(operands.x, implementation)
    check_nonzeros(operands.nonzeros, implementation)
    if implementation in ("ecr", "coo") or isinstance(operands.x, CooStar):
        plain = geometry.without_pool()
        y = run.run(operands, plain, activation, precision, implementation, implementation or "ecr", False)
        return run.with_counts(max_pool.pool(y, geometry.pool), count_nonzeros)
    method = "direct" if implementation == "direct" else "pecr"
    return run.run(operands, geometry, activation, precision, implementation, method, count_nonzeros)


def dense(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike | PackedKernel,
    bias: jax.typing.ArrayLike | None = None,
    *,
    activation: Activation = None,
    precision: lax.PrecisionLike = None,
    implementation: DenseImplementation | None = None,
) -> jax.Array:
    """Matrix product that reads only the rows of `kernel` that meet a non-zero of `x`: `activation(x @ kernel + bias)`.

    At a small batch the time of a fully connected layer is that of reading its weights. Rows that meet only zeros, as a
    ReLU leaves them, need not be read. As in `conv`, a skipped zero drops `0 * inf` and `0 * nan`.

    Args:
      x: [..., C], float32, bfloat16, float16 or float64. Native kernels take float64 on a CPU only.
      kernel: [C, K], x's dtype; or what `jax_sparse_conv.pack` made of it.
      bias: [K], x's dtype, or None.
      activation: None, or "relu" or `jax.nn.relu`.
      precision: as in `conv`.
      implementation: "ecr" takes each row of x as one compressed window. "xla" is dense. None is ECR for few rows: up
        to 16 on a CPU, and one on a GPU. Rows that `vmap` adds count. None is dense for more rows, and without a kernel
        for the platform and dtype. It may be dense for small kernels, and on a GPU for those that its cache may hold.
        On a CPU the zeros of x decide as well, when the compiled function runs.

    Returns:
      [..., K] in x's dtype.

    Raises:
      ValueError: a shape or argument that does not fit, or an implementation that cannot run.
      TypeError: dtypes that differ.
    """
    given = Operands.of(x, kernel, bias)
    if isinstance(given.x, CooStar):
        raise TypeError("x is a CooStar, which conv and conv_pool read; dense takes an array, such as x.todense()")
    shape, kernel_shape = given.x.shape, given.kernel.shape
    if len(shape) < 1 or len(kernel_shape) != 2 or shape[-1] != kernel_shape[0]:
        raise ValueError(f"x.shape={shape} and kernel.shape={kernel_shape} are not [..., C] and [C, K]")
    check_implementation(implementation, DENSE_IMPLEMENTATIONS, "dense", given.x.dtype)
    given.check((*shape[:-1], kernel_shape[1]))
    activation = canonical_activation(activation)
    precision = canonical_precision(precision)
    is_xla = implementation == "xla" or (implementation is None and str(given.x.dtype) not in KERNEL_DTYPES)
    method = "xla" if is_xla else None if implementation is None else "dense"
    is_traced = any(isinstance(value, jax.core.Tracer) for value in given[:3])
    with run.scope(implementation):
        return (_dense if is_traced else _dense_alone)(given, activation, precision, method)


def _dense(given: Operands, activation: ActivationName | None, precision: Any, method: str | None) -> jax.Array:
    if method == "xla":
        y = reference.dense(explicit.whole(given.x, -1), explicit.whole(given.kernel, -2), precision)
        return reference.epilogue(y, given.bias, None, activation)
    # A row of x is a one-pixel map and the kernel a 1x1 window.
    explicit.check_apart(given.x, given.kernel, given.x.ndim - 1)
    operands = Operands(explicit.rows_of(given.x), given.kernel[None, None], given.bias, packed=given.packed)
    geometry = geo.resolve(operands.x.shape, operands.kernel.shape, padding="VALID")
    out = run.run(operands, geometry, activation, precision, method, "dense", False)
    return explicit.of_rows(out, given.x)


# Of an eager call: reshaped outside of `jit`, the kernel would be copied.
_dense_alone = jax.jit(_dense, static_argnames=("activation", "precision", "method"))


def density(x: jax.typing.ArrayLike, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Fraction of non-zeros of `x` over `axis`, float32: 1 minus the sparsity. None is all axes.

    -0.0 counts as zero. NaN, infinities and subnormals count as non-zero, as in every kernel of this package and in
    `count_nonzeros`. The bits decide, because XLA takes a subnormal for zero on a CPU.

    Raises:
      TypeError: an x that is no array.
      ValueError: an axis that x does not have, or has twice.
    """
    x = as_array("x", x)
    return reference.density(x, axis if axis is None else geo.axes_of("axis", axis, "x", x.shape))


def _result_shape(operands: Operands, geometry: Geometry) -> tuple[int, ...]:
    """[N, Ho, Wo, K], in front of a pool."""
    x_shape, kernel_shape = operands.x.shape, operands.kernel.shape
    return (x_shape[0], *geometry.conv_size(x_shape[1:3], kernel_shape[:2]), kernel_shape[-1])
