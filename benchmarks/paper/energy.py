"""Energy that the first visible GPU has used: NVML's counter, or its power integrated over samples of nvidia-smi."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import jax

_PERIOD = 0.1  # seconds between samples of nvidia-smi


class Meter(Protocol):
    """Joules since some moment; `source` says where they come from, `works` whether there are any."""

    source: str
    works: bool

    def joules(self) -> float: ...


class _Nvml:
    source = "NVML total energy counter"
    works = True

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        name = visible_gpu()
        by = pynvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
        self._handle = by(int(name) if name.isdecimal() else name)

    def joules(self) -> float:
        return float(self._pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


class _Smi:
    source = "power samples of nvidia-smi, integrated"
    works = True

    def __init__(self) -> None:
        self._joules, self._done = 0.0, threading.Event()
        self._last = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def joules(self) -> float:
        return self._joules

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_PERIOD):
            watts, now = power_of_smi(), time.perf_counter()
            self._joules += (watts or 0.0) * (now - self._last)
            self._last = now


class _Nothing:
    works = False

    def __init__(self, reason: str) -> None:
        self.source = reason

    def joules(self) -> float:
        return 0.0


def visible_gpu() -> str:
    """The first GPU that CUDA gives this process, as NVML and nvidia-smi know it: an index or a UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def power_of_smi() -> float | None:
    """Watts of the first visible GPU by nvidia-smi, or None."""
    query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--id={visible_gpu()}"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def meter() -> Iterator[Meter]:
    """The best meter there is; one that does not work, with the reason as its source, where the backend is a CPU."""
    if jax.default_backend() == "cpu":
        yield _Nothing("not measured: the backend is a CPU")
        return
    try:
        pynvml = importlib.import_module("pynvml")  # pip install nvidia-ml-py
    except ImportError:
        yield from _smi()
        return
    try:
        pynvml.nvmlInit()
        found = _Nvml(pynvml)
        found.joules()
    except pynvml.NVMLError:
        yield from _smi()
        return
    yield found
    pynvml.nvmlShutdown()


def _smi() -> Iterator[Meter]:
    if power_of_smi() is None:
        yield _Nothing("not measured: neither NVML nor nvidia-smi gives a power")
        return
    sampler = _Smi()
    try:
        yield sampler
    finally:
        sampler.stop()
