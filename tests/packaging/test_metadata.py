"""What the package says of itself: its version, and the Pythons it runs on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jax_sparse_conv

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")))


def test_the_package_has_one_version() -> None:
    assert project()["project"]["version"] == jax_sparse_conv.__version__


def test_pythons_that_are_promised_are_those_that_the_check_runs() -> None:
    classifiers = "\n".join(project()["project"]["classifiers"])
    promised = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    later = re.search(r"^pairs=\((.*)\)$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    assert later is not None
    assert promised == ["3.11", *re.findall(r'"(3\.\d+) 0\.\d+"', later[1])]


def test_wheels_are_made_for_the_pythons_that_are_promised() -> None:
    settings = project()
    assert settings["project"]["requires-python"] == ">=3.11"
    assert settings["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    assert {"cp311-*", "cp312-*", "cp313-*", "cp314-*"} <= set(settings["tool"]["cibuildwheel"]["build"].split())


def test_jax_with_cuda_is_of_the_versions_that_the_package_takes() -> None:
    settings = project()["project"]
    taken = {re.sub(r"^[a-z]+", "", each) for each in settings["dependencies"] if each.startswith("jax")}
    assert {re.sub(r"^jax\[cuda13\]", "", each) for each in settings["optional-dependencies"]["cuda13"]} == taken
