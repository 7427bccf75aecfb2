"""What is chosen for every layer is what the golden files say: a change of it is a change to review."""

from __future__ import annotations

import decisions
import gradient_decisions
import pytest

CASES = [(name, platform, kind) for name, (platform, kinds) in decisions.files().items() for kind in kinds]


@pytest.mark.parametrize(("name", "platform", "kind"), CASES)
def test_choices_are_those_of_the_golden_file(name: str, platform: str, kind: str) -> None:
    """If this change is meant, `python tests/golden/decisions.py` writes the files anew."""
    compare(name, decisions.text_of(platform, kind))


@pytest.mark.parametrize(("name", "platform"), gradient_decisions.FILES.items())
def test_gradients_are_those_of_the_golden_file(name: str, platform: str) -> None:
    """If this change is meant, `python tests/golden/gradient_decisions.py` writes the files anew."""
    compare(name, gradient_decisions.text_of(platform))


def compare(name: str, text: str) -> None:
    expected, found = (decisions.FOLDER / name).read_text(encoding="utf-8").splitlines(), text.splitlines()
    changed = [f"{was} -> {now}" for was, now in zip(expected, found, strict=False) if was != now]
    assert not changed, "\n".join([f"{len(changed)} of {len(expected)} lines of {name} changed:", *changed[:10]])
    assert len(found) == len(expected)


@pytest.mark.parametrize("network", ["lenet5", "resnet18"])
def test_the_calls_are_those_of_the_networks(network: str) -> None:
    known = set(decisions.calls())
    assert known.issuperset(decisions.traced_calls([network]))
