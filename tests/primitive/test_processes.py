"""Several processes: forked before JAX starts, spawned after, two at once; on a GPU also one without memory left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

RIGHT = """
import multiprocessing
import sys

import numpy as np

IMPLEMENTATIONS = (None, "ecr", "direct", "xla")


def right(seed):
    import jax.numpy as jnp

    import jax_sparse_conv as jsc

    rng = np.random.default_rng(seed)
    x = np.maximum(rng.standard_normal((2, 9, 8, 16)), 0).astype(np.float32)
    kernel = rng.standard_normal((3, 3, 16, 24)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
    wanted = np.einsum("nhwcij,ijck->nhwk", windows, kernel)
    for implementation in IMPLEMENTATIONS:
        y = jsc.conv(
            jnp.asarray(x), jnp.asarray(kernel), padding="VALID", precision="highest", implementation=implementation
        )
        np.testing.assert_allclose(np.asarray(y), wanted, rtol=1e-4, atol=1e-4)
    return seed


def children(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(right, range(4)).get(100) == list(range(4))


if __name__ == "__main__":
    import jax_sparse_conv
"""

FORK_BEFORE = """
    children("fork")  # the package is imported; JAX has no backend and no threads yet
    right(0)
    print("right")
"""

SPAWN_AFTER = """
    right(0)
    children("spawn")
    right(1)
    print("right")
"""

MANY_CALLS = """
    for seed in range(30):
        right(seed)
    print("right")
"""

OUT_OF_MEMORY = """
    import jax
    import jax.numpy as jnp

    right(0)
    channels = 256
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    rows = limit // (channels * 4 * 1024) + 1  # the result alone is as large as all memory
    x, kernel = jnp.ones((1, rows, 1024, 1)), jnp.ones((3, 3, 1, channels))
    for implementation in IMPLEMENTATIONS:
        try:
            jax.block_until_ready(jax_sparse_conv.conv(x, kernel, implementation=implementation))
        except jax.errors.JaxRuntimeError as error:
            assert "RESOURCE_EXHAUSTED" in str(error), error
        else:
            raise AssertionError(f"{implementation}: no error")
        right(1)
    print("right")
"""

SECONDS = 240.0
ON_CPU = {"JAX_PLATFORMS": "cpu"}


def start(folder: Path, script: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    path = folder / "processes.py"
    path.write_text(RIGHT + script)
    line = [sys.executable, str(path)]
    return subprocess.Popen(
        line, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
    assert_right(start(tmp_path, FORK_BEFORE, ON_CPU))


def test_children_spawned_after_use(tmp_path: Path) -> None:
    assert_right(start(tmp_path, SPAWN_AFTER, ON_CPU))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_two_processes_at_once(platform: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if platform == "cuda":
        request.getfixturevalue("gpu")
    environment = ON_CPU if platform == "cpu" else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    both = [start(tmp_path, MANY_CALLS, environment) for _ in range(2)]
    for process in both:
        assert_right(process)


def test_out_of_memory_is_an_error_and_the_next_call_is_right(gpu: jax.Device, tmp_path: Path) -> None:
    """In a process that may have 1 GiB."""
    fraction = min(0.5, 2**30 / gpu.memory_stats()["bytes_limit"])
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.4f}"}
    assert_right(start(tmp_path, OUT_OF_MEMORY, settings))
