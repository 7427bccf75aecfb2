"""Command line, `python -m jax_sparse_conv`: `env`, `tune`, and `run`, `calibrate` or `maps` of a network."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli.photograph import SAMPLE, UserError, batch_of, load, optional
from jax_sparse_conv._src.dispatch import model

if TYPE_CHECKING:
    import jax

    from jax_sparse_conv._src.cli.comparison import Comparison
    from jax_sparse_conv._src.plans.calibration import Progress
    from jax_sparse_conv._src.plans.plan import Plan
    from jax_sparse_conv.models import Network
    from jax_sparse_conv.models.layers import ConvNet

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit status, 1 for a mistake that one sentence on stderr explains."""
    options = _parser().parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        {"env": _env, "run": _run, "calibrate": _calibrate, "maps": _maps, "tune": _tune}[options.command](options)
    except UserError as error:
        print(f"jax_sparse_conv: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_sparse_conv", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    env = commands.add_parser("env", help="versions, build, registered custom calls, devices, and what is missing")
    env.add_argument("--json", action="store_true", help="as JSON")
    run = commands.add_parser(
        "run",
        help="a network on a photograph, dense and sparse",
        description="Classify a photograph with dense layers and with sparse ones, and compare times and results.",
    )
    _add_network(run)
    add = run.add_argument
    add("--labels", type=Path, help="text file with the classes' names, one a line (default: their indices)")
    add("--implementation", help='of the sparse layers: auto (default), ecr, pecr, ...; "auto" is None')
    add("--plan", type=Path, help="JSON file of `calibrate`: each layer's implementation, instead of --implementation")
    add("--repeats", type=_positive, default=30, help="samples for each time, of which the median counts (default: 30)")
    add("--json", type=Path, help="write everything to this file")
    add("--plot", type=Path, help="draw zeros and ratio of every layer into this PNG")
    calibrate = commands.add_parser(
        "calibrate",
        help="time every implementation of a network's layers on a photograph, and keep the choice",
        description="Run a network on a photograph, time every implementation of each of its layers on what it is "
        "given there, print the plan and write it to a file that `run --plan` and jax_sparse_conv.Plan.load read.",
    )
    _add_network(calibrate)
    add = calibrate.add_argument
    add(
        "--repeats",
        type=_positive,
        default=10,
        help="samples of each candidate, of which the median counts (default: 10)",
    )
    add("--out", type=Path, required=True, help="the plan's JSON file")
    maps = commands.add_parser(
        "maps",
        help="write every convolution input of a network on photographs",
        description="Run a network on photographs and write the input of every convolution (maps.npz), and a list of "
        "shapes and zero fractions, of groups of pixels and of channels (maps.json, maps.csv, channels.csv).",
    )
    _add_network(maps, "+")
    maps.add_argument("--out", type=Path, required=True, help="folder to write to; made if it does not exist")
    _add_tune(
        commands.add_parser(
            "tune",
            help="make the package fast on the GPU or CPU at hand",
            description="Time what kernels can take against XLA, for the layers of networks, and write the table that "
            "implementation=None reads. It goes on where it was stopped.",
        )
    )
    return parser


def _add_tune(parser: argparse.ArgumentParser) -> None:
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument("--network", nargs="+", metavar="NAME", help="whose layers to time (default: four)")
    layers.add_argument("--layers", type=Path, metavar="FILE", help="JSON list of calls, as a plan has them")
    add = parser.add_argument
    add("--batch", type=_positive, nargs="+", default=(1, 8, 32), metavar="N", help="images of a batch: 1 8 32")
    add("--kinds", nargs="+", choices=model.KINDS, default=model.KINDS, help="of products (default: all)")
    add("--device", type=_device, metavar="N", help="CUDA's number of the GPU, or cpu (default: 0, cpu without a GPU)")
    add("--budget", type=float, default=30, metavar="MINUTES", help="stop after so long (default: 30)")
    add("--out", type=Path, metavar="FOLDER", help="of the table and the raw times (default: the user's cache folder)")
    add("--no-xla", action="store_true", help="time kernels alone, which is enough to fit their models and fast")
    add("--show", action="store_true", help="print the tables in use for the device, and stop")
    fit = "fit the models to raw times, those of the user's cache folder or of these files, and stop"
    add("--fit", type=Path, nargs="*", metavar="FILE", help=fit)


def _add_network(parser: argparse.ArgumentParser, images: str | None = None) -> None:
    """Which network runs on what."""
    add = parser.add_argument
    add("--network", default="vgg19", help="vgg19 (default), resnet50, ...; a wrong name lists them")
    add("--image", type=Path, nargs=images, help=f"photograph (default: scikit-learn's {SAMPLE})")
    add("--weights", type=Path, help="safetensors file with torchvision, timm or Keras names (default: seeded weights)")
    add("--batch", type=_positive, default=1, help="images: the photograph, mirrored and shifted copies (default: 1)")
    add("--size", type=_positive, help="height and width of the images (default: the network's)")
    add("--dtype", choices=DTYPES, default="float32")
    add("--precision", choices=PRECISIONS, default="default", help="of the dense layers, as in lax (default: default)")
    add("--seed", type=_seed, default=0, help="of the weights, without --weights")


def _device(text: str) -> int | str:
    if text != "cpu" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 'cpu' or a GPU's number from 0 on")
    return text if text == "cpu" else int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return int(text)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _env(options: argparse.Namespace) -> None:
    found = environment.collect()
    print(json.dumps(found, indent=2) if options.json else "\n".join(environment.lines(found)))


def _run(options: argparse.Namespace) -> None:
    import jax

    from jax_sparse_conv._src.cli import comparison, report

    out = report.console()
    _check_outputs(options)
    implementation = _implementation(options)
    network = _network(options.network)
    names = _labels(options.labels)
    size = options.size or network.input_size
    images = batch_of(load(options.image, size), options.batch)
    with jax.default_matmul_precision(options.precision), report.progress() as advance:
        model, x = _prepare(network, images, options, advance)
        found = comparison.compare(model, x, implementation, options.repeats, advance)
    notes = []
    if options.weights is None:
        notes.append(f"Without --weights the weights are seeded (seed {options.seed}): the classes mean nothing.")
    if not isinstance(implementation, str):
        notes += _beyond_plan(implementation, found)
    chosen = f"plan {options.plan.name}" if options.plan else f"implementation {implementation}"
    title = (
        f"{network.name}, {environment.device_name()}, batch {options.batch}, {size}x{size}, {options.dtype}, "
        f"precision {options.precision}, {chosen}"
    )
    report.print_comparison(found, out, title, names, notes)
    try:
        if options.json:
            report.write_json(options.json, _record(options, size) | report.as_json(found, names) | {"notes": notes})
        if options.plot:
            report.plot(found.layers, options.plot, title)
    except OSError as error:
        raise UserError(f"the results cannot be written: {error}") from error


def _implementation(options: argparse.Namespace) -> str | Plan:
    """What the sparse side runs."""
    from jax_sparse_conv._src.cli import comparison
    from jax_sparse_conv._src.plans import plan

    if options.plan is None:
        options.implementation = options.implementation or "auto"
        comparison.check_implementation(options.implementation)
        return str(options.implementation)
    if options.implementation is not None:
        raise UserError(f"--implementation {options.implementation} and --plan exclude each other")
    try:
        return plan.Plan.load(options.plan)
    except (OSError, ValueError) as error:
        raise UserError(f"--plan: {error}") from error


def _beyond_plan(plan: Plan, found: Comparison) -> list[str]:
    """What the plan says nothing of: it is for calls of the shapes that it was made with."""
    planned = {(layer.path, layer.call.x_shape) for layer in plan.layers}
    others = [row for row in found.layers if (row.path, row.input_shape) not in planned]
    if not others:
        return []
    made = dict.fromkeys(layer.call.x_shape for layer in plan.layers if layer.path == others[0].path)
    return [
        f"The plan has nothing for {len(others)} of {len(found.layers)} layers as they are called here, which choose "
        f"for themselves: it has {others[0].path} for inputs of {' and '.join(map(str, made)) or 'no shape'}, not "
        f"{others[0].input_shape}."
    ]


def _calibrate(options: argparse.Namespace) -> None:
    import jax

    from jax_sparse_conv._src.cli import report
    from jax_sparse_conv._src.plans.calibration import calibrate

    _check_writable("out", options.out)
    network = _network(options.network)
    images = batch_of(load(options.image, options.size or network.input_size), options.batch)
    with jax.default_matmul_precision(options.precision), report.progress() as advance:
        model, x = _prepare(network, images, options, advance)
        plan = calibrate(model, [x], repeats=options.repeats, progress=advance)
    print(plan)
    try:
        plan.save(options.out)
    except OSError as error:
        raise UserError(f"the plan cannot be written: {error}") from error


def _maps(options: argparse.Namespace) -> None:
    import jax
    import numpy as np

    from jax_sparse_conv._src.cli import feature_maps, report

    if not options.out.absolute().parent.is_dir():
        raise UserError(f"--out {options.out}: the folder {options.out.absolute().parent} does not exist")
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out} is a file, not a folder to write to")
    network = _network(options.network)
    size = options.size or network.input_size
    photographs = [load(path, size) for path in options.image or [None]]
    images = np.concatenate([batch_of(photograph, options.batch) for photograph in photographs])
    header = environment.describe_run(options.argv) | {
        **{name: getattr(options, name) for name in ("network", "batch", "dtype", "precision", "seed")},
        "size": size,
        "images": [_without_folders(path) for path in options.image or [SAMPLE]],
        "weights": _without_folders(options.weights),
    }
    with jax.default_matmul_precision(options.precision), report.progress() as advance:
        model, x = _prepare(network, images, options, advance)
        try:
            entries = feature_maps.write(options.out, network.name, model, x, header, advance)
        except OSError as error:
            raise UserError(f"the maps cannot be written: {error}") from error
        except ValueError as error:  # with --weights the first thing to run the network
            raise UserError(f"--size {options.size}: {error}") from error
    print(f"{len(entries)} maps of {len(images)} images in {options.out}: {', '.join(feature_maps.FILES)}")
    if options.weights is None:
        print("Without --weights the weights are seeded and the zeros those of a profile, not of a trained network.")


def _tune(options: argparse.Namespace) -> None:
    from jax_sparse_conv._src.tune import command

    try:
        command.run(options)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _check_writable(name: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"--{name} {path}: the folder {path.absolute().parent} does not exist")
    if path.is_dir():
        raise UserError(f"--{name} {path} is a folder, not a file to write")


def _check_outputs(options: argparse.Namespace) -> None:
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None:
            _check_writable(name, path)
    if options.plot is not None:
        if options.plot.suffix.lower() != ".png":
            raise UserError(f"--plot {options.plot}: the plot is a PNG, so the name must end in .png")
        optional("matplotlib.figure", "matplotlib")


def _network(name: str) -> Network:
    from jax_sparse_conv import models

    if name not in models.NETWORKS:
        raise UserError(f"--network {name!r} is not one of {', '.join(sorted(models.NETWORKS))}")
    return models.NETWORKS[name]


def _labels(path: Path | None) -> list[str] | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--labels {path} cannot be read: {error}") from error


def _prepare(
    network: Network, images: Any, options: argparse.Namespace, advance: Progress
) -> tuple[ConvNet, jax.Array]:
    """The network with its weights set, in the wanted dtype, and its input."""
    from flax import nnx

    from jax_sparse_conv import models

    advance(f"building {network.name}", None)
    model = models.build(network.name, rngs=nnx.Rngs(options.seed))
    if options.weights is None:
        models.fold_batch_norm(model)  # first: the profile runs every layer, and fused ones compile faster
        advance("giving the layers their zeros", None)
        x = network.preprocess(images)
        _set_profile(model, x, options.size)
    else:
        advance("loading the weights", None)
        x = network.preprocess(images, _load_weights(model, options.weights))
        models.fold_batch_norm(model)
    _cast(model, options.dtype)
    return model, x.astype(options.dtype)


def _set_profile(model: ConvNet, x: jax.Array, size: int | None) -> None:
    from jax_sparse_conv import models

    try:
        models.set_sparsity_profile(model, x)
    except ValueError as error:  # the first thing to run the network, so it meets a map that is too small
        raise UserError(f"--size {size}: {error}") from error


def _load_weights(model: ConvNet, path: Path) -> str:
    """Load a file and return its convention."""
    from jax_sparse_conv import models

    try:
        return models.load_weights(model, path).convention
    except FileNotFoundError as error:
        raise UserError(f"--weights {path}: there is no such file") from error
    except (ImportError, OSError, ValueError) as error:
        message = " ".join(str(error).split())
        named = message if message.startswith(str(path)) else f"{path}: {message}"
        raise UserError(f"--weights {named}") from error


def _cast(model: ConvNet, dtype: str) -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def cast(value: jax.Array) -> jax.Array:
        return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value

    nnx.update(model, jax.tree.map(cast, nnx.state(model)))


def _record(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """What was run: the first part of the JSON file."""
    chosen = ("network", "batch", "dtype", "precision", "implementation", "seed", "repeats")
    return {
        **environment.describe_run(options.argv),
        **{name: getattr(options, name) for name in chosen},
        "size": size,
        "image": _without_folders(options.image or SAMPLE),
        "weights": _without_folders(options.weights),
        "plan": _without_folders(options.plan),
    }


def _without_folders(path: Path | str | None) -> str | None:
    return None if path is None else environment.without_folders(str(path))


if __name__ == "__main__":
    sys.exit(main())
