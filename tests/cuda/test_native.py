"""The native extensions: what is registered, what is missing and why, and the cost of importing the package."""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import PLATFORM

from jax_sparse_conv._src import _native
from jax_sparse_conv._src.primitive import custom_call, primitives
from jax_sparse_conv._src.problem.geometry import Geometry


def test_cpu_targets_are_registered() -> None:
    assert _native.registered_targets()["cpu"] == [
        "jsc_ecr",
        "jsc_pecr",
        "jsc_direct",
        "jsc_dense",
        "jsc_coo",
        "jsc_coo_lists",
        "jsc_kernel_gradient",
        "jsc_turned_kernel",
        "jsc_max_pool_gradient",
        "jsc_max_pool_tangent",
        "jsc_channel_sums",
        "jsc_channel_sums_gradient",
        "jsc_channel_affine",
        "jsc_channel_affine_gradient",
        "jsc_channel_joined",
        "jsc_channel_joined_gradient",
        "jsc_channel_masked_gradient",
        "jsc_dense_block",
        "jsc_coo_fromdense",
        "jsc_coo_todense",
    ]
    assert _native.cpu_isa() in ("portable", "avx2", "avx512")


@pytest.mark.parametrize(
    ("listed", "count"),
    [("0", 1), ("0-1", 2), ("0,64", 2), ("0-3,8,10-11", 7), ("", 1), ("3-", 1), ("x", 1), ("5-2", 1)],
)
def test_processors_of_a_list_are_counted(listed: str, count: int) -> None:
    assert importlib.import_module("jax_sparse_conv._cpu").processors_in_list(listed) == count


def test_processors_that_share_a_cache_have_it_in_parts() -> None:
    cache_bytes = importlib.import_module("jax_sparse_conv._cpu").cache_bytes
    for level, name in ((1, "SC_LEVEL1_DCACHE_SIZE"), (2, "SC_LEVEL2_CACHE_SIZE")):
        assert cache_bytes(level) > 0
        whole = os.sysconf(name) if name in os.sysconf_names else 0
        assert whole <= 0 or whole // cache_bytes(level) in range(1, 1 + (os.cpu_count() or 1))


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="reads the symbols by Linux's nm")
@pytest.mark.parametrize("name", ["_cpu", "_planner", "_cuda"])
def test_an_extension_exports_its_module_alone(name: str) -> None:
    if name == "_cuda" and not _native.registered_targets()["cuda"]:
        pytest.skip(_native.missing_reasons()["cuda"])
    extension = importlib.import_module(f"jax_sparse_conv.{name}")
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(extension.__file__)], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()] == [f"PyInit_{name}"]


@pytest.mark.parametrize("target", _native.registered_targets()[PLATFORM])
def test_a_call_with_wrong_numbers_of_arrays_is_an_error(target: str) -> None:
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((2,), np.float32))
    of_any_number = "attributes values and layers must be arrays of"  # a chain's, which say what its arrays are
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"Wrong number of arguments|{of_any_number}"):
        jax.block_until_ready(jax.jit(call)())


def test_a_missing_extension_keeps_its_reason() -> None:
    assert "only for 'cpu', 'cuda'" in str(_native.why_missing("ecr", "tpu", "float32"))
    assert _native.why_missing("ecr", "cpu", "float32") is None
    assert "dtype int32 is not supported on cpu" in str(_native.why_missing("ecr", "cpu", "int32"))
    if not _native.registered_targets()["cuda"]:
        assert _native.missing_reasons()["cuda"]
        assert _native.missing_reasons()["cuda"] in str(_native.why_missing("ecr", "cuda", "float32"))


@pytest.mark.parametrize(
    ("architectures", "has"),
    [
        ("80-real;90-real;90-virtual;90a-real", True),
        ("90a;90a-real", True),
        ("80", False),
        ("120-real", False),
        ("", False),
    ],
)
def test_warpgroups_are_code_of_the_build(monkeypatch: pytest.MonkeyPatch, architectures: str, has: bool) -> None:
    build = types.SimpleNamespace(CUDA_ARCHITECTURES=architectures)
    monkeypatch.setattr(_native, "_find_build_info", lambda: build)
    assert _native.has_warpgroups() is has
    monkeypatch.setattr(_native, "_find_build_info", lambda: None)
    assert not _native.has_warpgroups()


def test_an_extension_that_does_not_load_is_an_answer_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libgone.so.1: cannot open shared object file")

    monkeypatch.setattr(_native, "_find_build_info", lambda: types.SimpleNamespace(CUDA_BUILT=True))
    monkeypatch.setattr(_native.importlib, "import_module", broken)
    monkeypatch.setattr(_native, "_modules", {})
    monkeypatch.setattr(_native, "_reasons", {})
    monkeypatch.setattr(_native, "_registered", {})
    _native._load("cuda", "_cuda", "CUDA")
    assert _native.why_missing("ecr", "cuda", "float32") == (
        "the cuda extension is missing: ImportError: libgone.so.1: cannot open shared object file"
    )


def test_a_tree_in_which_nothing_is_built_imports_and_says_so(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(_native.__file__).parents[1]
    files = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(source, tmp_path / "jax_sparse_conv", ignore=files)
    code = (
        "import jax.numpy as jnp, jax_sparse_conv as jsc\n"
        f"assert jsc.__file__.startswith({str(tmp_path)!r}), jsc.__file__\n"
        "assert jsc.conv(jnp.ones((1, 3, 3, 2)), jnp.ones((1, 1, 2, 4))).sum() == 72\n"
        "jsc.conv(jnp.ones((1, 3, 3, 2)), jnp.ones((1, 1, 2, 4)), implementation='ecr')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    # -S would lose jax; -P keeps the clone's own directory out, and the copy comes before an editable install's finder.
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in type(f).__name__ and " + (
        "'Redirecting' not in type(f).__name__]\n" + code
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ValueError: implementation='ecr' cannot run here: the cpu extension is missing: this copy" in done.stderr
    assert "is not built; install it with `pip install -e .`" in done.stderr
    env = subprocess.run(
        [sys.executable, "-P", "-c", code.splitlines()[0] + "\nimport runpy, sys; sys.argv = ['x', 'env']\n"
         "runpy.run_module('jax_sparse_conv', run_name='__main__')"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert env.returncode == 0, env.stderr
    assert "is not built" in env.stdout


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stride": np.asarray([0, 1], np.int64)}, "must be at least 1"),
        ({"groups": np.int64(5)}, "groups=5 does not divide"),
        ({"padding": np.asarray([1, 1], np.int64)}, "attribute padding must be an array of 4 int64"),
        ({"pool": np.int64(7)}, "pool 0, 1 or 2, got 0 and 7"),
        ({"has_bias": np.int64(1)}, "number of operands does not match"),
        ({"padding": np.asarray([3, 3, 3, 3], np.int64)}, "but the operation gives"),
    ],
)
def test_the_native_side_checks_every_call_itself(change: dict[str, np.ndarray], sentence: str) -> None:
    """A hand-written call with wrong attributes gets an error, not a crash or a read out of bounds."""
    reason = _native.why_missing("ecr", PLATFORM, "float32")
    if reason is not None:
        pytest.skip(reason)
    attributes = custom_call.attributes(primitives.Config(Geometry(padding=((1, 1), (1, 1))), "ecr")) | change
    results = [jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32)]
    if PLATFORM == "cuda":
        results.append(jax.ShapeDtypeStruct((0,), jnp.uint8))
    call = jax.ffi.ffi_call("jsc_ecr", results)
    with pytest.raises(Exception, match=sentence):
        jax.block_until_ready(call(jnp.ones((1, 4, 4, 2)), jnp.ones((1, 3, 3, 2, 3)), **attributes))


def test_import_adds_little_to_importing_jax_and_flax() -> None:
    """Counted in modules of others, not seconds: nothing heavy comes with the package itself."""
    code = (
        "import sys, jax, flax, flax.nnx\n"
        "before = set(sys.modules)\n"
        "import jax_sparse_conv\n"
        "added = set(sys.modules) - before\n"
        "print(len([m for m in added if not m.startswith('jax_sparse_conv')]))\n"
        "print(*[m for m in ('matplotlib', 'rich', 'sklearn', 'PIL', 'safetensors') if m in added])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(out[0]) <= 4
    assert out[1] == ""
