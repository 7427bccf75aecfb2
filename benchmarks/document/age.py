"""How far behind the kernels the files of results are: commits to the sources since the oldest row that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import paper_rows, results
from benchmarks.common.results import RESULTS, ROOT, Row

MOST_BEHIND = 20  # commits to a GPU's kernels after its log of tests
MOST_FAILED = 10  # tests of the newest run of all
_OF_GPUS, _OF_CPUS = ("cuda", "native"), ("cpu", "native")
_ALL_TESTS = "tests"
_PAPERS = "paper"  # a folder of a device's


@dataclass(frozen=True)
class Age:
    """Of a file: what it shows, and the commits since."""

    file: str
    rows: int
    dates: str
    commit: str
    behind: int | None  # None: the clone does not know the commit


def no_history(root: Path = ROOT) -> str | None:
    """Why commits cannot be counted, where they cannot."""
    if results.git("rev-parse", "--show-toplevel", root=root) != str(root.resolve()):
        return "this is no clone"
    if results.git("rev-parse", "--is-shallow-repository", root=root) == "true":
        return "this clone is shallow"
    return None


def of_files(folder: Path = RESULTS, root: Path = ROOT) -> list[Age]:
    """Those of every device's files."""
    ages = []
    for path in sorted([*folder.glob("*/*.json"), *folder.glob(f"*/{_PAPERS}/*.json")]):
        shown = _shown(path)
        if shown:
            file = path.relative_to(folder)
            commit = shown[0]["commit"]
            behind = commits_since(commit, _OF_CPUS if _is_of_cpu(file) else _OF_GPUS, root)
            ages.append(Age(file.as_posix(), len(shown), paper_rows.dates(shown), str(commit), behind))
    return ages


def _shown(path: Path) -> Sequence[Row]:
    """The rows of a file that are shown or count, the oldest first."""
    if path.parent.name == _PAPERS:
        return paper_rows.read(path)
    rows = [row for row in results.read(path) if "label" not in row]
    return counted_tests(rows) if path.stem == "tests" else rows


def commits_since(commit: str | None, sources: Sequence[str], root: Path = ROOT) -> int | None:
    """Commits after this one that changed the sources; None where the clone does not know it."""
    found = commit and results.git("rev-list", "--count", f"{commit}..HEAD", "--", *sources, root=root)
    return int(found) if found else None


def counted_tests(rows: Sequence[Row]) -> Sequence[Row]:
    """Runs of some of the tests do not count once all have run after them."""
    whole = [place for place, row in enumerate(rows) if row["tests_of"] == _ALL_TESTS]
    return rows[whole[-1] :] if whole else rows


def old_logs(ages: Sequence[Age]) -> list[str]:
    """What is refused: that on no GPU the tests have run since its kernels changed too often.

    One GPU's log has to be young. The others' say themselves how old they are, as not every GPU is there all the time.
    """
    logs = [age for age in ages if Path(age.file).stem == "tests" and not _is_of_cpu(Path(age.file))]
    known = [(age.behind, age.file) for age in logs if age.behind is not None]
    if len(known) < len(logs) or not known or min(known)[0] <= MOST_BEHIND:
        return []
    behind, file = min(known)
    return [
        f"{file}, the newest log, is {behind} commits to {' and '.join(_OF_GPUS)} behind, more than {MOST_BEHIND}: "
        "run python -m benchmarks tests on a GPU"
    ]


def failures(folder: Path = RESULTS) -> tuple[list[str], list[str]]:
    """Of the logs of tests: which tests failed in runs that count, and logs that are refused for too many."""
    notes, refused = [], []
    for path in sorted(folder.glob("*/tests.json")):
        file = path.relative_to(folder).as_posix()
        for row in counted_tests([row for row in results.read(path) if "label" not in row]):
            if row["failed"]:
                notes.append(f"{file}: {row['failed']} failed of {row['tests_of']}, commit {row['commit']}:")
                notes += [f"  {name}" for name in row["failures"]]
            if row["tests_of"] == _ALL_TESTS and row["failed"] > MOST_FAILED:
                refused.append(f"{file}: {row['failed']} tests of the newest run failed, more than {MOST_FAILED}")
    return notes, refused


def without_log(folder: Path = RESULTS) -> list[str]:
    """Devices that have no log of the tests."""
    devices = sorted({path.parent for path in folder.glob("*/*.json")})
    return [device.name for device in devices if not (device / "tests.json").is_file()]


def _is_of_cpu(file: Path) -> bool:
    return file.parts[0].startswith("cpu_")
