"""Tiles of the layers of networks' chains, found by timing whole chains.

    python -m benchmarks chain_tiles --networks resnet50 --kinds default --json tiles.json --write
    python -m benchmarks chain_tiles --from tiles.json more.json --write    # measures nothing

Chains are those that `rewrite.fuse` makes of a network, compiled by themselves with seeded weights, as CUDA graphs.
For one kind of layer after the other, those with most of the time first, every tile that the planner expects to take at
most 1.5 times as long as its best, up to 16 of them, takes turns with the tiles kept so far; the two best do so again,
and one is kept where the chain is faster by more than 0.2 % and by more than the noise, and its results are right. Two
passes at most. Times are of a chain, from samples of 30 ms, without what a call costs the host. "us" has the model's
tiles beside those that the search began with and those kept, in turns once more at the end and of programs compiled
anew; "gain_us" of a layer is what its turns said when it was kept, which is more than it is worth: the best of many,
each timed by one program. --from-table begins with the tiles that the package's table has.

What goes into the table are the tiles of all layers of a chain that is faster so than by the model, its own where no
other was kept: together they took that time, whatever a later model would choose for some of them.

Every network runs in a process of its own. --json is written after every tile that is kept, and a network that fails
keeps what it had; without --json nothing is kept but by --write, which adds to the table of the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command, results, tables
from benchmarks.common.cases import KINDS
from benchmarks.tune import chain_programs, chain_search
from benchmarks.tune.chain_programs import FusedChain
from benchmarks.tune.chain_search import Group, Trial
from jax_sparse_conv import models
from jax_sparse_conv._src import devices, environment
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.dispatch.chain_tiles import Key, Searched, Tiles
from jax_sparse_conv._src.fusion import chain_rules

NETWORKS = ("resnet50", "vgg19", "regnetx_16gf")
LEAST_OF_ALL = 0.005
"""Of a chain's time, that all its tiles must gain together to go into the table."""

_SUITE = "chain_tiles"
_PROGRAMS, _ROUNDS = 3, 5  # of the last turns: programs of either side, and samples of each
_START = time.perf_counter()
_COLUMNS = (
    ("network", "network", "<", "{}"),
    ("kind", "kind", "<", "{}"),
    ("layers", "layers", ">", "{}"),
    ("model_us", "model us", ">", "{:.1f}"),
    ("start_us", "start us", ">", "{:.1f}"),
    ("kept_us", "kept us", ">", "{:.1f}"),
    ("ratio", "ratio", ">", "{:.3f}"),
    ("changed", "tiles kept", ">", "{}"),
    ("tried", "tried", ">", "{}"),
    ("seconds", "s", ">", "{:.0f}"),
    ("complete", "complete", "<", "{}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print a table, and write a JSON file and the package's tiles; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        if options.child:
            _search_all(options, _Report(options.json))
            return 0
        command.check_folder("--json", options.json)
        if options.batch < 1 or options.batch > chain_rules.MAX_IMAGES:
            raise ValueError(f"--batch {options.batch} is not 1 to {chain_rules.MAX_IMAGES}, what chains have")
        contents = read(options.files) if options.files else [_measured(options, arguments)]
        chains = [chain for content in contents for chain in content["chains"]]
        if options.write:
            _write(contents)
    except (OSError, ValueError) as error:
        print(f"benchmarks {_SUITE}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(tables.aligned([_row(chain) for chain in chains], _COLUMNS))
    failed = [failure for content in contents for failure in content["failed"]]
    for failure in failed:
        print(f"{failure['network']}, {failure['kind']}: {failure['reason']}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(_SUITE, __doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=sorted(models.NETWORKS), default=list(NETWORKS), metavar="NAME")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="precision or dtype")
    add("--batch", type=int, default=1)
    add("--seconds", type=float, default=600.0, help="for each network and kind; then what has been kept is the result")
    add("--json", type=Path, help="file of results that the chains go into")
    add("--write", action="store_true", help="add the tiles kept to the package's table")
    add("--from-table", action="store_true", help="begin with the package's tiles in the place of the model's")
    add("--from", dest="files", nargs="+", type=Path, help="take the results of these files, measure nothing")
    add("--quick", action="store_true", help="tiny networks: does everything run?")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def _progress(text: str) -> None:
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


# --- the process that starts others: it asks nothing of JAX, so as not to take the GPU --------------------------------


def _measured(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What the processes of all networks found."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.json.with_suffix(".part.json") if options.json else Path(folder) / "tiles.json"
        named = {"command": command.portable(_SUITE, arguments), "seconds": options.seconds, "quick": options.quick}
        command.write(path, {**named, "chains": [], "failed": []}, indent=1)
        for network in options.networks:
            line = ["--child", "--networks", network, "--kinds", *options.kinds, "--batch", str(options.batch)]
            line += ["--seconds", str(options.seconds), "--json", str(path), *(["--quick"] if options.quick else [])]
            line += ["--from-table"] if options.from_table else []
            try:
                command.run(_SUITE, line, command.COMMAND_BUFFERS)
            except ValueError as error:
                reason = str(error).rsplit(" ended ", 1)[-1]
                _progress(f"{network}: the process ended {reason}")
                report = _Report(path)
                report.fail(network, "all that it had not said", f"the process ended {reason}")
        (content,) = read([path])
        if content["chains"]:
            results.add(options.json, _SUITE, content)
        path.unlink()  # what a search that is cut short leaves
        return content


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What processes found: a content for every run of a file of results."""
    contents: list[dict[str, Any]] = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("suite") == _SUITE:
            contents += _by_run(content)
            continue
        if not isinstance(content, dict) or not {"chains", "failed"} <= content.keys():
            raise ValueError(f"{path} has no chains: it is no result of the suite {_SUITE}")
        contents.append(content)
    return contents


def _by_run(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, run in enumerate(content["runs"]):
        chains = [row for row in content["rows"] if row["run"] == number]
        yield {"failed": [], **run, "chains": chains, "quick": any(chain.get("quick") for chain in chains)}


def _row(chain: Mapping[str, Any]) -> tables.Row:
    us = chain["us"]
    changed = sum(group["kept"] is not None for group in chain["groups"])
    named = {name: chain[name] for name in ("network", "kind", "layers", "tried", "seconds", "complete")}
    times = {
        "model_us": us["model"],
        "start_us": us.get("start", us["model"]),  # files from before there was a choice
        "kept_us": us["kept"],
        "ratio": us["model"] / us["kept"],
    }
    return {**named, **times, "changed": changed}


def _write(contents: Sequence[Mapping[str, Any]]) -> None:
    """Add what results kept to the package's table.

    Raises:
      ValueError: results of --quick, whose networks nobody has.
    """
    if any(content.get("quick") for content in contents):
        raise ValueError("--write takes no results of --quick, whose networks are not those of the registry")
    tables_of_gpus = chain_tiles.load(chain_tiles.TABLE)
    for found in found_tiles(contents):
        tables_of_gpus = chain_tiles.merged(tables_of_gpus, found)
        count = sum(map(len, found.tiles.values()))
        _progress(f"{count} tiles of {found.device} go into {chain_tiles.TABLE.name}")
    chain_tiles.save(chain_tiles.TABLE, tables_of_gpus)


def found_tiles(contents: Sequence[Mapping[str, Any]]) -> list[Searched]:
    """The tiles of results, by GPU: of chains that are faster by them, of layers in several what gained most.

    The model's own, of layers that warpgroups take, stand behind all that were kept; of two as good it is the larger.
    """
    best: dict[tuple[str, tuple[int, int], int], dict[tuple[str, Key], tuple[bool, float, chain_tiles.Tile]]] = {}
    for content in contents:
        if not content["chains"]:
            continue
        gpu = content["gpu"]
        major, minor = gpu["capability"]
        tiles = best.setdefault((str(gpu["device"]), (major, minor), int(gpu["multiprocessors"])), {})
        for chain in content["chains"]:
            model, kept = chain["us"]["model"], chain["us"]["kept"]
            if model - kept <= LEAST_OF_ALL * model:
                continue
            for group in (group for group in chain["groups"] if group["model"] is not None):
                place, is_kept = (chain["products"], chain_tiles.checked_key(group["layer"])), group["kept"] is not None
                tile = chain_tiles.checked_tile(group["kept"] if is_kept else group["model"])
                found = is_kept, float(group["gain_us"]), tile
                tiles[place] = max(found, tiles.get(place, found))
    return [Searched(*gpu, {kind: _of_kind(tiles, kind) for kind in chain_tiles.KINDS}) for gpu, tiles in best.items()]


def _of_kind(tiles: Mapping[tuple[str, Key], tuple[bool, float, chain_tiles.Tile]], kind: str) -> Tiles:
    return {key: tile for (of, key), (*_, tile) in tiles.items() if of == kind}


# --- the process of one network ---------------------------------------------------------------------------------------


class _Report:
    """The JSON file: what is there, and this process's chains behind it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = read([path])[0]

    def describe(self) -> None:
        """Add date, versions and GPU, once."""
        device = devices.current()
        gpu = {
            "device": environment.device_name(),
            "capability": device.capability,
            "multiprocessors": device.multiprocessors,
        }
        self._content = {**environment.describe_run(), "gpu": gpu, **self._content}

    def add(self, chain: dict[str, Any]) -> None:
        """Write a chain, in the place of what was there of it."""
        of = ("network", "kind", "chain", "batch")
        others = [each for each in self._content["chains"] if any(each[name] != chain[name] for name in of)]
        self._content["chains"] = [*others, chain]
        command.write(self._path, self._content, indent=1)

    def fail(self, network: str, kind: str, reason: str) -> None:
        """Write why there is not more."""
        self._content["failed"].append({"network": network, "kind": kind, "reason": reason})
        command.write(self._path, self._content, indent=1)


def _search_all(options: argparse.Namespace, report: _Report) -> None:
    report.describe()
    for network in options.networks:
        for kind in options.kinds:
            start = time.perf_counter()
            try:
                found = chain_programs.chains_of(network, kind, options.batch, options.quick)
                for index, fused in enumerate(found):
                    left = options.seconds - (time.perf_counter() - start)
                    end = time.perf_counter() + left / (len(found) - index)
                    _search_chain(_Search(network, kind, options.batch, index, fused, end, options.from_table), report)
            except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:  # and XLA's, a RuntimeError
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                _progress(f"{network}, {kind}: {reason}")
                report.fail(network, kind, reason)


@dataclasses.dataclass(frozen=True)
class _Search:
    """A chain to be searched until a time of `time.perf_counter`, from the table's tiles or the model's on."""

    network: str
    kind: str
    batch: int
    index: int
    fused: FusedChain
    end: float
    from_table: bool = False

    def start(self) -> Tiles:
        """The tiles that the search begins with, of the layers that have them."""
        table = chain_tiles.known(self.products) if self.from_table else {}
        return {key: table[key] for key in dict.fromkeys(self.fused.keys) if key in table}

    @property
    def products(self) -> str:
        """The kind of `chain_tiles.KINDS`."""
        precise = chain_rules.is_precise(self.fused.layers[0].config, self.fused.operands[0].dtype)
        return chain_tiles.kind_of(self.fused.operands[0].dtype.itemsize, precise)


def groups_of(fused: FusedChain, products: str, device: devices.Device) -> list[Group]:
    """The kinds of convolutions of a fused chain, with what is worth timing of each."""
    keys = [key for key, layer in zip(fused.keys, fused.layers, strict=True) if not layer.is_dense]
    return [
        Group(key, keys.count(key), chain_search.chosen_candidates(chain_tiles.candidates(key, products, device)))
        for key in dict.fromkeys(keys)
    ]


def _search_chain(of: _Search, report: _Report) -> None:
    start = time.perf_counter()
    groups = groups_of(of.fused, of.products, devices.current())
    chain = chain_programs.Programs(of.fused, of.products)
    begun = of.start()
    reason = chain.prepare([begun])[0]
    if reason is not None:
        raise ValueError(f"the chain does not run: {reason}")
    first = sorted(chain.seconds(begun) for _ in range(5))[2]
    kept = dict(begun)
    gains: dict[Key, float] = {}
    trials: list[Trial] = []
    us = dict.fromkeys(("model", "start", "kept"), 1e6 * first)

    def write(complete: bool) -> None:
        row = {"network": of.network, "kind": of.kind, "batch": of.batch, "chain": of.index, "products": of.products}
        row |= {"layers": len(of.fused.layers), "us": us, "complete": complete, "tried": len(trials)}
        row |= {"pays": _pays(of.fused), "seconds": time.perf_counter() - start}
        described = [_described(group, begun, kept, gains) for group in groups]
        report.add({**row, "groups": described, "trials": _trials(trials)})

    def tried(trial: Trial, tiles: Tiles) -> None:
        trials.append(trial)
        is_kept = trial.refused is None and trial.is_faster
        text = "kept" if is_kept else trial.refused or "not faster"
        gain = f"{1e6 * trial.gain:+.2f} us of {1e6 * trial.before:.1f} (error {1e6 * trial.error:.2f})"
        _progress(f"{of.network}, {of.kind}: {list(trial.key)} by {list(trial.tile)} {gain}: {text}")
        if is_kept:
            gains[trial.key] = gains.get(trial.key, 0.0) + 1e6 * trial.gain
            us["kept"] = 1e6 * (trial.before - trial.gain)
            write(False)

    _progress(f"{of.network}, {of.kind}: {len(of.fused.layers)} layers, {us['start']:.1f} us")
    complete = chain_search.search(groups, chain, kept, has_time=lambda: time.perf_counter() < of.end, tried=tried)
    us |= dict(zip(us, _last_turns(of, [{}, begun, kept]), strict=True))
    write(complete)
    times = f"{us['model']:.1f} us by the model, {us['start']:.1f} at the start"
    _progress(f"{of.network}, {of.kind}: {times}, {us['kept']:.1f} by {len(kept)} tiles kept")


def _last_turns(of: _Search, sides: Sequence[Tiles]) -> list[float]:
    """Microseconds of the chain by each of these tiles, in programs that no turn has chosen.

    Programs of the same tiles differ, by where their buffers lie perhaps, and the search kept the fastest of many.
    """
    found = []
    for _ in range(_PROGRAMS):
        fresh = chain_programs.Programs(of.fused, of.products)
        found.append(chain_search.turns(fresh, sides, _ROUNDS))
    return [1e6 * statistics.median(side) for side in zip(*found, strict=True)]


def _pays(fused: FusedChain) -> bool:
    """Whether networks make a chain of it by themselves."""
    return chain_rules.pays(fused.calls)


def _described(group: Group, begun: Tiles, kept: Tiles, gains: Mapping[Key, float]) -> dict[str, Any]:
    model = group.candidates[0].tile if group.candidates else None
    found = {"layer": group.key, "count": group.count, "candidates": len(group.candidates), "model": model}
    given_way = model if group.key in begun else None  # to the model's, which is to take the place of what was there
    return {**found, "kept": kept.get(group.key, given_way), "gain_us": gains.get(group.key, 0.0)}


def _trials(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    return [
        {"layer": each.key, "tile": each.tile, "before_us": 1e6 * each.before, "gain_us": 1e6 * each.gain,
         "error_us": 1e6 * each.error, "refused": each.refused}
        for each in trials
    ]  # fmt: skip
