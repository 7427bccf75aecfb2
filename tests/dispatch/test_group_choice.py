"""When `implementation=None` takes "direct" for groups of few channels on a GPU, and which have their own kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from platforms import on_a_gpu
from works import SAME, conv1x1, conv3x3

from jax_sparse_conv._src.dispatch import direct_choice, group_choice
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.work import Work


def grouped(images: int, size: int, channels: int, of_group: int, stride: int = 1, **kind: Any) -> Work:
    geometry = Geometry(strides=(stride, stride), padding=SAME.padding, groups=channels // of_group)
    return conv3x3(images, size, channels, channels, **{"geometry": geometry, **kind})


@pytest.mark.parametrize(
    ("work", "exact", "tf32", "sixteen_bits"),
    [
        (grouped(1, 56, 72, 24), True, True, True),
        (grouped(8, 112, 72, 24, 2), True, True, True),
        (grouped(32, 56, 96, 48), True, True, True),
        (grouped(32, 28, 240, 40), True, True, True),
        (grouped(32, 14, 784, 56), True, True, True),
        (grouped(32, 28, 128, 16), True, True, True),
        (grouped(64, 28, 128, 16), True, False, False),  # more work than measured
        (grouped(8, 56, 128, 16, 2), True, True, True),
        (grouped(8, 56, 64, 16, 2), True, True, True),
        (grouped(8, 112, 64, 16, 2), True, False, False),
        (grouped(32, 28, 160, 16, 2), True, False, False),
        (grouped(8, 14, 720, 120), True, True, True),
        (grouped(8, 112, 224, 112, 2), True, True, True),
        (grouped(8, 28, 672, 168), True, True, True),
        (grouped(16, 28, 672, 168), True, True, False),  # more work than measured in 16 bits, the next in TF32 too
        (grouped(32, 112, 336, 168, 2), True, True, False),
        (grouped(36, 112, 336, 168, 2), True, False, False),
        (grouped(9, 28, 672, 168), True, True, False),
        (grouped(8, 14, 1056, 264), True, False, False),  # not measured
        (grouped(64, 56, 96, 48), False, False, False),  # not measured, as those below
        (grouped(8, 28, 256, 32), True, False, True),  # as other layers of so much work, like the next
        (grouped(8, 28, 64, 8), False, False, False),
        (grouped(8, 56, 96, 48, 3), False, False, True),
        (dataclasses.replace(grouped(8, 28, 96, 48), kernel_shape=(1, 5, 5, 48, 96)), True, False, False),  # too much
        (dataclasses.replace(grouped(8, 28, 96, 48), kernel_shape=(1, 3, 3, 48, 48)), False, False, False),
        (grouped(0, 28, 96, 48), False, False, False),
        (grouped(32, 56, 392, 56, 2), True, True, True),
        (conv3x3(8, 28, 48, 48), False, False, False),  # one group
        (grouped(8, 28, 96, 48, geometry=Geometry((1, 1), ((2, 2), (2, 2)), (2, 2), groups=2)), True, False, True),
        (grouped(8, 56, 96, 48, geometry=Geometry((1, 3), SAME.padding, groups=2)), True, False, True),
        (grouped(8, 112, 64, 16, geometry=Geometry((1, 2), SAME.padding, groups=4)), True, False, False),
        (dataclasses.replace(grouped(8, 28, 96, 48), kernel_shape=(1, 3, 3, 48, 192)), True, False, False),
    ],
)
def test_groups_of_few_channels_on_hopper_gpus_are_direct(
    h200: None, work: Work, exact: bool, tf32: bool, sixteen_bits: bool
) -> None:
    assert direct_choice.prefers_direct(work, "cuda") == exact
    for dtype, wanted in (("float32", tf32), ("bfloat16", sixteen_bits), ("float16", sixteen_bits)):
        assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype, exact=False), "cuda") == wanted


def test_16_bits_are_not_precise_whatever_is_asked_for(h200: None) -> None:
    work = grouped(8, 112, 64, 16, 2, dtype="bfloat16")
    assert work.exact
    assert not direct_choice.prefers_direct(work, "cuda")
    assert direct_choice.prefers_direct(grouped(8, 28, 672, 168, dtype="bfloat16"), "cuda")


def test_groups_of_few_channels_are_not_measured_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (8, 0), has_warpgroups=True)
    assert not direct_choice.prefers_direct(dataclasses.replace(conv1x1(8, 56, 32, 32), exact=True), "cuda")
    assert not direct_choice.prefers_direct(grouped(8, 56, 72, 24, exact=False), "cuda")


@pytest.mark.parametrize(
    ("channels", "features", "groups", "dtype", "has"),
    [
        (16, 16, 2, "float32", True),
        (16, 16, 2, "bfloat16", True),
        (8, 16, 2, "bfloat16", False),  # channels in no whole 16 bytes
        (24, 24, 2, "float32", False),  # features in no whole eights
        (48, 40, 2, "float32", False),
        (80, 112, 2, "float32", True),
        (144, 144, 2, "float32", False),
        (128, 128, 2, "float32", True),
        (64, 64, 1, "float32", False),
    ],
)
def test_groups_that_have_a_kernel(channels: int, features: int, groups: int, dtype: str, has: bool) -> None:
    work = conv3x3(1, 14, channels, features, geometry=Geometry(padding=SAME.padding, groups=groups), dtype=dtype)
    assert group_choice.has_group_kernel(work) == has
    wide = dataclasses.replace(work, kernel_shape=(1, 47, 47, *work.kernel_shape[3:]))
    assert not group_choice.has_group_kernel(wide)
    one_by_one = dataclasses.replace(work, kernel_shape=(1, 1, 1, *work.kernel_shape[3:]))
    assert group_choice.has_group_kernel(one_by_one) == (has and dtype == "float32")  # or of one unit
