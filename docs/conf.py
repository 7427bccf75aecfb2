"""Sphinx's settings: `sphinx-build -W -b html docs build/docs`. The build needs neither a GPU nor a network."""

from __future__ import annotations

import re
from typing import Any

from sphinx.util import inspect

import jax_sparse_conv

project = "jax_sparse_conv"
author = "the authors of jax_sparse_conv"
release = version = jax_sparse_conv.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
default_role = "literal"  # docstrings have single backticks
smartquotes_action = "D"  # dashes; "direct" keeps its quotes

html_theme = "furo"
html_title = f"jax_sparse_conv {release}"
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "force"  # the quickstart runs at every build
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_typehints = "none"  # the docstrings say shapes and dtypes
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
_LETTER = re.compile(r"^(\s+\w+: [A-Z])\.$", re.MULTILINE)


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What reStructuredText would read in another way: code with letters right behind it, and "C." as a list's item."""
    text = _CODE.sub(lambda found: f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else ""), "\n".join(lines))
    text = _LETTER.sub(r"\1\\.", text)
    if what == "property":  # in front of a colon Napoleon expects a type
        text = text.replace(": ", "; ", 1)
    lines[:] = text.split("\n")


def signature_of_init(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Of classes whose metaclass takes anything, as those of nnx modules do."""
    if what == "class" and signature == "(*args, **kwargs)":
        found = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(found, show_annotation=False, show_return_annotation=False)
    return signature, returns


def setup(app: Any) -> None:
    """Connects what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", as_rst, priority=100)  # before Napoleon
    app.connect("autodoc-process-signature", signature_of_init)
