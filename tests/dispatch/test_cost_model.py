"""The cost model of COO*: the paper's equations by hand, what may be chosen, and that calls carry the choice."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse_conv as jsc
from benchmarks.suites import cost_model as benchmark
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device
from jax_sparse_conv._src.dispatch.coo import configurations, cost_model
from jax_sparse_conv._src.dispatch.coo.configurations import Configuration, CooCall, Variant
from jax_sparse_conv._src.primitive import custom_call, primitives
from jax_sparse_conv._src.primitive.primitives import Config
from jax_sparse_conv._src.problem.geometry import Geometry

TILE = Variant(3, kernel=3, stride=1, height=4, width=4, out_channels=2, max_warps=8, min_blocks=2)
LAYER = CooCall(images=2, height=28, width=30, channels=128, out_channels=96, density=0.5)


def test_the_equations_by_hand() -> None:
    device = Device(multiprocessors=10, threads=2048, registers=65536, clock_hz=1e9, lanes=128)
    found = Configuration(TILE, out_channel_warps=1, slices=4, splits=2)
    assert device.flops == 2 * 10 * 128 * 1e9
    assert TILE.positions == 36
    # eq. (3): 7 x 8 tiles of results, 2 blocks of 64 output channels, 2 images, C / TC = 2
    assert found.blocks(LAYER) == 7 * 8 * 2 * 2 * 2
    # 128 registers a thread, 128 threads a block: 4 blocks, 512 of 2048 threads
    assert found.resident(LAYER, device) == 4
    assert found.occupancy(LAYER, device) == 0.25
    # eq. (4) the right way up: 448 blocks of 128 threads, 10 x 512 at once
    assert cost_model.waves(found, LAYER, device) == math.ceil(448 * 128 / 5120) == 12
    # eqs. (5) to (9): 40 blocks a wave, each with 2 * 16 * 9 * 64 * 64 * 0.5 operations, at a quarter of the rate
    wave = 40 * (2 * 16 * 9 * 64 * 64 * 0.5) / (device.flops * 0.25)
    assert cost_model.paper_time(found, LAYER, device) == pytest.approx(12 * wave)
    # Table 2: the input once for each block of output channels, halos included, and the kernel once for each tile
    tiles = 2 * 7 * 8
    assert found.data_movement(LAYER) == tiles * 4 * (2 * 36 * 128 + 9 * 128 * 96)


@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("channels", [1, 8, 1000])
def test_what_is_chosen_can_run(density: float, channels: int) -> None:
    device = Device()
    call = CooCall(images=1, height=7, width=7, channels=channels, out_channels=33, density=density)
    table = [v for v in configurations.variants() if v.covers((3, 3), Geometry())]
    assert table
    found = cost_model.choose(table, call, device)
    assert found.variant in table
    assert found.out_channel_warps * found.slices <= found.variant.max_warps
    assert found.splits == 1 or 8 * found.splits <= channels
    assert found.shared_bytes(call) <= device.block_shared_memory
    published = cost_model.choose_as_published(table, call, device)
    assert found.occupancy(call, device) >= 0.5 * published.occupancy(call, device)
    assert 0 < cost_model.estimated_time(found, call, device) < 1


def test_denser_maps_and_more_images_take_longer() -> None:
    device = Device()
    for variant in configurations.variants():
        found = Configuration(variant, 1, 2, 1)
        times = [
            cost_model.estimated_time(found, CooCall(images, 28, 28, 64, 64, density=density), device)
            for images, density in ((1, 0.1), (1, 0.9), (64, 0.9))
        ]
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_every_row_of_the_table_fits_one_byte_and_a_block() -> None:
    for variant in configurations.variants():
        assert variant.positions < 256
        call = CooCall(1, 32, 32, 64, 64)
        widest = Configuration(variant, variant.max_warps, 1, 1)
        assert widest.shared_bytes(call) <= Device().block_shared_memory


def test_the_call_carries_the_choice() -> None:
    x, kernel = (jnp.zeros(shape).aval for shape in ((1, 14, 14, 256), (1, 3, 3, 256, 256)))
    config = Config(Geometry(padding=((1, 1), (1, 1))), "coo")
    attributes, densities = custom_call.variants(x, kernel, config)
    chosen = cost_model.for_operands(x.shape, kernel.shape, config.geometry, 4).attribute
    assert (attributes, densities) == ([chosen], ())
    scratch = cost_model.workspace_bytes(x.shape, kernel.shape, config.geometry, attributes)
    assert scratch == (0 if chosen[3] == 1 else 4 * chosen[3] * 14 * 14 * 256)
    forced = dataclasses.replace(config, coo=(2, 1, 1, 1))
    assert custom_call.variants(x, kernel, forced) == ([(2, 1, 1, 1)], ())
    assert cost_model.workspace_bytes(x.shape, kernel.shape, config.geometry, [(2, 1, 1, 1)]) == 0


def test_a_device_that_is_not_there() -> None:
    if _native.registered_targets()["cuda"]:
        pytest.skip("this machine has the CUDA extension")
    with pytest.raises(RuntimeError):
        Device.of(0)
    assert devices.current() == Device()


def test_a_forced_configuration_gives_the_same_result() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.maximum(rng.standard_normal((1, 9, 9, 32)), 0), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((3, 3, 32, 40)), jnp.float32)
    geometry = Geometry(padding=((1, 1), (1, 1)))
    wanted = jsc.conv(x, kernel, implementation="xla", precision="highest")
    for variant in configurations.variants():
        if variant.covers((3, 3), geometry):
            config = primitives.Config(geometry, "coo", coo=(variant.index, 1, 4, 2))
            found = primitives.bind(x, kernel[None], None, None, config)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_benchmark_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if _native.registered_targets()["cuda"]:
        pytest.skip("this machine has the CUDA extension")
    assert benchmark.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
