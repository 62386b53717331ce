# SPDX-License-Identifier: Apache-2.0
"""Generated kernels timed against a vendor library, so that `--offload auto` takes the faster of the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import tvm

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.tuned import use_winners
from tvm_convgrad.measure.program import random_operands, tvm_call
from tvm_convgrad.measure.timing import pairs
from tvm_convgrad.offload.measured import KERNEL, Measured, default_path
from tvm_convgrad.tuning.search import Work
from tvm_convgrad.tuning.store import Store

MEASURED_DTYPES = {"float32", "bfloat16"}


@dataclass(frozen=True)
class Comparison:
    """A direction of a problem by the generated kernel and by a library.

    Attributes:
        seconds: of a call, by KERNEL and the backend's name; empty where one of the two does not compute it.
        reason: why nothing was timed, or nothing.
    """

    direction: str
    descriptor: str
    seconds: dict[str, float]
    reason: str = ""

    def plain(self, backend: str) -> dict[str, float | str | None]:
        """For JSON; times are None where nothing was timed."""
        times = {name: self.seconds.get(name) for name in (KERNEL, backend)}
        return {"direction": self.direction, "descriptor": self.descriptor, **times, "reason": self.reason}


def compare_all(
    work: Sequence[Work], backend: str, machine: Machine, target: tvm.target.Target, store: Store, seconds: float
) -> Iterator[Comparison]:
    """Time each problem's kernel, with its tuned tiling, and the backend's call; record both for `--offload auto`.

    Args:
        store: of tuned tilings.
        seconds: to spend on the turns of each problem.

    Raises:
        ArtifactError: the file of measurements is damaged or cannot be written.
    """
    measured = Measured(default_path(), store.cores)
    for each in work:
        try:
            with use_winners(store):
                found = compare(each.direction, each.problem, backend, target, seconds)
            measured.record(each.direction, each.problem, machine, found)
            yield Comparison(each.direction, each.problem.descriptor, found)
        except (ProblemError, UnsupportedError) as error:  # one of the two does not compute it: nothing to compare
            yield Comparison(each.direction, each.problem.descriptor, {}, str(error))


def compare(
    direction: str, problem: ConvProblem, backend: str, target: tvm.target.Target, seconds: float
) -> dict[str, float]:
    """Seconds of a call of KERNEL and of a backend, medians of turns.

    Raises:
        ProblemError: symbolic extents.
        UnsupportedError: there is no kernel for it, or the backend refuses it.
    """
    problem.require_static("measuring")
    if {dtype for _, dtype in problem.tensors.values()} - MEASURED_DTYPES:
        raise UnsupportedError(f"{problem.descriptor}: libraries are measured in float32 and bfloat16")
    arrays = random_operands(direction, problem)
    calls = [tvm_call(direction, problem, arrays, target, impl) for impl in (KERNEL, backend)]
    for call in calls:
        call.run()
    times = pairs(calls, seconds)
    return {impl: median(times[call.name]) for impl, call in zip((KERNEL, backend), calls, strict=True)}


__all__ = ["Comparison", "compare", "compare_all"]
