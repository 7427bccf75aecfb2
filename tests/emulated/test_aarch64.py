"""The CPU's kernels for aarch64, under an emulator: some of what `emulate.sh` runs, where the tools are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from platforms import PLATFORM

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")


def test_every_loop_and_dtype() -> None:
    if PLATFORM != "cpu":
        pytest.skip("these are the CPU's kernels")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    chosen = ["tests/primitive/test_instruction_sets.py", "-n", "0", "-k", "not every_16_bit_value"]
    settings = os.environ | {"PYTHON": sys.executable}
    ran = subprocess.run(
        [ROOT / "tests" / "emulated" / "emulate.sh", *chosen], env=settings, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
