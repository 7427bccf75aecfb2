"""When `implementation=None` takes "direct" for 1x1 convolutions in TF32 and 16 bits on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
from works import conv1x1

from jax_sparse_conv._src.dispatch import choice, direct_choice
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.work import Work


@pytest.mark.parametrize(
    ("work", "tf32", "sixteen_bits"),
    [
        (conv1x1(1, 14, 896, 896), True, True),
        (conv1x1(8, 7, 2048, 2048), True, True),  # few pixels
        (conv1x1(1, 28, 128, 512), True, True),
        (conv1x1(1, 28, 352, 128), True, True),
        (conv1x1(1, 56, 64, 256), True, True),
        (conv1x1(1, 112, 32, 256), False, False),  # few channels
        (conv1x1(1, 112, 32, 256, strides=2), True, True),
        (conv1x1(1, 28, 512, 512), True, True),
        (conv1x1(1, 56, 256, 512), True, True),
        (conv1x1(8, 28, 512, 896, strides=2), True, True),
        (conv1x1(8, 56, 256, 512), True, False),
        (conv1x1(32, 56, 256, 512), False, False),
        (conv1x1(8, 14, 1024, 512), True, True),
        (conv1x1(8, 14, 896, 896), True, False),
        (conv1x1(32, 14, 896, 896), True, False),
        (conv1x1(8, 28, 352, 128), True, True),
        (conv1x1(8, 28, 512, 128), True, False),
        (conv1x1(8, 56, 192, 128), True, True),  # a whole tile of features, as the next
        (conv1x1(32, 28, 512, 128), True, True),
        (conv1x1(32, 56, 256, 128), True, True),
        (conv1x1(32, 56, 288, 128), False, False),  # more than measured
        (conv1x1(32, 56, 256, 120), False, False),
        (conv1x1(8, 56, 192, 120), True, False),
        (conv1x1(8, 56, 128, 128), False, True),
        (conv1x1(8, 56, 160, 128), True, True),
        (conv1x1(32, 112, 64, 128, strides=2), False, False),
        (dataclasses.replace(conv1x1(20, 112, 64, 128), geometry=Geometry(strides=(1, 2))), False, False),
        (dataclasses.replace(conv1x1(8, 56, 192, 256), geometry=Geometry(strides=(1, 2))), True, True),
        (dataclasses.replace(conv1x1(32, 56, 256, 128), kernel_shape=(1, 1, 3, 256, 128)), False, False),
        (dataclasses.replace(conv1x1(32, 56, 256, 128), kernel_shape=(1, 3, 1, 256, 128)), False, False),
        (conv1x1(12, 28, 384, 128), True, False),  # fewer pixels than measured in 16 bits
        (conv1x1(16, 28, 256, 128), False, True),
        (conv1x1(32, 56, 264, 128), True, True),
        (conv1x1(33, 56, 256, 128), False, False),
        (conv1x1(16, 28, 544, 128), True, False),  # more channels
        (conv1x1(8, 56, 256, 64), True, False),
        (conv1x1(32, 14, 576, 128), True, False),  # 6,272 pixels to a tile
        (conv1x1(32, 14, 608, 128), False, False),
        (conv1x1(128, 7, 736, 128), False, False),
        (conv1x1(32, 14, 768, 128), True, False),
        (conv1x1(32, 14, 608, 136), True, False),
        (conv1x1(25, 14, 768, 128), True, False),  # fewer pixels than that
    ],
)
def test_products_on_h200_are_direct_where_they_are_faster(
    h200: None, work: Work, tf32: bool, sixteen_bits: bool
) -> None:
    for dtype, wanted in (("float32", tf32), ("bfloat16", sixteen_bits), ("float16", sixteen_bits)):
        given = dataclasses.replace(work, dtype=dtype, exact=False)
        assert direct_choice.prefers_direct(given, "cuda") == wanted
        assert choice.threshold(given, "cuda") == 0  # what is not for it is for cuDNN


def test_a_residual_is_a_map_that_a_call_reads(h200: None) -> None:
    work = conv1x1(16, 28, 128, 512)
    assert direct_choice.prefers_direct(work, "cuda")
    assert direct_choice.prefers_direct(dataclasses.replace(work, residual=True), "cuda")
    work = conv1x1(32, 28, 512, 512)
    assert direct_choice.prefers_direct(work, "cuda")
    assert not direct_choice.prefers_direct(dataclasses.replace(work, residual=True), "cuda")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv1x1(8, 28, 128, 512), True),  # ResNet-50's expansions
        (conv1x1(32, 7, 512, 2048), True),
        (conv1x1(8, 56, 64, 256), False),  # more elements than measured
        (conv1x1(8, 28, 128, 384), False),  # to three times as many features
        (conv1x1(10, 28, 128, 512), False),
        (conv1x1(8, 28, 120, 512), True),
        (conv1x1(8, 56, 192, 128), False),
    ],
)
def test_a_residual_in_16_bits_is_for_expansions(h200: None, work: Work, direct: bool) -> None:
    for dtype in ("bfloat16", "float16"):
        given = dataclasses.replace(work, dtype=dtype, residual=True)
        assert direct_choice.prefers_direct(given, "cuda") == direct


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv1x1(8, 56, 64, 128), True),
        (conv1x1(8, 56, 96, 128), False),
        (conv1x1(8, 56, 192, 128), False),
        (conv1x1(8, 56, 224, 128), True),
        (conv1x1(8, 56, 96, 160), True),  # more than a tile
        (conv1x1(8, 56, 192, 64), True),
        (
            dataclasses.replace(conv1x1(8, 56, 192, 128), kernel_shape=(1, 1, 1, 96, 128), geometry=Geometry(groups=2)),
            True,
        ),
    ],
)
def test_a_residual_in_tf32_is_cudnns_for_a_tile_of_some_work(h200: None, work: Work, direct: bool) -> None:
    given = dataclasses.replace(work, exact=False, residual=True)
    assert direct_choice.prefers_direct(given, "cuda") == direct


@pytest.mark.parametrize(("residual", "direct"), [(False, True), (True, False)])
def test_products_of_a_tile_with_a_residual_are_cudnns_in_tf32(h200: None, residual: bool, direct: bool) -> None:
    work = dataclasses.replace(conv1x1(8, 56, 96, 96), residual=residual)
    assert direct_choice.prefers_direct(work, "cuda") == direct
