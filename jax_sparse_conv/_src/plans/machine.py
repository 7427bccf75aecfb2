"""What a plan is for: the device, and the versions of the packages that decide how long an implementation takes."""

from __future__ import annotations

from jax_sparse_conv._src import _native, devices, environment

_VERSIONS = ("jax_sparse_conv", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13",
             "nvidia-cudnn-cu12")  # fmt: skip


def device_label() -> str:
    """What a plan depends on: a GPU's kind, or a CPU's model, cores and instruction set."""
    name = environment.device_name()
    if devices.default_platform() != "cpu":
        return name
    return f"{name}, {environment.cores()} cores, {_native.cpu_isa()}"


def versions() -> dict[str, str]:
    """Versions of the packages that decide how long an implementation takes."""
    found = environment.versions()
    return {name: found[name] for name in _VERSIONS if name in found}
