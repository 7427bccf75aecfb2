"""`jit_inference`: a function jitted with its weights, what depends on them alone computed once.

A call finds its `_Entry` by the types of its arguments. An entry has the program that `transform` makes, and shares
what was computed of the weights with entries that need the same of them, such as those of other batch sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_sparse_conv._src import devices
from jax_sparse_conv._src.accelerate import equations, few_arguments, hoist, micro_batches, transform
from jax_sparse_conv._src.accelerate.hoist import Split
from jax_sparse_conv._src.accelerate.report import Report, report_of
from jax_sparse_conv._src.accelerate.transform import Program
from jax_sparse_conv._src.api.exports import export_checks
from jax_sparse_conv._src.fusion.jaxprs import named_like
from jax_sparse_conv._src.primitive import jax_internals

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
W = TypeVar("W")

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_MODELS = {
    "flax.linen": ("Module", "variables: jit_inference(model.apply, variables)"),
    "keras": ("Model", "weights: jit_inference(lambda w, x: model.stateless_call(*w, x)[0], (trainable, rest))"),
}
"""Of other frameworks by module, which must have been imported: their class, and what is to be given in its place."""
_CALLBACK = "pure_callback"  # the text of a program does not say which function it calls


def compiler_options() -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=...)` with which fused chains cost the host least.

    On a GPU a program of few calls then runs as one CUDA graph, as longer ones do by default. Empty elsewhere, and
    without what this version of XLA refuses. `jit_inference` sets them by itself.
    """
    options = {"xla_gpu_graph_min_graph_size": 1} if devices.default_platform() == "gpu" else {}
    return {name: value for name, value in options.items() if _is_accepted(name, value)}


@functools.lru_cache(maxsize=8)
def _is_accepted(name: str, value: Any) -> bool:
    """Whether XLA compiles with an option; one that it does not know is an error of its own."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@dataclasses.dataclass(eq=False)
class _Entry:
    """What runs calls of one kind.

    Attributes:
      program: the function, rewritten.
      chained: its two parts with layers in chains, and batches in micro-batches where a CPU runs them faster.
      constants: of its trace.
      settings: of JAX when it was traced, as `jax_internals.settings_of_values`.
      prepared: what was computed of the weights.
      jitted: of `prepared` and the arguments of a call.
    """

    program: Program
    chained: Split
    constants: Sequence[Any]
    settings: tuple[bool, bool]
    prepared: list[jax.Array]
    jitted: Any


class Inference(Generic[P, R_co]):
    """A function of weights and arguments, jitted with its weights; made by `jit_inference`.

    It is called with the arguments behind the weights. It composes with `jit`, `vmap` and `grad` by the arguments.
    """

    def __init__(
        self,
        function: Callable[..., R_co],
        weights: Any,
        static_argnames: str | Sequence[str] | None = None,
    ) -> None:
        self._function = function
        self._static_argnames = _static_names(function, static_argnames)
        self._leaves, self._tree, self._places = _weights_of(weights)
        self._entries: dict[Any, _Entry] = {}
        self._lock = threading.RLock()  # of new entries and new weights

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """`function(weights, *args, **kwargs)`."""
        entry = self._entry(args, kwargs)
        if jax_internals.is_tracing():  # JAX takes compiler options of the outermost `jit` alone
            traced: R_co = self._run(entry.program, entry.chained, entry.prepared, args, kwargs)
            return traced
        result: R_co = entry.jitted(entry.prepared, *args, **kwargs)
        return result

    def update(self, weights: Any) -> None:
        """Take new weights, and compute again what depends on them alone.

        Nothing is traced anew, unless a leaf that is no array differs.

        Args:
          weights: a pytree like the one that this was made of, with arrays of the same shapes and dtypes.

        Raises:
          ValueError: another structure, or an array of another shape or dtype.
        """
        leaves, tree, places = _weights_of(weights)
        if tree != self._tree or places != self._places:
            raise ValueError(f"weights={tree} has another structure than {self._tree}, which this was made of")
        for place in places:
            new, old = (jax.typeof(each[place]) for each in (leaves, self._leaves))
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                path = jax.tree_util.keystr(jax.tree.leaves_with_path(weights)[place][0])
                raise ValueError(f"weights{path} is {new.dtype}{list(new.shape)}, not {old.dtype}{list(old.shape)}")
        if all(map(_is_same, leaves, self._leaves)):
            self._replace(leaves)
        else:
            self._forget(weights)

    def _replace(self, leaves: Sequence[Any]) -> None:
        with self._lock:
            self._leaves = list(leaves)
            made: dict[int, list[jax.Array]] = {}
            for entry in self._entries.values():
                shared = id(entry.prepared)
                if shared not in made:
                    made[shared] = self._prepared(entry.chained, entry.constants, entry.settings)
                entry.prepared = made[shared]

    def _forget(self, weights: Any) -> None:
        """Take weights of other types, for which everything is traced anew."""
        with self._lock:
            self._leaves, self._tree, self._places = _weights_of(weights)
            self._entries = {}

    def prepared(self, /, *args: Any, **kwargs: Any) -> list[jax.Array]:
        """What was computed of the weights for a call with such arguments."""
        return list(self._entry(args, kwargs).prepared)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `lower` of a jitted function. What it compiles to takes the list `prepared` in front of the arguments."""
        entry = self._entry(args, kwargs)
        lowered: jax.stages.Lowered = entry.jitted.lower(entry.prepared, *args, **kwargs)
        return lowered

    def export(self, /, *args: Any, platforms: Sequence[str] | None = None, **kwargs: Any) -> jax.export.Exported:
        """The program of a call with such arguments and its weights, for `jax.export`.

        The weights that this has now are constants of the program. So it runs without the model and its code, and
        `update` does not change it. Its file has their size. Packed copies for a CPU may double that.

        Args:
          *args: of a call. `jax.ShapeDtypeStruct`s will do, with symbolic sizes too. Static arguments are by name.
          platforms: that it is to run on, such as `["cpu", "cuda"]`; None is the default device's.
          **kwargs: of a call.

        Returns:
          What `jax.export.export` returns: `call(*args, **kwargs)` runs it, `serialize()` makes bytes of it.

        Raises:
          TypeError: platforms that are a string.
          ValueError: a named implementation without a kernel for a platform, as `jax_sparse_conv.conv` says it.

        Warns:
          UserWarning: where `implementation=None` is XLA's because sizes are symbolic, or because this installation
            has no kernels for a platform.
        """
        if isinstance(platforms, str):
            raise TypeError(f"platforms={platforms!r} is a string, not a sequence of them, such as [{platforms!r}]")
        entry = self._entry(args, kwargs)
        prepared = list(entry.prepared)

        def inference(*_positional: Any, **_named: Any) -> Any:
            return self._run(entry.program, entry.chained, prepared, _positional, _named)

        jitted = jax.jit(inference, static_argnames=self._static_argnames or None)
        return jax.export.export(jitted, platforms=platforms, disabled_checks=export_checks())(*args, **kwargs)

    def report(self, /, *args: Any, **kwargs: Any) -> Report:
        """What becomes of every convolution in a call with such arguments."""
        program = self._entry(args, kwargs).program
        return report_of(program.split.every, program.rows)

    # --- entries -----------------------------------------------------------------------------------------------------

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Entry:
        static = {name: kwargs[name] for name in self._static_argnames if name in kwargs}
        moving = {name: value for name, value in kwargs.items() if name not in static}
        leaves, tree = jax.tree.flatten((args, moving))
        types = tuple(map(_type, leaves))
        names = tuple((name, type(static[name]), static[name]) for name in sorted(static))
        key = (tree, types, names, jax_internals.trace_context())
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:
                entry = self._entries.get(key) or self._made(tree, types, static)
                self._entries[key] = entry
        return entry

    def _made(self, tree: Any, types: Sequence[Any], static: Mapping[str, Any]) -> _Entry:
        count = len(self._places)

        @named_like(self._function)
        def flat(*arrays: Any) -> Any:
            leaves = list(self._leaves)
            for place, array in zip(self._places, arrays[:count], strict=True):
                leaves[place] = array
            args, kwargs = jax.tree.unflatten(tree, arrays[count:])
            return self._function(jax.tree.unflatten(self._tree, leaves), *args, **kwargs, **static)

        avals = [jax.typeof(self._leaves[place]) for place in self._places]
        try:
            closed, shape = jax.make_jaxpr(flat, return_shape=True)(*avals, *types)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note("Name a flag of the call in static_argnames=..., and give it by name: train=False.")
            raise
        if any(isinstance(value, jax.Ref) for value in closed.consts):
            raise ValueError(
                "the function reads or writes a reference (jax.new_ref) that it holds itself, which inference with "
                "fixed weights would lose; jax.jit keeps it"
            )
        if equations.has_hidden_64_bits(closed.jaxpr):
            raise ValueError(
                f"the function cannot be rewritten: {transform.HIDDEN_64_BITS}; call it in jax.enable_x64(True), or "
                "leave it to jax.jit"
            )
        fixed = [True] * (len(closed.consts) + count) + [False] * len(types)
        program = transform.of_jaxpr(closed, fixed, jax.tree.structure(shape))
        transform.warn_of_unknown_sizes(program)
        chained = few_arguments.with_chains(program.split)
        every = micro_batches.with_micro_batches(chained.every, len(chained.once.out_avals))
        chained = Split(chained.once, every)
        prepared = self._shared(chained, closed.consts)

        # Names that no argument has: JAX takes one named as the tuple of the others for that.
        def run(_prepared: Sequence[Any], /, *_positional: Any, **_named: Any) -> Any:
            return self._run(program, chained, _prepared, _positional, _named)

        options = compiler_options()
        jitted = jax.jit(run, static_argnames=self._static_argnames or None, compiler_options=options or None)
        return _Entry(program, chained, closed.consts, jax_internals.settings_of_values(), prepared, jitted)

    def _shared(self, chained: Split, constants: Sequence[Any]) -> list[jax.Array]:
        """What a program needs of the weights; the same arrays that another needs in the same way."""
        text, settings = str(chained.once), jax_internals.settings_of_values()
        for entry in () if _CALLBACK in text else self._entries.values():
            same_constants = [id(each) for each in entry.constants] == [id(each) for each in constants]
            if same_constants and entry.settings == settings and str(entry.chained.once) == text:
                return entry.prepared
        return self._prepared(chained, constants, settings)

    def _prepared(self, chained: Split, constants: Sequence[Any], settings: tuple[bool, bool]) -> list[jax.Array]:
        with jax.enable_x64(settings[0]):
            return transform.prepared(chained.once, [*constants, *(self._leaves[place] for place in self._places)])

    def _run(
        self,
        program: Program,
        chained: Split,
        prepared: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        moving = {name: value for name, value in kwargs.items() if name not in self._static_argnames}
        arguments = jax.tree.leaves((args, moving))
        return jax.tree.unflatten(program.results, hoist.evaluate(chained.every, *prepared, *arguments))


def _static_names(function: Callable[..., Any], names: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of static arguments, each of which the function has."""
    if names is None or (isinstance(names, Sequence) and not names):
        return ()
    found = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    if not found or not all(isinstance(name, str) for name in found):
        raise TypeError(f"static_argnames={names!r} is no name and no names; it is as in jax.jit")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function in C
        return found
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name in () if takes_any else found:
        if name not in parameters:
            raise ValueError(f"static_argnames has {name!r}, which the function does not take: {', '.join(parameters)}")
    return found


def jit_inference(
    function: Callable[Concatenate[W, P], R_co], weights: W, *, static_argnames: str | Sequence[str] | None = None
) -> Inference[P, R_co]:
    """`jax.jit` of an accelerated function whose weights stay as they are.

    The function is rewritten as by `accelerate`. Everything that depends on the weights alone is computed once: batch
    norms folded into kernels, masks, casts, transposed and packed kernels. `update` takes new weights and computes it
    again. On a GPU what a fused chain or a dense block reads of the weights lies in one array, so that a call has few
    arguments. Of large arrays that it reads as they are there is no copy.

    Args:
      function: of the weights and the arguments of a call.
      weights: a pytree of arrays, such as Flax's or Haiku's variables or an Equinox module. Leaves that are no arrays
        are taken as they are.
      static_argnames: as in `jax.jit`, of arguments given by name.

    Returns:
      An `Inference`, called with the arguments behind the weights. Each kind of arguments is compiled once.

    Raises:
      TypeError: a function that cannot be called, an nnx module or another framework's, or static_argnames that are
        no names.
      ValueError: a static_argnames that the function does not take; in a call, a function that alone reads and writes
        a reference, or in which alone `jax.enable_x64` is on.
    """
    if not callable(function):
        raise TypeError(f"function={function!r} cannot be called")
    if isinstance(function, nnx.Module):
        kind = type(function).__name__
        raise TypeError(f"function is the nnx module {kind}, which holds its weights: jsc.nnx.jit_inference takes it")
    for library, (name, advice) in _MODELS.items():
        if (found := getattr(sys.modules.get(library), name, None)) is not None and isinstance(function, found):
            raise TypeError(
                f"function is the {library} model {type(function).__name__}, not a function of its {advice}"
            )
    return Inference(function, weights, static_argnames)


def _weights_of(weights: Any) -> tuple[list[Any], Any, tuple[int, ...]]:
    """Leaves, structure, and which leaves are arrays."""
    leaves, tree = jax.tree.flatten(weights)
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS))
    moved = [jnp.asarray(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf for leaf in leaves]
    return moved, tree, places


def _is_same(new: Any, old: Any) -> bool:
    """Whether a program for one leaf is right for the other: for arrays of the same type, and for the same value."""
    if isinstance(old, jax.Array):
        return bool(getattr(jax.typeof(new), "weak_type", False) == getattr(jax.typeof(old), "weak_type", False))
    return new is old or (type(new) is type(old) and bool(new == old))


def _type(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
