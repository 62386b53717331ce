# SPDX-License-Identifier: Apache-2.0
"""The example in Java: it gives the bits that Python's Session gives, and shows the C library's error messages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tvm_convgrad.device.files import Runtime
from tvm_convgrad.training.runtime.checkpoint import load
from tvm_convgrad.training.runtime.session import Session

EXAMPLE = Path(__file__).parents[2] / "examples" / "java" / "Train.java"
OLDEST, STEPS = 22, 3
"""The first version of Java with java.lang.foreign, and how many steps are compared."""


@cache
def find_java() -> str | None:
    """A Java that is new enough: that of JAVA_HOME, of PATH, or of Debian's folder of Javas."""
    homes = [Path(os.environ.get("JAVA_HOME", "")), *sorted(Path("/usr/lib/jvm").glob("*"))]
    for program in (*(str(home / "bin" / "java") for home in homes), "java"):
        found = shutil.which(program)
        if found is None:
            continue
        said = subprocess.run([found, "-version"], capture_output=True, text=True, check=False).stderr
        version = re.search(r'version "(\d+)', said)
        if version is not None and int(version[1]) >= OLDEST:
            return found
    return None


def java(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the example; skips where no Java is new enough."""
    program = find_java()
    if program is None:
        pytest.skip(f"there is no Java {OLDEST} or newer, in JAVA_HOME, PATH or /usr/lib/jvm")
    runtime = Runtime.installed()
    libraries = os.pathsep.join(str(path.parent) for path in (runtime.tvm, runtime.ffi))
    command = [program, "--enable-native-access=ALL-UNNAMED", EXAMPLE, *arguments]
    environment = os.environ | {"LD_LIBRARY_PATH": libraries}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)


def test_steps_are_pythons(tiny_step: Path, c_library: Path, tmp_path: Path) -> None:
    x, y = tiny.make_arrays(tiny.BATCH, 0)
    x.tofile(tmp_path / "x.raw")
    y.tofile(tmp_path / "y.raw")
    saved = tmp_path / "java.ckpt"
    done = java(c_library, tiny_step, STEPS, tmp_path / "x.raw", tmp_path / "y.raw", saved)
    assert done.returncode == 0, done.stderr
    session = Session(tiny_step)
    expected = [np.float32(session.step(x, y)[0]) for _ in range(STEPS)]
    assert [np.float32(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)] == expected
    state = load(saved).state
    for name, array in session.state.items():
        np.testing.assert_array_equal(state[name], array, name)


def test_errors_are_the_c_librarys(tiny_step: Path, c_library: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(8))
    done = java(c_library, tiny_step, 1, tmp_path / "raw", tmp_path / "raw")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^Train: .*8 bytes", done.stderr, re.MULTILINE)
    done = java(c_library, tmp_path / "raw", 1, tmp_path / "raw", tmp_path / "raw")
    assert done.returncode == 1
    assert "Train: " in done.stderr
