# SPDX-License-Identifier: Apache-2.0
"""A folder of compiled objects by key: written whole, checked when read, bounded in size, shared by processes."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

VARIABLE = "CONVGRAD_CACHE"
"""The environment variable that names the folder."""

LIMIT = 2 << 30
"""Bytes of a folder, beyond which the objects that were used least recently go."""

_KEPT_SHARE = 0.8  # of the limit, after a removal: the next one is not due at once
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".object"
_STALE_SECONDS = 3600.0  # after which a part of a file is one that a killed process left
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> Path:
    """The folder of compiled objects: CONVGRAD_CACHE, or `objects` in the user's cache folder."""
    stated = os.environ.get(VARIABLE)
    return Path(stated) if stated else Path(platformdirs.user_cache_dir("tvm-convgrad")) / "objects"


def refusal(folder: Path) -> str:
    """Why code in a folder is not to be trusted, or nothing; a folder that does not exist is nobody's.

    Raises:
        OSError: what there is cannot be looked at.
    """
    try:
        state = folder.stat()
    except FileNotFoundError:
        return ""
    if state.st_uid != os.geteuid():
        return f"it belongs to another user (number {state.st_uid})"
    if state.st_mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(state.st_mode):o}; chmod go-w would change that)"
    return ""


class KeptObjects:
    """The objects in a folder. A folder that cannot be read or written costs time, and fails nothing.

    It holds code, so one that belongs to another user, or that others can write to, is neither read nor written.

    Attributes:
        folder: it need not exist.
        limit: bytes that it may have.
        problem: a sentence about the first thing that could not be read or written; empty without one.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder or default_folder(), limit
        self.problem = ""

    def get(self, key: str) -> bytes | None:
        """The object of a key, or None. A damaged one is removed, so that it is made again."""
        path = self._path(key)
        try:
            if self._refused():
                return None
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed("read", error)
            return None
        digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(kept).digest() != digest:
            with suppress(OSError):  # of another user: the write that follows says so
                path.unlink()
            return None
        with suppress(OSError):  # a folder that can only be read still serves
            os.utime(path)
        return kept

    def drop(self, key: str) -> None:
        """Remove the object of a key, if it can be removed."""
        with suppress(OSError):  # of a folder that can only be read: it stays
            if not self._refused():
                self._path(key).unlink()

    def remove(self, beginning: bytes) -> int:
        """Remove all objects that begin with some bytes; how many were removed.

        Raises:
            OSError: one cannot be read or removed.
        """
        removed = 0
        if self._refused():
            return removed
        for path, _ in self._files():
            with suppress(FileNotFoundError), path.open("rb") as file:  # another process may have removed it
                file.seek(_DIGEST_BYTES)
                if file.read(len(beginning)) == beginning:
                    path.unlink()
                    removed += 1
        return removed

    def put(self, key: str, content: bytes) -> None:
        """Keep an object: a reader sees all of it or none. After a failure nothing more is tried."""
        if self.problem:
            return
        path, temporary = self._path(key), None
        try:
            if not path.parent.is_dir():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.parent.mkdir(mode=0o700, exist_ok=True)
            if self._refused():
                return
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
                temporary = Path(file.name)
                file.write(hashlib.sha256(content).digest())  # in place of a flush to the disk, which is slow
                file.write(content)
            temporary.rename(path)
        except OSError as error:
            self._failed("written", error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def trim(self) -> None:
        """Remove what was used least recently if the folder is beyond its limit; another process may be at it."""
        if self.problem or self.size()[1] <= self.limit:
            return
        try:
            with FileLock(self.folder / ".lock", timeout=0):
                files = sorted(self._files(), key=lambda found: found[1].st_mtime)
                total = sum(state.st_size for _, state in files)
                for path, state in files:
                    if total <= self.limit * _KEPT_SHARE:
                        break
                    path.unlink(missing_ok=True)
                    total -= state.st_size
        except Timeout:
            return
        except OSError as error:
            self._failed("trimmed", error)

    def size(self) -> tuple[int, int]:
        """How many objects there are, and their bytes."""
        sizes = [state.st_size for _, state in self._files()]
        return len(sizes), sum(sizes)

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Files and their states; parts that killed processes left are removed."""
        found = []
        newest = 0.0
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process has removed it
                found.append((path, path.stat()))
                newest = max(newest, found[-1][1].st_mtime)
        for path in self.folder.glob("*/*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < newest - _STALE_SECONDS:
                    path.unlink()
        return found

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def _refused(self) -> bool:
        """Whether the folder is not to be trusted now; `problem` then says why."""
        reason = refusal(self.folder)
        if reason:
            self.problem = self.problem or (
                f"{self.folder}: compiled objects are code, and this folder is not used for them, as {reason}. "
                f"Set {VARIABLE} to a folder of your own; until then all is compiled again."
            )
        return bool(reason)

    def _failed(self, what: str, error: OSError) -> None:
        self.problem = self.problem or (
            f"{self.folder}: compiled objects cannot be {what} ({error.strerror}); what is missing is compiled again. "
            f"Set {VARIABLE} to another folder."
        )


__all__ = ["LIMIT", "VARIABLE", "KeptObjects", "default_folder", "refusal"]
