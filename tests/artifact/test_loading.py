# SPDX-License-Identifier: Apache-2.0
"""A process that has loaded a library, such as a notebook, loads another build of the same path."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import build_tiny
from tvm_convgrad.training.runtime.session import Session

X, Y = tiny.make_arrays(tiny.BATCH, 0)


@pytest.fixture(scope="module")
def builds(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two builds of the tiny model, whose losses differ from the third step on."""
    folder = tmp_path_factory.mktemp("builds")
    return tuple(build_tiny(tiny_model, folder / f"{m}.so", lr=0.1, momentum=m) for m in (0.0, 0.9))  # type: ignore[return-value]


def losses(path: Path) -> list[float]:
    session = Session(path)
    return [session.step(X, Y)[0] for _ in range(4)]


def replace(path: Path, build: Path) -> None:
    """As `convgrad build` writes: a new file under the name of the old one."""
    new = path.with_name("new")
    shutil.copyfile(build, new)
    new.replace(path)


@pytest.mark.parametrize("name", ["step.so", "link.so"])
def test_a_path_that_was_built_again_is_the_new_step(builds: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    path, (plain, momentum) = tmp_path / "step.so", builds
    (tmp_path / "link.so").symlink_to(path)
    expected = losses(plain), losses(momentum)
    assert expected[0] != expected[1]
    kept = []
    for build in (0, 1, 0, 1):
        replace(path, builds[build])
        assert losses(path) == expected[build], build
        assert losses(tmp_path / name) == expected[build], build
        kept.append(Session(path))
    for build, session in zip((0, 1, 0, 1), kept, strict=True):  # which go on with their own code
        assert [session.step(X, Y)[0] for _ in range(4)] == expected[build]


@pytest.mark.parametrize("name", ["step", "step.so.1", "step.tar"])
def test_a_library_has_any_name(builds: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    for build in builds:
        shutil.copyfile(build, tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / name)
        assert losses(tmp_path / name) == losses(build)


OVERWRITE = """
import os, shutil, sys
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.session import Session

Session(sys.argv[1])
with open(sys.argv[1], "r+b") as file:
    content = open(sys.argv[2], "rb").read()
    file.write(content)
    file.truncate(len(content))
try:
    Session(sys.argv[1])
except ArtifactError as error:
    print(error, flush=True)
os._exit(0)  # whatever the loaded library has to do at the end is not its code any more
"""


def test_a_file_overwritten_in_place_is_refused(builds: tuple[Path, Path], tmp_path: Path) -> None:
    path, (plain, momentum) = tmp_path / "step.so", builds
    shutil.copyfile(plain, path)
    command = [sys.executable, "-c", OVERWRITE, str(path), str(momentum)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"{path}: was overwritten in place .* renaming, as `convgrad build` does\.\n", done.stdout)
