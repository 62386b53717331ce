# SPDX-License-Identifier: Apache-2.0
"""The structure of the source: which folder may import which, no circle of files, imports at the top of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize")

LAYERS = (
    ("tvm_convgrad/core",),
    ("tvm_convgrad/threads.py",),
    ("legalize", "tvm_convgrad/codegen"),
    ("tvm_convgrad/kernels",),
    ("relax_ops",),
    ("tvm_convgrad/targets.py",),
    ("tvm_convgrad/offload",),
    ("relay_ops",),
    ("tvm_convgrad/graph_ir.py",),
    ("tvm_convgrad/op.py",),
    ("tvm_convgrad/batching.py",),
    ("tvm_convgrad/evaluation.py",),
    ("tvm_convgrad/training/ir",),
    ("tvm_convgrad/training/model", "tvm_convgrad/training/runtime", "tvm_convgrad/training/schedule"),
    ("tvm_convgrad/training/autodiff", "tvm_convgrad/training/passes"),
    ("tvm_convgrad/training/step",),
    ("tvm_convgrad/training/compile",),
    ("tvm_convgrad/device",),
    ("tvm_convgrad/importer",),
    ("tvm_convgrad/training/frontends",),
    ("tvm_convgrad/training/export",),
    ("tvm_convgrad/measure",),
    ("tvm_convgrad/tuning",),
    ("tvm_convgrad/bridge",),
    ("tvm_convgrad/jax", "tvm_convgrad/torch"),
    ("tvm_convgrad/report", "tvm_convgrad/verify"),
    ("tvm_convgrad/bench",),
    ("tvm_convgrad/commands",),
    ("tvm_convgrad/cli.py",),
    ("tvm_convgrad/__main__.py",),
)
"""Folders and files from the ground up: each imports what stands before it, and what stands in its own place only."""


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _files() -> dict[str, Path]:
    """Our modules by their dotted names."""
    return {_module(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def _imports() -> tuple[tuple[str, str, int, bool], ...]:
    """(module, imported module of ours, line, whether it is inside a function) of every import."""
    return tuple(found for name, path in _files().items() for found in _imports_of(name, path))


def _imports_of(name: str, path: Path) -> Iterator[tuple[str, str, int, bool]]:
    files = _files()

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            found: list[str] = []
            if isinstance(child, ast.Import):
                found = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module:
                found = [f"{child.module}.{alias.name}" for alias in child.names]
                found = [full if full in files else child.module for full in found]
            yield from ((name, target, child.lineno, inside) for target in found if target in files)
            yield from walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    yield from walk(ast.parse(path.read_text()), False)


def _layer(name: str) -> int | None:
    """The number of a module's layer; None of the front of the package, which hands names on when they are used."""
    place = _files()[name].relative_to(ROOT).as_posix()
    found = [n for n, layer in enumerate(LAYERS) for each in layer if place == each or place.startswith(f"{each}/")]
    if not found:
        assert place in ("tvm_convgrad/__init__.py", "tvm_convgrad/training/__init__.py"), f"{place} is in no layer"
        return None
    return found[0]


def _room(name: str) -> str:
    place = _files()[name].relative_to(ROOT).as_posix()
    return next(each for layer in LAYERS for each in layer if place == each or place.startswith(f"{each}/"))


def test_folders_import_one_way() -> None:
    wrong = []
    for name, target, line, _ in _imports():
        own, other = _layer(name), _layer(target)
        if own is None or other is None:
            continue
        if other > own or (other == own and _room(name) != _room(target)):
            wrong.append(f"{_files()[name].relative_to(ROOT)}:{line} imports {target}")
    assert wrong == []


def test_the_architecture_page_has_these_layers() -> None:
    block = (ROOT / "docs" / "ARCHITECTURE.md").read_text().partition("## The layers")[2].split("```")[1]
    listed = []
    for line in block.splitlines()[1:]:
        first, *others = re.findall(r"\S+(?:/|\.py)(?= )", line)
        paths = [first, *(other if (ROOT / other).exists() else f"{Path(first).parent}/{other}" for other in others)]
        listed.append(sorted(path.rstrip("/") for path in paths))
    assert listed[::-1] == [sorted(layer) for layer in LAYERS]


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in _files()}
    for name, target, _, _ in _imports():
        if target != "tvm_convgrad" and name != target:  # the front imports nothing of TVM when it is imported
            graph[name].add(target)
    while True:  # take away what imports nothing that is left
        ground = {name for name, targets in graph.items() if not targets & graph.keys()}
        if not ground:
            break
        graph = {name: targets for name, targets in graph.items() if name not in ground}
    while True:  # and what nothing left imports
        used = set().union(*graph.values()) if graph else set()
        if graph.keys() <= used:
            break
        graph = {name: targets for name, targets in graph.items() if name in used}
    assert {name: sorted(targets & graph.keys()) for name, targets in graph.items()} == {}


def test_imports_name_modules_that_exist() -> None:
    """mypy finds what is missing here in an installed copy, if there is one."""
    missing = []
    for package in (*PACKAGES, "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                else:
                    modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                ours = [module for module in modules if module.split(".")[0] in PACKAGES]
                missing += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in ours if name not in _files()]
    assert missing == []


WHILE_RUNNING = {
    "tvm_convgrad/commands": "`convgrad --help` does not import TVM",
    "tvm_convgrad/training/frontends/formats": "the list of formats is read without TVM, ONNX and PyTorch",
    "tvm_convgrad/bridge/worker.py": "only the process that compiles loads TVM",
    "tvm_convgrad/training/compile/kernel_worker.py": "only the process that compiles loads TVM",
    "tvm_convgrad/training/runtime/artifact.py": "an artifact is read and checked without TVM",
    "tvm_convgrad/batching.py": "a TVM that has Relay lacks the Relax that vmap_rule emits",
    "tvm_convgrad/bench/contenders.py": "the process whose memory is measured loads one contender only",
    "tvm_convgrad/bench/steps.py": "PyTorch is optional, and bench/networks.py is made of it",
    "tvm_convgrad/bench/per_sample.py": "PyTorch is optional, and bench/networks.py is made of it",
    "relax_ops/register.py": "`import tvm` calls it before TVM is whole",
    "relay_ops/register.py": "`import tvm` calls it before TVM is whole",
}
"""Where our own modules are imported inside functions, and why."""


def test_imports_stand_at_the_top_of_files() -> None:
    inside = {}
    for name, target, line, in_function in _imports():
        place = _files()[name].relative_to(ROOT).as_posix()
        if in_function and not any(place == each or place.startswith(f"{each}/") for each in WHILE_RUNNING):
            inside[f"{place}:{line}"] = target
    assert inside == {}


@pytest.mark.parametrize("place", WHILE_RUNNING)
def test_every_exception_is_still_needed(place: str) -> None:
    files = {_files()[name].relative_to(ROOT).as_posix() for name, _, _, in_function in _imports() if in_function}
    assert any(file == place or file.startswith(f"{place}/") for file in files)
