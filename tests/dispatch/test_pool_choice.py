"""Which pools are in the kernels of "direct" on a GPU, and where `implementation=None` takes it for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from platforms import on_a_gpu
from works import POOLED, SAME, conv3x3

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch import direct_choice
from jax_sparse_conv._src.primitive import lowering, primitives
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.work import Work


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"exact": True}, True),
        ({"exact": True, "x_shape": (8, 224, 224, 3)}, False),  # what tiles compute twice costs more
        ({"x_shape": (8, 224, 224, 3)}, True),
        ({"dtype": "float64"}, False),
        ({"kernel_shape": (1, 13, 13, 3, 64)}, False),  # weights too large
    ],
)
def test_pools_of_images_are_inside_direct(h200: None, changes: dict[str, Any], inside: bool) -> None:
    pool = Pool("max", (3, 3), (2, 2), ((1, 1), (1, 1)))
    stem = Geometry(strides=(2, 2), padding=((3, 3), (3, 3)), pool=pool)
    work = Work("ecr", (1, 224, 224, 3), (1, 7, 7, 3, 64), stem, "float32", False)
    work = dataclasses.replace(work, **changes)
    assert direct_choice.pools_in_direct(work) == inside
    for other in (Pool("avg", (3, 3), (2, 2), pool.padding), Pool("max", (5, 5), (2, 2), pool.padding)):
        assert not direct_choice.pools_in_direct(
            dataclasses.replace(work, geometry=dataclasses.replace(stem, pool=other))
        )


@pytest.mark.parametrize(
    ("changes", "preferred"),
    [
        ({}, True),
        ({"exact": True}, False),
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "float64"}, False),
        ({"kernel_shape": (1, 3, 3, 128, 192)}, False),
        ({"kernel_shape": (1, 3, 3, 128, 48)}, False),
        ({"kernel_shape": (1, 1, 5, 128, 128)}, False),
        ({"x_shape": (32, 112, 112, 8), "kernel_shape": (1, 3, 3, 8, 64)}, False),
        ({"x_shape": (32, 112, 112, 4), "kernel_shape": (1, 3, 3, 4, 64)}, False),
        ({"geometry": dataclasses.replace(POOLED, dilation=(2, 2))}, False),
        ({"geometry": dataclasses.replace(POOLED, pool=Pool("avg", (2, 2), (2, 2), ((0, 0), (0, 0))))}, False),
        ({"geometry": SAME}, False),
    ],
)
def test_pools_for_which_direct_is_preferred(
    h200: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], preferred: bool
) -> None:
    """VGG-19's second block at batch 32, whose convolution alone is cuDNN's."""
    work = dataclasses.replace(conv3x3(32, 112, 128, 128, exact=False, geometry=POOLED), **changes)
    assert direct_choice.prefers_pooled(work) == preferred
    for capability, has_warpgroups in (((7, 5), True), ((8, 0), True), ((9, 0), False), ((10, 0), True)):
        on_a_gpu(monkeypatch, capability, has_warpgroups=has_warpgroups)
        assert not direct_choice.prefers_pooled(work)


@pytest.mark.parametrize(
    ("x_shape", "platform", "apart"),
    [
        ((1, 56, 56, 128), "cuda", True),
        ((1, 56, 56, 128), "cpu", False),  # the native call may be direct, with the pool
        ((1024, 56, 56, 128), "cuda", False),
    ],
)
def test_a_pool_behind_direct_is_xlas(
    h200: None, monkeypatch: pytest.MonkeyPatch, x_shape: tuple[int, ...], platform: str, apart: bool
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    geometry = Geometry(padding=SAME.padding, pool=Pool("max", (3, 3), (2, 2), ((0, 0), (0, 0))))
    config = primitives.Config(geometry, "pecr", "relu", fallback=True, precision=(lax.Precision.HIGHEST,) * 2)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x_shape, (1, 3, 3, 128, 128))]
    assert lowering._pools_apart(*operands, config, platform) == apart
    named = dataclasses.replace(config, fallback=False)
    assert not lowering._pools_apart(*operands, named, platform)


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"exact": True}, True),
        ({"exact": True, "x_shape": (256, 56, 56, 128)}, True),
        ({"exact": True, "x_shape": (1024, 56, 56, 128)}, False),  # not measured
        ({"x_shape": (512, 56, 56, 128)}, True),
        ({"x_shape": (1024, 56, 56, 128)}, False),  # not measured
        ({"dtype": "bfloat16", "x_shape": (32, 56, 56, 128)}, True),
        ({"dtype": "bfloat16", "x_shape": (64, 56, 56, 128)}, False),  # XLA's pool is faster
        ({"dtype": "bfloat16", "x_shape": (512, 56, 56, 128), "kernel_shape": (1, 3, 3, 128, 64)}, True),
        ({"x_shape": (16, 56, 56, 128), "kernel_shape": (1, 3, 3, 128, 48)}, False),  # not measured
        ({"kernel_shape": (1, 3, 3, 128, 256)}, True),
        ({"x_shape": (8, 56, 56, 128), "kernel_shape": (1, 3, 3, 128, 256)}, False),  # XLA's pool is faster
        ({"x_shape": (1, 56, 56, 126), "kernel_shape": (1, 3, 3, 126, 128)}, False),
        ({"kernel_shape": (1, 1, 1, 128, 128)}, False),  # a tile is no patch
        ({"kernel_shape": (1, 11, 11, 128, 128)}, False),  # patches too large
    ],
)
def test_pools_of_pairs_are_inside_direct_on_h200(
    h200: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], inside: bool
) -> None:
    work = dataclasses.replace(conv3x3(1, 56, 128, 128, exact=False, geometry=POOLED), **changes)
    assert direct_choice.pools_in_direct(work) == inside
    for pool in (None, Pool("max", (3, 3), (2, 2), ((0, 0), (0, 0))), Pool("max", (2, 2), (2, 2), ((0, 1), (0, 0)))):
        other = dataclasses.replace(POOLED, pool=pool)
        assert not direct_choice.pools_in_direct(dataclasses.replace(work, geometry=other))
    assert not direct_choice.pools_in_direct(
        dataclasses.replace(work, geometry=dataclasses.replace(POOLED, strides=(2, 2)))
    )
    on_a_gpu(monkeypatch, (8, 0), has_warpgroups=True)
    assert not direct_choice.pools_in_direct(work)


@pytest.mark.parametrize(
    ("x_shape", "features", "dtype", "is_direct"),
    [
        ((32, 112, 112, 128), 128, "float32", True),
        ((32, 56, 56, 256), 256, "float32", False),
        ((32, 224, 224, 64), 64, "bfloat16", True),
        ((32, 112, 112, 128), 128, "bfloat16", False),
        ((512, 224, 224, 64), 64, "bfloat16", False),  # not measured
    ],
)
def test_a_pool_inside_direct_makes_large_layers_its(
    h200: None, monkeypatch: pytest.MonkeyPatch, x_shape: tuple[int, ...], features: int, dtype: str, is_direct: bool
) -> None:
    """The convolution alone is cuDNN's."""
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    config = primitives.Config(POOLED, "pecr", "relu", fallback=True)
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x_shape, (1, 3, 3, x_shape[3], features))]
    assert lowering.resolved(*operands, lowering._unpooled(config), "cuda") is None
    assert not lowering._pools_apart(*operands, config, "cuda")
    chosen = lowering.resolved(*operands, config, "cuda")
    assert (chosen is not None and chosen.method == "direct" and chosen.geometry == POOLED) == is_direct
    assert (chosen is None) != is_direct


@pytest.mark.parametrize("implementation", ["direct", None])
def test_a_pool_inside_direct_is_lowered_as_one_call(
    h200: None, monkeypatch: pytest.MonkeyPatch, implementation: str | None
) -> None:
    monkeypatch.setattr(_native, "why_missing", lambda *_: None)
    method = "direct" if implementation else "pecr"
    config = primitives.Config(POOLED, method, "relu", fallback=implementation is None)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 56, 56, 128), (1, 3, 3, 128, 128))]
    assert not lowering._pools_apart(*operands, config, "cuda")
    chosen = lowering.resolved(*operands, config, "cuda")
    assert chosen is not None
    assert (chosen.method, chosen.geometry) == ("direct", POOLED)
    assert lowering._pools_apart(*operands, config, "cpu") == (implementation == "direct")
    large = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 56, 56, 128), (1, 3, 3, 128, 128))]
    assert lowering._pools_apart(*large, config, "cuda") == (implementation == "direct")
