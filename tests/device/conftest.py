# SPDX-License-Identifier: Apache-2.0
"""The C library, compiled once for all tests of this folder."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm

from tests.device.binding import CSession, Open
from tvm_convgrad.device.files import NAME, Runtime
from tvm_convgrad.device.library import build_library
from tvm_convgrad.training.compile.linking import linker_for


@pytest.fixture(scope="session")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / NAME
    linker = linker_for(tvm.target.Target("llvm"))
    build_library(linker, path, Runtime.installed(), options=("-O0", "-Wall", "-Wextra", "-Werror"))
    return path


@pytest.fixture
def open_c(c_library: Path) -> Iterator[Open]:
    """Opens a session, which is closed at the end of the test."""
    library = ctypes.CDLL(str(c_library))
    opened: list[CSession] = []

    def open_session(path: Path) -> CSession:
        opened.append(CSession(library, path))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()
