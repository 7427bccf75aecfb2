"""Several devices: sharded jit, vmap, grad, shard_map and explicit sharding, without gathering what is independent."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import jax
import pytest

CHECKED = [
    "jit, images and channels split",
    "jit, implementation=None",
    "jit, groups",
    "jit, conv_pool",
    "vmap over x and kernel, both split",
    "vmap over x and kernel, one image each",
    "vmap over x and kernel, images split every way",
    "grad",
    "shard_map",
    "grad through shard_map",
    "shard_map, kernel split",
    "counts and adaptive",
    "jit, packed kernel",
    "shard_map, packed kernel",
    "jit, dense block",
    "shard_map, dense block",
    "jit, packed dense block",
    "shard_map, packed dense block",
    "set_mesh, arrays of no mesh",
    "set_mesh, a constraint inside",
    "set_mesh, accelerate",
    "explicit sharding",
    "explicit sharding, derivatives",
    "explicit sharding, layouts",
    "explicit sharding, dense",
    "explicit sharding, mapped",
    "compressed maps",
    "export",
]
MAPS = [
    "rows and columns",
    "sizes that do not divide",
    "windows beyond the neighbours",
    "input channels",
    "methods",
    "dense and conv_general_dilated",
    "gradients",
    "explicit sharding",
    "inside shard_map",
    "lax",
    "without Shardy",
]
NETWORKS = ["accelerate and jit_inference", "replaced models", "training", "chains and dense blocks"]
POOLS = ["jit", "averages", "explicit types", "shard_map", "conv_pool", "windows that overlap", "one row"]


def cpus(devices: int) -> dict[str, str]:
    """The environment of a process that takes the CPU for so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run(environment: dict[str, str], name: str = "sharded.py", wanted: Sequence[str] = CHECKED) -> None:
    helpers = pathlib.Path(__file__).parents[1] / "helpers"
    path = os.pathsep.join([str(helpers), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(helpers / "sharded" / name)],
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == list(wanted)


def test_four_cpu_devices() -> None:
    run(cpus(4))


def test_maps_that_are_split_over_eight_devices() -> None:
    run(cpus(8), "sharded_maps.py", MAPS)


def test_max_pools_on_two_devices() -> None:
    run(cpus(2), "sharded_pools.py", POOLS)


def test_networks_on_eight_devices() -> None:
    run(cpus(8), "sharded_networks.py", NETWORKS)


def test_the_gpus_of_this_machine() -> None:
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {jax.device_count()} {jax.default_backend()} device(s)")
    run({"JAX_DEFAULT_MATMUL_PRECISION": "highest"})
