"""Command line, `python -m jax_sparse_conv`: `run`, `calibrate` or `maps` of a network, `tune`, `doctor`, `env`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jax_sparse_conv._src.cli import arguments, progress
from jax_sparse_conv._src.cli.errors import UserError

# Takes the parsed options; the result is the exit status, None for 0.
Command: TypeAlias = Callable[[argparse.Namespace], int | None]
_INTERRUPTED = 130  # what shells report of a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit status.

    It is 1 for a mistake that one sentence on stderr explains, 1 of a `doctor` that found something broken, and 130
    after Ctrl-C.
    """
    try:
        options = arguments.parser(__doc__ or "").parse_args(argv)
        options.argv = list(sys.argv[1:] if argv is None else argv)
        with progress.interruptions():
            status = _command(options.command)(options)
            sys.stdout.flush()
    except UserError as error:
        return _failed(str(error), 1)
    except KeyboardInterrupt:
        return _failed("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains of it when it ends
        return 1
    except MemoryError as error:
        return _failed(f"there is not enough memory: {error}", 1)
    return status or 0


def _command(name: str) -> Command:
    """The function of a command; its module is imported now, which takes seconds where it is a network's."""
    module = {"run": "run", "doctor": "doctor", "env": "doctor"}.get(name, "commands")
    if module != "doctor":
        # A bar starts in the same line, once there is one.
        print("   0.0 s  starting", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    found: Command = getattr(importlib.import_module(f"jax_sparse_conv._src.cli.{module}"), name)
    return found


def _failed(sentence: str, status: int) -> int:
    print(f"jax_sparse_conv: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
