# SPDX-License-Identifier: Apache-2.0
"""Marks the tests that need PyTorch, so that `pytest -m torch` runs them alone; fixtures of a tiny compiled step.

Tests that call a backend's library carry the mark of its entry themselves, and are skipped, with the reason, where it
is not installed. Those of a mark that its entry calls `on_request`, and those that need a GPU (`gpu`), run only with
-m; the latter fail without one.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests import tiny
from tvm_convgrad.offload.registry import ENTRIES, backend
from tvm_convgrad.threads import JOBS, VARIABLE, available_cores

if TYPE_CHECKING:
    from tests.cli.command import Command

_MODULE = re.compile(r"^(torch\w* = pytest\.importorskip\(\"torch\"|import torch|from torch)", re.MULTILINE)
_FUNCTION = re.compile(r"importorskip\(\"torch\"|\bimport torch\b")


_QUIET_THREADS = {"TVM_THREAD_POOL_SPIN_COUNT": "0", "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
"""For the workers of a run, and what they start: threads of TVM, PyTorch and numpy that wait sleep.

Spinning, they take the cores of the tests beside them: two processes at a time, each on two threads, take six times the
processor time for PyTorch's small convolutions, and ten times for numpy's products of 300 x 300.
"""


def pytest_configure(config: pytest.Config) -> None:
    for entry in ENTRIES.values():
        config.addinivalue_line("markers", f"{entry.marker.name}: {entry.marker.text}")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, and runs only with -m gpu (make test-gpu)")
    config.addinivalue_line(
        "markers", "zoo: builds models of other libraries, and runs only with -m zoo (make test-zoo)"
    )
    config.addinivalue_line(
        "markers", "browser: shows pages in Chromium, and runs only with -m browser (make test-browser)"
    )
    config.addinivalue_line("markers", "federated: runs Flower, and runs only with -m federated (make test-federated)")
    config.addinivalue_line("markers", "device: emulates aarch64, and runs only with -m device (make test-device)")
    config.addinivalue_line(
        "markers", "cross: links for another architecture; skipped where no compiler for it is installed"
    )
    config.addinivalue_line("markers", "jax: the bridge to JAX; skipped where JAX is not installed")
    config.addinivalue_line("markers", "torch: compares with PyTorch (set by tests/conftest.py)")
    os.environ["CONVGRAD_TUNINGS"] = str(config.rootpath / "no such folder" / "tunings.json")  # not the user's own
    if "CONVGRAD_CACHE" not in os.environ:  # of this run only, whose workers share it
        kept = tempfile.TemporaryDirectory(prefix="convgrad-test-objects-")
        config.add_cleanup(kept.cleanup)
        os.environ["CONVGRAD_CACHE"] = kept.name
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:  # they share the cores
        for name in (VARIABLE, JOBS):
            os.environ.setdefault(name, str(max(available_cores() // workers, 1)))
    for name, value in _QUIET_THREADS.items():
        os.environ.setdefault(name, value)
    os.environ["CONVGRAD_RUNTIMES"] = str(config.rootpath / ".pytest_cache" / "runtimes")  # kept from run to run


_ON_REQUEST = (
    *(entry.marker.name for entry in ENTRIES.values() if entry.marker.on_request),
    "gpu",
    "zoo",
    "federated",
    "browser",
    "device",
)
"""Marks of tests that run only with -m: they need what the suite has no time for, a GPU, a browser, libraries."""


_MARKS = (*(entry.marker.name for entry in ENTRIES.values()), "gpu", "zoo", "torch", "browser", "device", "cross")
"""All marks of the suite."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m MARK, files without that word are not imported: importing all of them takes ten seconds."""
    mark = config.option.markexpr
    if mark in _MARKS and collection_path.match("test_*.py") and not _has_word(collection_path, mark):
        return True
    return None


@cache
def _has_word(path: Path, word: str) -> bool:
    return word in path.read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in _ON_REQUEST:
        if mark not in config.option.markexpr:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    for item in items:
        if isinstance(item, pytest.Function) and _needs_torch(item):
            item.add_marker("torch")
    for name, entry in ENTRIES.items():
        marked = [item for item in items if item.get_closest_marker(entry.marker.name)]
        if marked:
            missing = backend(name).unavailable(None)
            for item in marked if missing else ():
                item.add_marker(pytest.mark.skip(reason=f"{name}: {missing}"))
    for item in items:
        for mark in item.iter_markers():
            if mark.name in _MARKS and not _has_word(item.path, mark.name):
                raise pytest.UsageError(f"{item.nodeid}: write its mark, {mark.name}, in the file, for -m {mark.name}")


def _needs_torch(item: pytest.Function) -> bool:
    """Whether the module, the test, or a fixture or helper of the module that it uses asks for PyTorch."""
    if _begins_with_torch(item.module):
        return True
    used = _functions(item.module)[item.originalname]
    return bool(_FUNCTION.search(used)) or any(
        name in item.fixturenames or re.search(rf"\b{name}\b", used) for name in _functions_with_torch(item.module)
    )


@cache
def _begins_with_torch(module: ModuleType) -> bool:
    """Whether the module itself imports PyTorch."""
    return bool(_MODULE.search(inspect.getsource(module)))


@cache
def _functions_with_torch(module: ModuleType) -> list[str]:
    """Fixtures and helpers defined in the module that ask for PyTorch themselves."""
    functions = _functions(module).items()
    return [name for name, text in functions if not name.startswith("test_") and _FUNCTION.search(text)]


@cache
def _functions(module: ModuleType) -> dict[str, str]:
    """The text of each function of a module, decorators included, whatever these make of it."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[min(part.lineno for part in (node, *node.decorator_list)) - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command `convgrad` as a function."""
    from tests.cli.command import Command  # needs a TVM that has Relax, which Relay's tests do not

    return Command(monkeypatch, capfd)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data") / "data.npz")


def build_tiny(
    model: str,
    path: Path,
    batch: int | str | None = None,
    backends: tuple[str, ...] = ("auto",),
    target: object = None,
    **options: object,
) -> Path:
    """Compile the tiny model into an artifact at `path`, its convolutions as calls of `backends`."""
    from tvm_convgrad.report.gradients import describe_convolutions
    from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
    from tvm_convgrad.training.compile.lower import compile_to_link
    from tvm_convgrad.training.compile.targets import parse_target
    from tvm_convgrad.training.frontends import load_model
    from tvm_convgrad.training.step.build import build_step

    step = build_step(load_model(model, batch=batch), **options)
    target = target or parse_target("llvm")
    executable, plan, initial = compile_to_link(step, target, backends)
    save_artifact(executable, make_manifest(step, target, describe_convolutions(plan)), path, initial=initial)
    return path


@pytest.fixture(scope="session")
def tiny_step(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the tiny model, fixed batch. Tests must not write to it."""
    path = tmp_path_factory.mktemp("step") / "step.so"
    return build_tiny(tiny_model, path, lr=0.1, momentum=0.9)


@pytest.fixture(scope="session")
def tiny_dynamic_step(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a free batch."""
    path = tmp_path_factory.mktemp("step") / "dynamic.so"
    return build_tiny(tiny_model, path, batch="dynamic", lr=0.1, momentum=0.9)


@pytest.fixture(scope="session")
def tiny_split_step(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny step with its gradients apart."""
    path = tmp_path_factory.mktemp("step") / "split.so"
    return build_tiny(tiny_model, path, lr=0.1, momentum=0.9, split=True)
