"""The suites' parsers. Nothing here imports JAX, which reads some settings when it is imported."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator

_WIDTH = 79
_GLUE = "\0"  # between an option and its first value


class _Help(argparse.HelpFormatter):
    """80 columns; of descriptions, indented lines stay lines and items of lists stay items."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n{2,}", inspect.cleandoc(text))
        return "\n\n".join("\n".join(indent + line for line in _filled(each, width)) for each in paragraphs)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "+":
            return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."
        return super()._format_args(action, default_metavar)


def _filled(paragraph: str, width: int) -> Iterator[str]:
    """Its lines; commands and items begin lines of their own, and a long command goes on behind a backslash."""
    for block in re.split(r"\n(?=  |- |\d\. )", paragraph):
        hanging = re.match(r" +|- |\d\. |", block)
        assert hanging
        is_command = block.startswith("    ")
        more = (8 if is_command else len(hanging[0])) * " "
        text = hanging[0] + " ".join(block.split()).removeprefix(hanging[0].strip() + " ")
        text = re.sub(r"(--[\w-]+) (?!-)", rf"\1{_GLUE}", text) if is_command else text
        *lines, last = textwrap.wrap(text, width - 2, subsequent_indent=more, break_on_hyphens=False)
        for line in lines:
            yield line.replace(_GLUE, " ") + (" \\" if is_command else "")
        yield last.replace(_GLUE, " ")


def parser(suite: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Of `python -m benchmarks SUITE`, whose docstring is the help."""
    name = f"python -m benchmarks {suite}"
    return argparse.ArgumentParser(
        prog=name, usage=f"{name} [options]", description=description, epilog=epilog, formatter_class=_Help
    )
