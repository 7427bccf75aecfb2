"""Which GPUs a build compiles for: those that are named, those that are there, or a set that runs on all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CMAKE = shutil.which("cmake")
MODULE = Path(__file__).parents[2] / "cmake" / "cuda_architectures.cmake"

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not on the path")


def chosen(folder: Path, gpus: str | None, named: str | None = None) -> tuple[str, str]:
    """The architectures and the line about them where nvidia-smi answers `gpus` and CUDAARCHS is `named`."""
    script = folder / "script.cmake"
    script.write_text(
        f'include("{MODULE}")\njsc_cuda_architectures(found note)\nmessage("${{found}}")\nmessage("${{note}}")\n',
        "utf-8",
    )
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n" if gpus is None else f"#!/bin/sh\nprintf '{gpus}'\n", "utf-8")
    smi.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDAARCHS"}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    if named is not None:
        environment["CUDAARCHS"] = named
    assert CMAKE is not None
    done = subprocess.run([CMAKE, "-P", str(script)], env=environment, capture_output=True, text=True, check=True)
    found, note = done.stderr.splitlines()
    return found, note


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ("9.0\\n", "90-real"),
        ("12.0\\n", "120-real"),
        ("9.0\\n9.0\\n8.6\\n", "90-real;86-real"),
    ],
)
def test_the_gpus_that_are_there_are_compiled_for_once_each(tmp_path: Path, gpus: str, found: str) -> None:
    architectures, note = chosen(tmp_path, gpus)
    assert architectures == found
    assert note == f"CUDA kernels for {found}, the GPUs of this machine; CUDAARCHS names others"


@pytest.mark.parametrize("gpus", [None, "No devices were found\\n"])
def test_without_a_gpu_the_build_says_what_it_compiles_for_and_how_to_have_less(
    tmp_path: Path, gpus: str | None
) -> None:
    architectures, note = chosen(tmp_path, gpus)
    assert architectures == "80-real;90-real;90-virtual"
    assert "no GPU is here" in note
    assert "JSC_CUDA=OFF" in note
    assert "CUDAARCHS=90" in note


def test_what_the_environment_names_comes_first(tmp_path: Path) -> None:
    assert chosen(tmp_path, "9.0\\n", named="89") == ("89", "CUDA kernels for 89, as CUDAARCHS says")
