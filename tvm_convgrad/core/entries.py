# SPDX-License-Identifier: Apache-2.0
"""A file of measured entries by key: JSON, written whole under a lock, beside the user's other caches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.files import write_atomic

LOCK_SECONDS = 60.0

VARIABLE = "CONVGRAD_TUNINGS"


def default_path() -> Path:
    """The file of tuned tilings: CONVGRAD_TUNINGS, or tunings.json in the user's cache folder; others lie beside it."""
    stated = os.environ.get(VARIABLE)
    return Path(stated) if stated else Path(platformdirs.user_cache_dir("tvm-convgrad")) / "tunings.json"


class Entries:
    """What a file keeps. Entries that other processes have written meanwhile stay.

    Attributes:
        path: of the file; it need not exist.

    Raises:
        ArtifactError: the file is damaged, or cannot be read.
    """

    def __init__(
        self,
        path: Path,
        form: int,
        noun: str,
        wrong: Callable[[Any], str],
        remedy: str = "",
        superseded: tuple[int, ...] = (),
    ) -> None:
        """Read the file.

        Args:
            form: the number of its format.
            noun: what it keeps, in a word.
            wrong: what is not as it should be in an entry, or nothing.
            remedy: what else helps where it is damaged, beside removing it.
            superseded: older formats whose entries are all of older versions, which nothing looks up: a file of one
                reads as empty, and the next entry replaces it.
        """
        self.path, self._superseded = path, superseded
        self._form, self._noun, self._wrong, self._remedy = form, noun, wrong, remedy
        self._entries = self._read()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Any:
        """The entry of a key, or None."""
        return self._entries.get(key)

    def put(self, key: str, entry: Any) -> None:
        """Keep an entry.

        Raises:
            ArtifactError: the file is damaged or cannot be written, or another process keeps its lock.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"{self.path}: its folder cannot be made ({error.strerror}).") from error
        with self._locked():
            self._entries = self._read()
            self._entries[key] = entry
            text = json.dumps({"format": self._form, "entries": self._entries}, indent=1, sort_keys=True)
            write_atomic(self.path, (text + "\n").encode())

    def damaged(self, what: str) -> ArtifactError:
        """The error of a damaged file."""
        return ArtifactError(
            f"{self.path}: no {self._noun} that `convgrad tune` wrote ({what}); remove the file{self._remedy}."
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except Timeout as error:
            raise ArtifactError(f"{self.path}: another process keeps its lock; end it and try again.") from error
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be locked ({error.strerror}).") from error
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError):  # the home of some service accounts is /dev/null
            return {}
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise self.damaged(f"no JSON ({error})") from error
        if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
            raise self.damaged("no entries")
        if content.get("format") in self._superseded:
            return {}
        if content.get("format") != self._form:
            raise self.damaged(f"format {content.get('format')!r}, this version reads {self._form}")
        entries: dict[str, Any] = content["entries"]
        for key, entry in entries.items():
            what = self._wrong(entry)
            if what:
                raise self.damaged(f"{key}: {what}")
        return entries


__all__ = ["LOCK_SECONDS", "VARIABLE", "Entries", "default_path"]
