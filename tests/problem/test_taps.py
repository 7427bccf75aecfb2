"""Which taps of a kernel meet a map, against a convolution that is computed tap by tap."""

from __future__ import annotations

import numpy as np
import pytest

from jax_sparse_conv._src.problem import geometry as geo
from jax_sparse_conv._src.problem import taps
from jax_sparse_conv._src.problem.geometry import Geometry


def convolution(x: np.ndarray, kernel: np.ndarray, geometry: Geometry) -> np.ndarray:
    """x [H, W], kernel [kh, kw]."""
    out = np.zeros(geometry.conv_size(x.shape, kernel.shape))
    for row, column in np.ndindex(out.shape):
        for tap, weight in np.ndenumerate(kernel):
            at = [
                place * stride + each * dilation - low
                for place, stride, each, dilation, (low, _) in zip(
                    (row, column), geometry.strides, tap, geometry.dilation, geometry.padding, strict=True
                )
            ]
            if all(0 <= i < size for i, size in zip(at, x.shape, strict=True)):
                out[row, column] += x[at[0], at[1]] * weight
    return out


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_geometries(first: int) -> None:
    smaller = 0
    for seed in range(first, first + 100):
        rng = np.random.default_rng(seed)
        size, kernel_size = (tuple(map(int, rng.integers(1, most, 2))) for most in (6, 8))
        strides, dilation = (tuple(map(int, rng.integers(1, most, 2))) for most in (5, 4))
        pads = [tuple(map(int, rng.integers(-1, 8, 2))) for _ in range(2)]
        try:
            geometry = geo.resolve(
                (1, *size, 1), (*kernel_size, 1, 1), strides=strides, padding=pads, kernel_dilation=dilation
            )
        except ValueError:  # it crops more than there is
            continue
        (rows, columns), small = taps.read(geometry, size, (*kernel_size, 2**8, 2**8))
        smaller += small is not geometry
        x, kernel = rng.standard_normal(size), rng.standard_normal(kernel_size)
        found = convolution(x, kernel[rows, columns], small)
        np.testing.assert_allclose(found, convolution(x, kernel, geometry), rtol=1e-12, atol=1e-12)
        assert min(0, *small.padding[0], *small.padding[1]) >= min(0, *geometry.padding[0], *geometry.padding[1])
    assert smaller > 10


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "left"),
    [
        ((1, 1), (3, 3), 1, (1, 1)),  # the last layers of a ResNet on 32x32
        ((2, 2), (3, 3), 2, (2, 2)),
        ((2, 2), (3, 3), 1, (3, 3)),
        ((2, 2), (5, 5), 1, (3, 3)),
        ((1, 7), (3, 3), 1, (1, 3)),
        ((3, 5), (9, 9), 1, (5, 9)),
        ((7, 7), (1, 1), 2, (1, 1)),
        ((0, 4), (3, 3), 1, (3, 3)),
    ],
)
def test_taps_of_small_maps(
    size: tuple[int, int], kernel: tuple[int, int], strides: int, left: tuple[int, int]
) -> None:
    geometry = geo.resolve((1, *size, 64), (*kernel, 64, 64), strides=strides)
    (rows, columns), small = taps.read(geometry, size, (*kernel, 64, 64))
    assert (rows.stop - rows.start, columns.stop - columns.start) == left
    assert min(small.padding[0] + small.padding[1]) >= 0


def test_small_kernels_are_not_copied() -> None:
    geometry = geo.resolve((1, 1, 1, 8), (3, 3, 8, 8))
    assert taps.read(geometry, (1, 1), (3, 3, 8, 8)) == ((slice(0, 3), slice(0, 3)), geometry)
