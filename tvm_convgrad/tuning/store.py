# SPDX-License-Identifier: Apache-2.0
"""The file of tuned cuts: JSON, written whole under a lock, by problem, face, machine, threads and version.

The version includes a digest of the kernels' sources: a cut of another version's kernel means nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import tvm_convgrad
from tvm_convgrad.errors import ArtifactError
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.candidates import refusal
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tuned import TUNED, plain_tilings, with_plain_tilings
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.training.envelope import write_atomic

VARIABLE = "CONVGRAD_TUNINGS"
FORMAT = 1
LOCK_SECONDS = 60.0
_FIELDS = {"kind": str, "tilings": list, "seconds": float, "own_seconds": float, "candidates": int}


def default_path() -> Path:
    """Where tunings are kept: CONVGRAD_TUNINGS, or tunings.json in the user's cache folder."""
    import platformdirs

    stated = os.environ.get(VARIABLE)
    return Path(stated) if stated else Path(platformdirs.user_cache_dir("tvm-convgrad")) / "tunings.json"


@lru_cache(maxsize=1)
def kernels_version() -> str:
    """Our version, and a digest of what makes kernels."""
    digest = hashlib.sha256()
    for source in sorted(Path(plan.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return f"{tvm_convgrad.__version__}+{digest.hexdigest()[:12]}"


class Store:
    """The tunings in a file, for one number of threads.

    Attributes:
        path: of the file; it need not exist.
        threads: those that measured, or that the step will run on.
        used: the keys of what lookups have found.

    Raises:
        ArtifactError: the file is damaged, or cannot be read.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.path, self.threads = path, threads
        self.used: set[str] = set()
        self._entries = self._read()

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, problem: ConvProblem, face: str, machine: Machine) -> str:
        """What an entry is found by."""
        described = ",".join(f"{name}={value}" for name, value in asdict(machine).items())
        return f"{face} {problem.descriptor} | {described} | threads={self.threads} | {kernels_version()}"

    def entry(self, problem: ConvProblem, face: str, machine: Machine) -> dict[str, Any] | None:
        """What is kept for a face of a problem."""
        return self._entries.get(self.key(problem, face, machine))

    def __call__(self, problem: ConvProblem, face: str, machine: Machine, choice: plan.Choice) -> plan.Choice | None:
        """The tuned choice: what `kernels.tuned.use_winners` takes.

        Raises:
            ArtifactError: the entry is not one of this kernel.
        """
        key = self.key(problem, face, machine)
        entry = self._entries.get(key)
        if entry is None:
            return None
        gain = entry["own_seconds"] / entry["seconds"]
        try:
            if entry["kind"] != choice.kind:
                raise ValueError(f"of {entry['kind']}, not {choice.kind}")
            found = with_plain_tilings(choice, entry["tilings"], f"{TUNED}: {gain:.2f}x the cost model's cut")
            reason = refusal(found, machine)
            if reason:
                raise ValueError(reason)
        except ValueError as error:
            raise self._damaged(f"{key}: {error}") from error
        self.used.add(key)
        return found

    def record(
        self, problem: ConvProblem, face: str, machine: Machine, choice: plan.Choice, **measured: float | int
    ) -> None:
        """Keep the winner of a face of a problem; other processes' entries stay.

        Args:
            choice: the winner.
            measured: `seconds` of it, `own_seconds` of the plan's own choice, and how many `candidates` there were.

        Raises:
            ArtifactError: the file is damaged or cannot be written, or another process keeps its lock.
        """
        entry = {"kind": choice.kind, "tilings": plain_tilings(choice), **measured}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"{self.path}: its folder cannot be made ({error.strerror}).") from error
        with self._locked():
            self._entries = self._read()
            self._entries[self.key(problem, face, machine)] = entry
            text = json.dumps({"format": FORMAT, "entries": self._entries}, indent=1, sort_keys=True)
            write_atomic(self.path, (text + "\n").encode())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

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
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise self._damaged(f"no JSON ({error})") from error
        if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
            raise self._damaged("no entries")
        if content.get("format") != FORMAT:
            raise self._damaged(f"format {content.get('format')!r}, this version reads {FORMAT}")
        entries: dict[str, Any] = content["entries"]
        for key, entry in entries.items():
            if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
                raise self._damaged(f"{key}: not the fields {', '.join(_FIELDS)}")
            for name, kind in _FIELDS.items():
                if type(entry[name]) is not kind:
                    raise self._damaged(f"{key}: {name} is no {kind.__name__}")
            if not all(isinstance(tiling, dict) for tiling in entry["tilings"]):
                raise self._damaged(f"{key}: tilings are no objects")
            if not (entry["seconds"] > 0 and entry["own_seconds"] > 0):
                raise self._damaged(f"{key}: a time that is not positive")
        return entries

    def _damaged(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"{self.path}: not tunings that `convgrad tune` wrote ({what}); remove the file, or build with --no-tuned."
        )
