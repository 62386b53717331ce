# SPDX-License-Identifier: Apache-2.0
"""Writing a result file: the check of its path before the work, and the write that leaves no half of a file."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from tvm_convgrad.core.errors import ArtifactError


def check_destination(path: Path) -> None:
    """Refuse a path that no file can be written to, before the work whose result it is to hold.

    Raises:
        ArtifactError: the folder does not exist, or `path` is a folder itself.
    """
    if not path.parent.is_dir():
        raise ArtifactError(f"{path}: the folder {path.parent} does not exist; make it first.")
    if path.is_dir():
        raise ArtifactError(f"{path}: this is a folder; give the name of the file to write.")


def require_absent(path: Path) -> None:
    """Refuse a path where a file is, which a command overwrites with --force only.

    Raises:
        ArtifactError: there is a file.
    """
    if path.exists():
        raise ArtifactError(f"{path}: exists already; choose another name, or add --force to overwrite it.")


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a crash at any moment leaves the old file or the new one, never a part.

    The bytes go to a hidden file beside `path`, which is flushed to the disk and then renamed. What an earlier
    process on this host left there when it was killed is removed.

    Raises:
        ArtifactError: the folder is missing or cannot be written, or the disk is full.
    """
    host = re.sub(r"\W", "_", socket.gethostname())
    temporary = path.with_name(f".{path.name}.{host}.{os.getpid()}.tmp")
    try:
        for stale in path.parent.glob(f".{path.name}.{host}.*.tmp"):
            if not _alive(int(stale.name.split(".")[-2])):
                stale.unlink(missing_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):  # of a file system that is only read, too
            temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{path}: cannot be written ({error.strerror}); is the folder there, and writable?") from (
            error
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to somebody else
        return True
    return True
