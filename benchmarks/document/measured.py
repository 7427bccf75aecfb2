"""docs/results/measured.md: one section for each device, one table for each suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.results import RESULTS, Row, read
from benchmarks.document import layer_tables, network_tables

DEVICES = {
    "h200": "H200",
    "h100": "H100",
    "cpu_amd_epyc": "AMD EPYC",
    "cpu_amd_epyc_zen4": "AMD EPYC of Zen 4",
    "cpu_amd_epyc_zen3": "AMD EPYC of Zen 3, AVX2",
    "cpu_intel_xeon": "Intel Xeon",
}
"""Folders of results, as the page calls them."""

PICTURES = {
    ("h200", "layers"): (
        "h200_crossover.png",
        "XLA's time at `HIGHEST` over that of the sparse kernels and of XLA in TF32, against zeros. Three 3x3 layers, "
        "one image, `h200/paper/fig11.json`.",
    ),
    ("cpu_amd_epyc", "cpu"): ("cpu_crossover.png", "XLA's time over ours against zeros: the 3x3 layers by `ecr`."),
    ("cpu_amd_epyc", "run"): ("cpu_run_vgg19.png", "Zeros and ratio of each layer of VGG-19, one image."),
}
"""By device and suite: a picture below the table, and what it shows."""

_ON_THE_PAGE_OF_PAPERS = ("cost_model", "direct_ablation")
_COMMANDS = {"run": "python -m jax_sparse_conv run"}

_Table = Callable[[Sequence[Row]], list[str]]
SUITES: dict[str, tuple[str, str, _Table]] = {
    "networks": (
        "Whole networks",
        """\
Each side under the faster of XLA's flag sets. Images are 224x224, batch norm is folded on both sides. Cells: XLA's time
over ours; in brackets the same without zeros, with biases so high that no ReLU clips anything; our time. A network with
all chains, paying or not, has a line where its time differs from that of `None` by over 3 %. Weights are arguments of
the program, or constants in it.""",
        network_tables.networks,
    ),
    "run": (
        "Networks and their layers",
        """\
A photograph through a whole network, densely in XLA and sparsely, then layer by layer. Sparse is an implementation for
all layers, or a plan of `jsc.calibrate`.""",
        network_tables.run,
    ),
    "real_weights": (
        "Real weights",
        """\
ImageNet weights on photographs. The difference is that of the last feature map from XLA's, relative, by the Frobenius
norm.""",
        network_tables.real_weights,
    ),
    "peers": (
        "Beside other frameworks",
        """\
Whole networks with the same weights, translated to each framework. All sides have the same number of threads and took
turns in one process. Milliseconds are of a trained network's zeros. The ratio is the time of the fastest other
framework over ours; XLA is not among them. "Without zeros" biases are so high that no ReLU clips anything. The error is
ours, relative to float64, with zeros.""",
        network_tables.peers,
    ),
    "profile": (
        "Where a network's time goes",
        """\
Shares of a call on a CPU, by XLA's own trace. Convolutions and dense layers have the gradients by x among them. Then
come gradients of kernels and of pools, XLA's own operations, and the time between operations. The last column is the
operation that takes longest.""",
        network_tables.profile,
    ),
    "training": (
        "Training",
        """\
A step: the loss and the gradients of all weights, of networks with weights as initialised. The error is how far our
gradients are from XLA's, by the Frobenius norm.""",
        network_tables.training,
    ),
    "gradients": (
        "Gradients of single layers",
        """\
A gradient from a fixed cotangent, by x and by the kernel, in float32. Half of x and of the cotangent is zero. "of each"
is `vmap` over inputs. With a pool the convolution in front of it is part of the time, on both sides. Errors are lax's
and ours against float64, the root of the mean square over the values' own.""",
        layer_tables.gradients,
    ),
    "packed": (
        "Packed kernels as arguments",
        """\
XLA's time over ours, XLA called in the same way: weights as arguments, packed ones, constants, and both kinds of
arguments under `nnx.jit`, which returns a copy of all parameters. Packed copies are beside the weights.""",
        network_tables.packed,
    ),
    "models": (
        "Models that others wrote",
        """\
Each model as it is, by `accelerate` and by `jit_inference`. "trained" weights are as the framework initialises them,
with kernels scaled and biases moved so that each ReLU makes a trained network's zeros. With "dense" ones no ReLU clips
anything. "initial" ones have the zeros of random weights. Zeros are the mean of the convolutions' inputs. "as graphs"
is `jit` with the flags under which XLA makes CUDA graphs of everything. The ratio is the faster `jit`'s time over
`jit_inference`'s. Memory is `jit`'s over `jit_inference`'s: temporary arrays, constants, and what was computed of the
weights.""",
        network_tables.others,
    ),
    "latency": (
        "What one call costs that is waited for",
        """\
Microseconds of a call at batch 1: among many dispatched without waiting, waited for by `block_until_ready`, and polled
by `is_ready()`. "nothing" reads one element of the image. "product" is one product of matrices, in one kernel, that
takes about as long as the network: what it costs more when it is waited for is JAX's and the host's.""",
        network_tables.latency,
    ),
    "host": (
        "What a call costs its host",
        """\
Microseconds of a call, by the way weights get in. "host" reads one element of every weight, "network" is the network
itself at batch 1. `nnx.jit` walks through the model and hands all parameters back.""",
        network_tables.host,
    ),
    "chain_tiles": (
        "Tiles of fused chains",
        "Microseconds of a chain with the tiles that the model chooses, and with those that a search kept.",
        network_tables.chain_tiles,
    ),
    "zoo": (
        "Every layer of the networks",
        """\
Distinct layers of the package's networks, each against XLA. Cells: geometric mean of XLA's time over ours, the least
and the most. Layers that `None` left to XLA are not in the means. A row is of what `None` took at its commit. Tables of
choices are made from such rows, so it may take something else by now.""",
        layer_tables.zoo,
    ),
    "layers": (
        "Named layers",
        """\
Geometric means of XLA's time over ours. All cells of a line are of the same layers, so a line shows what zeros bring.
The column of no zeros is the kernel's own gain.""",
        layer_tables.layers,
    ),
    "cpu": (
        "Layers by the CPU kernels",
        """\
Geometric means of XLA's time over ours, in streaks of calls. All cells of a line are of the same layers. The column of
no zeros is the kernel's own gain. The file also holds single calls, calls inside one program and a roofline.""",
        layer_tables.layers,
    ),
    "accuracy": (
        "Errors",
        """\
Relative errors against float64, by the Frobenius norm: of kernels, and of whole networks with weights as initialised on
a photograph, or on a batch of it. Layers have values of both signs in the kernel and none below zero in x. A network
under `jit_inference` runs in chains of layers, under `jax.jit` layer by layer, its batch norms folded or not.""",
        layer_tables.accuracy,
    ),
    "adaptive": (
        "Choosing on the device",
        """\
`"adaptive"` against the faster of `"ecr"` and `"direct"` by itself: in how many rows it is within 3 % and 2 us, and how
many microseconds it is behind.""",
        layer_tables.adaptive,
    ),
    "calls": (
        "What a call costs the device",
        "The smallest layers, as nodes of a CUDA graph.",
        layer_tables.calls,
    ),
    "scaling": (
        "Cores",
        "XLA's time over ours on more and more cores, and how much faster each side is on the most than on one.",
        layer_tables.scaling,
    ),
    "sorting": (
        "Sorted channels",
        "What it brings to sort channels by how often they fire: the time as given over that of the sorted ones.",
        layer_tables.sorting,
    ),
    "instructions": (
        "Instructions",
        "Thousands of instructions of a call, counted by valgrind, by loop of the CPU kernels.",
        layer_tables.instructions,
    ),
    "loops": (
        "Loops of a CPU",
        """\
The loop that the CPU kernels choose, "auto", beside the dense ones and that over pixels, in turns. The regret is its
time over that of the fastest.""",
        layer_tables.loops,
    ),
    "sweep": (
        "Random layers",
        "XLA's time over that of `None`, both with plain arguments or constants. What loses was timed again, longer.",
        layer_tables.sweep,
    ),
    "fuzz": (
        "Random calls",
        """\
Calls of every operation against NumPy in float64, each element within a bound of its own. A finding is a wrong value,
an error, a hang or the end of the process. A skipped call has no kernel on the device, or wants what JAX lacks there.
It is drawn, but did not run. Calls of one program differ in their values and zeros.""",
        layer_tables.fuzz,
    ),
    "tests": (
        "Tests",
        "The package's tests on this device: how many passed, failed and were skipped.",
        layer_tables.tests,
    ),
}
"""By suite: title, what is measured, and its table."""


def page(results: Path = RESULTS) -> str:
    """The page, from a folder of results."""
    sections = [_HEADER]
    for folder, name in DEVICES.items():
        files = {path.stem: path for path in (results / folder).glob("*.json")}
        unknown = files.keys() - SUITES.keys() - set(_ON_THE_PAGE_OF_PAPERS)
        if unknown:
            raise ValueError(f"{folder}: the page has no table for {', '.join(sorted(unknown))}")
        sections.append(f"## {name}")
        for suite in (suite for suite in SUITES if suite in files):
            sections += _section(name, folder, suite, read(files[suite]))
    return "\n\n".join(sections) + "\n"


def _section(name: str, folder: str, suite: str, rows: Sequence[Row]) -> list[str]:
    title, about, table = SUITES[suite]
    shown = [row for row in rows if "label" not in row]
    others = Counter(row["label"] for row in rows if "label" in row)
    text = [f"### {name}: {title[0].lower()}{title[1:]}", about, _source(folder, suite, shown), *table(shown)]
    if others:
        labels = ", ".join(f'{count} "{label}"' for label, count in sorted(others.items()))
        text.append(f"Rows of the file with a label, which are not in the table: {labels}.")
    return [*text, *_picture(folder, suite)]


def _source(folder: str, suite: str, rows: Sequence[Row]) -> str:
    """Where a table is from."""
    dates, commits = ([rows[0][key], rows[-1][key]] for key in ("date", "commit"))
    command = _COMMANDS.get(suite, f"python -m benchmarks {suite}")
    flags = " and ".join(sorted({row["flags"] for row in rows}))
    device = rows[0]["device"] + (f" ({_cores(rows)})" if rows[0]["backend"] == "cpu" else "")
    lines = [
        ("file", f"`{folder}/{suite}.json`, {_counted(len(rows), 'row')}"),
        ("device", f"{device}, XLA's flags: {flags}"),
        ("measured", f"{_range([date[:10] for date in dates])}, of commit {_range(commits)}, by `{command}`"),
    ]
    return "\n".join(f"- {what}: {found}." for what, found in lines)


def _cores(rows: Sequence[Row]) -> str:
    found = sorted({(int(row["cpu"]["cores"]), row["cpu"]["instruction_set_in_use"]) for row in rows})
    return " and ".join(f"{_counted(cores, 'core')}, {instructions}" for cores, instructions in found)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _range(ends: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def _picture(folder: str, suite: str) -> list[str]:
    if (folder, suite) not in PICTURES:
        return []
    name, shows = PICTURES[folder, suite]
    return [shows, f"![{name.removesuffix('.png').replace('_', ' ')}]({name})"]


_HEADER = """\
# Measured

Written by `python -m benchmarks document` from the files in `benchmarks/results/`; do not edit. There is a section for
each device and a table for each suite. Above a table stand its file, device, dates, commits and command. Each row of a
file names its own command, driver and versions, and the newest row of each case stays.

- Ratios are XLA's time over ours; above 1 is a gain. Both sides of a ratio ran in turns.
- Conversion to a sparse format is included in every time.
- A gain that is there without zeros is the kernel's, not the zeros'. `"direct"` skips nothing.
- On these GPUs nearly all of the gain of whole networks is the kernels'. Zeros bring more in fully connected layers of
  one image. On the CPUs much of the gain is from zeros.
- Weights are seeded, with the zeros of a trained network, where real weights are not named. Those zeros were measured
  on ResNet-50 without its last stage and on DenseNet-169. For the others they are filled in
  ([Networks](../api/models.md)).
- "Command buffers" means that XLA makes one CUDA graph of the program. Under the default flags the host launches every
  kernel.
- Rows with a label are of something else than the package as it comes, such as an earlier engine.

The papers' claims are on [their own page](../papers.md), with the suites `cost_model` and `direct_ablation`. How times
are taken is under [Measuring](../design/measuring.md), why the kernels are as they are under
[Kernels](../design/kernels/index.md)."""
