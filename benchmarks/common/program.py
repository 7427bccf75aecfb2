"""What XLA made of a jitted function: counted in its optimised HLO and, on a GPU, in the thunks that it dumps."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][\w\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)", re.MULTILINE)
_MOVES = ("copy", "transpose")


def counts(hlo: str) -> dict[str, Any]:
    """Of an optimised program: custom calls by target, fusions, and what only moves data, fusions by such names too."""
    calls: collections.Counter[str] = collections.Counter()
    fusions = moves = 0
    for name, opcode, line in _launched(hlo):
        target = _TARGET.search(line)
        if opcode == "custom-call" and target:
            calls[target[1]] += 1
        is_fusion = opcode == "fusion"
        fusions += is_fusion
        moves += opcode in _MOVES or (is_fusion and any(move in name for move in _MOVES))
    return {"custom_calls": dict(calls), "fusions": fusions, "moves": moves}


def _launched(hlo: str) -> Iterator[tuple[str, str, str]]:
    """(name, opcode, line) of the instructions of the program itself and of its command buffers, not of fusions."""
    counted = False
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            counted = bool(header[1]) or header[2].startswith("command_buffer")
        elif counted and (found := _INSTRUCTION.match(line)):
            yield found[1], found[2], line


def thunks(folder: Path, name: str) -> dict[str, int] | None:
    """What the host launches for the function of this name, from a folder that `--xla_dump_to` names.

    `launches` are the outermost thunks, `command_buffers` those of them that are a CUDA graph, `inside` what the graphs
    hold. None where XLA dumped no thunks, as on a CPU.
    """
    for kind in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        files = sorted(folder.glob(f"*.jit_{name}.*{kind}.txt"))
        if files:
            return count_thunks(files[-1].read_text(encoding="utf-8"))
    return None


def count_thunks(text: str) -> dict[str, int]:
    """As `thunks`, of a dump."""
    found = [(not indent, kind) for indent, kind in _THUNK.findall(text)]
    outermost = [kind for outer, kind in found if outer]
    graphs = outermost.count("kCommandBuffer")
    return {"launches": len(outermost), "command_buffers": graphs, "inside": len(found) - len(outermost)}
