# SPDX-License-Identifier: Apache-2.0
"""Which folders of the training package may import which, wherever the import stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tvm_convgrad

ROOT = Path(tvm_convgrad.__file__).parent
ALLOWED = {
    "training.ir": set(),
    "training.model": {"training.ir"},
    "training.autodiff": {"training.ir"},
    "training.frontends": {"training.ir", "training.model", "importer"},
    "training.step": {"training.ir", "training.model", "training.autodiff"},
    "training.schedule": set(),
    "training.passes": {"training.ir", "training.schedule"},
    "training.runtime": set(),
    "training.compile": {f"training.{each}" for each in ("ir", "model", "step", "passes", "schedule", "runtime")},
    "training.export": {f"training.{each}" for each in ("ir", "model", "step", "frontends", "compile", "runtime")},
    "importer": {"training.ir", "training.model"},
}
WITHOUT_TVM = ("training/step/names.py", "training/step/options.py", "training/runtime/schema.py", "core/files.py")


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder: str) -> None:
    own = f"tvm_convgrad.{folder}."
    others = {f"tvm_convgrad.{other}.": other for other in ALLOWED if other != folder}
    found = {
        (path.name, other)
        for path in (ROOT / folder.replace(".", "/")).rglob("*.py")
        for name in imported(path)
        if not name.startswith(own)
        for prefix, other in others.items()
        if name.startswith(prefix)
    }
    assert not {each for each in found if each[1] not in ALLOWED[folder]}


def test_folders_are_all_listed() -> None:
    folders = {path.parent.name for path in (ROOT / "training").glob("*/__init__.py")}
    assert folders == {name.removeprefix("training.") for name in ALLOWED if name != "importer"}


@pytest.mark.parametrize("file", WITHOUT_TVM)
def test_light_modules_import_no_tvm(file: str) -> None:
    assert not [name for name in imported(ROOT / file) if name.split(".")[0] in ("tvm", "tvm_ffi", "relax_ops")]
