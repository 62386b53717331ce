# SPDX-License-Identifier: Apache-2.0
"""The file of tuned cuts: JSON, written whole under a lock, by problem, face, machine, cores and version.

The version includes a digest of the kernels' sources: a cut of another version's kernel means nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tvm_convgrad
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.candidates import refusal
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.tuned import TUNED, plain_tilings, with_plain_tilings
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.tuning.entries import Entries

VARIABLE = "CONVGRAD_TUNINGS"
FORMAT = 1
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
    """The tunings in a file, for one number of cores.

    Attributes:
        path: of the file; it need not exist.
        cores: that the target has (`kernels.target.cores_of`), whatever machine builds.
        used: the keys of what lookups have found.

    Raises:
        ArtifactError: the file is damaged, or cannot be read.
    """

    def __init__(self, path: Path, cores: int) -> None:
        self.path, self.cores = path, cores
        self.used: set[str] = set()
        self._entries = Entries(path, FORMAT, "tunings", _wrong, ", or build with --no-tuned")

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, problem: ConvProblem, face: str, machine: Machine, choices: Sequence[plan.Choice] = ()) -> str:
        """What an entry is found by: of several kernels another one wins than of the first alone."""
        described = ",".join(f"{name}={value}" for name, value in asdict(machine).items())
        kinds = f" | {' or '.join(choice.kind for choice in choices)}" if len(choices) > 1 else ""
        return f"{face} {problem.descriptor} | {described} | cores={self.cores} | {kernels_version()}{kinds}"

    def entry(self, problem: ConvProblem, face: str, machine: Machine) -> dict[str, Any] | None:
        """What is kept for a face of a problem, of the kernels that the plan may take."""
        key = self.key(problem, face, machine, plan.kernels(problem, face, machine))
        found: dict[str, Any] | None = self._entries.get(key)
        return found

    def __call__(
        self, problem: ConvProblem, face: str, machine: Machine, choices: Sequence[plan.Choice]
    ) -> plan.Choice | None:
        """The tuned choice: what `kernels.tuned.use_winners` takes.

        Raises:
            ArtifactError: the entry is not one of these kernels.
        """
        key = self.key(problem, face, machine, choices)
        entry = self._entries.get(key)
        if entry is None:
            return None
        gain = entry["own_seconds"] / entry["seconds"]
        try:
            choice = next((each for each in choices if each.kind == entry["kind"]), None)
            if choice is None:
                raise ValueError(f"of {entry['kind']}, not {' or '.join(each.kind for each in choices)}")
            found = with_plain_tilings(choice, entry["tilings"], f"{TUNED}: {gain:.2f}x the cost model's cut")
            reason = refusal(problem, face, found, machine)
            if reason:
                raise ValueError(reason)
        except ValueError as error:
            raise self._entries.damaged(f"{key}: {error}") from error
        self.used.add(key)
        return replace(found, estimate=found.estimate / gain)

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
        self._entries.put(self.key(problem, face, machine, plan.kernels(problem, face, machine)), entry)


def _wrong(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        return f"not the fields {', '.join(_FIELDS)}"
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind:
            return f"{name} is no {kind.__name__}"
    if not all(isinstance(tiling, dict) for tiling in entry["tilings"]):
        return "tilings are no objects"
    return "" if entry["seconds"] > 0 and entry["own_seconds"] > 0 else "a time that is not positive"
