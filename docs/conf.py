"""Sphinx's settings: `sphinx-build -W -b html docs build/docs`. The build needs neither a GPU nor a network."""

from __future__ import annotations

import re

import jax_sparse_conv

project = "jax_sparse_conv"
author = "the authors of jax_sparse_conv"
release = version = jax_sparse_conv.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
default_role = "literal"  # docstrings have single backticks

html_theme = "furo"
html_title = f"jax_sparse_conv {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # the quickstart runs at every build
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_typehints = "none"  # the docstrings say shapes and dtypes
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")


def literal_code(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Single backticks in docstrings are code, also with letters right behind them ("`nnx.Param`s")."""
    text = "\n".join(lines)
    lines[:] = _CODE.sub(lambda found: f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else ""), text).split("\n")


def setup(app: object) -> None:
    """Connects what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", literal_code, priority=100)  # type: ignore[attr-defined]
