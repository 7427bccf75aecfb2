"""What runs here, as skip reasons rather than silence, and programs that are lowered as if for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import pytest

from jax_sparse_conv._src import _native, devices
from jax_sparse_conv._src.devices import Cpu, Device

CPU = Cpu("Intel(R) Xeon(R) Processor @ 2.50GHz", "avx512", 2)  # that no table is shipped for
LOOPS = ("windows", "scatter", "pixels")  # of the CPU's convolution
PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def require(method: str, dtype: str) -> None:
    """Skip, with the reason, where `method` has no kernel for this platform and dtype."""
    if method == "adaptive" and PLATFORM == "cpu":
        method = "ecr"  # and XLA's
    reason = _native.why_missing(method, PLATFORM, dtype)
    if reason is not None and (PLATFORM != "cpu" or "dtype" in reason):
        pytest.skip(reason)
    assert reason is None, reason  # the CPU extension is always built


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, has_warpgroups: bool) -> Device:
    """As if programs were lowered for an H200 of this compute capability, by kernels with warpgroup products or not."""
    device = Device(capability=capability, name="")  # without a name there is no table
    monkeypatch.setattr(devices, "current", lambda: device)
    monkeypatch.setattr(devices, "known", lambda: device)
    monkeypatch.setattr(_native, "has_warpgroups", lambda: has_warpgroups)
    return device


@contextlib.contextmanager
def on_cpu(isa: str | None = None, loop: str | None = None) -> Iterator[None]:
    """Has the CPU's kernels use an instruction set, and convolutions a loop; results must be there before it ends."""
    chosen = _native.cpu_isa()
    try:
        if isa is not None:
            _native.set_cpu_isa(isa)
        if loop is not None:
            _native.set_cpu_loop(loop)
        yield
    finally:
        if isa is not None:
            _native.set_cpu_isa(chosen)
        if loop is not None:
            _native.set_cpu_loop("auto")
