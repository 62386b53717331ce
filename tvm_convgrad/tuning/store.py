# SPDX-License-Identifier: Apache-2.0
"""The file of tuned tilings: JSON, written whole under a lock, by problem, direction, machine, cores and version.

The version includes a digest of the kernels' sources: a tiling of another version's kernel means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.entries import Entries
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.contract import planned
from tvm_convgrad.kernels.tuned import TUNED, plain_tilings, with_plain_tilings
from tvm_convgrad.kernels.version import kernels_version

FORMAT = 2
_FIELDS = {"kernel": str, "tilings": list, "seconds": float, "own_seconds": float, "candidates": int}


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
        self._entries = Entries(path, FORMAT, "tunings", _wrong, ", or build with --no-tuned", superseded=(1,))

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, problem: ConvProblem, direction: str, machine: Machine, choices: Sequence[Choice] = ()) -> str:
        """What an entry is found by: of several kernels another one wins than of the first alone."""
        described = ",".join(f"{name}={value}" for name, value in asdict(machine).items())
        kinds = f" | {' or '.join(choice.name for choice in choices)}" if len(choices) > 1 else ""
        return f"{direction} {problem.descriptor} | {described} | cores={self.cores} | {kernels_version()}{kinds}"

    def entry(self, problem: ConvProblem, direction: str, machine: Machine) -> dict[str, Any] | None:
        """What is kept for a direction of a problem, of the kernels that the plan may take."""
        key = self.key(problem, direction, machine, chooser.choices(problem, direction, machine))
        found: dict[str, Any] | None = self._entries.get(key)
        return found

    def __call__(
        self, problem: ConvProblem, direction: str, machine: Machine, choices: Sequence[Choice]
    ) -> Choice | None:
        """The tuned choice: what `kernels.tuned.use_winners` takes.

        Raises:
            ArtifactError: the entry is not one of these kernels.
        """
        key = self.key(problem, direction, machine, choices)
        entry = self._entries.get(key)
        if entry is None:
            return None
        gain = entry["own_seconds"] / entry["seconds"]
        try:
            choice = next((each for each in choices if each.name == entry["kernel"]), None)
            if choice is None or choice.kernel is None or choice.plan is None:
                raise ValueError(f"of {entry['kernel']}, not {' or '.join(each.name for each in choices)}")
            tuned = with_plain_tilings(choice.plan, entry["tilings"])
            reason = choice.kernel.invalid(planned(problem), direction, tuned, machine)
            if reason:
                raise ValueError(reason)
        except ValueError as error:
            raise self._entries.damaged(f"{key}: {error}") from error
        self.used.add(key)
        reason = f"{TUNED}: {gain:.2f}x the cost model's plan"
        return replace(choice, plan=tuned, reason=reason, estimate=choice.estimate / gain)

    def record(
        self, problem: ConvProblem, direction: str, machine: Machine, choice: Choice, **measured: float | int
    ) -> None:
        """Keep the winner of a direction of a problem; other processes' entries stay.

        Args:
            choice: the winner.
            measured: `seconds` of it, `own_seconds` of the plan's own choice, and how many `candidates` there were.

        Raises:
            ArtifactError: the file is damaged or cannot be written, or another process keeps its lock.
        """
        assert choice.plan is not None
        entry = {"kernel": choice.name, "tilings": plain_tilings(choice.plan), **measured}
        self._entries.put(self.key(problem, direction, machine, chooser.choices(problem, direction, machine)), entry)


def _wrong(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        return f"not the fields {', '.join(_FIELDS)}"
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind:
            return f"{name} is not of type {kind.__name__}"
    if not all(isinstance(tiling, dict) for tiling in entry["tilings"]):
        return "tilings are not objects"
    return "" if entry["seconds"] > 0 and entry["own_seconds"] > 0 else "a time that is not positive"
