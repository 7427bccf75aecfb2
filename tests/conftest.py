"""Fixtures of all tests, and how a process that runs them is set up."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share a GPU
os.environ.setdefault("JSC_TABLES", "shipped")  # what is chosen does not depend on the user's own tables

import hypothesis
import jax
import pytest

# The emitters for CPUs that XLA had before take half of the time to compile a program. A library that does not know the
# flag ends the process; later ones do not, nor do those of GPUs.
if find_spec("jax_plugins") is None and jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

from platforms import LOOPS, PLATFORM, on_a_gpu, on_cpu

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Device

# What folders share asserts too, and shows as much where it fails.
HELPERS = Path(__file__).parent / "helpers"
pytest.register_assert_rewrite(*(path.stem for path in HELPERS.glob("*.py") if path.stem != "platforms"))

# The same draws in every run: what fails on a change comes from the change.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# On CPUs, half of the suite's time was LLVM's, which optimized thousands of programs that run once. Their HLO is the
# same without, and the extension's kernels are compiled already. JAX_DISABLE_MOST_OPTIMIZATIONS=0 has LLVM optimize.
if PLATFORM == "cpu" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the processes that tests start
    jax.config.update("jax_disable_most_optimizations", True)

# A collection walks all that hundreds of traced programs have left, and JAX's own hook runs with each.
gc.set_threshold(100_000, 20, 50)


def pytest_xdist_auto_num_workers() -> int:
    """One worker a core, but not more than share a GPU's memory well."""
    return min(6, os.cpu_count() or 1)


@pytest.fixture(scope="session")
def gpu() -> jax.Device:
    """The first GPU, or a skip."""
    if PLATFORM != "cuda":
        pytest.skip(f"needs an NVIDIA GPU; the default backend is {jax.default_backend()!r}")
    return jax.devices("gpu")[0]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Device:
    """As if programs were lowered for an H200, which planners know by this description."""
    return on_a_gpu(monkeypatch, (9, 0), has_warpgroups=True)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def any_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the CPU's kernels in turn, where this machine has it."""
    if request.param not in _native.cpu_isas():
        pytest.skip(f"{request.param} is not one of {_native.cpu_isas()}")
    with on_cpu(isa=request.param):
        yield request.param


@pytest.fixture
def cpu_isa(any_isa: str) -> str:
    """The same where the CPU is what programs run on."""
    if PLATFORM != "cpu":
        pytest.skip("the backend is not the CPU")
    return any_isa


@pytest.fixture(params=LOOPS)
def cpu_loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the three loops of the CPU's convolution in turn, whatever the layer's zeros."""
    if PLATFORM != "cpu":
        pytest.skip("the backend is not the CPU")
    with on_cpu(loop=request.param):
        yield request.param


@pytest.fixture
def pixels(any_isa: str) -> Iterator[str]:
    """Has the CPU run its pixel loop, on each instruction set that this machine has."""
    with on_cpu(loop="pixels"):
        yield any_isa


@pytest.fixture
def float32_products() -> Iterator[None]:
    """No TF32 on a GPU: for tests whose tolerances are those of float32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def optimized() -> Iterator[None]:
    """LLVM optimizes: without, XLA's derivatives of convolutions of few channels are wrong (openxla/xla#48713)."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def dense_blocks_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense blocks are made as for a GPU that has them, and lowered layer by layer where there is none."""
    if jax.default_backend() == "gpu":
        return
    monkeypatch.setattr(devices, "default_platform", lambda: "gpu")
    monkeypatch.setattr(_native, "why_missing", lambda *of: None)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: True)
