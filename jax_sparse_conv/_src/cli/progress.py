"""What a command shows on stderr while it works: a bar on a terminal, lines with the time elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from jax_sparse_conv._src.cli.errors import optional

if TYPE_CHECKING:
    from jax_sparse_conv._src.plans.calibration import Progress

_SECONDS_BETWEEN_LINES = 1.0  # of steps that are counted, which may be hundreds


_interruptions: list[int] = []


@contextmanager
def interruptions() -> Iterator[None]:
    """Inside of it Ctrl-C raises KeyboardInterrupt, and once more at the next step if nobody saw the first.

    Python drops what is raised in callbacks of its garbage collector and of weak references, which JAX has many of.
    """

    def note(number: int, frame: Any) -> None:
        _interruptions.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        _interruptions.clear()
        signal.signal(signal.SIGINT, before)


def _checked(advance: Progress) -> Progress:
    def checked(step: str, steps: int | None) -> None:
        if _interruptions:
            raise KeyboardInterrupt
        advance(step, steps)

    return checked


@contextmanager
def progress() -> Iterator[Progress]:
    """Yields `advance(step, steps)`, to be called before each step; a step without a number of `steps` is not counted.

    Raises:
      UserError: stderr is a terminal, and rich is not installed.
    """
    if not sys.stderr.isatty():
        yield _checked(_lines(sys.stderr))
        return
    rich_progress = optional("rich.progress", "rich")
    stderr = optional("rich.console", "rich").Console(stderr=True)
    with rich_progress.Progress(console=stderr, transient=True) as bar:
        task = bar.add_task("", total=None)
        done = 0

        def advance(step: str, steps: int | None) -> None:
            nonlocal done
            bar.update(task, total=steps, completed=done, description=step)
            done += steps is not None

        yield _checked(advance)


def _lines(file: IO[str]) -> Progress:
    """A line at once for what is not counted; of what is counted those that are a second apart."""
    start = time.monotonic()
    done, last = 0, float("-inf")

    def advance(step: str, steps: int | None) -> None:
        nonlocal done, last
        now = time.monotonic()
        done += steps is not None
        if steps is None or now - last >= _SECONDS_BETWEEN_LINES:
            count = "" if steps is None else f"{done} of {steps}: "
            print(f"{now - start:6.1f} s  {count}{step}", file=file, flush=True)
            last = now

    return advance
