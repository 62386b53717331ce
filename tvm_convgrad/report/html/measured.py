# SPDX-License-Identifier: Apache-2.0
"""What a profile adds to the page: measured times in the place of estimates, and the other operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.report.gradients import Entry
from tvm_convgrad.report.matching import with_batch
from tvm_convgrad.report.profile import Limits, Row
from tvm_convgrad.report.step_graph import StepGraph
from tvm_convgrad.training.runtime.timeline import Timeline


@dataclass(frozen=True)
class Measured:
    """A profile of a step.

    Attributes:
        timeline: of its kernel calls.
        rows: of `report.profile.rows_of`.
        limits: what the machine reaches by this many threads.
        batch, threads: with which it ran.
    """

    timeline: Timeline
    rows: Sequence[Row]
    limits: Limits
    batch: int
    threads: int

    @property
    def total(self) -> float:
        """Seconds of all operators."""
        return sum(call.seconds for call in self.timeline.calls)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each call."""
        return tuple(call.seconds for call in self.timeline.calls)

    def entries(self, entries: Sequence[Entry], graph: StepGraph) -> list[Entry]:
        """The convolutions with this batch, measured `seconds`, their `share` in the time and of the `roofline`.

        What no call computes alone has None for these three, and what has free extents besides the batch no rates.
        """
        calls = {node.entry: node.calls[0] for node in graph.nodes if node.entry is not None}
        found = []
        for number, entry in enumerate(entries):
            problem = ConvProblem.from_descriptor(with_batch(entry["descriptor"], self.batch))
            numbers: Entry = {"descriptor": problem.descriptor, "gflop": None, "bytes": None, "per": "unknown"}
            numbers |= {"seconds": None, "share": None, "roofline": None}
            if problem.is_static:
                numbers |= {"gflop": 2e-9 * problem.macs, "bytes": problem.bytes, "per": "step"}
            if number in calls:
                call = self.timeline.calls[calls[number]]
                numbers |= {"seconds": call.seconds, "share": call.seconds / self.total}
                if problem.is_static:
                    numbers["roofline"] = self.limits.least(2.0 * problem.macs, problem.bytes) / call.seconds
            found.append(entry | numbers)
        return found


__all__ = ["Measured"]
