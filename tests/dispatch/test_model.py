"""The models of time: their files, whose constants count, and what holds of every expectation."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch import folders, model
from jax_sparse_conv._src.dispatch.planner import Layer
from jax_sparse_conv._src.problem.geometry import Geometry, Pool
from jax_sparse_conv._src.problem.workload import Workload

SAME = Geometry(padding=((1, 1), (1, 1)))
KINDS = (("float32", True), ("float32", False), ("bfloat16", False))


def workload(images: int = 1, size: int = 28, channels: int = 128, kind: int = 0, groups: int = 1) -> Workload:
    dtype, exact = KINDS[kind]
    geometry = dataclasses.replace(SAME, groups=groups)
    shapes = (images, size, size, channels), (1, 3, 3, channels // groups, channels)
    return Workload("ecr", *shapes, geometry, dtype, exact)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.CACHE, str(tmp_path))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    return tmp_path


def with_floor(found: model.Model, floor: float) -> model.Model:
    """With another time of XLA's smallest 3x3 convolutions."""
    group = found.xla["window"]
    kinds = {
        kind: tuple(floor if "floor" in name else value for name, value in zip(group.names, values, strict=True))
        for kind, values in group.kinds.items()
    }
    return dataclasses.replace(found, xla={**found.xla, "window": dataclasses.replace(group, kinds=kinds)})


def test_a_file_comes_back(tmp_path: Path) -> None:
    shipped = model.load(model.SHIPPED)
    model.save(tmp_path / "model.json", shipped)
    assert model.load(tmp_path / "model.json") == shipped


def test_the_shipped_file_says_what_fitted_it() -> None:
    fit = model.load(model.SHIPPED).fit
    assert fit["times"] > 9000
    assert "tune --fit" in fit["command"]
    assert all(0 < each["rms"] < 0.5 for each in fit["residuals"].values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 1}, "its format is 1, not 2"),
        ({"kernels": {"mma": {"names": ["block"], "kinds": {"tf32": [1, 2]}, "first": {}}}}, "mma, tf32: 1 constants"),
        ({"kernels": {"mma": {"names": ["block"], "kinds": {"tf32": [1]}, "first": {}}}}, "mma: kinds and first"),
        ({"xla": {"window": {"names": ["floor"], "kinds": {"tf32": [-1]}, "first": {}}}}, "of 0 or more"),
        ({"others": None}, "NoneType"),
    ],
)
def test_what_is_no_model(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(model.SHIPPED.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        model.load(path)


def test_the_users_own_wins_unless_it_is_hidden(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device(name="NVIDIA A900")
    before = model.xla_us(workload(), gpu)
    model.save(model.path_of_user(gpu.name), with_floor(model.load(model.SHIPPED), 1000.0))
    model.forget()
    assert model.xla_us(workload(), gpu) > 1000
    assert model.xla_us(workload(), Device()) == model.xla_us(workload(), Device(name=""))
    for switch in ("off", "shipped"):
        monkeypatch.setenv(folders.SWITCH, switch)
        assert model.xla_us(workload(), gpu) == before
    model.forget()


def test_the_build_has_the_shipped_constants(h200: Device) -> None:
    """Planners that are told none expect what they expect by the file."""
    layer = Layer.of(workload())
    candidates = [rated.candidate for rated in layer.candidates(h200, 3)]
    by_file = layer.expected(candidates, h200, model.load(model.SHIPPED).of_planners)
    assert layer.expected(candidates, h200) == pytest.approx(by_file)
    doubled = [2 * value for value in model.load(model.SHIPPED).of_planners]
    assert layer.expected(candidates, h200, doubled) != pytest.approx(by_file)


def test_the_header_has_every_constant() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "cmake" / "model_header.py"))
    content = json.loads(model.SHIPPED.read_text(encoding="utf-8"))
    text = script["header"](content)
    assert f"kCount = {len(model.load(model.SHIPPED).of_planners)};" in text
    assert "ModelGroup kSplitkChannels{" in text
    content["kernels"]["mma"]["kinds"]["tf32"] = [1.0]
    with pytest.raises(ValueError, match="mma: every kind must have"):
        script["header"](content)


def test_the_header_names_what_no_gpu_has_of_its_own() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "cmake" / "model_header.py"))
    content = json.loads(model.SHIPPED.read_text(encoding="utf-8"))
    lines = script["header"](content).splitlines()
    first = lines.index("namespace cpu_windows {")
    listed = model.shipped("cpu windows")
    assert lines[first + 1 : first + 3] == [
        f"inline constexpr double kList = {listed['list']};",
        f"inline constexpr double kListTap = {listed['list, tap']};",
    ]
    assert lines[first + 1 + len(listed)] == "}"
    content["others"]["cpu windows"]["names"][:2] = ["list tap", "list, tap"]
    with pytest.raises(ValueError, match="cpu windows: names that differ"):
        script["header"](content)


@pytest.mark.parametrize("kind", range(3))
def test_more_work_takes_longer(h200: Device, kind: int) -> None:
    found = [workload(images, kind=kind) for images in (1, 8, 64)]
    for expected in (
        [model.xla_us(each, h200) for each in found],
        [Layer.of(each).dense(h200).us for each in found],
        [model.sparse_us(each, h200, 0.5) for each in found],
    ):
        assert expected == sorted(expected)
        assert expected[0] > 1


def spectra(call: Workload, gpu: Device) -> tuple[float, ...]:
    """Of the features: microseconds of the bytes of transforms, and of their products."""
    return model.features(call, gpu)[4:6]


def test_small_maps_are_transformed_at_highest(h200: Device) -> None:
    """That takes less time than the products would at the peak, as it did where it was measured."""
    many = workload(128)
    assert model.xla_us(many, h200) < model.features(many, h200)[0]
    of_bytes, of_products = spectra(many, h200)
    assert of_bytes == pytest.approx(1e6 * 8 * 32 * 17 * (2 * 128 * 128 + 128 * 128) / h200.memory_bytes_per_second)
    assert of_products == pytest.approx(1e6 * 8 * 32 * 17 * 128 * 128 * 128 / h200.flops)


@pytest.mark.parametrize(
    "call",
    [
        workload(128, size=56),
        workload(128, kind=1),
        workload(128, kind=2),
        workload(128, groups=2),
        workload(128, channels=4),
        dataclasses.replace(workload(128), kernel_shape=(1, 1, 1, 128, 128), geometry=Geometry()),
        dataclasses.replace(workload(128), geometry=dataclasses.replace(SAME, strides=(1, 2))),
        dataclasses.replace(workload(128), geometry=dataclasses.replace(SAME, dilation=(2, 1))),
    ],
)
def test_other_convolutions_are_not_transformed(h200: Device, call: Workload) -> None:
    assert spectra(call, h200) == (0, 0)
    assert model.xla_us(call, h200) > 0


def test_long_sums_are_shared(h200: Device) -> None:
    """So a product of a short sum takes longer than one of a long sum."""

    def us(channels: int) -> float:
        shapes = (1, 14, 14, channels), (1, 1, 1, channels, 128)
        return model.xla_us(dataclasses.replace(workload(), x_shape=shapes[0], kernel_shape=shapes[1]), h200)

    assert (us(128) - us(64)) / 64 > 1.5 * (us(2048) - us(1024)) / 1024


def test_zeros_save_time_and_densities_come_back(h200: Device) -> None:
    times = [model.sparse_us(workload(8), h200, density) for density in (0.0, 0.05, 0.3, 1.0)]
    assert times == sorted(times)
    assert [model.density_of(1 - (1 - d) ** 4) for d in (0.0, 0.1, 1.0)] == pytest.approx([0.0, 0.1, 1.0])


def test_pools_that_overlap_take_longer(h200: Device) -> None:
    apart, overlapping = (
        dataclasses.replace(
            workload(32), method="pecr", geometry=dataclasses.replace(SAME, pool=Pool("max", window, (2, 2), pads))
        )
        for window, pads in (((2, 2), ((0, 0), (0, 0))), ((3, 3), ((1, 0), (1, 0))))
    )
    assert model.pool_us(overlapping, h200) > model.pool_us(apart, h200)


def test_classes_of_convolutions() -> None:
    assert model.class_of(workload()) == "window"
    assert model.class_of(workload(groups=8)) == "grouped"  # of 16 channels
    assert model.class_of(workload(channels=120, groups=5)) == "other_groups"
    product = dataclasses.replace(workload(), kernel_shape=(1, 1, 1, 128, 64), geometry=Geometry())
    assert model.class_of(product) == "product"
    assert model.class_of(dataclasses.replace(product, geometry=Geometry(strides=(2, 2)))) == "strided_product"
    assert model.class_of(dataclasses.replace(workload(channels=3), kernel_shape=(1, 3, 3, 3, 64))) == "few_channels"
