"""The commands `doctor` and `env`: what they say of an installation, whole and broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src import _native, environment
from jax_sparse_conv._src.cli import doctor
from jax_sparse_conv._src.dispatch import folders


def test_env_needs_nothing_optional(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("rich", "matplotlib", "PIL", "sklearn", "safetensors"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for line in ("versions:", f"  jax: {jax.__version__}", "build:", "targets:", "devices: ", "gpu driver: "):
        assert line in out


def test_env_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"] == jax.__version__
    assert set(found["targets"]) == {"cpu", "cuda"}
    assert found["backend"] == jax.default_backend()


def test_env_survives_whatever_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the driver\nis gone")

    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(_native, "registered_targets", broken)
    monkeypatch.setattr(_native, "missing_reasons", lambda: {"cpu": "ImportError: libfoo.so.1: cannot open"})
    monkeypatch.setattr(_native, "cpu_isa", broken)
    monkeypatch.setitem(sys.modules, "jax_sparse_conv._build_info", None)
    monkeypatch.setenv("PATH", "")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "  cpu: ImportError: libfoo.so.1: cannot open" in out
    assert "devices: unavailable: RuntimeError: the driver is gone" in out
    assert "targets: unavailable: RuntimeError" in out
    assert "build: unavailable: ModuleNotFoundError" in out
    assert "gpu driver: none" in out


def by_topic(topic: str) -> list[doctor.Finding]:
    return [finding for finding in doctor.examine() if finding.topic == topic]


def broken(*_: Any) -> Any:
    raise RuntimeError("the driver\nis gone")


def test_a_whole_installation(capsys: pytest.CaptureFixture[str]) -> None:
    if _native.missing_reasons().get("cpu"):
        pytest.skip("the native kernels are not built here")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out
    assert f"a convolution that skips zeros is right on {jax.default_backend()}" in out
    assert out.splitlines()[-1] == "Nothing is broken."
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["topic"] for each in found} >= {"versions", "devices", "custom calls", "table", "flags", "extras"}
    assert not any(each["is_broken"] for each in found)


def test_what_is_broken_names_its_cure_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_native, "missing_reasons", lambda: {"cpu": "ImportError: libfoo.so.1: cannot open"})
    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setenv("JSC_TABLES", "none")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "BROKEN devices: RuntimeError: the driver is gone" in lines
    place = lines.index("BROKEN custom calls: the cpu extension is missing: ImportError: libfoo.so.1: cannot open")
    assert lines[place + 1].startswith("       -> pip install --force-reinstall")
    assert any(line.startswith("BROKEN flags: JSC_TABLES='none' is not one of") for line in lines)
    assert lines[-1].endswith("broken: see the commands above.")


def test_a_gpu_that_jax_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_driver", lambda: "580.65.06")
    monkeypatch.setattr(doctor, "_backend", lambda: "cpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (finding,) = by_topic("devices")
    assert finding.is_broken
    assert finding.mend == 'pip install -U "jax[cuda13]"'
    monkeypatch.setattr(environment, "gpu_driver", lambda: "550.54.15")
    assert by_topic("devices")[0].mend == 'pip install -U "jax[cuda12]"'
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # as the user wants it
    assert not by_topic("devices")[0].is_broken


def test_cuda_kernels_that_are_missing_matter_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "missing_reasons", lambda: {"cuda": "built without nvcc"})
    monkeypatch.setattr(_native, "planner", lambda: None)
    for backend, is_broken in (("cpu", False), ("gpu", True)):
        monkeypatch.setattr(doctor, "_backend", lambda backend=backend: backend)
        (finding,) = [each for each in by_topic("custom calls") if "built without nvcc" in each.text]
        assert finding.is_broken == is_broken
        assert ("JSC_CUDA=ON" in (finding.mend or "")) == is_broken


def test_tables_that_are_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU may have a table that is shipped")
    monkeypatch.setenv(folders.CACHE, str(tmp_path))
    monkeypatch.delenv(folders.SWITCH, raising=False)
    (finding,) = by_topic("table")
    assert (finding.status, finding.mend) == ("note", "python -m jax_sparse_conv tune --device cpu")
    from jax_sparse_conv._src import devices

    path = tmp_path / f"{devices.cpu().slug}.json"
    path.write_text("{")
    (finding,) = by_topic("table")
    assert finding.is_broken
    assert finding.mend is not None
    assert finding.mend.startswith(f"rm {path}")
    path.unlink()
    (tmp_path / "gradients").mkdir()
    (tmp_path / "gradients" / path.name).write_text("{}")
    of_gradients, of_forward = by_topic("table")
    assert of_gradients.is_broken
    assert of_gradients.mend == f"rm {tmp_path / 'gradients' / path.name} && {of_forward.mend} --gradients"


def test_a_kernel_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_sparse_conv._src.api import ops

    monkeypatch.setattr(ops, "conv", lambda x, kernel, **_: x)
    (finding,) = by_topic("kernels")
    assert finding.is_broken
    assert "is wrong by" in finding.text


def test_extras_that_are_missing_are_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (finding,) = [each for each in by_topic("extras") if each.text.startswith("hub")]
    assert (finding.status, finding.mend) == ("note", 'pip install "jax-sparse-conv[hub]"')


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("packaging")
    declared = ["jax<0.2,>=0.1", "numpy>=2.0", 'rich>=1000; extra == "examples"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: declared)
    finding = by_topic("versions")[0]
    assert finding.is_broken
    assert finding.text == f"jax<0.2,>=0.1 is needed, {jax.__version__} is installed"
    assert finding.mend == 'pip install -U "jax<0.2,>=0.1"'
