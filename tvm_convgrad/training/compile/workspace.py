# SPDX-License-Identifier: Apache-2.0
"""The temporary folder of a build."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WORKSPACE = "convgrad-build-"
_YOUNG_SECONDS = 10  # between making a folder and locking it no other build may take it for left behind


@contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder for a build; one that a killed build has left is removed by the next.

    Its maker holds a lock on it, which the system takes away when that process ends, however it ends.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_WORKSPACE}*"):
        with suppress(OSError), _locked(left):  # BlockingIOError: in use; PermissionError: another user's
            if time.time() - left.stat().st_mtime > _YOUNG_SECONDS:
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=_WORKSPACE))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


__all__ = ["workspace"]
