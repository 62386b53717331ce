# SPDX-License-Identifier: Apache-2.0
"""The cache of runtime libraries: private, built once, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

import pytest

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.offload import libraries


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path / "cache" / "runtimes"))
    path = tmp_path / "runtime.cc"
    path.write_text('extern "C" int answer() { return ANSWER; }\n')
    return path


def build(source: Path, key: str = "0") -> Path:
    return libraries.build("toy", key, "libtoy.so.1", source, ["-DANSWER=42"])


def test_built_once_and_private(source: Path) -> None:
    library = build(source)
    assert library.parent.name == "toy-0"
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(libraries.cache_folder().stat().st_mode) == 0o700
    made = library.stat().st_mtime_ns
    assert build(source).stat().st_mtime_ns == made
    assert build(source, "1") != library


def test_what_is_damaged_is_built_anew(source: Path) -> None:
    library = build(source)
    whole = library.read_bytes()
    library.write_bytes(whole[:-100])
    assert libraries.built(library.parent, library.name) is None
    assert build(source).read_bytes() == whole
    (library.parent / "sha256").unlink()
    assert build(source).read_bytes() == whole


def test_a_failed_build_leaves_nothing(source: Path) -> None:
    source.write_text("this is not C++")
    with pytest.raises(SetupError, match=r"the runtime for toy could not be compiled by .*: .*runtime.cc:1"):
        build(source)
    assert [path.name for path in libraries.cache_folder().iterdir()] == ["toy-0.lock"]


def test_a_folder_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.VARIABLE, str(source))  # a file
    with pytest.raises(SetupError, match=r"set CONVGRAD_RUNTIMES to a writable folder"):
        build(source)


def test_a_folder_that_others_can_write_to_is_refused(source: Path) -> None:
    """Also where the library is in it already, whole."""
    library = build(source)
    libraries.cache_folder().chmod(0o777)
    with pytest.raises(SetupError, match=r"runtimes holds code.*, but others can write to it \(mode 777; "):
        build(source)
    libraries.cache_folder().chmod(0o755)
    assert build(source) == library


def test_a_library_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "libtoy.so.1"
    bad.write_text("no ELF")
    with pytest.raises(SetupError, match=r"cannot be loaded \(.*\); `convgrad build-runtime toy` makes it again"):
        libraries.load("toy", bad, "toy.run", {"CONVGRAD_TOY": "1"})
    assert "CONVGRAD_TOY" not in os.environ


def test_settings_hold_while_a_library_is_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then, and the user's own go before."""
    lines = [
        "#include <stdlib.h>",
        'extern "C" { int seen; const char* kept; }',
        "__attribute__((constructor)) static void look() {",
        '  seen = getenv("CONVGRAD_A") != 0; kept = getenv("CONVGRAD_B"); }',
    ]
    source.write_text("\n".join(lines))
    monkeypatch.setenv("CONVGRAD_B", "mine")
    library = build(source)
    libraries.load("toy", library, "toy.run", {"CONVGRAD_A": "1", "CONVGRAD_B": "2"})
    loaded = ctypes.CDLL(str(library))
    assert ctypes.c_char_p.in_dll(loaded, "kept").value == b"mine"
    assert ctypes.c_int.in_dll(loaded, "seen").value == 1
    assert "CONVGRAD_A" not in os.environ
