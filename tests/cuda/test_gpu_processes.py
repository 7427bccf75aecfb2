"""Processes on a GPU: one that runs out of the device's memory, and two at once."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

COMMON = """
import jax, jax.numpy as jnp, numpy as np
import jax_sparse_conv as jsc

def assert_right(seed, implementation):
    rng = np.random.default_rng(seed)
    x = np.maximum(rng.standard_normal((2, 9, 8, 16)), 0).astype(np.float32)
    kernel = rng.standard_normal((3, 3, 16, 24)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (1, 2))
    wanted = np.einsum("nhwcij,ijck->nhwk", windows, kernel)
    y = jsc.conv(
        jnp.asarray(x), jnp.asarray(kernel), padding="VALID", precision="highest", implementation=implementation
    )
    np.testing.assert_allclose(np.asarray(y), wanted, rtol=1e-4, atol=1e-4)

IMPLEMENTATIONS = (None, "ecr", "direct", "xla")
"""

OUT_OF_MEMORY = """
limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
for implementation in IMPLEMENTATIONS:
    assert_right(0, implementation)
channels = 256
rows = limit // (channels * 4 * 1024) + 1  # the result alone is as large as all memory
x, kernel = jnp.ones((1, rows, 1024, 1)), jnp.ones((3, 3, 1, channels))
for implementation in IMPLEMENTATIONS:
    try:
        jax.block_until_ready(jsc.conv(x, kernel, implementation=implementation))
    except jax.errors.JaxRuntimeError as error:
        assert "RESOURCE_EXHAUSTED" in str(error), error
    else:
        raise AssertionError(f"{implementation}: no error")
    for after in IMPLEMENTATIONS:
        assert_right(1, after)
print("right")
"""

MANY_CALLS = """
for seed in range(30):
    for implementation in IMPLEMENTATIONS:
        assert_right(seed, implementation)
print("right")
"""

SECONDS = 240.0

pytestmark = pytest.mark.usefixtures("gpu")


def start(script: str, **environment: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", COMMON + script]
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


def test_out_of_memory_is_an_error_and_the_next_call_is_right(gpu: jax.Device) -> None:
    """In a process that may have 1 GiB."""
    total = gpu.memory_stats()["bytes_limit"]
    fraction = min(0.5, 2**30 / total)
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.4f}"}
    assert_right(start(OUT_OF_MEMORY, **settings))


def test_two_processes_on_one_gpu() -> None:
    both = [start(MANY_CALLS, XLA_PYTHON_CLIENT_PREALLOCATE="false") for _ in range(2)]
    for process in both:
        assert_right(process)
