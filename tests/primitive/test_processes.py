"""Several processes: forked before JAX starts, spawned after, and two at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import multiprocessing
import sys

import numpy as np


def right(seed):
    import jax.numpy as jnp

    import jax_sparse_conv as jsc

    rng = np.random.default_rng(seed)
    x = np.maximum(rng.standard_normal((2, 9, 8, 16)), 0).astype(np.float32)
    kernel = rng.standard_normal((3, 3, 16, 24)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
    wanted = np.einsum("nhwcij,ijck->nhwk", windows, kernel)
    for implementation in (None, "ecr", "xla"):
        y = jsc.conv(jnp.asarray(x), jnp.asarray(kernel), padding="VALID", implementation=implementation)
        np.testing.assert_allclose(np.asarray(y), wanted, rtol=1e-4, atol=1e-4)
    return seed


def children(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(right, range(4)).get(100) == list(range(4))


if __name__ == "__main__":
    import jax_sparse_conv

    if sys.argv[1] == "fork before":
        children("fork")  # the package is imported; JAX has no backend and no threads yet
        right(0)
    else:
        right(0)
        children("spawn")
        right(1)
    print("right")
"""

SECONDS = 150.0


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = folder / "processes.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    line = [sys.executable, str(path), *arguments]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_right(process: subprocess.Popen[str]) -> None:
    with process:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, errors[-4000:]
    assert out.split() == ["right"]


def test_children_forked_before_the_first_use(tmp_path: Path) -> None:
    """JAX does not support a fork after it."""
    assert_right(start(tmp_path, "fork before"))


def test_children_spawned_after_use(tmp_path: Path) -> None:
    assert_right(start(tmp_path, "spawn after"))


def test_two_processes_at_once(tmp_path: Path) -> None:
    both = [start(tmp_path, "fork before"), start(tmp_path, "fork before")]
    for process in both:
        assert_right(process)
