"""Every example runs as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_sparse_conv

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PACKAGE = Path(jax_sparse_conv.__file__).parents[1]  # the package that the other tests test, installed or not
ARGUMENTS = {"classify_photo.py": ["--network", "resnet18", "--size", "64"]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_loses_nothing(path: Path) -> None:
    if path.name == "classify_photo.py":
        pytest.importorskip("sklearn")
        pytest.importorskip("PIL")
    search = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(path), *ARGUMENTS.get(path.name, [])],
        env={**os.environ, "PYTHONPATH": search, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = re.findall(r"difference[^\n]* (\S+e[-+]\d+|nan)$", done.stdout, re.MULTILINE)
    assert differences, done.stdout
    assert all(float(difference) < 2e-3 for difference in differences), done.stdout


def test_there_are_examples() -> None:
    assert {"replace_layers.py", "vmap.py"} <= {path.name for path in EXAMPLES}
