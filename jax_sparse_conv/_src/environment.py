"""What a result depends on: versions, build, targets, devices. Collecting it never raises.

Everything that can fail is asked for separately, and a failure is the sentence in its place.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
FAILURES = (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What asking a broken installation may raise: extensions, drivers, files and packages that are not what they were."""

_BUILD_FIELDS = {
    "cuda_built": "CUDA_BUILT",
    "cuda_reason": "CUDA_REASON",
    "cuda_architectures": "CUDA_ARCHITECTURES",
    "cuda_compiler": "CUDA_COMPILER",
    "cxx_compiler": "CXX_COMPILER",
    "build_type": "BUILD_TYPE",
}


def collect() -> dict[str, Any]:
    """Everything `env` prints and every result file carries, as JSON values."""
    return {
        "versions": versions(),
        "build": _or_reason(_build),
        "cpu": _or_reason(_cpu),
        "targets": _or_reason(_targets),
        "missing": _or_reason(_missing),
        "backend": _or_reason(_backend),
        "devices": _or_reason(_devices),
        "tables": _or_reason(_tables),
        "gpu_driver": gpu_driver(),
    }


def describe_run(argv: list[str] | None = None) -> dict[str, Any]:
    """Date, command, device, environment and XLA's flags: what every result file of this package starts with.

    Folders of this machine are not in it.

    Args:
      argv: the arguments after `python -m module`; None takes the process's own command line.
    """
    command = ["python", *(sys.orig_argv[1:] if argv is None else ["-m", "jax_sparse_conv", *argv])]
    found = collect()
    if isinstance(found["tables"], dict):  # else why there are none
        found["tables"] = {
            name: ", ".join(map(without_folders, text.split(", "))) for name, text in found["tables"].items()
        }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(map(without_folders, command)),
        "device": device_name(),
        "environment": found,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def without_folders(argument: str) -> str:
    """An argument without the folders of this machine: of a path that is absolute or leads up its last part."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = pathlib.Path(value)
    return f"{option}{equals}{path.name if path.is_absolute() or '..' in path.parts else value}"


def lines(found: dict[str, Any]) -> list[str]:
    """`collect()`'s answer as text, one fact a line."""
    result = []
    for section, value in found.items():
        title = section.replace("_", " ")
        if not isinstance(value, dict):
            result.append(f"{title}: {_text(value)}")
            continue
        result.append(f"{title}:" if value else f"{title}: none")
        result.extend(f"  {key}: {_text(entry)}" for key, entry in value.items())
    return result


def device_name() -> str:
    """The default device's kind ("NVIDIA H200"), or the processor's model name on CPU."""

    def ask() -> str:
        from jax_sparse_conv._src import devices

        device = devices.default()
        return cpu_model() if device.platform == "cpu" else str(device.device_kind)

    return str(_or_reason(ask))


def gpu_driver() -> str | None:
    """The NVIDIA driver's version, or None where `nvidia-smi` finds none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None


def versions() -> dict[str, str]:
    """Versions of this package and of those that it runs on, by the names pip knows them by."""
    found = {"jax_sparse_conv": _or_reason(_own_version), "python": platform.python_version()}
    found |= {name: _or_reason(functools.partial(importlib.metadata.version, name)) for name in _PACKAGES}
    for name in _CUDA_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _own_version() -> str:
    return str(importlib.import_module("jax_sparse_conv").__version__)


def _build() -> dict[str, Any]:
    info = importlib.import_module("jax_sparse_conv._build_info")
    return {key: getattr(info, name, "unknown") for key, name in _BUILD_FIELDS.items()}


def _cpu() -> dict[str, str]:
    native = importlib.import_module("jax_sparse_conv._src._native")
    return {
        "model": _or_reason(cpu_model),
        "cores": _or_reason(cores),
        "instruction_set_in_use": _or_reason(native.cpu_isa),
        "bfloat16": _or_reason(_bfloat16),
    }


def _bfloat16() -> str:
    native = importlib.import_module("jax_sparse_conv._src._native")
    if native.cpu_multiplies_tiles():
        return "AMX"
    return "AVX512-BF16" if native.cpu_multiplies_pairs() else "widened to float32"


def cores() -> str:
    """Number of cores that this process may use."""
    import os

    return str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


@functools.cache
def cpu_model() -> str:
    """The processor's name, as the system says it, and the numbers of its design.

    Virtual machines say "AMD EPYC" of designs of which one is twice as fast as another, and Arm's say nothing.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return named_cpu(text) or platform.processor() or platform.machine()


def named_cpu(cpuinfo: str) -> str:
    """The name and numbers of the first processor of `/proc/cpuinfo`; "" where it has none."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    name = fields.get("model name", "")
    for family, model in (("cpu family", "model"), ("CPU implementer", "CPU part")):
        if family in fields and model in fields:
            words = (family.split()[-1], fields[family], model.split()[-1], fields[model])
            return f"{name or platform.machine()} ({' '.join(words)})"
    return name


def _tables() -> dict[str, str]:
    """Which tables of choices are there for the first device, a GPU or the CPU."""
    table = importlib.import_module("jax_sparse_conv._src.dispatch.table")
    gradient_table = importlib.import_module("jax_sparse_conv._src.dispatch.gradient_table")
    devices = importlib.import_module("jax_sparse_conv._src.devices")
    first = importlib.import_module("jax").local_devices()[0]
    paths = table.paths_of(devices.cpu().slug) if first.platform == "cpu" else table.paths_on(first)
    paths |= {f"{whose}, gradients": path for whose, path in gradient_table.paths_on(first).items()}
    return {name: str(path) if path.exists() else f"none, {path}" for name, path in paths.items()}


def _targets() -> dict[str, Any]:
    return dict(importlib.import_module("jax_sparse_conv._src._native").registered_targets())


def _missing() -> dict[str, Any]:
    return dict(importlib.import_module("jax_sparse_conv._src._native").missing_reasons())


def _backend() -> str:
    import jax

    return str(jax.default_backend())


def _devices() -> list[str]:
    import jax

    return [f"{device} ({device.device_kind})" for device in jax.devices()]


def _or_reason(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except FAILURES as error:
        return f"unavailable: {reason_of(error)}"


def reason_of(error: Exception) -> str:
    """One line about an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)
