"""What `implementation=None` does on a CPU without a plan: a row of a table, else rules.

A CPU decides in the running program, by a sample of x. Convolutions do so inside the native call, which has a dense
kernel of its own. Where that kernel is slower than XLA's, and in dense layers of several rows, a branch leads to XLA.
Counts of the non-zeros serve it as well as a sample.

The rules' numbers are constants of `model.json`. They were chosen by hand, from times of `benchmarks cpu`,
`benchmarks zoo` and `benchmarks sweep` on two cores.
"""

from __future__ import annotations

import dataclasses
import math

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch import cpu_table, model
from jax_sparse_conv._src.problem.workload import Workload


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a call on a CPU.

    Attributes:
      below: the density of x up to which it is the native call, XLA beyond; 0 never, infinite always.
      may_be_dense: whether the native call may take its own dense kernel, by a sample of x.
    """

    below: float
    may_be_dense: bool = False


def on_cpu(workload: Workload) -> Choice:
    """By the table of the CPU, else by the rules."""
    row = cpu_table.decision(workload)
    if row is not None:
        return Choice(row.below, has_dense(workload))
    return by_rules(workload)


def has_dense(workload: Workload) -> bool:
    """Whether the native call has a dense kernel for it."""
    if workload.method not in ("ecr", "pecr") or workload.is_symbolic:
        return False
    return has_pairs(workload) or (
        workload.geometry.groups == 1 and (workload.itemsize > 2 or _has_few_channels_out(workload))
    )


def _has_few_channels_out(workload: Workload) -> bool:
    """Whether there are so few output channels that dense loops serve any dtype: dot products, or the direct one."""
    return workload.geometry.groups == 1 and workload.kernel_shape[4] <= model.shipped("cpu dots")["channels, most"]


def has_pairs(workload: Workload) -> bool:
    """Whether the native call may multiply pairs of bfloat16 channels, at twice the rate of float32."""
    if workload.dtype != "bfloat16" or workload.method not in ("ecr", "pecr") or workload.is_symbolic:
        return False
    is_even = workload.kernel_shape[3] % 2 == 0 or workload.geometry.groups == 1
    return is_even and _native.cpu_multiplies_pairs()


# --- rules -----------------------------------------------------------------------------------------------------------


def by_rules(workload: Workload) -> Choice:
    """What is expected to be the fastest without a table."""
    if has_pairs(workload):
        return Choice(math.inf, may_be_dense=True)
    if has_dense(workload) and (_suits_dense(workload) or suits_few_channels_out(workload)):
        return Choice(math.inf, may_be_dense=True)
    below = density_of_sparse(workload)
    if below <= 0 or not has_dense(workload) or _most_of_odd(workload) < math.inf:
        return Choice(below)
    if _is_xlas_without_zeros(workload):
        return Choice(below)
    return Choice(math.inf, may_be_dense=True)


def density_of_sparse(workload: Workload) -> float:
    """The density of x up to which the sparse loops are expected to be as fast as XLA; infinite where they always are.

    "adaptive" branches by it, too: its sparse side has no dense kernel, so rows of tables are not of it.
    """
    if workload.is_symbolic:
        return math.inf
    if _is_small_product(workload) or _scales_a_large_map(workload):
        return 0.0
    if workload.is_image:
        return math.inf if _is_small_image(workload) else 0.0
    if workload.method == "dense":
        return _density_of_rows(workload)
    if workload.geometry.groups > 1 or workload.itemsize == 2:
        return math.inf
    of = model.shipped("cpu conv")
    if workload.flops < of["operations, small"]:
        return math.inf
    odd = _most_of_odd(workload)
    if odd < math.inf or workload.pixels <= of["pixels, few"]:
        return odd
    return of["density, large result"] if _has_large_result(workload) else of["density"]


def _is_small_image(workload: Workload) -> bool:
    """Whether the loops beat XLA on an image: few output channels, and no stem with a large window.

    With strides only the dense kernel does, which 16-bit types do not have.
    """
    if workload.itemsize == 2 and max(workload.geometry.strides) > 1:
        return False
    of = model.shipped("cpu shapes")
    is_narrow = workload.kernel_shape[4] <= of["channels, image"] and _taps(workload) <= of["taps, image"]
    return is_narrow and not _has_large_result(workload)


def _is_small_product(workload: Workload) -> bool:
    """Whether it is a 1x1 convolution of so few channels, in and out, that vectors of them are mostly empty.

    On large maps XLA's product is faster up to a vector of them.
    """
    if workload.method == "dense" or _taps(workload) > 1 or workload.itemsize == 2:
        return False
    channels, groups = workload.kernel_shape[4], workload.geometry.groups
    of = model.shipped("cpu shapes")
    is_large = groups == 1 and workload.pixels > of["pixels, large product"]
    most = of["channels, large product" if is_large else "channels, small product"]
    return max(workload.x_shape[3], channels) <= most if groups == 1 else max(groups, channels) < most


def _scales_a_large_map(workload: Workload) -> bool:
    """Whether it is a 1x1 depthwise convolution: memory bounds it, and zeros save none."""
    if workload.method == "dense" or _taps(workload) > 1 or workload.itemsize == 2:
        return False
    channels, most = workload.kernel_shape[4], model.shipped("cpu shapes")["elements, scaled"]
    return 1 < workload.geometry.groups == channels and workload.pixels * channels > most


def _most_of_odd(workload: Workload) -> float:
    """The density up to which the loops win on shapes that they do not suit, infinite for all others.

    A vector of output channels is mostly empty where there are few. Large windows have long lists of taps. Strides
    beyond the window pass over pixels that the loops read all the same.
    """
    if workload.is_image or workload.geometry.groups > 1 or workload.itemsize == 2:
        return math.inf
    of = model.shipped("cpu shapes")
    channels, taps = workload.kernel_shape[4], _taps(workload)
    passed = math.prod(workload.geometry.strides) / taps
    limits = [math.inf]
    if channels <= of["channels, few"] and workload.flops >= of["operations, few channels"]:
        limits.append(of["density, few channels"] if channels <= of["channels, fewest"] else of["density, channels"])
    if taps >= of["taps, many"]:
        limits.append(of["density, many taps"] if channels > of["channels, few"] else 0.0)
    if taps > 1 and all(s > k for s, k in zip(workload.geometry.strides, workload.kernel_shape[1:3], strict=True)):
        limits.append(of["density, strides"] if passed < of["passed over"] else 0.0)
    return min(limits)


def _suits_dense(workload: Workload) -> bool:
    """Whether the dense kernel beats XLA on a shape that the sparse loops do not suit: an image, few input channels, or
    a large window and a vector of output channels. One row of a window is one run of its products.
    """
    of = model.shipped("cpu shapes")
    taps, strides = _taps(workload), zip(workload.geometry.strides, workload.kernel_shape[1:3], strict=True)
    if workload.is_image:
        return True
    if taps == 1 or any(s > k for s, k in strides):
        return False
    is_large = taps >= of["taps, many"] and workload.kernel_shape[4] > of["channels, few"]
    return is_large or workload.kernel_shape[3] <= of["channels in, few"]


def suits_few_channels_out(workload: Workload) -> bool:
    """Whether those loops suit it: windows are long enough for vectors of them, and many where strides are long."""
    if workload.is_symbolic or not _has_few_channels_out(workload):
        return False
    of, taps = model.shipped("cpu dots"), _taps(workload)
    if taps * workload.kernel_shape[3] < of["products, least"]:
        return False
    if taps == 1 or max(workload.geometry.strides) <= of["strides, most"]:
        return True
    most = of["channels, most" if _native.cpu_has_many_registers() else "channels, most, few registers"]
    return workload.kernel_shape[4] <= most and workload.pixels >= of["pixels, strides"]


def _taps(workload: Workload) -> int:
    return math.prod(workload.kernel_shape[1:3])


def _has_large_result(workload: Workload) -> bool:
    """Whether the result is so large that its memory is new in every call."""
    result = workload.pixels * workload.kernel_shape[4] * workload.itemsize
    return workload.geometry.pool is None and result > model.shipped("cpu conv")["bytes, large result"]


def _is_xlas_without_zeros(workload: Workload) -> bool:
    """Whether XLA is faster than the dense kernel: large results, and 1x1 that pools or widens a large map."""
    if _has_large_result(workload):
        return True
    if math.prod(workload.kernel_shape[1:3]) > 1:
        return False
    channels, out_channels = workload.kernel_shape[3:]
    of = model.shipped("cpu conv")
    if workload.geometry.pool is not None and workload.flops > of["operations, 1x1"]:
        return True
    widens = channels >= of["channels, widening"] and out_channels >= of["times, widening"] * channels
    return widens and workload.pixels >= of["pixels, widening"]


def _density_of_rows(workload: Workload) -> float:
    """Of a dense layer."""
    of = model.shipped("cpu dense")
    rows, weights = workload.x_shape[0], math.prod(workload.kernel_shape)
    if rows > of["rows"]:
        return 0.0
    if workload.itemsize == 2 and rows <= of["rows, 16 bits"]:  # XLA's products are not made for them
        return math.inf
    if workload.flops < of["operations, small"]:  # over before a branch pays
        return math.inf
    if rows == 1:
        return math.inf if weights <= of["weights, most"] else of["density"]
    if rows > of["rows, few"]:
        return of["density, many rows"] if weights > of["weights, many"] else 0.0
    if weights > of["weights, many"]:
        return of["density"]
    return of["density, many rows"] if weights > of["weights, few"] else 0.0
