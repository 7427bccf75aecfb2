"""The commands `doctor`, which checks an installation, and `env`, which lists all there is to know of it.

Each check is a function that yields findings, says what it saw, and names the command that mends what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from jax_sparse_conv._src import environment

_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir -e .   # in the clone"
_WITH_CUDA = f"JSC_CUDA=ON {_REBUILD}"
_FLAGS = (
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JSC_TABLES",
    "JSC_CACHE",
    "CUDA_VISIBLE_DEVICES",
)
_EXTRAS = {
    "examples": ("PIL", "rich", "matplotlib", "safetensors", "sklearn"),
    "hub": ("huggingface_hub",),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
      topic: what was looked at.
      text: what was seen.
      mend: the command that makes it better, or None where nothing is missing.
      is_broken: whether something does not work that should; otherwise a `mend` is an offer.
    """

    topic: str
    text: str
    mend: str | None = None
    is_broken: bool = False

    @property
    def status(self) -> str:
        return "BROKEN" if self.is_broken else "note" if self.mend else "ok"


def doctor(options: argparse.Namespace) -> int:
    """The command; the result is 1 where something is broken."""
    findings = examine()
    content = [{"status": each.status, **dataclasses.asdict(each)} for each in findings]
    print(json.dumps(content, indent=2) if options.json else "\n".join(lines(findings)))
    return int(any(finding.is_broken for finding in findings))


def env(options: argparse.Namespace) -> None:
    """The command."""
    found = environment.collect()
    print(json.dumps(found, indent=2) if options.json else "\n".join(environment.lines(found)))


def examine() -> list[Finding]:
    """All findings; a check that fails itself is one of them."""
    findings = []
    for topic, check in _CHECKS.items():
        try:
            findings += [Finding(topic, *found) for found in check()]
        except environment.FAILURES as error:
            findings.append(Finding(topic, environment.reason_of(error), _REBUILD, True))
    return findings


def lines(findings: list[Finding]) -> list[str]:
    """Findings as text; the command below what it mends, and the verdict last."""
    result = []
    for finding in findings:
        result.append(f"{finding.status:7}{finding.topic}: {finding.text}")
        if finding.mend is not None:
            result.append(f"       -> {finding.mend}")
    broken = sum(finding.is_broken for finding in findings)
    return [*result, f"{broken} broken: see the commands above." if broken else "Nothing is broken."]


_Found = Iterator[tuple[Any, ...]]  # the arguments of a Finding behind its topic


def _versions() -> _Found:
    found = environment.versions()
    wrong = _unmet()
    if wrong:
        yield f"{'; '.join(wrong)}", "pip install -U " + " ".join(f'"{each.split(" is ")[0]}"' for each in wrong), True
    yield (", ".join(f"{name} {version}" for name, version in found.items()),)


def _unmet() -> list[str]:
    """Requirements of this package that what is installed does not meet."""
    try:
        requirements = importlib.import_module("packaging.requirements")
        declared = importlib.metadata.requires("jax-sparse-conv") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []  # a source tree on the path, or no library to compare versions
    unmet = []
    for requirement in map(requirements.Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version = importlib.metadata.version(requirement.name)
            if not requirement.specifier.contains(version, prereleases=True):
                unmet.append(f"{requirement} is needed, {version} is installed")
    return unmet


def _extensions() -> _Found:
    native = _module("_native")
    for platform, reason in native.missing_reasons().items():
        if platform == "cpu":
            yield f"the cpu extension is missing: {reason}", _REBUILD, True
        elif _backend() == "gpu":
            yield f"the cuda extension is missing, and JAX runs on a GPU: {reason}", _WITH_CUDA, True
        else:
            yield (f"none for CUDA, which nothing here needs: {reason}",)
    for platform, targets in native.registered_targets().items():
        if targets:
            instructions = f" ({native.cpu_isa()})" if platform == "cpu" else ""
            yield (f"{len(targets)} custom calls for {platform}{instructions}",)
    native.planner()  # raises with the reason


def _kernels() -> _Found:
    """A small convolution that skips zeros, where programs run by default, against NumPy."""
    import jax.numpy as jnp
    import numpy as np

    from jax_sparse_conv._src.api import ops

    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((1, 4, 4, 16)), rng.standard_normal((1, 1, 16, 16))
    x[x < 0.5] = 0
    y = ops.conv(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), implementation="ecr")
    error = float(np.abs(np.asarray(y) - x @ kernel[0, 0]).max())
    if not error < 1e-4:
        yield f"a convolution on {_backend()} is wrong by {error:.1e}", _REBUILD, True
    else:
        yield (f"a convolution that skips zeros is right on {_backend()}",)


def _devices() -> _Found:
    import jax

    names = ", ".join(str(device.device_kind) for device in jax.devices())
    driver = environment.gpu_driver()
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if driver is not None and _backend() != "gpu" and not chosen:
        cuda = "cuda13" if int(driver.split(".")[0]) >= 580 else "cuda12"
        yield (
            f"there is an NVIDIA GPU (driver {driver}), and JAX runs on {names}",
            f'pip install -U "jax[{cuda}]"',
            True,
        )
    else:
        said = "no NVIDIA driver" if driver is None else f"driver {driver}"
        yield (f"JAX runs on {names} ({environment.device_name()}); {said}",)


def _table() -> _Found:
    import jax

    table, cpu_table, gradient_table = (_module(f"dispatch.{name}table") for name in ("", "cpu_", "gradient_"))
    devices = _module("devices")
    first = jax.local_devices()[0]
    is_cpu = first.platform == "cpu"
    paths = cpu_table.paths(devices.cpu()) if is_cpu else table.paths_on(first)
    tune = f"python -m jax_sparse_conv tune{' --device cpu' if is_cpu else ''}"
    of_gradients = gradient_table.paths_on(first)
    of_both = [(path, (cpu_table if is_cpu else table).load, tune) for path in paths.values()]
    of_both += [(path, gradient_table.load, f"{tune} --gradients") for path in of_gradients.values()]
    for path, load, command in of_both:
        try:
            rows = len(load(path).rows) if path.exists() else 0
        except (OSError, ValueError) as error:
            yield f"{error}", f"rm {path} && {command}", True
        else:
            if path.exists():
                yield (f"{path}, {rows} rows",)
    if not any(path.exists() for path in paths.values()):
        yield "none for this device: rules and models choose what runs", tune


def _flags() -> _Found:
    said = [f"{name}={os.environ[name]}" for name in _FLAGS if os.environ.get(name)]
    folders = _module("dispatch.folders")
    try:
        folders.switch()
    except ValueError as error:
        yield str(error), f"unset {folders.SWITCH}", True
    yield (", ".join(said) or "none set",)


def _extras() -> _Found:
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if not _can_import(name)]
        if missing:
            yield f"{extra}: {', '.join(missing)} cannot be imported", f'pip install "jax-sparse-conv[{extra}]"'
        else:
            yield (f"{extra}: {', '.join(modules)}",)


_CHECKS: dict[str, Callable[[], _Found]] = {
    "versions": _versions,
    "devices": _devices,
    "custom calls": _extensions,
    "kernels": _kernels,
    "table": _table,
    "flags": _flags,
    "extras": _extras,
}


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _module(name: str) -> Any:
    return importlib.import_module(f"jax_sparse_conv._src.{name}")


def _backend() -> str:
    import jax

    return str(jax.default_backend())
