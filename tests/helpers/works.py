"""Calls as the models of what runs see them."""

from __future__ import annotations

from typing import Any

from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.work import Work

SAME = Geometry(padding=((1, 1), (1, 1)))

POOLED = Geometry(padding=SAME.padding, pool=Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0))))


def conv3x3(n: int, size: int, channels: int, features: int, **fields: Any) -> Work:
    values = {"geometry": SAME, "dtype": "float32", "exact": True, "method": "ecr"} | fields
    groups = values["geometry"].groups
    return Work(x_shape=(n, size, size, channels), kernel_shape=(1, 3, 3, channels // groups, features), **values)


def conv1x1(n: int, size: int, channels: int, features: int, strides: int = 1) -> Work:
    geometry = Geometry(strides=(strides, strides))
    return Work("ecr", (n, size, size, channels), (1, 1, 1, channels, features), geometry, "float32", False)


def rows(count: int) -> Work:
    return Work("dense", (count, 1, 1, 2048), (1, 1, 1, 2048, 1000), Geometry(), "float32", True)
