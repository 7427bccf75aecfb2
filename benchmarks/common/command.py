"""What the commands of this folder share: parsers, the line a result carries, XLA's flag sets, where results go."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.help import parser as parser
from jax_sparse_conv._src import environment

GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONVOLUTION",
    "xla_gpu_graph_min_graph_size": 1,
}
"""Compiler options with which XLA makes CUDA graphs of everything."""

COMMAND_BUFFERS = " ".join(f"--{name}={value}" for name, value in GRAPHS.items())


def portable(suite: str, arguments: Sequence[str]) -> str:
    """`python -m benchmarks SUITE arguments` without this machine's folders: of paths out of this one the last part."""
    return shlex.join(["python", "-m", "benchmarks", suite, *map(environment.without_folders, arguments)])


def run(suite: str, arguments: Sequence[str], flags: str) -> None:
    """Run `python -m benchmarks SUITE arguments` in a process of its own, because XLA reads its flags once.

    The calling process must not take the GPU, so it asks nothing of JAX.
    """
    line = [sys.executable, "-m", "benchmarks", suite, *arguments]
    status = subprocess.run(line, env=with_flags(flags), stdout=subprocess.DEVNULL).returncode
    if status:
        raise ValueError(f"{shlex.join(line)} ended with status {status}")


def with_flags(*flags: str) -> dict[str, str]:
    """This process's environment with more XLA flags."""
    return {**os.environ, "XLA_FLAGS": " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), *flags)))}


def without_dumps(flags: str) -> str:
    """XLA flags as a result shows them: without those that only say what to write where."""
    return " ".join(flag for flag in flags.split() if not flag.startswith("--xla_dump_"))


def check_folder(option: str, path: Path | None) -> None:
    """Raise a ValueError, before anything is measured, for a file in a folder that does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.absolute().parent} does not exist")


def write(path: Path | None, content: Mapping[str, Any], indent: int = 2) -> None:
    """Write a result, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
