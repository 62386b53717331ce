# SPDX-License-Identifier: Apache-2.0
"""Which was faster, the generated kernel or a library: measured by `convgrad tune --offload`, heeded by `auto`.

The file is JSON beside the tunings, written whole under a lock; an entry counts for the machine, cores, kernels and
runtime that it was measured for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.tuning.entries import Entries

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

    def winner(self, face: str, problem: ConvProblem, machine: Machine | None) -> Winner | None:
        """What was the fastest for a face of a problem, or None if it has not been measured."""
        entry = self._entries.get(self._key(face, problem, machine)) if self._entries else None
        if entry is None:
            return None
        best, second = sorted(entry, key=lambda name: entry[name])[:2]
        return Winner(best, entry[second] / entry[best])

    def record(self, face: str, problem: ConvProblem, machine: Machine, seconds: Mapping[str, float]) -> None:
        """Keep the seconds of KERNEL and of backends; what other processes have kept stays.

        Raises:
            ArtifactError: the file is damaged or cannot be written, or another process keeps its lock.
        """
        self._entries.put(self._key(face, problem, machine), dict(seconds))

    def _key(self, face: str, problem: ConvProblem, machine: Machine | None) -> str:
        from tvm_convgrad.offload.common import NAMES, backend
        from tvm_convgrad.tuning.store import kernels_version

        runtimes = ",".join(backend(name).digest() for name in NAMES if "llvm" in backend(name).kinds)
        return f"{face} {problem.descriptor} | {machine} | cores={self.cores} | {kernels_version()} | {runtimes}"


def default_path() -> Path:
    """Beside the tunings."""
    from tvm_convgrad.tuning.store import default_path as tunings

    return tunings().with_name("offload.json")


def compare(face: str, problem: ConvProblem, name: str, target: Any, seconds: float) -> dict[str, float]:
    """Seconds of a call of KERNEL and of a backend, medians of turns.

    Raises:
        ProblemError: symbolic extents.
        UnsupportedError: there is no kernel for it, or the backend refuses it.
    """
    from tvm_convgrad.bench.measure import pairs
    from tvm_convgrad.bench.ours import random_operands, tvm_call
    from tvm_convgrad.bench.place import Place

    problem.require_static("measuring")
    if {dtype for _, dtype in problem.tensors.values()} - {"float32", "bfloat16"}:
        raise UnsupportedError(f"{problem.descriptor}: libraries are measured in float32 and bfloat16")
    arrays = random_operands(face, problem)
    place = Place(target, gpu=False, impl=KERNEL)
    calls = [tvm_call(face, problem, arrays, place, impl) for impl in (KERNEL, name)]
    for call in calls:
        call.run()
    times = pairs(calls, seconds)
    return {impl: median(times[call.name]) for impl, call in zip((KERNEL, name), calls, strict=True)}


def _wrong(entry: Any) -> str:
    if not isinstance(entry, dict) or len(entry) < 2:
        return "not two times"
    whole = all(isinstance(value, float) and 0 < value < float("inf") for value in entry.values())
    return "" if whole else "a time that is none"


__all__ = ["KERNEL", "Measured", "Winner", "compare", "default_path"]
