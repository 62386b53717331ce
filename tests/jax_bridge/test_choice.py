# SPDX-License-Identifier: Apache-2.0
"""Who computes is measured and kept; patches nest and end; whatever goes wrong beside, programs run with XLA's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
bridge = pytest.importorskip("tvm_convgrad.jax")

import jax.numpy as jnp  # noqa: E402

from tvm_convgrad.bridge import choice as choices  # noqa: E402
from tvm_convgrad.core.errors import ConvGradError  # noqa: E402
from tvm_convgrad.jax import choice, patching  # noqa: E402


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> choice.Choices:
    """No choices, and no programs that were compiled by earlier ones."""
    made = choice.Choices()
    for module in ("choice", "lowering", "patching"):
        monkeypatch.setattr(f"tvm_convgrad.jax.{module}.CHOICES", made)
    jax.clear_caches()
    return made


def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


def operands(size: int = 6):
    return jnp.ones((2, 3, size, size)), jnp.ones((4, 3, 3, 3))


@pytest.mark.parametrize(("kernel", "where"), [(0.9, "kernel"), (0.98, "XLA")])
def test_the_faster_one_is_taken_and_kept(
    fresh, store: Path, monkeypatch: pytest.MonkeyPatch, kernel: float, where: str
) -> None:
    """A second process finds the choice on disk: it is not measured again."""
    size = 6 if where == "kernel" else 7
    monkeypatch.setattr(choice, "_in_turns", lambda *_: (kernel, 1.0))
    with bridge.patch(folder=store):
        jax.jit(convolve)(*operands(size))
    assert [told.where for told in bridge.explain()] == [where]
    assert bridge.explain()[0].why == f"measured: the kernel takes {kernel * 1e6:.0f} us, XLA 1000000 us"
    fresh.made.clear()
    jax.clear_caches()
    monkeypatch.setattr(choice, "_in_turns", None)
    with bridge.patch(folder=store):
        jax.jit(convolve)(*operands(size))
    assert [told.where for told in bridge.explain()] == [where]


def test_it_is_really_measured(fresh, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    in_turns = choice._in_turns
    monkeypatch.setattr(choice, "_in_turns", lambda *arguments: found.append(in_turns(*arguments)) or found[-1])
    with bridge.patch(folder=store):
        jax.jit(jax.grad(lambda *both: convolve(*both).sum()))(*operands(5))
    assert len(found) == 1  # dgrad: nothing else is left of the program
    assert min(found[0]) > 0


def test_patches_nest_and_end(fresh, store: Path) -> None:
    """A function that was jitted is traced again under another patch, and under the same one is not."""
    traced = []

    @jax.jit
    def function(x, w):
        traced.append(patching._policy.value)
        return convolve(x, w)

    function(*operands())
    with bridge.patch(folder=store):
        with bridge.patch(always=True, folder=store):
            for _ in range(2):
                function(*operands())
        assert not patching._policy.value.always
        bridge.unpatch()
        function(*operands())
    assert patching._policy.value is None
    function(*operands())
    assert [each and each.always for each in traced] == [None, True]


@pytest.mark.parametrize("given", [{"always": "no"}, {"always": 1}, {"folder": ""}, {"folder": 3}])
def test_wrong_arguments_are_refused(given) -> None:
    """What was patched stays so."""
    before = patching._policy.get_global()
    with pytest.raises(ConvGradError, match=f"patch: {next(iter(given))} is"):
        bridge.patch(**given)
    assert patching._policy.get_global() == before


def test_threads(fresh, store: Path) -> None:
    """A patch holds in all threads, which may compile and run programs at the same time."""
    found = {}

    def work(size: int) -> None:
        x, w = operands(size)
        found[size] = np.asarray(jax.jit(lambda *both: convolve(*both) + convolve(*both))(x, w))

    with bridge.patch(always=True, folder=store):
        threads = [threading.Thread(target=work, args=(size,)) for size in (6, 6, 7, 7)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert bridge.stats().kernels == 2
    for size, each in found.items():
        np.testing.assert_array_equal(each, 2 * convolve(*operands(size)))


SECOND = """
import json, sys, jax, jax.numpy as jnp
from pathlib import Path
import tvm_convgrad.jax as bridge
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
def loss(x, w): return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME").sum()
with bridge.patch(always=True, folder=Path(sys.argv[1])):
    y = jax.jit(jax.grad(loss, 1))(jnp.ones((2, 3, 6, 6)), jnp.ones((4, 3, 3, 3)))
stats = bridge.stats()
maps = Path("/proc/self/maps").read_text()
print(json.dumps([float(y.sum()), stats.compiled, stats.kernel_calls, "tvm" in sys.modules, "gomp" in maps]))
"""


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Neither kernels nor, with JAX's compilation cache, programs; neither TVM nor OpenMP is in the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SECOND, str(tmp_path / "store"), str(tmp_path / "programs")]
    found = [
        json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    assert found == [[6144.0, 1, 1, False, False], [6144.0, 0, 1, False, False]]
    assert list((tmp_path / "programs").iterdir())


def test_without_a_compiler_programs_go_on(fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning says why, however many convolutions there are."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    choices._warned.clear()
    wanted = convolve(*operands())
    with bridge.patch(folder=tmp_path), pytest.warns(RuntimeWarning, match="has ended") as warned:
        found = jax.jit(lambda *both: convolve(*both) + convolve(*both))(*operands())
    assert len([each for each in warned if "tvm_convgrad.jax" in str(each.message)]) == 1
    assert {told.where for told in bridge.explain()} == {"XLA"}
    np.testing.assert_array_equal(found, 2 * wanted)


def test_a_store_of_others_is_not_used(fresh, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    choices._warned.clear()
    with bridge.patch(always=True, folder=folder), pytest.warns(RuntimeWarning, match="others can write"):
        jax.jit(convolve)(*operands())
    assert not list(folder.rglob("*.object"))


def test_without_jax_it_says_what_is_missing() -> None:
    program = "import sys; sys.modules['jax'] = None; import tvm_convgrad.jax"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "pip install 'tvm-convgrad[jax]'" in done.stderr.splitlines()[-1]
