"""`Inference.export`, and programs that run in a process which has only the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Inputs
from flax import nnx
from jax import export
from oracle import expected, relative_error
from platforms import PLATFORM, require

import jax_sparse_conv as jsc
from jax_sparse_conv._src import _native

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide" / "export.md"
X = jax.nn.relu(jax.random.normal(jax.random.key(0), (2, 8, 8, 16)))
KERNEL = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 16, 32))
CASE = Case("exported", X.shape, 32, activation="relu")
ANY = jax.ShapeDtypeStruct(export.symbolic_shape("n,8,8,16"), jnp.float32)
ELSEWHERE = """
import sys
from pathlib import Path
import jax
import numpy as np

here = Path(sys.argv[1])
exported = jax.export.deserialize(bytearray((here / "program").read_bytes()))
x = np.load(here / "x.npy")
try:
    exported.call(x)
except jax.errors.JaxRuntimeError as error:
    print(error)
import jax_sparse_conv
np.save(here / "y.npy", exported.call(x))
"""


def network(kernel: jax.Array, x: jax.Array, scale: Any = 1.0, *, twice: bool = False) -> dict[str, jax.Array]:
    dimensions = ("NHWC", "HWIO", "NHWC")
    with jax.default_matmul_precision("highest"):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
    return {"map": jax.nn.relu(y) * scale * (2 if twice else 1)}


def close(found: Any, x: jax.Array = X, kernel: jax.Array = KERNEL, scale: float = 1) -> None:
    wanted = scale * expected(CASE, Inputs(x, kernel, None, None))
    assert relative_error(found["map"], wanted) < 2e-6


def test_its_weights_are_in_it() -> None:
    predict = jsc.jit_inference(network, KERNEL)
    exported = predict.export(X)
    assert [each.shape for each in exported.in_avals] == [X.shape]
    predict.update(2 * KERNEL)
    close(exported.call(X))
    close(predict.export(X).call(X), kernel=2 * KERNEL)


def test_of_any_number_of_images() -> None:
    exported = jsc.jit_inference(network, KERNEL).export(ANY)
    for x in (X, X[:1], jnp.concatenate([X, X, X])):
        close(exported.call(x), x)


def test_arguments_by_name_and_static_ones() -> None:
    predict = jsc.jit_inference(network, KERNEL, static_argnames="twice")
    exported = predict.export(X, scale=jnp.float32(3), twice=True)
    close(exported.call(X, scale=jnp.float32(0.5)), scale=1)


def test_of_a_model() -> None:
    model = nnx.Sequential(nnx.Conv(16, 32, (3, 3), use_bias=False, rngs=nnx.Rngs(0)), nnx.relu)
    with jax.default_matmul_precision("highest"):
        exported = jsc.nnx.jit_inference(model).export(ANY)
    close({"map": exported.call(X)}, kernel=model.layers[0].kernel[...])


def test_for_several_platforms() -> None:
    predict = jsc.jit_inference(network, KERNEL)
    exported = predict.export(X, platforms=["cpu", "tpu"])
    assert exported.platforms == ("cpu", "tpu")
    assert "stablehlo.convolution" in exported.mlir_module()  # of the TPU
    assert "jsc_ecr" in exported.mlir_module()
    with pytest.raises(TypeError, match=r"platforms='cuda' is a string, not a sequence of them, such as \['cuda'\]"):
        predict.export(X, platforms="cuda")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, np.ndarray]:
    """What a new process says before it imports the package, and what it computes behind that."""
    pytest.importorskip("flatbuffers", reason="JAX serialises programs by flatbuffers")
    require("ecr", "float32")
    here = tmp_path_factory.mktemp("exported")
    named = jsc.jit_inference(
        lambda kernel, x: jsc.conv(x, kernel, activation="relu", precision="highest", implementation="ecr"), KERNEL
    )
    (here / "program").write_bytes(named.export(ANY).serialize())
    np.save(here / "x.npy", X)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(here)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, np.load(here / "y.npy")


def test_it_runs_in_a_new_process(elsewhere: tuple[str, np.ndarray]) -> None:
    close({"map": elsewhere[1]})


def test_the_guide_has_what_xla_says_without_the_package(elsewhere: tuple[str, np.ndarray]) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    (message,) = re.findall(r"^No FFI handler registered for jsc_ecr on a platform Host$", text, re.MULTILINE)
    assert message.replace("Host", "Host" if PLATFORM == "cpu" else "CUDA") in elsewhere[0]


def test_checks_are_of_every_custom_call() -> None:
    allowed = {each.is_custom_call() for each in jsc.export_checks()}
    assert allowed == set(_native.TARGETS)
    sources = [file for platform in ("cpu", "cuda") for file in (ROOT / platform / "ffi").glob("*.cc")]
    named = set(re.findall(r'[\[{]"(jsc_\w+)"', "".join(each.read_text(encoding="utf-8") for each in sources)))
    assert allowed == named
    for registered in _native.registered_targets().values():
        assert allowed.issuperset(registered)


def test_without_checks_jax_refuses() -> None:
    require("ecr", "float32")
    function = jax.jit(lambda x: jsc.conv(x, KERNEL, implementation="ecr"))
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        export.export(function)(X)
    found = export.export(function, disabled_checks=jsc.export_checks())(X).call(X)
    assert relative_error(found, expected(Case("", X.shape, 32), Inputs(X, KERNEL, None, None))) < 2e-6
