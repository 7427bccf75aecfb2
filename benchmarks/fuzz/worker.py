"""The process that runs cases: a line of JSON in for each case, a line of JSON out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any, TextIO

from benchmarks.common.results import ROOT
from benchmarks.fuzz.case import Case, from_text

_LONGEST = 400  # characters of a message
_START_SECONDS = 120.0
_DEVICES = "--xla_force_host_platform_device_count=4"  # CPUs, for cases with a mesh
_RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Worker:
    """A process that runs one case after the other.

    Args:
      seconds: in which a case has to end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        environment["XLA_FLAGS"] = f"{_DEVICES} {environment.get('XLA_FLAGS', '')}".strip()  # the last of a flag counts
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._is_new = True

    def run(self, case: Case) -> dict[str, Any]:
        """{"outcome": "right", "wrong", "raised" or "skipped", "message": why}, or "died" or "hung"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._seconds + (_START_SECONDS if self._is_new else 0), self._process.kill)
        self._is_new = False
        timer.start()
        try:
            self._process.stdin.write(case.text() + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        timed_out = not timer.is_alive()
        timer.cancel()
        if not answer.endswith("\n"):
            code = self._process.wait()
            message = f"did not end in {self._seconds:g} s" if timed_out else f"the process ended with status {code}"
            return {"outcome": "hung" if timed_out else "died", "message": message}
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # a case that nobody read
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _serve(questions: TextIO, answers: TextIO) -> None:
    from benchmarks.fuzz import checks

    for line in questions:
        case = from_text(line)
        try:
            wrong = checks.run(case)
            answer = {"outcome": "wrong" if wrong else "right", "message": wrong or ""}
        except checks.SkippedError as error:
            answer = {"outcome": "skipped", "message": str(error)}
        except _RAISED as error:
            answer = {"outcome": "raised", "message": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answer["message"] = answer["message"][:_LONGEST]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JSC_TABLES", "shipped")
    own = os.fdopen(os.dup(1), "w")  # what libraries print must not mix with the answers
    os.dup2(2, 1)
    _serve(sys.stdin, own)
