"""What commands show while they work, and how they end when nobody waits for the rest."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_sparse_conv import models
from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src.cli import networks, progress

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_piped_has_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([100.0, 100.0, 102.5, 103.0, 103.2, 104.1])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with progress.progress() as advance:
        advance("building", None)
        advance("loading", None)
        for layer in ("conv1", "conv2", "conv3"):
            advance(layer, 3)
    lines = ["   0.0 s  building", "   2.5 s  loading", "   4.1 s  3 of 3: conv3"]  # not two within a second
    assert capsys.readouterr().err.splitlines() == lines


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress() as advance:
        advance("building", None)
        for step in ("conv1", "conv2"):
            advance(step, 2)
        text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" in text
    assert not re.search(r"^ +\d+\.\d s", text, re.MULTILINE)


@pytest.mark.parametrize("command", [["run"], ["maps", "--out", "out"], ["calibrate", "--out", "plan.json"]])
def test_an_interruption_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "build", interrupted)
    assert main([*command, "--network", "lenet5"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "jax_sparse_conv: interrupted"


def test_an_interruption_that_nobody_saw_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with progress.interruptions(), progress.progress() as advance:
        advance("building", None)
        with contextlib.suppress(KeyboardInterrupt):  # as a callback of the garbage collector does
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            advance("loading", None)
    assert signal.getsignal(signal.SIGINT) is before
    with progress.progress() as advance:
        advance("another command", None)


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def filled(*_: object) -> None:
        raise MemoryError("Unable to allocate 6.00 TiB")

    monkeypatch.setattr(networks, "images_of", filled)
    assert main(["run", "--network", "lenet5"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "jax_sparse_conv: there is not enough memory: Unable to allocate 6.00 TiB"


def test_ctrl_c_and_a_pipe_that_closes() -> None:
    """In a process of their own, because signals and file descriptors are a process's."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    module = [sys.executable, "-m", "jax_sparse_conv"]
    with subprocess.Popen(
        [*module, "run", "--network", "vgg19"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate()
    assert first == b"   0.0 s  starting\n"
    assert process.returncode == 130
    assert rest.splitlines()[-1] == b"jax_sparse_conv: interrupted"
    with subprocess.Popen([*module, "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 1
