"""A case: one call with all that its arrays are made from, and the sizes that follow from it, computed anew."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

Pair = tuple[int, int]
Pads = tuple[Pair, Pair]

OPERATIONS = ("conv", "conv_pool", "dense", "conv_general_dilated", "accelerate")
TRANSFORMS = ("none", "vmap x", "vmap kernel", "vmap both", "vmap bias", "grad", "jacfwd", "vmap grad")
SHARDED = {"none": "shard", "grad": "shard grad"}
"""By transform: the same, split over a mesh of devices."""

GRADIENTS = ("grad", "vmap grad", "shard grad")
VALUES = ("positive", "signed", "large", "small", "subnormal", "spread", "sparse kernel")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      operation: of `OPERATIONS`.
      implementation: what the operation takes; None chooses. "accelerate" has None alone.
      dtype: of every array.
      transform: of `TRANSFORMS`, or of the values of `SHARDED`.
      jit: whether the whole is compiled as one program.
      x: [N, H, W, C]; of a dense layer [N, 1, 1, C].
      out_channels: K.
      kernel: kh and kw.
      strides, padding, dilation, groups: as the operation takes them.
      bias, residual, activation: of the operation; "accelerate" spells them in lax.
      pool, window, window_strides, window_padding: of a pool, or None.
      zeros: share of zeros of x.
      values: of `VALUES`.
      packed: whether the kernel is packed first.
      counts: whether the non-zeros of the result are asked for.
      given: whether the non-zeros of x are handed over.
      channels_first: whether the function that is accelerated has [N, C, H, W].
      split: into how many parts a mesh splits N, H, W, C and K.
      seed: of the arrays.
    """

    operation: str
    implementation: str | None
    dtype: str
    transform: str
    jit: bool
    x: tuple[int, int, int, int]
    out_channels: int
    kernel: Pair = (1, 1)
    strides: Pair = (1, 1)
    padding: Any = "VALID"
    dilation: Pair = (1, 1)
    groups: int = 1
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    pool: str | None = None
    window: Pair = (2, 2)
    window_strides: Pair | None = None
    window_padding: Any = "VALID"
    zeros: float = 0.7
    values: str = "positive"
    packed: bool = False
    counts: bool = False
    given: bool = False
    channels_first: bool = False
    split: tuple[int, int, int, int, int] = (1, 1, 1, 1, 1)
    seed: int = 0

    @property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        return (*self.kernel, self.x[3] // self.groups, self.out_channels)

    def text(self) -> str:
        """As JSON, which `from_text` reads; what is as by default is left out."""
        fields = dataclasses.fields(self)
        given = {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
        return json.dumps(given)


def from_text(text: str) -> Case:
    """The inverse of `Case.text`.

    Raises:
      ValueError: text that is no case.
    """
    try:
        fields = json.loads(text)
        return Case(**{name: _tuples(value) for name, value in fields.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--case {text!r} is no case: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# --- sizes -----------------------------------------------------------------------------------------------------------


def pads_of(padding: Any, size: Sequence[int], spans: Sequence[int], strides: Sequence[int]) -> Pads:
    """(low, high) of rows and columns."""
    found = []
    for axis, (n, span, stride) in enumerate(zip(size, spans, strides, strict=True)):
        if padding == "VALID":
            found.append((0, 0))
        elif isinstance(padding, str):
            missing = max(0, (-(-n // stride) - 1) * stride + span - n)
            less, more = missing // 2, missing - missing // 2
            found.append((less, more) if padding == "SAME" else (more, less))
        elif isinstance(padding, int):
            found.append((padding, padding))
        else:
            found.append(padding[axis])
    return found[0], found[1]


def _spans(case: Case) -> list[int]:
    return [(k - 1) * d + 1 for k, d in zip(case.kernel, case.dilation, strict=True)]


def _count(size: int, pads: tuple[int, int], span: int, stride: int) -> int:
    free = size + sum(pads) - span
    return free // stride + 1 if free >= 0 else 0


def conv_pads(case: Case) -> Pads:
    return pads_of(case.padding, case.x[1:3], _spans(case), case.strides)


def conv_size(case: Case) -> tuple[int, int]:
    """Rows and columns of the convolution's result."""
    along = zip(case.x[1:3], conv_pads(case), _spans(case), case.strides, strict=True)
    rows, columns = (_count(*each) for each in along)
    return rows, columns


def out_shape(case: Case) -> tuple[int, ...]:
    """[N, Po, Qo, K] behind the pool."""
    size = conv_size(case)
    if case.pool is not None:
        strides = case.window_strides or case.window
        pads = pads_of(case.window_padding, size, case.window, strides)
        size = tuple(_count(*each) for each in zip(size, pads, case.window, strides, strict=True))  # type: ignore[assignment]
    return (case.x[0], *size, case.out_channels)
