"""Dense blocks of `flax.nnx` models whose parameters are one: where each layer's lie, and how layers get at them.

The model holds one `nnx.Param` a block. A `PackedPart` stands in the place of each parameter of its layers. It is no
array and no variable, so the state has the block's parameter alone. While the model runs, it lends the layers the
array.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_sparse_conv._src.fusion.block_parameters import PackedDenseBlock

_lent: contextvars.ContextVar[Mapping[str, PackedDenseBlock]] = contextvars.ContextVar("jax_sparse_conv_lent")


@contextlib.contextmanager
def lent(blocks: Mapping[str, PackedDenseBlock]) -> Iterator[None]:
    """Inside the `with` block, the layers of these blocks, by name, have their parameters."""
    token = _lent.set(blocks)
    try:
        yield
    finally:
        _lent.reset(token)


@dataclasses.dataclass(frozen=True)
class PackedPart:
    """Stands for a parameter of a layer that lies in its block's: read like a variable, while the model runs.

    Attributes:
      block: the block's name.
      offset: elements in front of it.
      shape: as the layer has it.
      dtype_name: of the parameters when they were packed.
    """

    block: str
    offset: int
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> Any:
        found = _lent.get({}).get(self.block)
        return jnp.dtype(self.dtype_name) if found is None else found.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def get_value(self) -> jax.Array:
        """The parameter, a slice of the block's.

        Raises:
          ValueError: the model is not running.
        """
        found = _lent.get({}).get(self.block)
        if found is None:
            self._refuse("is read only while the model runs")
        # The offset is an operand, so that outside of jit one compilation serves all parameters of a shape.
        return lax.dynamic_slice(found.values, (self.offset,), (self.size,)).reshape(self.shape)

    def set_value(self, value: Any) -> NoReturn:
        """Refused: a part cannot be replaced.

        Raises:
          ValueError: always.
        """
        del value
        self._refuse("cannot be set")

    def __getitem__(self, index: Any) -> jax.Array:
        value = self.get_value()
        return value if index is ... else value[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set_value(value)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.get_value())

    def __jax_array__(self) -> jax.Array:
        return self.get_value()

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> np.ndarray:
        return np.array(self.get_value(), dtype, copy=copy)

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"a parameter of shape {self.shape} is packed with all others of dense block {self.block!r} and {what}; "
            "jax_sparse_conv.nnx.unpack(model) gives the layers their own again"
        )


class WithDenseBlocks(nnx.Module):
    """Base of modules that can hold the parameters of each of their dense blocks as one."""

    @abc.abstractmethod
    def pack_blocks(self) -> int:
        """Pack the blocks that would be read so, in place; returns how many convolutions are in packed ones now."""

    @abc.abstractmethod
    def unpack_blocks(self) -> int:
        """Undo `pack_blocks`; returns how many convolutions have their own parameters again."""


def owners(model: nnx.Module) -> list[WithDenseBlocks]:
    """The modules of a model that have dense blocks."""
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, WithDenseBlocks)]


def references(model: nnx.Module) -> Mapping[int, int]:
    """`id(parameter)` -> how many attributes of the model's modules are that parameter."""
    values = (value for _, module in nnx.iter_modules(model) for value in vars(module).values())
    return collections.Counter(id(value) for value in values if isinstance(value, nnx.Variable))


# A layer's attribute that is a parameter: (module, name).
Place = tuple[nnx.Module, str]


def take(name: str, places: Iterable[Place], packed: PackedDenseBlock) -> None:
    """Put a `PackedPart` in the place of every parameter of a block, in the order that they are packed in."""
    for (module, attribute), offset, shape in zip(places, packed.sizes.offsets(), packed.sizes.shapes(), strict=True):
        setattr(module, attribute, nnx.static(PackedPart(name, offset, shape, str(packed.dtype))))


def check_taken(name: str, places: Iterable[Place]) -> None:
    """Raise unless a `PackedPart` stands in the place of every parameter of a packed block.

    Raises:
      ValueError: a layer has a parameter of its own too, by `nnx.update` with another model's state or an assignment.
    """
    for module, attribute in places:
        if not isinstance(getattr(module, attribute), PackedPart):
            raise ValueError(
                f"dense block {name!r} is packed, and the {attribute} of a {type(module).__name__} in it is there a "
                "second time. A packed state is for a packed model, so call jax_sparse_conv.nnx.pack(model) before "
                "nnx.update, and jax_sparse_conv.nnx.unpack(model) before layers get new parameters; unpack(model) now "
                "gives all layers the packed ones"
            )


def give_back(places: Iterable[Place], packed: PackedDenseBlock) -> None:
    """Undo `take`."""
    layers, transition = packed.sizes.slices(packed.values)
    values = [value for part in (*layers, *([] if transition is None else [transition])) for value in part]
    for (module, attribute), value in zip(places, values, strict=True):
        setattr(module, attribute, nnx.data(nnx.Param(value)))
