"""What `python -m jax_sparse_conv` is told: its commands and their options."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import jax_sparse_conv
from jax_sparse_conv._src.cli.photograph import SAMPLE
from jax_sparse_conv._src.dispatch import model

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")


def parser(description: str) -> argparse.ArgumentParser:
    """The whole command line."""
    made = argparse.ArgumentParser(prog="python -m jax_sparse_conv", description=description)
    version = f"jax_sparse_conv {jax_sparse_conv.__version__}"
    made.add_argument("--version", action="version", version=version, help="print the version, and stop")
    commands = made.add_subparsers(dest="command", required=True)
    _add_run(
        commands.add_parser(
            "run",
            help="a network on photographs, dense and sparse",
            description="Classify photographs with dense layers and with sparse ones, and compare times and results.",
        )
    )
    _add_others(commands)
    _add_tune(
        commands.add_parser(
            "tune",
            help="make the package fast on the GPU or CPU at hand",
            description="Time what kernels can take against XLA, for the layers of networks, and write the table that "
            "implementation=None reads. It goes on where it was stopped.",
        )
    )
    doctor = commands.add_parser("doctor", help="check this installation, and say which command mends it")
    env = commands.add_parser("env", help="versions, build, registered custom calls, devices: all of it, for a report")
    for each in (doctor, env):
        each.add_argument("--json", action="store_true", help="as JSON")
    return made


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_network(parser)
    add = parser.add_argument
    add("--labels", type=Path, help="text file with the classes' names, one a line (default: their indices)")
    add("--implementation", help="of the sparse layers: auto (default), ecr, pecr, coo, ...; a wrong name lists them")
    add("--plan", type=Path, help="JSON file of `calibrate`: each layer's implementation, instead of --implementation")
    add(
        "--repeats",
        type=_positive,
        help="samples for each time, of which the median counts (default: up to 30, fewer of slow layers)",
    )
    add("--json", type=Path, help="write everything to this file")
    add("--html", type=Path, help="write a page of it to this file, which needs nothing else to be read")
    add("--plot", type=Path, help="draw zeros and ratio of every layer into this PNG")


def _add_others(commands: Any) -> None:
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
    add(
        "--thresholds",
        action="store_true",
        help="also time maps of other densities, and keep the density at which a layer changes its implementation",
    )
    add("--out", type=Path, required=True, help="the plan's JSON file")
    maps = commands.add_parser(
        "maps",
        help="write every convolution input of a network on photographs",
        description="Run a network on photographs and write the input of every convolution (maps.npz), and a list of "
        "shapes and zero fractions, of groups of pixels and of channels (maps.json, maps.csv, channels.csv).",
    )
    _add_network(maps)
    maps.add_argument("--out", type=Path, required=True, help="folder to write to; made if it does not exist")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument("--network", nargs="+", metavar="NAME", help="whose layers to time (default: four)")
    layers.add_argument("--layers", type=Path, metavar="FILE", help="JSON list of calls, as a plan's layers have them")
    add = parser.add_argument
    add("--batch", type=_positive, nargs="+", metavar="N", help="images (default: 1 8 32, or those of --layers' calls)")
    add("--kinds", nargs="+", choices=model.KINDS, help="of products (default: all, or those of --layers' calls)")
    add("--device", type=_device, metavar="N", help="CUDA's number of the GPU, or cpu (default: 0, cpu without a GPU)")
    add("--budget", type=_minutes, default=30, metavar="MINUTES", help="stop after so long (default: 30)")
    add("--part", type=_part, default=(1, 1), metavar="I/N", help="every Nth call from the Ith: a process per GPU")
    add("--out", type=Path, metavar="FOLDER", help="of the table and the raw times (default: the user's cache folder)")
    add("--gradients", action="store_true", help="time gradients, for training; with --show and --fit of theirs")
    add("--no-xla", action="store_true", help="time kernels alone, which is enough to fit their models and fast")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="print the tables in use for the device, and stop")
    fit = "fit the models to raw times, those of the user's cache folder or of these files, and stop"
    instead.add_argument("--fit", type=Path, nargs="*", metavar="FILE", help=fit)


def _add_network(parser: argparse.ArgumentParser) -> None:
    """Which network runs on what."""
    add = parser.add_argument
    add("--network", default="vgg19", help="vgg19 (default), resnet50, ...; a wrong name lists them")
    add("--image", type=Path, nargs="+", metavar="FILE", help=f"photographs (default: scikit-learn's {SAMPLE})")
    add(
        "--weights",
        help="safetensors file with torchvision, timm or Keras names, or hub, or hub:OWNER/NAME: those of the "
        "Hugging Face hub (default: seeded weights)",
    )
    add("--batch", type=_positive, default=1, help="of each photograph: itself, mirrored and shifted ones (default: 1)")
    add("--size", type=_positive, help="height and width of the images (default: the network's)")
    add("--dtype", choices=DTYPES, default="float32")
    add("--precision", choices=PRECISIONS, default="default", help="of the dense layers, as in lax (default: default)")
    add("--seed", type=_seed, default=0, help="of the weights, without --weights")


def _device(text: str) -> int | str:
    if text != "cpu" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 'cpu' or a GPU's number from 0 on")
    return text if text == "cpu" else int(text)


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N, such as 1/4")
    return int(number), int(of)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return int(text)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes, 0 or more")
    return value


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
