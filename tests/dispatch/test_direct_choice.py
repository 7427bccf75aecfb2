"""When `implementation=None` takes "direct" on a GPU, and which pools are in its kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from platforms import on_a_gpu
from works import SAME, conv1x1, conv3x3

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import direct_choice
from jax_sparse_conv._src.problem.geometry import Geometry
from jax_sparse_conv._src.problem.work import Work


def test_small_tf32_convolutions_on_h200_are_direct(h200: None) -> None:
    assert direct_choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False), "cuda")
    assert not direct_choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False), "cpu")
    assert not direct_choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False, method="pecr"), "cuda")


@pytest.mark.parametrize("kind", [{"exact": False}, {"exact": True}, {"dtype": "bfloat16", "exact": False}])
def test_images_on_h200_are_direct(h200: None, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]) -> None:
    assert direct_choice.prefers_direct(conv3x3(1, 224, 3, 64, **kind), "cuda")
    assert direct_choice.prefers_direct(conv3x3(8, 224, 3, 64, **kind), "cuda")
    assert direct_choice.prefers_direct(conv3x3(1, 112, 3, 32, **kind), "cuda")
    assert direct_choice.prefers_direct(conv3x3(128, 224, 3, 64, **kind), "cuda")
    assert not direct_choice.prefers_direct(conv3x3(256, 224, 3, 64, **kind), "cuda")  # not measured, as those below
    assert not direct_choice.prefers_direct(conv3x3(1, 112, 3, 16, **kind), "cuda")
    dilated = Geometry(padding=SAME.padding, dilation=(2, 2))
    assert not direct_choice.prefers_direct(conv3x3(1, 224, 3, 64, geometry=dilated, **kind), "cuda")
    on_a_gpu(monkeypatch, (8, 0), has_warpgroups=True)
    assert not direct_choice.prefers_direct(conv3x3(1, 224, 3, 64, **kind), "cuda")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(8, 14, 256, 256), True),
        (conv3x3(1, 28, 512, 512), True),
        (conv3x3(1, 224, 64, 64), True),
        (conv3x3(8, 28, 512, 512), True),
        (conv3x3(8, 56, 256, 256), True),
        (conv3x3(32, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), True),
        (conv3x3(32, 56, 256, 256), False),  # not faster than cuDNN, as those below
        (conv3x3(32, 112, 128, 128), False),
        (conv3x3(128, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), False),
        (conv3x3(1, 224, 64, 32), False),  # not measured, as those below
        (conv3x3(1, 112, 130, 128), False),
        (conv3x3(1, 112, 128, 130), False),
        (conv3x3(1, 56, 256, 256, geometry=Geometry(padding=SAME.padding, groups=2)), True),
        (conv3x3(8, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), True),
        (conv3x3(8, 28, 384, 384, geometry=Geometry(padding=SAME.padding, groups=4)), False),  # of 96: not measured
        (conv3x3(1, 56, 256, 256, method="pecr"), False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_larger_windows_on_h200_are_direct(
    h200: None, monkeypatch: pytest.MonkeyPatch, work: Work, direct: bool, dtype: str
) -> None:
    work = dataclasses.replace(work, dtype=dtype, exact=False)
    assert direct_choice.prefers_direct(work, "cuda") == direct
    with monkeypatch.context() as build:
        build.setattr(_native, "has_warpgroups", lambda: False)  # compiled for other GPUs
        assert not direct_choice.prefers_direct(work, "cuda")
    on_a_gpu(monkeypatch, (8, 0), has_warpgroups=True)
    assert not direct_choice.prefers_direct(work, "cuda")  # has no warpgroup products


def _grouped(groups: int, strides: int = 1) -> Geometry:
    return Geometry(strides=(strides, strides), padding=SAME.padding, groups=groups)


STRIDED = conv3x3(32, 56, 128, 128, geometry=_grouped(1, strides=2))


@pytest.mark.parametrize(
    ("work", "tf32", "sixteen_bits"),
    [
        (conv3x3(32, 28, 512, 512, geometry=_grouped(4)), False, False),
        (conv3x3(8, 112, 128, 128), True, False),
        (conv3x3(16, 28, 512, 512, geometry=_grouped(4)), True, True),
        (conv3x3(23, 28, 512, 512, geometry=_grouped(4)), True, False),
        (conv3x3(24, 28, 512, 512, geometry=_grouped(4)), False, False),
        (conv3x3(8, 112, 128, 128, geometry=_grouped(2)), False, False),
        (conv3x3(32, 14, 2048, 2048, geometry=_grouped(16, strides=2)), True, True),
        (STRIDED, False, False),
        (conv3x3(26, 56, 128, 128, geometry=_grouped(1, strides=2)), True, True),
        (conv3x3(27, 56, 128, 128, geometry=_grouped(1, strides=2)), False, False),
        (conv3x3(24, 56, 128, 128, geometry=Geometry(strides=(1, 2), padding=SAME.padding)), False, False),
        (dataclasses.replace(STRIDED, kernel_shape=(1, 1, 3, 128, 128)), False, False),
        (conv3x3(32, 56, 128, 132, geometry=_grouped(1, strides=2)), True, False),  # 16 bits: not what is copied
        (conv3x3(32, 56, 128, 136, geometry=_grouped(1, strides=2)), True, True),  # more than a tile
        (conv1x1(32, 56, 128, 128, strides=2), True, True),
    ],
)
def test_maps_that_only_an_h200_is_as_fast_with_are_cudnns(
    h200: None, work: Work, tf32: bool, sixteen_bits: bool
) -> None:
    for dtype, wanted in (("float32", tf32), ("bfloat16", sixteen_bits), ("float16", sixteen_bits)):
        assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype, exact=False), "cuda") == wanted


DILATED = Geometry(padding=((2, 2), (2, 2)), dilation=(2, 2))
WIDE = Geometry(padding=((3, 3), (3, 3)))


@pytest.mark.parametrize(
    ("work", "kind", "direct"),
    [
        (conv3x3(8, 56, 128, 32), "bfloat16", True),
        (conv3x3(8, 56, 130, 34), "bfloat16", False),  # copied one by one, as the next
        (conv3x3(8, 56, 129, 33), "tf32", False),
        (conv3x3(32, 56, 128, 32), "tf32", True),
        (conv3x3(32, 56, 128, 32, geometry=DILATED), "tf32", False),
        (conv3x3(128, 224, 8, 64), "tf32", False),
        (conv3x3(128, 224, 64, 64, geometry=DILATED), "tf32", False),
        (conv1x1(8, 28, 192, 64), "bfloat16", True),
        (conv1x1(8, 28, 192, 32), "bfloat16", False),
        (conv1x1(8, 7, 2048, 2048), "bfloat16", True),
        (conv1x1(8, 9, 2048, 2048), "bfloat16", False),
        (conv1x1(8, 56, 64, 128), "tf32", True),
        (conv1x1(8, 56, 96, 128), "tf32", False),
        (conv1x1(8, 56, 96, 160), "tf32", True),  # more than a tile
        (dataclasses.replace(conv3x3(8, 28, 512, 512, geometry=WIDE), kernel_shape=(1, 7, 7, 512, 512)), "tf32", False),
        (conv3x3(128, 112, 256, 256, geometry=_grouped(2, strides=2)), "highest", True),
        (conv3x3(256, 112, 256, 256, geometry=_grouped(2, strides=2)), "highest", False),
        (conv3x3(128, 56, 256, 256), "highest", True),
        (conv3x3(128, 56, 256, 256, geometry=DILATED), "highest", False),
        (conv3x3(128, 56, 256, 508), "highest", False),
        (conv1x1(128, 56, 1024, 512), "highest", False),
        (conv3x3(1024, 56, 128, 32), "highest", False),
    ],
)
def test_what_was_not_measured_on_h200_is_left_to_others(h200: None, work: Work, kind: str, direct: bool) -> None:
    dtype = "float32" if kind in ("tf32", "highest") else kind
    work = dataclasses.replace(work, dtype=dtype, exact=kind == "highest")
    assert direct_choice.prefers_direct(work, "cuda") == direct


def test_windows_to_few_features_want_warpgroup_products(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=False)
    for dtype in ("float32", "bfloat16"):
        work = conv3x3(32, 56, 128, 32, exact=False, dtype=dtype)
        assert not direct_choice.prefers_direct(work, "cuda")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(32, 13, 128, 32), False),  # smaller maps than measured
        (conv3x3(40, 14, 128, 32), False),  # more work
        (conv3x3(0, 14, 128, 32), False),
    ],
)
def test_windows_to_few_features_in_16_bits_as_measured(h200: None, work: Work, direct: bool) -> None:
    assert direct_choice.prefers_direct(dataclasses.replace(work, dtype="bfloat16"), "cuda") == direct


@pytest.mark.parametrize("images", [1, 8, 32, 128])
@pytest.mark.parametrize("size", [7, 14, 28, 56])
def test_windows_to_few_features_on_h200_are_direct(h200: None, images: int, size: int) -> None:
    """DenseNet's 3x3 layers."""
    work = conv3x3(images, size, 128, 32, exact=False)
    assert direct_choice.prefers_direct(work, "cuda")
    # In 16 bits, on small maps of many images.
    is_cudnns = size <= 14 and images * size**2 >= 6272 and (size, images) != (14, 32)
    for dtype in ("bfloat16", "float16"):
        assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype), "cuda") != is_cudnns


@pytest.mark.parametrize(
    ("work", "tf32", "sixteen_bits"),
    [
        (conv3x3(128, 224, 64, 64), True, False),
        (conv3x3(32, 56, 64, 64), True, True),
        (conv3x3(256, 224, 64, 64), False, False),  # not measured, as the next
        (conv3x3(256, 56, 128, 32), False, False),
        (conv3x3(8, 112, 64, 128), True, False),
        (conv3x3(32, 112, 64, 128), False, False),
    ],
)
def test_large_windows_to_64_features_are_direct_in_tf32(
    h200: None, work: Work, tf32: bool, sixteen_bits: bool
) -> None:
    for dtype, wanted in (("float32", tf32), ("bfloat16", sixteen_bits), ("float16", sixteen_bits)):
        assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype, exact=False), "cuda") == wanted


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv1x1(8, 56, 32, 32), True),
        (conv1x1(32, 56, 48, 48), True),
        (conv1x1(8, 112, 32, 48, strides=2), True),
        (conv1x1(8, 56, 64, 48), False),  # not measured, as those below
        (conv1x1(8, 112, 32, 24), False),
        (conv1x1(8, 112, 24, 32), False),
        (conv1x1(8, 112, 32, 48, strides=3), False),
        (conv1x1(8, 56, 56, 48), False),
        (dataclasses.replace(conv1x1(8, 112, 32, 48), geometry=Geometry(strides=(1, 3))), False),
        (
            dataclasses.replace(conv1x1(8, 56, 64, 64), kernel_shape=(1, 1, 1, 32, 64), geometry=Geometry(groups=2)),
            False,
        ),
        (conv3x3(8, 28, 32, 48), False),
    ],
)
def test_few_channels_to_few_features_at_highest_on_h200_are_direct(h200: None, work: Work, direct: bool) -> None:
    assert direct_choice.prefers_direct(dataclasses.replace(work, exact=True), "cuda") == direct


def test_a_smaller_hopper_takes_direct_for_less(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    work = conv3x3(16, 28, 512, 512, exact=False)
    assert direct_choice.prefers_direct(work, "cuda")
    monkeypatch.setattr(devices, "current", lambda: Device(multiprocessors=66))
    assert not direct_choice.prefers_direct(work, "cuda")
    assert direct_choice.prefers_direct(conv3x3(8, 28, 512, 512, exact=False), "cuda")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(1, 14, 256, 256), True),
        (conv3x3(1, 28, 512, 512), True),
        (conv3x3(1, 224, 64, 64), True),
        (conv3x3(2, 28, 512, 512), True),
        (conv3x3(1, 56, 64, 128, geometry=Geometry(padding=SAME.padding, groups=2)), True),
        (conv3x3(4, 56, 128, 32), True),
        (conv3x3(1, 56, 128, 32), True),
        (conv3x3(64, 7, 128, 32), True),
        (conv3x3(1, 56, 128, 24), False),
        (conv3x3(1, 56, 120, 32), False),
        (conv3x3(1, 56, 128, 32, geometry=Geometry(strides=(2, 2), padding=SAME.padding)), False),
        (dataclasses.replace(conv1x1(1, 56, 1152, 32), exact=True), False),
        (conv3x3(64, 14, 512, 512), True),
        (conv3x3(128, 224, 64, 64), True),
        (conv3x3(128, 56, 256, 256), True),
        (conv3x3(128, 56, 128, 32), True),
        (conv3x3(128, 28, 512, 512, geometry=Geometry(padding=SAME.padding, groups=4)), True),
        (conv3x3(64, 28, 512, 512), False),  # cuDNN has another algorithm there
        (conv3x3(256, 224, 64, 64), False),  # not measured, as those below
        (conv3x3(256, 56, 256, 256, geometry=Geometry(padding=SAME.padding, groups=2)), False),
        (conv3x3(1, 14, 256, 32), True),
        (conv3x3(1, 14, 255, 256), False),
        (conv3x3(1, 14, 256, 254), False),
        (conv3x3(1, 28, 512, 512, method="pecr"), False),
        (conv3x3(1, 56, 64, 64, geometry=Geometry(padding=SAME.padding, groups=2)), False),
        (conv3x3(1, 56, 256, 64, geometry=Geometry(padding=SAME.padding, groups=2)), False),
        (conv3x3(1, 224, 3, 64), True),
        (conv3x3(0, 14, 256, 256), False),
    ],
)
def test_small_batches_in_float32_on_h200_are_direct(h200: None, work: Work, direct: bool) -> None:
    assert direct_choice.prefers_direct(work, "cuda") == direct
    assert not direct_choice.prefers_direct(work, "cpu")


@pytest.mark.parametrize(
    ("work", "direct"),
    [
        (conv3x3(1, 14, 256, 256), True),
        (conv3x3(1, 14, 512, 512), True),
        (conv3x3(1, 14, 896, 896, geometry=Geometry(padding=SAME.padding, groups=7)), True),
        (conv3x3(1, 14, 260, 256), False),  # copied element by element
        (conv3x3(1, 14, 128, 32), True),
        (conv3x3(1, 56, 128, 32), True),
        (conv3x3(8, 28, 96, 32), False),  # as much work for so few features and products
        (conv3x3(8, 28, 256, 64, geometry=Geometry(padding=SAME.padding, groups=2)), True),
        (conv3x3(1, 28, 256, 16), False),  # not measured
        (conv3x3(1, 224, 3, 64), True),
        (conv3x3(0, 14, 256, 256), False),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_convolutions_in_16_bits_on_h200_are_direct(h200: None, work: Work, direct: bool, dtype: str) -> None:
    assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype, exact=False), "cuda") == direct
    assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype), "cuda") == direct


@pytest.mark.parametrize(
    ("work", "in_float32", "in_16_bits"),
    [
        (conv3x3(1, 14, 256, 16), True, True),
        (conv1x1(1, 56, 32, 64), True, True),
        (conv3x3(1, 11, 6, 16), True, False),  # copied element by element
        (conv3x3(1, 11, 8, 12), True, False),
        (conv3x3(1, 11, 8, 4), False, False),  # not measured
        (conv3x3(1, 14, 160, 160, geometry=Geometry(padding=SAME.padding, groups=10)), True, True),
        (conv3x3(1, 14, 120, 120, geometry=Geometry(padding=SAME.padding, groups=10)), True, False),
        (conv3x3(1, 14, 100, 100, geometry=Geometry(padding=SAME.padding, groups=10)), False, False),
        (conv3x3(1, 14, 60, 60, geometry=Geometry(padding=SAME.padding, groups=10)), False, False),
        (conv3x3(1, 14, 256, 16, method="pecr"), False, False),
        (conv1x1(8, 112, 8, 8), False, False),  # not measured
        (conv1x1(8, 7, 64, 64), True, True),
    ],
)
def test_small_layers_on_h200_are_direct(h200: None, work: Work, in_float32: bool, in_16_bits: bool) -> None:
    assert direct_choice.prefers_direct(dataclasses.replace(work, exact=True), "cuda") == in_float32
    for dtype in ("bfloat16", "float16"):
        assert direct_choice.prefers_direct(dataclasses.replace(work, dtype=dtype, exact=False), "cuda") == in_16_bits


def test_few_features_in_float32_want_warpgroup_products(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), has_warpgroups=False)
    assert not direct_choice.prefers_direct(conv3x3(1, 56, 128, 32), "cuda")
    assert direct_choice.prefers_direct(conv3x3(4, 56, 128, 32), "cuda")


def test_direct_in_float32_wants_tensor_cores_much_faster_than_ffma(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (8, 9), has_warpgroups=True)
    assert not direct_choice.prefers_direct(conv3x3(1, 14, 256, 256), "cuda")
    assert direct_choice.prefers_direct(conv3x3(1, 14, 256, 256, exact=False), "cuda")


@pytest.mark.parametrize(
    ("work", "least", "most"),
    [
        (conv3x3(1, 28, 512, 512, exact=False), 3.7e9, 1e10),
        (conv3x3(1, 28, 512, 512), 1e11, 2e11),
        (conv3x3(1, 28, 512, 512, geometry=_grouped(4)), 1e10, 2e10),
        (conv3x3(1, 56, 128, 32), 1e10, 2e10),
    ],
)
def test_layers_of_chains_are_as_large_as_they_were_measured(
    h200: None, monkeypatch: pytest.MonkeyPatch, work: Work, least: float, most: float
) -> None:
    assert least < direct_choice.most_chain_flops(work) < most
    on_a_gpu(monkeypatch, (8, 0), has_warpgroups=True)
    assert direct_choice.most_chain_flops(work) < 2e10
