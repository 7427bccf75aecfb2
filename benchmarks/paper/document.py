"""docs/papers.md: every claim of the sources beside what the committed results say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import paper_rows
from benchmarks.common.cases import KINDS
from benchmarks.common.results import RESULTS, read
from benchmarks.networks import network_rows, networks
from benchmarks.networks.network_cases import ARGUMENTS
from benchmarks.paper import answers
from benchmarks.paper.answers import NOT_YET, Content
from benchmarks.paper.claims import CHENG, CHENG_PARTS, CHENG_PRINTED, claims
from benchmarks.suites import direct_ablation

_GPU = "h200"  # a folder of results
_GPUS, _CPUS = (_GPU, "h100"), ("cpu_amd_epyc", "cpu_intel_xeon")  # the first that has an experiment counts
_CASE = "{}/{}/{}"  # network, kind and batch
_CHENG_BATCH = 8  # of ResNet-50's layer there


def document(results: Path = RESULTS) -> str:
    """docs/papers.md, from a folder of results."""
    files = {device: _contents(results / device / "paper") for device in (*_GPUS, *_CPUS)}
    gpu, cpu = (_first(files, devices) for devices in (_GPUS, _CPUS))
    runs = sorted(read(results / _GPU / "run.json"), key=_order_of_run)
    lines = [_HEADER, _table(gpu, cpu, "O"), "", _RUNS, *map(_run_line, runs)]
    lines += _network_lines(results / _GPU / "networks.json")
    lines += [_CUSNN_HEADER, _table(gpu, cpu, "C"), _ZEROS]
    for start, contents in (("", gpu), ("cpu/", cpu)):
        for name, content in contents.items():
            lines += answers.zeros_lines(f"{start}{name}", content)
    lines += [_CHENG, *_cheng_lines(results), "", _FILES]
    for device, contents in files.items():
        lines += [_file_line(f"{device}/paper/{name}", content) for name, content in contents.items()]
    return "\n".join(lines) + "\n"


def _order_of_run(run: Content) -> tuple[str, bool, str]:
    return run["network"], bool(run["plan"]), run["precision"]


def _contents(folder: Path) -> dict[str, Content]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def _first(files: dict[str, dict[str, Content]], devices: Sequence[str]) -> dict[str, Content]:
    """By experiment, the content of the first device that has it."""
    return {name: content for device in reversed(devices) for name, content in files[device].items()}


def _card(content: Content) -> str:
    """Which GPU it was, where it was not that of the column."""
    device = str(content.get("device", ""))
    return f" ({device.removeprefix('NVIDIA ')})" if device.startswith("NVIDIA") and "H200" not in device else ""


def _table(gpu: dict[str, Content], cpu: dict[str, Content], source: str) -> str:
    lines = [
        "| no. | claim | paper | H200 | CPU, 2 cores | dense baseline here | experiment | why they differ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in claims():
        if claim.number.startswith(source):
            counted = {**cpu, **gpu} if claim.is_count else gpu
            ours = [
                claim.ours(content) + _card(content) if (content := found.get(claim.experiment)) else NOT_YET
                for found in (counted, cpu)
            ]
            measured = (*ours, claim.baseline, f"`{claim.experiment}`")
            cells = (claim.number, claim.text, claim.theirs, *measured, claim.why)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _network_lines(path: Path) -> list[str]:
    """What `benchmarks networks` has measured, where it has."""
    if not path.is_file():
        return []
    lines = [_NETWORKS]
    rows = {row["case"]: row for row in network_rows.read([path]) if row["weights"] == ARGUMENTS}
    cases = itertools.product(networks.NETWORKS, KINDS, networks.BATCHES)
    for row in (rows[name] for name in map(_CASE.format, *zip(*cases, strict=True)) if name in rows):
        for side, us in row["us"].items():
            zeros = "" if row["zeros_percent"] is None else f"{row['zeros_percent']:.0f} %"
            times = [f"{row['us']['xla']:.0f}" if "xla" in row["us"] else NOT_YET, f"{us:.0f}"]
            found = [f"{row[key][side]:.2f}x" if side in row[key] else NOT_YET for key in ("ratio", "no_zeros_ratio")]
            if side != "xla":
                cells = (row["network"], row["kind"], str(row["batch"]), zeros, side, *times, *found)
                lines.append(f"| {' | '.join(cells)} | {row['roof_percent'][side]:.0f} % |")
    return lines


def _cheng_lines(results: Path) -> list[str]:
    measured = _of_ablation(results)
    devices = {row["layer"]: row for row in measured if row["step"] != "parts"}
    lines = []
    for row in direct_ablation.figures(measured):
        baseline, why = CHENG[row["figure"]]
        effect = f"{row['change_percent']:+.0f} %"
        if row["figure"] in direct_ablation.TOTALS:
            effect = f"{row['without_us'] / row['with_us']:.1f}x"
        effect += f" ({row['without_us']:.1f} to {row['with_us']:.1f} us){_card(devices[row['layer']])}"
        cells = (f"D{row['figure']}", row["technique"], row["layer"], row["paper"], effect, baseline, why)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *_parts_lines(measured), *_direct_today(results / _GPU)]


def _of_ablation(results: Path) -> list[Content]:
    """Rows of the first GPU, and of the others those of what it has none."""
    rows: list[Content] = []
    for device in _GPUS:
        path = results / device / "direct_ablation.json"
        known = {(row["layer"], row["step"]) for row in rows}
        rows += [row for row in read(path) if (row["layer"], row["step"]) not in known] if path.is_file() else []
    return rows


def _parts_lines(measured: Sequence[Content]) -> Iterator[str]:
    """Where the time of the paper's kernel goes, and a dash for each layer of which that is not measured."""
    for layer in direct_ablation.LAYERS_OF_TABLE_1:
        if not any(row["layer"] == layer for row in measured):
            yield f"| D1 | all of the above | {layer} | 32x32 filters | {NOT_YET} | as above | {CHENG_PRINTED} |"
        parts = {row["engine"]: row for row in measured if row["layer"] == layer and row["step"] == "parts"}
        for number, what, theirs, engine, key, why in CHENG_PARTS:
            unit = "bytes" if key.endswith("bytes") else "%"
            ours = f"{parts[engine][key]:.0f} {unit}{_card(parts[engine])}" if engine in parts else NOT_YET
            cells = (number, what, layer, theirs, ours, "none", why)
            yield f"| {' | '.join(cells)} |"


def _direct_today(results: Path) -> list[str]:
    """What the package's own kernel takes on the second layer, against XLA."""
    wanted = {"layer": "resnet50 conv3 3x3", "batch": _CHENG_BATCH, "precision": "highest", "requested": "direct"}
    row = next(row for row in read(results / "layers.json") if wanted.items() <= row.items())
    return [
        "",
        f"On ResNet-50's layer XLA at HIGHEST takes {row['xla_us']:.1f} us and the package's `direct`, with tiles and "
        f"products of this GPU's own,\n{row['ours_us']:.1f} (`{_GPU}/layers.json`).",
    ]


def _run_line(content: Content) -> str:
    times = content["totals"]["network"]
    slowest = min(content["layers"], key=lambda layer: layer["ratio"])
    chosen = "plan" if content.get("plan") else f"`{content['implementation']}`"
    cells = (content["network"], content["precision"], chosen, _flags(content["xla_flags"]))
    measured = (f"{times['dense_us']:.0f}", f"{times['sparse_us']:.0f}", f"{times['ratio']:.2f}x")
    where = (f"{slowest['ratio']:.2f}x, {slowest['path']}", content["date"][:10])
    return f"| {' | '.join((*cells, *measured, *where))} |"


def _flags(found: str | list[str]) -> str:
    if isinstance(found, list):
        return "both XLA flag sets, the faster"
    return "command buffers" if "command_buffer" in found else "XLA's default flags"


def _file_line(name: str, content: Content) -> str:
    flags = _flags(content["xla_flags"])
    dates = paper_rows.dates(paper_rows.of(content)) if content["rows"] else content["date"][:10]
    return f"| `{name}.json` | {content['device']} | {dates} | {content['repeats']} | {flags} |"


_HEADER = """# The papers' claims and today's answers

Written by `python -m benchmarks document` from the files in `benchmarks/results/`; do not edit. A dash is
what has not been measured. Each row is one claim, the paper's number, ours, and the experiment that measured it
(`python -m benchmarks paper NAME`; the figures are beside the JSON files). The dense baseline is XLA's convolution
with bias and ReLU in the same jit, which picks the fastest of cuDNN's algorithms: "highest" is float32, "default"
is XLA's default precision, TF32 on this GPU. Ratios are XLA's time over ours, above 1 is a gain; several layers are
a geometric mean. Batch 1 and float32 unless said otherwise; the conversion to a sparse format is always included.
`ecr`, `pecr`, `coo` and `direct` are implementations, `auto` is `implementation=None` at HIGHEST and `auto default`
at the default precision, `ocpa` is PECR where a pool follows and ECR elsewhere. `direct` skips no zeros, and `None`
takes it for most layers at batch 1 on a GPU and for those with few zeros on a CPU: what `auto` gains there is the
kernel. "Profile" maps are those of a network with seeded weights that has a trained network's zeros. On the H200
the faster of XLA's default flags and of command buffers counts, on either side; the list of files at the end says
where only one of them was run. A cell of the H200's column that names another GPU is that one's, because no H200 has
run it. The CPU's column is of an AMD EPYC; what is counted is the same on every machine. Under command buffers XLA's
own side is the faster in nearly every row of which there are both; under the default flags the host launches every
kernel, which DenseNets at batch 1 wait for.

## ECR, PECR, OCPA (Xu et al. 2023, and their 2019 versions)
"""

_RUNS = """Whole networks by `python -m jax_sparse_conv run` on the H200 (`h200/run.json`), with the kernels of
that date (microseconds of a call, dense and sparse, batch 1). Sparse: a plan, or an implementation for all layers; the
slowest layer is the one with the least gain, timed by itself:

| network | precision | sparse | flags | dense us | sparse us | ratio | slowest layer | date |
|---|---|---|---|---|---|---|---|---|"""

_NETWORKS = """
Whole networks by `python -m benchmarks networks` on the H200 (`h200/networks.json`; microseconds of a call under
command buffers; a dash where XLA's own side stopped there with cuDNN's status 5003; `fused` is `None` with all
chains). Without zeros: biases so high that no ReLU clips anything; what is left of the gain there is the kernel.
Roofline: the share of the time that moving weights and maps once, or the dense operations, must take.

| network | precision | batch | zeros | side | XLA us | us | over XLA | without zeros | roofline |
|---|---|---|---|---|---|---|---|---|---|"""

_CUSNN_HEADER = """
## cuSNN, COO* (Xiang et al. 2022)
"""

_ZEROS = """
## Zeros, and what is left without them

Every experiment's geometric means over XLA at HIGHEST: on real maps (of a trained network, or of a network with its
zeros), on independent zeros (the layers' own, or all those of a sweep) and without zeros, where what is left of the
gain is not from them; and the time on a map of nothing but zeros in that on the layer's own, which is the conversion to
a sparse format and what a call costs anyway. `auto` has no such share, because it may run a dense kernel.

Whole networks (`networks`, `cusnn_fig12`, `cusnn_fig13`) have no independent zeros: a layer's map is what the layers
before make of it. Theirs without zeros and of nothing but zeros come from biases so high that no ReLU clips anything
and so low that each clips everything; the layer that reads the image and the fully connected ones are in all of them.
Not in the table are experiments that compare no sparse side with XLA. `cusnn_fig8`, `cusnn_fig9` and
`cusnn_microkernel` compare configurations or kernels with each other (on real maps and 0, 50 and 85 % of independent
zeros: C8 and C9). `fig3` and `cusnn_fig3` time XLA alone. `fig2`, `cusnn_fig2` and `memory` count and time nothing.

| experiment | side | real maps | i.i.d. zeros | 0 % zeros | conversion, at most |
|---|---|---|---|---|---|"""

_CHENG = """
## Tuned direct convolution (Cheng et al. 2018)

The effect of each technique on the time, by `python -m benchmarks direct_ablation` on the H200
(`h200/direct_ablation.json`). The paper counts cycles of a simulated GTX 480, where the two units are added to the
simulator; there is no unit for inner products, and tensor cores are the one for outer products. "The paper's" layer is
its Table 1 with filters of 5x5; those of 32x32 that it prints are a layer of their own. Every baseline is dense: the
same kernel without the technique. D8 to D25 are of a kernel written as Figs. 5 to 12 print it
(`benchmarks/suites/direct_parts.cu`).

| no. | technique | layer | paper | H200 | dense baseline here | why they differ |
|---|---|---|---|---|---|---|"""

_FILES = """## Result files

| file | device | measured | repeats | flags |
|---|---|---|---|---|"""
