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
FILES_OF_TRAINING = ["--json", "{folder}/digits.json", "--plot", "{folder}/digits.png"]
ARGUMENTS = {
    "classify_photo.py": ["--network", "resnet18", "--size", "64"],
    "train_digits.py": ["--epochs", "1", "--width", "8", "--repeat", "1", *FILES_OF_TRAINING],
}
NEEDS = {"classify_photo.py": ("sklearn", "PIL"), "train_digits.py": ("sklearn", "matplotlib", "optax")}
FILES = {"train_digits.py": ["digits.json", "digits.png"]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_loses_nothing(path: Path, tmp_path: Path) -> None:
    for needed in NEEDS.get(path.name, ()):
        pytest.importorskip(needed)
    search = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(path), *(each.format(folder=tmp_path) for each in ARGUMENTS.get(path.name, []))],
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
    assert sorted(file.name for file in tmp_path.iterdir()) == FILES.get(path.name, [])


def test_there_are_examples() -> None:
    assert {"replace_layers.py", "vmap.py"} <= {path.name for path in EXAMPLES}
