"""A model with its weights as one jitted function whose calls cost the host little.

Under `nnx.jit` a call walks through the whole model and hands every parameter back. `jax.jit` of a state sorts it in
Python. That matters for networks that take a GPU a fraction of a millisecond. Here weights are a flat list, which JAX
hands over without Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse_conv._src.accelerate import inference
from jax_sparse_conv._src.accelerate.inference import P, R_co
from jax_sparse_conv.nnx import models

M = TypeVar("M", bound=nnx.Module)


class Inference(inference.Inference[P, R_co], Generic[P, R_co]):
    """A model's weights and a jitted function of them, made by `jit_inference`. It is called as the model is."""

    def __init__(self, model: nnx.Module, function: Callable[..., Any], static_argnames: Any) -> None:
        self._of_model, self._parts = function, _Parts(model)
        super().__init__(self._call, self._parts.weights, static_argnames)

    def update(self, model: nnx.Module) -> None:
        """Take the weights that `model` has now.

        Nothing is traced anew unless a shape, a dtype or a sharding changes.

        Args:
          model: the one that this was made of, or one like it.

        Raises:
          TypeError: a model that is not an nnx module.
          ValueError: other layers, settings or parameters than the model had, or a parameter without a value.
        """
        parts = _Parts(model)
        if parts.given != self._parts.given:
            raise ValueError(
                f"the {type(model).__name__} has other layers, settings or parameters than the model that this was "
                f"made of{parts.difference(self._parts)} (replace and eval change them, too); "
                "jax_sparse_conv.nnx.jit_inference(model) makes a new one"
            )
        is_same, self._parts = parts.kind == self._parts.kind, parts
        if is_same:
            self._replace(parts.weights)
        else:
            self._forget(parts.weights)

    def _call(self, weights: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        model = self._parts.model(weights)
        with _without_keys_of_linen(model):
            result = self._of_model(model, *args, **kwargs)
        written = self._parts.written(weights, model)
        if written:
            more = f" and {len(written) - 1} more" if written[1:] else ""
            raise ValueError(
                f"the model writes {written[0]}{more} while it runs, which inference with fixed weights would lose; "
                "model.eval() keeps batch norms and dropout from it, nnx.jit keeps what is written, and "
                "jit_inference(model, lambda model, x: nnx.clone(model)(x)) drops it"
            )
        return result


class _Parts:
    """A model taken apart: what makes it up, and the leaves of its state as a flat list."""

    def __init__(self, model: nnx.Module) -> None:
        models.check_module(model)
        graph, state = nnx.split(model)
        self.given = graph, jax.tree.structure(state)  # as the caller has the model
        self.graph = graph
        self.structure: Any
        named, self.structure = jax.tree.flatten_with_path(state)
        for path, leaf in named:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"the model's {_name(path)} has no value, it is {leaf.dtype}{list(leaf.shape)} only; nnx.update "
                    "gives it one"
                )
            if isinstance(leaf, jax.Ref):
                raise ValueError(
                    f"the model's {_name(path)} is a reference that anyone may write, and weights that are to stay "
                    "must be arrays: make the model without nnx.var_defaults(ref=True)"
                )
        self.paths = [path for path, _ in named]
        self.weights: list[Any] = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for _, leaf in named]

        self.kind = graph, self.structure, [jax.typeof(leaf) for leaf in self.weights]  # what a trace depends on

    def model(self, weights: Sequence[Any]) -> nnx.Module:
        """The model with these weights."""
        module: nnx.Module = nnx.merge(self.graph, jax.tree.unflatten(self.structure, weights))
        return module

    def difference(self, other: _Parts) -> str:
        """The first parameter that differs from another model's, as part of a sentence; "" where none does."""
        old, new = (dict(zip(each.paths, map(jax.typeof, each.weights), strict=True)) for each in (other, self))
        for path, aval in new.items():
            if path not in old:
                return f", such as {_name(path)}, which is new"
            if (aval.shape, aval.dtype) != (old[path].shape, old[path].dtype):
                was = f"{old[path].dtype}{list(old[path].shape)}"
                return f": {_name(path)} is {aval.dtype}{list(aval.shape)}, not {was}"
        gone = [path for path in old if path not in new]
        return f", such as {_name(gone[0])}, which is gone" if gone else ""

    def written(self, weights: Sequence[Any], model: nnx.Module) -> list[str]:
        """Which of the weights are other values in the model now."""
        now = dict(jax.tree.leaves_with_path(nnx.state(model)))
        pairs = zip(self.paths, weights, strict=True)
        return [_name(path) for path, leaf in pairs if now.get(path) is not leaf]


@contextlib.contextmanager
def _without_keys_of_linen(model: nnx.Module) -> Iterator[None]:
    """Have Linen modules of a model run without the random keys of their own that every call of them takes.

    A Linen module that needs keys says so. They are arguments of its call then, as `rngs=`.
    """
    bridges = [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.bridge.ToNNX)]
    fields = [(each, *field) for each in bridges for field in vars(each).items()]
    held = [(each, name, value) for each, name, value in fields if isinstance(value, nnx.Rngs)]
    for each, name, _ in held:
        setattr(each, name, None)
    yield
    for each, name, value in held:
        setattr(each, name, value)


@overload
def jit_inference(
    model: Callable[P, R_co], function: None = None, *, static_argnames: str | Sequence[str] | None = None
) -> Inference[P, R_co]: ...
@overload
def jit_inference(
    model: M,
    function: Callable[Concatenate[M, P], R_co],
    *,
    static_argnames: str | Sequence[str] | None = None,
) -> Inference[P, R_co]: ...
@overload
def jit_inference(
    model: nnx.Module, function: None = None, *, static_argnames: str | Sequence[str] | None = None
) -> Inference[..., Any]: ...
def jit_inference(
    model: Any,
    function: Callable[..., Any] | None = None,
    *,
    static_argnames: str | Sequence[str] | None = None,
) -> Inference[..., Any]:
    """`jax.jit` of a model, accelerated, whose weights stay as they are, with little to do for the host in every call.

    At batch 1 a network takes a GPU less time than `nnx.jit` takes to walk through its modules. The result of this is
    called like the model. Its layers are rewritten as by `jax_sparse_conv.accelerate`, whatever layers they are. What
    depends on the weights alone, such as folded batch norms and packed kernels, is computed once. It keeps the weights
    that the model had; `update` takes new ones.

    Args:
      model: any nnx module, in the mode that it is to run in (`model.eval()`).
      function: of the model and the arguments of a call; by default the model's `__call__`.
      static_argnames: as in `jax.jit`, of arguments given by name.

    Returns:
      An `Inference`, called with the arguments of `function` behind the model. What the model sows is dropped. Linen
      modules in an `nnx.bridge.ToNNX` run without random keys of their own.

    Raises:
      TypeError: a model that is not an nnx module, or a function that cannot be called.
      ValueError: a parameter without a value, or one that is a reference. When called: a model that writes its state,
        as a batch norm may.
    """
    if function is not None and not callable(function):
        raise TypeError(f"function={function!r} cannot be called")
    called = type(model).__call__ if function is None else function
    return Inference(model, called, static_argnames)


def _name(path: Sequence[Any]) -> str:
    keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    return ".".join(keys[:-1] if keys[-1] == "value" else keys)
