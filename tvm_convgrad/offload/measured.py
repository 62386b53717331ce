# SPDX-License-Identifier: Apache-2.0
"""Which was faster, the generated kernel or a library: measured by `convgrad tune --offload`, used by `--offload auto`.

The file is JSON beside the tunings, written whole under a lock; an entry counts for the machine, cores, kernels and
runtime that it was measured for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.entries import Entries
from tvm_convgrad.core.entries import default_path as tunings
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.version import kernels_version
from tvm_convgrad.offload.registry import backend, names_of_kind

KERNEL = "kernel"
FORMAT = 1


@dataclass(frozen=True)
class Winner:
    """The fastest: KERNEL or a backend; `gain` is how many times faster than the next."""

    name: str
    gain: float


class Measured:
    """The measurements in a file, for one number of cores of the target.

    Raises:
        ArtifactError: the file is damaged, or cannot be read.
    """

    def __init__(self, path: Path, cores: int) -> None:
        self.path, self.cores = path, cores
        self._entries = Entries(path, FORMAT, "measurements", _wrong)

    def winner(self, direction: str, problem: ConvProblem, machine: Machine | None) -> Winner | None:
        """What was the fastest for a direction of a problem, or None if it has not been measured."""
        entry = self._entries.get(self._key(direction, problem, machine)) if self._entries else None
        if entry is None:
            return None
        best, second = sorted(entry, key=lambda name: entry[name])[:2]
        return Winner(best, entry[second] / entry[best])

    def record(self, direction: str, problem: ConvProblem, machine: Machine, seconds: Mapping[str, float]) -> None:
        """Keep the seconds of KERNEL and of backends; what other processes have kept stays.

        Raises:
            ArtifactError: the file is damaged or cannot be written, or another process keeps its lock.
        """
        self._entries.put(self._key(direction, problem, machine), dict(seconds))

    def _key(self, direction: str, problem: ConvProblem, machine: Machine | None) -> str:

        runtimes = ",".join(backend(name).digest() for name in names_of_kind("llvm"))
        return f"{direction} {problem.descriptor} | {machine} | cores={self.cores} | {kernels_version()} | {runtimes}"


def default_path() -> Path:
    """Beside the tunings."""
    return tunings().with_name("offload.json")


def _wrong(entry: Any) -> str:
    if not isinstance(entry, dict) or len(entry) < 2:
        return "not two times"
    whole = all(isinstance(value, float) and 0 < value < float("inf") for value in entry.values())
    return "" if whole else "an invalid time"


__all__ = ["KERNEL", "Measured", "Winner", "default_path"]
