"""The user's tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from platforms import CPU

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.dispatch import cpu_table, folders, gradient_table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, on a CPU that no table is shipped for."""
    monkeypatch.setenv(folders.CACHE, str(tmp_path))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    monkeypatch.setattr(devices, "cpu", lambda: CPU)
    for each in (cpu_table, gradient_table):
        each.forget()
    return tmp_path
