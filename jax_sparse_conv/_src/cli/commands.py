"""The commands `calibrate`, `maps` and `tune`."""

from __future__ import annotations

import argparse

import jax

from jax_sparse_conv._src import environment
from jax_sparse_conv._src.cli import feature_maps, networks, outputs, progress
from jax_sparse_conv._src.cli.errors import UserError
from jax_sparse_conv._src.plans import calibration
from jax_sparse_conv._src.tune import command


def calibrate(options: argparse.Namespace) -> None:
    """Time the candidates of each layer, print the plan and write it."""
    outputs.check_writable("out", options.out)
    network = networks.named(options.network)
    with jax.default_matmul_precision(options.precision), progress.progress() as advance:
        advance("reading the photographs", None)
        images = networks.images_of(options, options.size or network.input_size)
        prepared = networks.prepare(network, images, options, advance)
        plan = calibration.calibrate(
            prepared.model, [prepared.x], repeats=options.repeats, thresholds=options.thresholds, progress=advance
        )
    print(plan)
    try:
        plan.save(options.out)
    except OSError as error:
        raise UserError(f"the plan cannot be written: {error}") from error


def maps(options: argparse.Namespace) -> None:
    """Write the input of every convolution."""
    outputs.check_folder("out", options.out)
    network = networks.named(options.network)
    size = options.size or network.input_size
    header = environment.describe_run(options.argv) | {
        **{name: getattr(options, name) for name in ("network", "batch", "dtype", "precision", "seed")},
        "size": size,
        "images": networks.image_names(options),
        "weights": None if options.weights is None else environment.without_folders(options.weights),
    }
    with jax.default_matmul_precision(options.precision), progress.progress() as advance:
        advance("reading the photographs", None)
        images = networks.images_of(options, size)
        prepared = networks.prepare(network, images, options, advance)
        try:
            entries = feature_maps.write(options.out, network.name, prepared.model, prepared.x, header, advance)
        except OSError as error:
            raise UserError(f"the maps cannot be written: {error}") from error
        except ValueError as error:  # with --weights the first thing to run the network
            raise UserError(f"--size {options.size}: {error}") from error
    print(f"{len(entries)} maps of {len(images)} images in {options.out}: {', '.join(feature_maps.FILES)}")
    if options.weights is None:
        print("Without --weights the weights are seeded and the zeros those of a profile, not of a trained network.")


def tune(options: argparse.Namespace) -> None:
    """Time kernels and write the table."""
    try:
        command.run(options)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
