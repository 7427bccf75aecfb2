"""The one list of cases: every implementation, on every platform, is tested on all that it has."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_conv._src.api import ops


class Inputs(NamedTuple):
    x: Any
    kernel: Any
    bias: Any
    residual: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation: sizes, arguments and how many zeros its input has."""

    name: str
    x: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int] = (3, 3)
    strides: Any = 1
    padding: Any = "SAME"
    dilation: Any = 1
    groups: int = 1
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    pool: str | None = None
    window: tuple[int, int] = (2, 2)
    window_strides: tuple[int, int] | None = None
    window_padding: Any = "VALID"
    zeros: float = 0.7
    spread: int = 0  # channels of x are scaled by 2^-spread to 2^spread, and their weights by the inverse
    one_sign: bool = False  # of the weights

    @property
    def lax_padding(self) -> Any:
        """The padding as lax takes it."""
        if isinstance(self.padding, str):
            return self.padding
        pads = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        return [(p, p) if isinstance(p, int) else p for p in pads]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of jsc.conv or, with a pool, of jsc.conv_pool."""
        common = {
            "strides": self.strides,
            "padding": self.padding,
            "kernel_dilation": self.dilation,
            "feature_group_count": self.groups,
            "activation": self.activation,
        }
        if self.pool is None:
            return common
        return common | {
            "pool": self.pool,
            "window_shape": self.window,
            "window_strides": self.window_strides,
            "window_padding": self.window_padding,
        }


CONV_CASES = (
    Case("3x3", (1, 7, 7, 64), 64),
    Case("3x3 bias relu", (2, 6, 9, 16), 24, bias=True, activation="relu"),
    Case("3x3 residual relu", (1, 8, 8, 32), 40, bias=True, residual=True, activation="relu"),
    Case("residual alone", (2, 5, 5, 8), 8, residual=True),
    Case("no zeros", (1, 9, 9, 32), 32, zeros=0.0),
    Case("all zeros", (1, 9, 9, 32), 32, zeros=1.0, bias=True),
    Case("85 % zeros", (1, 14, 14, 128), 128, zeros=0.85),
    Case("95 % zeros", (2, 7, 7, 96), 160, zeros=0.95),
    Case("one pixel", (1, 1, 1, 16), 8),
    Case("one channel", (1, 12, 12, 1), 4),
    Case("one output channel", (1, 6, 6, 20), 1),
    Case("C=3 7x7 stride 2", (1, 23, 19, 3), 64, kernel=(7, 7), strides=2, padding=3, zeros=0.0, bias=True),
    Case("K=1000", (1, 2, 2, 33), 1000, kernel=(1, 1)),
    Case("odd C and K", (2, 5, 7, 37), 41),
    Case("1x1", (1, 10, 10, 48), 72, kernel=(1, 1)),
    Case("1x1 stride 2", (1, 9, 9, 64), 32, kernel=(1, 1), strides=2, padding="VALID"),
    Case("1x3", (1, 6, 8, 16), 16, kernel=(1, 3)),
    Case("5x5", (1, 9, 9, 12), 20, kernel=(5, 5)),
    Case("5x5 in several slices", (2, 11, 13, 50), 37, kernel=(5, 5), bias=True, activation="relu", zeros=0.6),
    Case("5x5 of one row", (2, 1, 8, 20), 16, kernel=(5, 5)),
    Case("11x11 stride 4", (1, 35, 35, 3), 16, kernel=(11, 11), strides=4, padding=2, zeros=0.2),
    Case("13x2", (1, 15, 5, 4), 6, kernel=(13, 2)),
    Case("kernel larger than map", (1, 3, 3, 8), 8, kernel=(5, 5), padding=2),
    Case("stride 2 SAME", (1, 8, 11, 24), 24, strides=2),
    Case("stride 3x1", (1, 11, 6, 8), 8, strides=(3, 1), padding="VALID"),
    Case("stride beyond kernel", (1, 12, 12, 8), 8, kernel=(2, 2), strides=5, padding="VALID"),
    Case("dilation 2", (1, 11, 11, 16), 16, dilation=2),
    Case("dilation 1x3 VALID", (1, 9, 13, 8), 12, dilation=(1, 3), padding="VALID"),
    Case("asymmetric padding", (1, 7, 6, 16), 16, padding=((0, 2), (3, 1)), strides=2),
    Case("negative padding", (1, 9, 9, 8), 8, padding=((-1, 2), (0, -2))),
    Case("wide padding", (1, 3, 4, 8), 8, padding=4),
    Case("groups 2", (1, 8, 8, 32), 48, groups=2, bias=True),
    Case("groups 32", (1, 7, 7, 64), 64, groups=32),
    Case("3x3 stride 2 groups 2", (2, 9, 10, 24), 36, strides=2, groups=2, bias=True),
    Case("5x5 stride 2", (1, 14, 13, 20), 33, kernel=(5, 5), strides=2, activation="relu"),
    Case("7x7", (1, 12, 13, 9), 70, kernel=(7, 7), bias=True),
    Case("depthwise", (2, 9, 9, 33), 33, groups=33),
    Case("depthwise x 3", (1, 6, 6, 10), 30, groups=10, activation="relu"),
    Case("batch 0", (0, 6, 6, 8), 8, bias=True),
    Case("empty result", (1, 2, 2, 8), 8, padding="VALID"),
    Case("deep", (1, 4, 4, 1030), 36),
    Case("large map", (1, 61, 67, 16), 16),
    Case("batch 17", (17, 5, 5, 32), 32),
)

# Float32-accurate sums: long ones, and of values whose magnitudes differ.
ACCURACY_CASES = (
    Case("4,608 products", (1, 6, 6, 512), 64, zeros=0.0),
    Case("9,216 products", (1, 5, 5, 1024), 64, padding="VALID", zeros=0.0),
    Case("9,216 products of one sign", (2, 4, 4, 1024), 36, padding="VALID", zeros=0.0, one_sign=True),
    Case("18,432 products, half of zeros", (2, 4, 4, 2048), 36, padding="VALID", zeros=0.5, one_sign=True),
    Case("magnitudes", (1, 7, 7, 256), 64, zeros=0.2, spread=40),
    Case("magnitudes, 1x1", (1, 8, 9, 1030), 36, kernel=(1, 1), zeros=0.2, spread=40),
)

# So long that float32 additions one after another are off by more than 2e-6.
LONG_CASES = (
    Case("18,432 products", (1, 5, 5, 2048), 64, padding="VALID", zeros=0.0),
    Case("18,432 products of one sign", (1, 5, 5, 2048), 64, padding="VALID", zeros=0.0, one_sign=True),
    Case("18,433 products, 1x1", (1, 3, 3, 18433), 33, kernel=(1, 1), zeros=0.0),
)

# Layers that a GPU's tensor cores have much to do with, of sizes that no tile divides.
LARGE_CASES = (
    Case("64->64 57x55", (3, 57, 55, 64), 64, bias=True, activation="relu", zeros=0.3),
    Case("136->200 29x31", (3, 29, 31, 136), 200, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("512->512 14x14", (1, 14, 14, 512), 512, bias=True, activation="relu", zeros=0.3),
    Case("512->512 7x7 batch 9", (9, 7, 7, 512), 512, residual=True, zeros=0.3),
    Case("256->256 28x28 without bias", (1, 28, 28, 256), 256, zeros=0.0),
    Case("64->64 107x112", (2, 107, 112, 64), 64, bias=True, activation="relu", zeros=0.3),
    Case("128->128 56x50", (5, 56, 50, 128), 128, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("3x3 stride 2", (3, 57, 55, 128), 128, strides=2, bias=True, zeros=0.3),
    Case("1x1", (4, 28, 27, 264), 520, kernel=(1, 1), residual=True, activation="relu", zeros=0.3),
    Case("1x1 stride 2", (4, 29, 27, 256), 512, kernel=(1, 1), strides=2, padding="VALID", zeros=0.3),
    Case("dilation 2", (2, 41, 37, 96), 104, dilation=2, activation="relu", zeros=0.3),
    Case("5x5", (2, 31, 30, 72), 80, kernel=(5, 5), bias=True, zeros=0.3),
    Case("1x7", (2, 24, 40, 192), 192, kernel=(1, 7), zeros=0.3),
    Case("wide and negative padding", (2, 33, 30, 64), 128, padding=((-1, 5), (4, -2)), bias=True, zeros=0.3),
    Case("groups of 128", (2, 29, 27, 512), 512, groups=4, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("groups of 128, 7x7", (3, 7, 7, 896), 896, groups=7, bias=True, activation="relu", zeros=0.3),
    Case("groups of 128, stride 2", (3, 28, 29, 384), 192, groups=3, strides=2, bias=True, zeros=0.3),
    Case("groups of 64, 1x1", (2, 31, 30, 256), 512, kernel=(1, 1), groups=4, residual=True, zeros=0.3),
    Case("groups of 32, dilation 2", (2, 33, 31, 96), 192, groups=3, dilation=2, activation="relu", zeros=0.3),
    Case("groups of 80", (1, 30, 29, 160), 128, groups=2, bias=True, zeros=0.3),
    Case("groups of 80, many pixels", (3, 57, 55, 160), 128, groups=2, activation="relu", zeros=0.3),
    Case("groups of 80, 256 output channels", (4, 56, 53, 160), 512, groups=2, bias=True, zeros=0.3),
    Case("54->90 61x59", (2, 61, 59, 54), 90, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("128->2048 14x14", (1, 14, 14, 128), 2048, bias=True, zeros=0.3),
    Case("1x1 128->1024", (1, 28, 28, 128), 1024, kernel=(1, 1), zeros=0.3),
    Case("7x7 64->1024", (1, 14, 14, 64), 1024, kernel=(7, 7), activation="relu", zeros=0.3),
    Case("7x7 256->512", (1, 28, 28, 256), 512, kernel=(7, 7), zeros=0.3),
    Case("7x7 64->2048", (1, 14, 14, 64), 2048, kernel=(7, 7), zeros=0.3),
    Case("many tiles", (5, 160, 151, 32), 40, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("many tiles, 1x1", (6, 160, 149, 64), 72, kernel=(1, 1), bias=True, residual=True, zeros=0.3),
    Case("320->1096 53x27, 1x1", (1, 53, 27, 320), 1096, kernel=(1, 1), bias=True, residual=True, zeros=0.3),
)

# The same with pools that tensor cores' kernels take themselves, on Hopper.
LARGE_POOL_CASES = (
    Case("64->64 56x56, max", (2, 56, 56, 64), 64, bias=True, activation="relu", pool="max", zeros=0.3),
    Case("512->512 14x14, max", (1, 14, 14, 512), 512, bias=True, activation="relu", pool="max", zeros=0.3),
    Case("136->200 29x31, max without relu", (3, 29, 31, 136), 200, pool="max", zeros=0.3),
    Case("72->136 45x27, average", (2, 45, 27, 72), 136, bias=True, activation="relu", pool="avg", zeros=0.3),
    Case("5x5, average without relu", (1, 31, 30, 72), 80, kernel=(5, 5), bias=True, pool="avg", zeros=0.3),
    Case("5x5, 72->264, average", (1, 31, 30, 72), 264, kernel=(5, 5), bias=True, pool="avg", zeros=0.3),
    Case("1x7, 256->64 5x9", (3, 5, 9, 256), 64, kernel=(1, 7), pool="max", zeros=0.3),
    Case("32->40 160x151, max, many tiles", (5, 160, 151, 32), 40, bias=True, pool="max", zeros=0.3),
)

# First layers of networks, whose x has few channels.
IMAGE_CASES = (
    Case("VGG", (1, 40, 48, 3), 64, bias=True, activation="relu", zeros=0.0),
    Case("stem", (2, 45, 64, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", zeros=0.0),
    Case("RegNet", (3, 33, 40, 3), 32, strides=2, padding=1, bias=True, activation="relu", zeros=0.0),
    Case("AlexNet", (2, 67, 64, 3), 64, kernel=(11, 11), strides=4, padding=2, bias=True, zeros=0.0),
    Case("rows of no whole pieces", (2, 45, 37, 3), 96, kernel=(7, 7), strides=2, padding=3, zeros=0.0),
    Case("one channel", (3, 28, 28, 1), 6, kernel=(5, 5), bias=True, activation="relu", zeros=0.0),
    Case("two channels, residual", (2, 19, 24, 2), 72, kernel=(3, 5), residual=True, activation="relu", zeros=0.0),
    Case("four channels", (3, 21, 17, 4), 136, kernel=(5, 3), strides=(3, 1), bias=True, zeros=0.0),
    Case("odd K", (5, 23, 19, 3), 41, kernel=(7, 7), strides=2, padding=((4, 2), (3, 1)), bias=True, zeros=0.0),
    Case("rows and K of whole pairs", (2, 9, 22, 3), 10, bias=True, residual=True, activation="relu", zeros=0.0),
    Case("rows and K of eight bytes", (2, 9, 20, 3), 20, kernel=(5, 3), bias=True, activation="relu", zeros=0.0),
    Case("one channel to one", (1, 30, 31, 1), 1, kernel=(7, 5), bias=True, zeros=0.0),
    Case("crop", (2, 20, 24, 3), 24, strides=(1, 2), padding=((-1, 0), (-2, -1)), zeros=0.0),
    Case("padding beyond the window", (1, 5, 7, 3), 8, kernel=(4, 4), padding=((6, 7), (5, 4)), zeros=0.0),
    Case("1x1 of an image", (2, 13, 16, 3), 16, kernel=(1, 1), bias=True, zeros=0.0),
    Case("many tiles", (17, 64, 72, 3), 64, bias=True, activation="relu", zeros=0.0),
)

IMAGE_POOL_CASES = (
    Case("stem and pool", (2, 45, 64, 3), 64, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu",
         pool="max", window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
    Case("VGG and pool", (3, 40, 48, 3), 64, bias=True, activation="relu", pool="max", zeros=0.0),
    Case("overlapping windows, odd K", (2, 23, 19, 3), 41, kernel=(5, 5), strides=2, padding=2, bias=True, pool="max",
         window=(3, 3), window_strides=(1, 1), window_padding=((2, 0), (1, 2)), zeros=0.0),
    Case("a pool, K of whole pairs", (2, 21, 22, 3), 34, bias=True, activation="relu", pool="max", zeros=0.0),
    Case("windows far apart", (2, 31, 29, 2), 32, bias=True, pool="max", window_strides=(4, 3), zeros=0.0),
)  # fmt: skip

# Float32-accurate sums of large layers: long ones, and of values whose magnitudes differ.
LARGE_EXACT_CASES = (
    Case("large, 9,216 products of one sign", (1, 14, 14, 1024), 256, zeros=0.3, one_sign=True),
    Case("large, 18,432 products", (1, 16, 16, 2048), 136, padding="VALID", zeros=0.0),
    Case("large, 4,096 products of one sign", (2, 14, 14, 4096), 520, kernel=(1, 1), zeros=0.0, one_sign=True),
    Case("large, magnitudes", (2, 28, 27, 256), 256, zeros=0.2, spread=40),
    Case("large, magnitudes, stride 2", (4, 29, 31, 264), 256, strides=2, zeros=0.2, spread=40),
)

CONV_POOL_CASES = (
    Case("2x2 max", (1, 8, 8, 32), 48, bias=True, activation="relu", pool="max"),
    Case("2x2 max without relu", (2, 7, 9, 16), 16, pool="max"),
    Case("VGG conv5_4", (1, 14, 14, 64), 96, bias=True, activation="relu", pool="max", zeros=0.85),
    Case("3x3 stride 2 overlap", (1, 12, 12, 24), 24, bias=True, activation="relu", pool="max", window=(3, 3),
         window_strides=(2, 2), window_padding=((1, 1), (1, 1))),
    Case("stem", (1, 30, 30, 3), 32, kernel=(7, 7), strides=2, padding=3, bias=True, activation="relu", pool="max",
         window=(3, 3), window_strides=(2, 2), window_padding=((1, 1), (1, 1)), zeros=0.0),
    Case("stride 1 overlap", (1, 7, 7, 8), 8, pool="max", window=(2, 2), window_strides=(1, 1)),
    Case("average", (1, 8, 8, 16), 24, bias=True, activation="relu", pool="avg"),
    Case("average padded", (1, 7, 7, 16), 16, pool="avg", window=(3, 3), window_strides=(2, 2), window_padding="SAME"),
    Case("global average", (2, 6, 6, 16), 40, activation="relu", pool="avg", window=(6, 6)),
    Case("gaps between windows", (1, 11, 11, 8), 8, pool="max", window=(2, 2), window_strides=(4, 3)),
    Case("window 1x3", (1, 6, 9, 8), 12, pool="max", window=(1, 3)),
    Case("groups", (1, 8, 8, 16), 24, groups=4, pool="max", activation="relu"),
    Case("dilation and stride", (1, 17, 17, 8), 8, dilation=2, strides=2, pool="max"),
    Case("all zeros", (1, 6, 6, 16), 16, bias=True, pool="max", zeros=1.0),
    Case("no zeros", (1, 6, 6, 16), 16, pool="max", zeros=0.0),
    Case("padding beyond map", (1, 4, 4, 8), 8, pool="max", window_padding=((3, 3), (3, 3))),
    Case("batch 0", (0, 6, 6, 8), 8, pool="max"),
    Case("window beyond map", (1, 3, 3, 8), 8, pool="max", window=(5, 5)),
    Case("odd C and K, batch 5", (5, 9, 7, 21), 35, pool="max", activation="relu", bias=True),
    Case("large map", (1, 60, 58, 8), 16, pool="max", activation="relu"),
)  # fmt: skip

# (rows, C, K) of a dense layer, zeros
DENSE_CASES = (
    ((1, 200, 96), 0.8),
    ((1, 1, 1), 0.0),
    ((3, 37, 41), 0.5),
    ((8, 512, 130), 0.85),
    ((2, 64, 1000), 1.0),
    ((5, 96, 64), 0.0),
    ((0, 16, 16), 0.5),
    ((33, 70, 24), 0.7),
    ((1, 4100, 257), 0.9),
    ((2, 18432, 40), 0.5),
    ((1, 1024, 1000), 0.0),
    ((1, 3001, 4104), 0.5),
    ((1, 4000, 2100), 0.5),  # longer than 32 MB in float32
    ((1, 4100, 4104), 0.5),  # and in 16 bits
    ((1, 4096, 4096), 0.0),  # rows of x and of the kernel that start 16 bytes
    ((1, 8200, 4096), 0.97),
    ((1, 25088, 1000), 0.8),
    ((1, 2056, 64), 1.0),
    ((1, 264, 3000), 0.3),
    ((1, 40000, 128), 0.6),
    ((4, 1025, 72), 0.95),
    ((8, 4100, 264), 0.0),
    ((7, 700, 1000), 0.8),
    ((16, 300, 512), 0.5),
)


def runs() -> list[tuple[Case, str]]:
    """Every case with every native implementation that computes all of it in one call."""
    convs = [name for name in ops.CONV_IMPLEMENTATIONS if name != "xla"]
    fused = [*(name for name in ops.CONV_POOL_IMPLEMENTATIONS if name not in ops.CONV_IMPLEMENTATIONS), "adaptive"]
    return [(case, name) for name in convs for case in CONV_CASES if computes(name, case)] + [
        (case, name) for name in fused for case in CONV_POOL_CASES
    ]


def computes(implementation: str, case: Case) -> bool:
    """Whether an implementation has the case's kernel, strides and dilation: COO* has a table, the others any."""
    if implementation != "coo":
        return True
    square = case.kernel in ((1, 1), (3, 3), (5, 5), (7, 7))
    return square and (case.kernel == (1, 1) or (case.dilation == 1 and case.strides in (1, 2)))


def feature_map(rng: np.random.Generator, shape: tuple[int, ...], zeros: float) -> np.ndarray:
    """Positive values with a share of exact zeros, some of them negative zeros; zeros come in runs, as in real maps."""
    values = np.abs(rng.standard_normal(shape)) + 0.05
    if len(shape) == 4 and min(shape) > 0:
        coarse = rng.random((shape[0], (shape[1] + 1) // 2, (shape[2] + 1) // 2, shape[3]))
        field = np.repeat(np.repeat(coarse, 2, 1), 2, 2)[:, : shape[1], : shape[2]]
        field = 0.6 * field + 0.4 * rng.random(shape)
        drop = field <= np.quantile(field, zeros) if zeros > 0 else np.zeros(shape, bool)
        drop |= zeros == 1.0
    else:
        drop = rng.random(shape) < zeros
    signed_zero = np.where(rng.random(shape) < 0.1, -0.0, 0.0)
    return np.where(drop, signed_zero, values)


def inputs(case: Case, dtype: Any = jnp.float32, seed: int = 0) -> Inputs:
    """The case's operands, rounded to `dtype`."""
    rng = np.random.default_rng([seed, *map(ord, case.name)])
    taps = case.kernel[0] * case.kernel[1] * case.x[3] // case.groups
    kernel = rng.standard_normal((*case.kernel, case.x[3] // case.groups, case.out_channels)) / np.sqrt(max(taps, 1))
    kernel = np.abs(kernel) if case.one_sign else kernel
    bias = rng.standard_normal(case.out_channels) if case.bias else None
    residual = rng.standard_normal(conv_shape(case)) if case.residual else None
    x = feature_map(rng, case.x, case.zeros)
    if case.spread:
        scale = np.exp2(rng.integers(-case.spread, case.spread, case.x[3], endpoint=True))
        x, kernel = x * scale, kernel / scale[:, None]
    arrays = (x, kernel, bias, residual)
    return Inputs(*(None if a is None else a.astype(np.dtype(dtype)) for a in arrays))


def on_device(value: Any) -> Any:
    """A copy on the device, of None none; `jnp.asarray` would have XLA compile a program for each shape."""
    return None if value is None else jax.device_put(np.array(value))


def conv_shape(case: Case) -> tuple[int, int, int, int]:
    """Shape of the convolution's result for the SAME padding and stride 1 that residual cases use."""
    assert case.padding == "SAME"
    assert case.strides == 1
    return (*case.x[:3], case.out_channels)
