"""The Python of the README and of the documentation runs as it stands there, each page from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.md")),
]
CODE = {
    str(page.relative_to(ROOT)): found
    for page in PAGES
    if (found := re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL))
}


@pytest.mark.parametrize("page", CODE)
def test_it_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a plan is saved
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(CODE[page], 1):
        exec(compile(code, f"{page}, block {number}", "exec"), names)
    results = [value for value in names.values() if isinstance(value, jax.Array)]
    assert results
    assert all(np.isfinite(result).all() for result in results if np.issubdtype(result.dtype, np.floating))


def test_the_guides_are_tested() -> None:
    assert {"README.md", "docs/guide/your_model.md", "docs/guide/plans_and_tuning.md"} <= set(CODE)
