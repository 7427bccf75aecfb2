"""Layers that benchmarks are tried with: one of each kind, small."""

from __future__ import annotations

import jax
import pytest

from benchmarks.common.cases import Layer
from jax_sparse_conv._src import _native

CPU_EXTENSION = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not _native.cpu_isas(), reason="needs the CPU extension and backend"
)
LAYERS = (
    Layer("odd", "conv", 5, 6, 7, maps="a/b"),
    Layer("strided", "conv", 3, 4, 8, strides=2),
    Layer("pooled", "conv_pool", 3, 4, 7, implementation="pecr"),
    Layer("dense", "dense", 20, 9, kernel=1),
)
