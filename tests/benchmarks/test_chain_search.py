"""`benchmarks chain_tiles`: the search on a chain whose times are known, its files, and one small run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.common import results
from benchmarks.tune import chain_programs, chain_search
from benchmarks.tune import chain_tiles as benchmark
from benchmarks.tune.chain_search import Group, Trial
from jax_sparse_conv._src import _native
from jax_sparse_conv._src.dispatch import chain_tiles
from jax_sparse_conv._src.dispatch.chain_tiles import Candidate, Key, Tile, Tiles

A, B, C, D = (tuple([1, 14, 14, channels] + [1] * 12) for channels in (64, 128, 256, 512))
TILES: list[Tile] = [(64, 56, 0, splits) for splits in (1, 2, 3, 4)]
CANDIDATES = tuple(Candidate(tile, 5000.0 + 100 * index) for index, tile in enumerate(TILES))
QUICK = ["--quick", "--networks", "resnet50", "--kinds", "default"]


class Known:
    """A chain of known times: 100 us, and what each tile adds; `beside` is added where both tiles are there."""

    def __init__(self, added: dict[tuple[Key, Tile], float], noise: float = 0.0, beside: tuple[Any, ...] = ()) -> None:
        self.added, self.noise, self.beside = added, noise, beside
        self.fails: dict[Tile, str] = {}
        self.wrong: dict[Tile, str] = {}
        self.prepared: list[Tiles] = []
        self.rng = np.random.default_rng(0)

    def prepare(self, sides: Sequence[Tiles]) -> list[str | None]:
        self.prepared += sides
        return [next((self.fails[tile] for tile in side.values() if tile in self.fails), None) for side in sides]

    def seconds(self, tiles: Tiles) -> float:
        us = 100 + sum(self.added.get(each, 0.0) for each in tiles.items())
        if self.beside and all(each in tiles.items() for each in self.beside[0]):
            us += self.beside[1]
        return 1e-6 * (us + self.noise * float(self.rng.standard_normal()))

    def why_wrong(self, key: Key, tiles: Tiles) -> str | None:
        return self.wrong.get(tiles.get(key, chain_tiles.BY_MODEL))

    def forget(self, kept: Tiles) -> None:
        self.kept = dict(kept)


def groups(*keys: Key) -> list[Group]:
    return [Group(key, 1 + index, CANDIDATES) for index, key in enumerate(keys)]


def searched(
    chain: Known, *keys: Key, seconds: int = 1000, kept: Tiles | None = None
) -> tuple[Tiles, bool, list[Trial]]:
    kept = {} if kept is None else kept
    trials: list[Trial] = []
    left = iter(range(seconds))
    ended = chain_search.search(
        groups(*keys),
        chain,
        kept,
        has_time=lambda: next(left, None) is not None,
        tried=lambda trial, _: trials.append(trial),
    )
    return kept, ended, trials


def test_the_fastest_tiles_are_kept() -> None:
    chain = Known({(A, TILES[1]): -3.0, (A, TILES[2]): -5.0, (B, TILES[3]): 4.0, (C, TILES[3]): -1.0})
    kept, ended, trials = searched(chain, A, B, C)
    assert kept == {A: TILES[2], C: TILES[3]} == chain.kept
    assert ended
    assert [trial.key for trial in trials if trial.is_faster] == [C, A]  # the one with most cycles first
    assert trials[0].before == pytest.approx(100e-6)
    assert trials[0].gain == pytest.approx(1e-6)


def test_layers_without_a_choice_are_not_timed() -> None:
    chain = Known({})
    alone = [Group(A, 9, CANDIDATES[:1]), Group(B, 9, ())]
    assert chain_search.search(alone, chain, {}, has_time=lambda: True, tried=lambda *_: None)
    assert chain.prepared == []


def test_a_second_pass_sees_what_the_first_has_changed() -> None:
    """B's tile is worth something only beside A's, which is found after it."""
    chain = Known({(A, TILES[1]): -2.0, (B, TILES[2]): 1.0}, beside=(((A, TILES[1]), (B, TILES[2])), -6.0))
    kept, _, trials = searched(chain, A, B)
    assert kept == {A: TILES[1], B: TILES[2]}
    assert [trial.key for trial in trials if trial.is_faster] == [A, B]


def test_what_gains_too_little_or_less_than_the_noise_is_not_kept() -> None:
    assert searched(Known({(A, TILES[1]): -0.15}), A)[0] == {}
    assert searched(Known({(A, TILES[1]): -0.25}), A)[0] == {A: TILES[1]}
    found = []
    for seed in range(50):
        noisy = Known({}, noise=1.0)
        noisy.rng = np.random.default_rng(seed)
        found.append(bool(searched(noisy, A)[0]))
    assert sum(found) <= 2
    steady = chain_search.trial_of(A, TILES[1], [10.0, 10.2, 9.9], [9.0, 9.2, 8.9])
    assert (steady.gain, steady.error, steady.is_faster) == (pytest.approx(1.0), pytest.approx(0.0), True)
    shaky = chain_search.trial_of(A, TILES[1], [10.0, 12.0, 9.0], [9.0, 14.0, 5.0])
    assert not shaky.is_faster


def test_wrong_results_and_programs_that_fail_are_not_kept() -> None:
    chain = Known({(A, TILES[1]): -3.0, (A, TILES[2]): -5.0, (A, TILES[3]): -9.0})
    chain.fails, chain.wrong = {TILES[3]: "does not compile"}, {TILES[2]: "relative error 0.1"}
    kept, _, trials = searched(chain, A)
    assert kept == {A: TILES[1]}
    assert "relative error 0.1" in [trial.refused for trial in trials]
    chain.fails = {TILES[1]: "no more"}
    with pytest.raises(ValueError, match="the chain does not run as it is: no more"):
        searched(chain, A, kept=kept)


def test_a_tile_that_is_kept_gives_way_to_the_models_own() -> None:
    kept, *_ = searched(Known({(A, TILES[1]): 3.0}), A, kept={A: TILES[1]})
    assert kept == {}


def test_the_search_ends_when_its_time_is_over() -> None:
    chain = Known({(each, TILES[1]): -3.0 for each in (A, B, C)})
    kept, ended, _ = searched(chain, A, B, C, seconds=2)
    assert kept == {B: TILES[1], C: TILES[1]}
    assert not ended


def test_candidates_are_near_the_best_and_few() -> None:
    found = [Candidate((64, 56, 0, splits), cycles) for splits, cycles in enumerate((100.0, 150.0, 151.0))]
    assert chain_search.chosen_candidates(found) == tuple(found[:2])
    assert len(chain_search.chosen_candidates([found[0]] * 20)) == chain_search.MOST
    assert chain_search.chosen_candidates([]) == ()
    larger = [Candidate((64, 56, 0, splits), 90.0, by_model=False) for splits in range(9, 17)]
    chosen = chain_search.chosen_candidates([*found, *larger])
    assert chosen == (*found[:2], *larger[: chain_search.MOST_LARGER])


# --- the files -------------------------------------------------------------------------------------------------------


def result(*chains: dict[str, Any], failed: Sequence[Any] = ()) -> dict[str, Any]:
    gpu = {"device": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}
    return {"gpu": gpu, "chains": list(chains), "failed": list(failed)}


def chain_of(network: str, us: tuple[float, float], *kept: tuple[Key, Tile | None, float], kind: str = "tf32") -> Any:
    listed = [{"layer": key, "count": 1, "candidates": 4, "model": TILES[0], "kept": tile, "gain_us": gain}
              for key, tile, gain in kept]  # fmt: skip
    return {"network": network, "kind": "default", "batch": 1, "chain": 0, "products": kind, "layers": 9, "tried": 3,
            "seconds": 1.0, "complete": True, "us": {"model": us[0], "kept": us[1]}, "groups": listed}  # fmt: skip


def test_results_go_into_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chain_tiles, "TABLE", tmp_path / "table.json")
    known = chain_tiles.Searched("NVIDIA H200", (9, 0), 132, {"tf32": {B: TILES[3]}, "highest": {B: TILES[3]}})
    chain_tiles.save(chain_tiles.TABLE, [known])
    first = result(
        chain_of("resnet50", (100.0, 90.0), (A, TILES[1], 2.0), (B, TILES[2], 8.0), (C, None, 9.0), (D, None, 0.0)),
        chain_of("resnet50", (100.0, 90.0), (A, TILES[2], 9.0), kind="16bit"),
    )
    second = result(
        chain_of("vgg19", (100.0, 95.0), (A, TILES[3], 5.0), (C, TILES[2], 0.0)),
        chain_of("regnetx_16gf", (100.0, 99.9), (A, TILES[2], 50.0), (C, TILES[2], 50.0)),  # not faster, all in all
    )
    for name, content in (("1.json", first), ("2.json", second), ("3.json", result())):
        (tmp_path / name).write_text(json.dumps(content))
    assert benchmark.main(["--from", *(str(tmp_path / f"{i}.json") for i in (1, 2, 3)), "--write"]) == 0
    (found,) = chain_tiles.load(chain_tiles.TABLE)
    assert (found.device, found.capability, found.multiprocessors) == ("NVIDIA H200", (9, 0), 132)
    assert found.tiles == {
        "highest": {B: TILES[3]},
        "tf32": {A: TILES[3], B: TILES[2], C: TILES[2], D: TILES[0]},  # the model's own where no other was kept
        "16bit": {A: TILES[2]},
    }
    assert "regnetx_16gf" in capsys.readouterr().out


def test_the_packages_table_is_what_the_results_say() -> None:
    (found,) = benchmark.found_tiles(benchmark.read([results.RESULTS / "h200" / "chain_tiles.json"]))
    (table,) = chain_tiles.load(chain_tiles.TABLE)
    assert table.tiles == found.tiles
    assert sum(map(len, table.tiles.values())) > 0


def test_results_that_are_none_and_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.json").write_text('{"rows": []}')
    assert benchmark.main(["--from", str(tmp_path / "no.json")]) == 1
    assert "no.json has no chains" in capsys.readouterr().err
    assert benchmark.main(["--batch", "9"]) == 1
    assert "--batch 9 is not 1 to 8" in capsys.readouterr().err
    before = chain_tiles.TABLE.read_text()
    (tmp_path / "quick.json").write_text(json.dumps({"quick": True, **result(chain_of("vgg19", (9.0, 8.0)))}))
    assert benchmark.main(["--from", str(tmp_path / "quick.json"), "--write"]) == 1
    assert "no results of --quick" in capsys.readouterr().err
    assert chain_tiles.TABLE.read_text() == before
    assert benchmark.main(["--json", str(tmp_path / "none" / "t.json")]) == 1
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "failed.json").write_text(
        json.dumps(result(failed=[{"network": "vgg19", "kind": "default", "reason": "no GPU"}]))
    )
    assert benchmark.main(["--from", str(tmp_path / "failed.json")]) == 1
    assert "vgg19, default: no GPU" in capsys.readouterr().out


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["default", "highest", "bfloat16"])
def test_the_chains_of_a_network(kind: str) -> None:
    (fused,) = chain_programs.chains_of("resnet50", kind, 2, quick=True)
    keys = fused.keys
    assert len(keys) == len(fused.layers)
    if kind == "bfloat16":  # four channels are no whole 16 bytes
        assert len(keys) == 6
    else:
        assert len(keys) == 9
        assert keys[0][:4] == (2, 16, 16, 3)
        assert len(keys[0]) == 24
    assert str(fused.operands[0].dtype) == ("bfloat16" if kind == "bfloat16" else "float32")
    named = fused.with_tiles({keys[1]: TILES[1]})
    assert [layer.tile for layer in named] == [TILES[1] if key == keys[1] else chain_tiles.BY_MODEL for key in keys]
    products = benchmark._Search("resnet50", kind, 2, 0, fused, 0.0).products
    assert products == {"default": "tf32", "highest": "highest", "bfloat16": "16bit"}[kind]
    last = max(index for index, layer in enumerate(fused.layers) if layer.residual is not None)
    alone = fused.alone(last)
    assert alone.keys == [keys[last]]
    assert len(alone.operands) == 4
    operands = chain_programs.random_operands(fused)
    assert [each.shape for each in operands] == [each.shape for each in fused.operands]
    for each in chain_programs._run(fused, {}, operands):
        assert np.isfinite(each).all()
        assert 0.01 < np.sqrt(np.mean(each**2)) < 100


def test_dense_layers_have_no_tiles_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_tiles, "candidates", lambda *of: [])
    (fused,) = chain_programs.chains_of("vgg19", "highest", 1)
    assert [layer.is_dense for layer in fused.layers] == [False] * 16 + [True] * 3
    groups = benchmark.groups_of(fused, "highest", 0)
    assert [group.key for group in groups] == list(dict.fromkeys(fused.keys[:16]))
    assert sum(group.count for group in groups) == 16


def test_programs_of_a_chain() -> None:
    (fused,) = chain_programs.chains_of("resnet50", "highest", 1, quick=True)
    key = fused.keys[2]
    programs = chain_programs.Programs(fused, "highest")
    sides: list[Tiles] = [{}, {key: TILES[1]}]
    assert programs.prepare(sides) == [None, None]
    assert all(programs.seconds(side) > 0 for side in sides)
    assert programs.why_wrong(key, sides[1]) is None
    programs._expected = [np.full((1,), 7.0)] * len(fused.results)
    assert "the chain: relative error" in str(programs.why_wrong(key, sides[1]))
    programs.forget({})
    with pytest.raises(KeyError):
        programs.seconds(sides[1])


def test_why_results_differ() -> None:
    one = [np.ones(4), np.ones(4)]
    assert chain_programs._difference(one, one, 0.0) is None
    assert "relative error 0.5, more than 0.1" in str(chain_programs._difference(one, [one[0], 1.5 * one[1]], 0.1))
    assert "nan" in str(chain_programs._difference(one, [np.full(4, np.nan), one[1]], 0.1))


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a process of the command does, with a planner's answers and a faster tile made up."""
    if jax.default_backend() != "cpu":
        pytest.skip("the planner and the times are made up here")
    monkeypatch.setattr(_native.planner(), "chain_tiles", lambda *_: [(*each.tile, each.cycles) for each in CANDIDATES])
    monkeypatch.setattr(chain_programs.Programs, "seconds", lambda self, tiles: 1e-4 - 1e-6 * len(tiles))
    monkeypatch.setattr(benchmark.command, "run", lambda module, line, flags: benchmark.main(line))
    path = tmp_path / "t.json"
    assert benchmark.main([*QUICK, "--kinds", "default", "bfloat16", "--seconds", "60", "--json", str(path)]) == 0
    (content,) = benchmark.read([path])
    assert {"date", "commit", "device", "versions", "command", "gpu"} <= content.keys()
    assert content["failed"] == []
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]
    for chain, kind in zip(content["chains"], ("default", "bfloat16"), strict=True):
        assert (chain["network"], chain["kind"], chain["complete"]) == ("resnet50", kind, True)
        assert chain["us"]["model"] == pytest.approx(100)
        assert chain["us"]["kept"] == pytest.approx(100 - len(chain["groups"]))
        assert all(group["model"] == list(TILES[0]) and group["kept"] for group in chain["groups"])
        assert chain["tried"] == len(chain["trials"]) > 0
    assert "resnet50" in capsys.readouterr().out
    assert sum(len(each.tiles["tf32"]) for each in benchmark.found_tiles([content])) == len(
        content["chains"][0]["groups"]
    )


def test_a_search_from_the_tables_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worse than the model's tile gives way to it, and what nothing is faster than stays."""
    if jax.default_backend() != "cpu":
        pytest.skip("the planner and the times are made up here")
    (fused,) = chain_programs.chains_of("resnet50", "default", 1, quick=True)
    bad, good = fused.keys[1], fused.keys[2]
    table: Tiles = {bad: TILES[3], good: TILES[1], A: TILES[1]}
    monkeypatch.setattr(chain_tiles, "known", lambda kind: table)
    monkeypatch.setattr(_native.planner(), "chain_tiles", lambda *_: [(*each.tile, each.cycles) for each in CANDIDATES])

    def seconds(self: chain_programs.Programs, tiles: Tiles) -> float:
        return 1e-4 + (9e-6 if bad in tiles else 0) - (5e-6 if tiles.get(good) == TILES[1] else 0)

    monkeypatch.setattr(chain_programs.Programs, "seconds", seconds)
    monkeypatch.setattr(benchmark.command, "run", lambda module, line, flags: benchmark.main(line))
    path = tmp_path / "t.json"
    assert benchmark.main([*QUICK, "--kinds", "default", "--from-table", "--json", str(path)]) == 0
    (content,) = benchmark.read([path])
    (chain,) = content["chains"]
    assert [chain["us"][name] for name in ("model", "start", "kept")] == pytest.approx([100, 104, 95])
    kept = {tuple(group["layer"]): group["kept"] for group in chain["groups"] if group["kept"] is not None}
    assert kept == {bad: list(TILES[0]), good: list(TILES[1])}
    (found,) = benchmark.found_tiles([content])
    assert found.tiles["tf32"] == {tuple(group["layer"]): TILES[0] for group in chain["groups"]} | {good: TILES[1]}


def test_a_network_that_fails_keeps_what_others_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chains_of(name: str, kind: str, batch: int, quick: bool) -> list[Any]:
        raise ValueError(f"{kind} is broken")

    monkeypatch.setattr(chain_programs, "chains_of", chains_of)
    monkeypatch.setattr(benchmark.command, "run", lambda module, line, flags: benchmark.main(line))
    path = tmp_path / "t.json"
    assert benchmark.main([*QUICK, "--kinds", "default", "highest", "--json", str(path)]) == 1
    printed = capsys.readouterr().out
    assert (
        "resnet50, default: ValueError: default is broken\nresnet50, highest: ValueError: highest is broken" in printed
    )

    def dies(module: str, line: Sequence[str], flags: str) -> None:
        assert "command_buffer" in flags
        raise ValueError("python -m benchmarks chain_tiles ended with status -11")

    monkeypatch.setattr(benchmark.command, "run", dies)
    assert benchmark.main([*QUICK, "--json", str(path)]) == 1
    assert "the process ended with status -11" in capsys.readouterr().out
    assert not path.exists()
