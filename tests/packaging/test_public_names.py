"""What a user finds by `dir` and by completion: the public names, and nothing that is imported beside them."""

from __future__ import annotations

from types import ModuleType

import pytest

import jax_sparse_conv as jsc


@pytest.mark.parametrize("module", [jsc, jsc.linen, jsc.models, jsc.nnx], ids=lambda module: str(module.__name__))
def test_dir_lists_the_public_names_alone(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
