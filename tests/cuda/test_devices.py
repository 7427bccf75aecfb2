"""Which GPU a program is lowered for, in a process with several devices: CPUs that stand for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device

LOWERED = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native, devices

devices._GPU = "cpu"
_native.why_missing = lambda *_: None
_native.workspace_bytes = lambda *arguments: found.append(arguments[-1]) or 0
names = ("clock_khz", "memory_clock_khz", "memory_bus_bits", "major", "minor")
_native.device_properties = lambda ordinal: found.append(ordinal) or (
    dict.fromkeys(names, 8) | {"clusters": (0,) * 17, "tensor_maps": False}
)
found = []
x, kernel = jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 16))
conv = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation="ecr"))
counted = jax.jit(lambda x, kernel: jsc.conv(x, kernel, implementation="ecr", count_nonzeros=True))
auto = jax.jit(lambda x, kernel: jsc.conv(x, kernel))
mesh = jax.make_mesh((2,), ("images",), devices=jax.devices()[1:], axis_types=(AxisType.Auto,))

def show(name, function, *arguments):
    function.trace(*arguments).lower(lowering_platforms=("cuda",))
    print(name, *sorted(set(found)))
    found.clear()

show("first", conv, x, kernel)
show("committed", conv, jax.device_put(x, jax.devices()[2]), kernel)
with jax.default_device(jax.devices()[1]):
    show("default", conv, jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 16)))
    show("counted", counted, jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 16)))
split = jax.shard_map(conv, mesh=mesh, in_specs=(P("images"), P()), out_specs=P("images"))
show("mesh", jax.jit(split), x, kernel)
show("chosen", auto, jax.device_put(x, jax.devices()[2]), kernel)
"""


def test_a_lowering_knows_its_device() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LOWERED], env=os.environ | flags, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["first 0", "committed 2", "default 1", "counted 1", "mesh 1", "chosen 2"]


@pytest.mark.parametrize(("is_export", "found"), [(False, (2, 0)), (True, ())])
def test_gpus_that_a_program_runs_on(is_export: bool, found: tuple[int, ...]) -> None:
    def device(platform: str, process: int, ordinal: int | None) -> Any:
        return SimpleNamespace(platform=platform, process_index=process, local_hardware_id=ordinal)

    assigned = [device("cpu", 0, 0), device("gpu", 0, 2), device("gpu", 1, 3), device("gpu", 0, None)]
    module = SimpleNamespace(
        axis_context=SimpleNamespace(device_assignment=assigned),
        lowering_parameters=SimpleNamespace(for_export=is_export),
    )
    assert devices.ordinals(SimpleNamespace(module_context=module)) == found


def with_properties(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """As if each GPU had this compute capability, before and behind the point; multiprocessors tell which one it is."""
    names = ("clock_khz", "memory_clock_khz", "memory_bus_bits", "minor", "major")
    properties = dict.fromkeys(names, capability) | {"clusters": (0, 5, *[0] * 15), "tensor_maps": True}
    monkeypatch.setattr(_native, "device_properties", lambda ordinal: properties | {"multiprocessors": 10 + ordinal})


def test_properties_are_those_of_the_device_that_is_lowered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_properties(monkeypatch, 8)
    Device.of.cache_clear()
    token = devices._ordinal.set(3)
    try:
        assert devices.ordinal() == 3
        assert devices.current().multiprocessors == 13
        assert devices.current().capability == (8, 8)
        assert devices.current().clusters == (0, 5, *[0] * 15)
        assert devices.current().tensor_maps
    finally:
        devices._ordinal.reset(token)
        Device.of.cache_clear()


def test_a_gpu_can_look_like_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without warpgroup products, clusters and a table, which are the newer one's."""
    with_properties(monkeypatch, 9)
    monkeypatch.setattr(devices, "_name", lambda ordinal: "NVIDIA H200")
    try:
        for text, capability in (("8.0", (8, 0)), ("8.6", (8, 6))):
            monkeypatch.setenv(devices.CAPABILITY, text)
            Device.of.cache_clear()
            assert (Device.of(0).capability, Device.of(0).name) == (capability, "")
        monkeypatch.setenv(devices.CAPABILITY, "8.0")
        Device.of.cache_clear()
        assert not Device.of(0).has_clusters
        assert not Device.of(0).has_warpgroups
        for text in ("8", "old", "8.0.1"):
            monkeypatch.setenv(devices.CAPABILITY, text)
            Device.of.cache_clear()
            with pytest.raises(ValueError, match=f"JSC_CAPABILITY='{text}' is not a compute capability, such as 8.0"):
                Device.of(0)
    finally:
        Device.of.cache_clear()


def test_the_default_device() -> None:
    assert devices.default() == jax.local_devices()[0]
    for chosen in (jax.devices("cpu")[-1], "cpu"):
        with jax.default_device(chosen):
            assert devices.default_platform() == "cpu"


@pytest.mark.skipif(not _native.cpu_isas(), reason="kernels are packed for the CPU extension only")
def test_kernels_are_packed_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the default device is a GPU: a kernel that lies on a CPU has a copy, one that is traced has none."""
    cpu = jax.devices("cpu")[-1]
    kernel = jax.device_put(jnp.ones((3, 3, 16, 16)), cpu)
    monkeypatch.setattr(devices, "default_platform", lambda: "gpu")
    packed = jsc.pack(kernel).packed
    assert packed is not None
    assert packed.devices() == {cpu}
    assert jax.eval_shape(jsc.pack, kernel).packed is None
