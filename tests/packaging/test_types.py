"""The names that type checkers know are those that run."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import jax_sparse_conv as jsc
from jax_sparse_conv._src.api import arguments
from jax_sparse_conv.models import registry

USES = Path(__file__).parent / "public_types.py"


def test_names_of_networks_are_those_of_the_registry() -> None:
    assert get_args(registry.NetworkName) == tuple(jsc.models.NETWORKS)


def test_names_of_implementations_are_those_that_errors_list() -> None:
    for names in (arguments.CONV_IMPLEMENTATIONS, arguments.CONV_POOL_IMPLEMENTATIONS, arguments.DENSE_IMPLEMENTATIONS):
        assert "xla" in names
        assert len(set(names)) == len(names)
    assert set(arguments.CONV_IMPLEMENTATIONS) < set(arguments.CONV_POOL_IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("module", "name"), [(jsc, "jsc"), (jsc.nnx, "jsc.nnx"), (jsc.models, "jsc.models"), (jsc.linen, "linen")]
)
def test_the_file_that_type_checkers_read_has_every_public_function(module: ModuleType, name: str) -> None:
    functions = [each for each in module.__all__ if inspect.isfunction(getattr(module, each))]
    assert functions
    text = USES.read_text("utf-8")
    assert not [each for each in functions if each not in jsc.models.NETWORKS and f"{name}.{each}(" not in text]
