# SPDX-License-Identifier: Apache-2.0
"""Sealed files: nothing lost or changed goes unseen, and a killed writer leaves the old file."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.files import write_atomic
from tvm_convgrad.training.runtime.envelope import Kind, seal, unseal

KIND = Kind(b"TESTKIND", 3, "a test file", "make test")
PAYLOAD, MANIFEST = bytes(range(256)) * 3, {"name": "é", "list": [1, 2.5, None]}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(seal(KIND, PAYLOAD, MANIFEST)[0])
    return path


def test_round_trip(sealed: Path) -> None:
    found = unseal(KIND, sealed)
    assert found.manifest == MANIFEST
    assert found.payload() == PAYLOAD
    assert found.digest == seal(KIND, PAYLOAD, MANIFEST)[1]


def test_every_truncation_is_refused(sealed: Path) -> None:
    content = sealed.read_bytes()
    for length in range(len(content)):
        sealed.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match="make it again"):
            unseal(KIND, sealed)


def test_every_changed_byte_is_refused(sealed: Path) -> None:
    content = bytearray(sealed.read_bytes())
    for index in range(len(content)):
        content[index] ^= 0x41
        sealed.write_bytes(content)
        with pytest.raises(ArtifactError):
            unseal(KIND, sealed)
        content[index] ^= 0x41


def test_added_bytes_are_refused(sealed: Path) -> None:
    content = sealed.read_bytes()
    sealed.write_bytes(b"\0" + content)
    with pytest.raises(ArtifactError, match="added to"):
        unseal(KIND, sealed)


def test_other_version_is_named(sealed: Path) -> None:
    newer = Kind(KIND.magic, 4, KIND.noun, KIND.maker)
    with pytest.raises(ArtifactError, match="format version 3, and this tvm-convgrad reads version 4"):
        unseal(newer, sealed)


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        unseal(KIND, tmp_path / "nothing")
    with pytest.raises(ArtifactError, match="directory"):
        unseal(KIND, tmp_path)


@pytest.mark.parametrize("moment", ["os.fsync", "pathlib.Path.replace"])
def test_killed_writer_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    module, _, function = moment.rpartition(".")
    program = (
        "import os, pathlib, signal, sys\n"
        "from tvm_convgrad.core.files import write_atomic\n"
        f"{module}.{function} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomic(pathlib.Path(sys.argv[1]), b'new')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2  # what the killed process had written
    write_atomic(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_of_a_living_process_stays(tmp_path: Path) -> None:
    host = re.sub(r"\W", "_", socket.gethostname())
    theirs = tmp_path / f".file.{host}.{os.getppid()}.tmp"
    theirs.write_bytes(b"being written")
    write_atomic(tmp_path / "file", b"mine")
    assert theirs.exists()


def test_missing_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_atomic(tmp_path / "nowhere" / "file", b"")


def test_a_file_system_that_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to remove a file that is not there, too."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ArtifactError, match=r"file: cannot be written \(Read-only file system\)"):
        write_atomic(tmp_path / "file", b"")
