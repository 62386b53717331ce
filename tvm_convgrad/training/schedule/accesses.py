# SPDX-License-Identifier: Apache-2.0
"""The accesses of stages in emitted loops: places of iterators, addresses, loads and stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tvm import tirx

from relax_ops.compat import buffer_of
from tvm_convgrad.codegen.loops import Loops, load, quotient, remainder
from tvm_convgrad.training.schedule.loop_order import run_of, size_of
from tvm_convgrad.training.schedule.stages import Address, Stage, rebuilt

Bases: TypeAlias = tuple[dict[Address, Any], Any]
"""Of a stage: by address of its loads, and of its store, where the inner loop begins."""

Held: TypeAlias = dict[Address, tuple[Any, Any]]
"""By address of a load: the buffer that has its values, and where in it."""


class Accesses:
    """Emits the accesses of groups of stages.

    Attributes:
        loops: what is emitted into.
        lanes: elements of a vector.
        views: by buffer of the function its view with one extent.
    """

    def __init__(self, loops: Loops, lanes: int) -> None:
        self.loops, self.lanes = loops, lanes
        self.views: list[tuple[Any, Any]] = []

    def view(self, buffer: tirx.Buffer) -> Any:
        """The buffer as one extent."""
        return next(view for other, view in self.views if other.same_as(buffer))

    def bases(self, group: list[Stage], places: dict[int, Any]) -> list[Bases]:
        """For each stage the addresses of its loads and of its store, without the offset of the inner loop."""

        def base(address: Address) -> Any:
            total: Any = address.constant
            for position, place in places.items():
                if address.coefficients[position]:
                    total = total + place * address.coefficients[position]
            return self.loops.let(total, "at")

        return [
            ({address: base(address) for address in dict.fromkeys(stage.address_of.values())}, base(stage.store))
            for stage in group
        ]

    def split(self, number: Any, positions: Sequence[int], group: list[Stage]) -> dict[int, Any]:
        """The places of iterators whose fused loop is at `number`, the last iterator fastest.

        Iterators that continue each other in all accesses count as one, whose place is that of the innermost.
        """
        extents, runs = group[0].extents, joined(positions, group)
        places: dict[int, Any] = {}
        for run in runs[:-1]:
            size = size_of(run, extents)
            places[run[0]] = self.loops.let(remainder(number, size), "i")
            number = self.loops.let(quotient(number, size), "i")
        if runs:
            places[runs[-1][0]] = self.loops.let(number, "i")
        return places

    def value(
        self, stage: Stage, bases: dict[Address, Any], run: tuple[int, ...], place: Any, held: Held | None = None
    ) -> Any:
        """What a stage stores, or combines, in iteration `place` of the inner loop; what is `held` is read there."""

        def read(wanted: Any) -> Any:
            address = stage.address_of[wanted]
            if held and address in held:
                return load(*held[address])
            step = address.coefficients[run[0]] if run else 0
            view = self.view(buffer_of(wanted))
            value = load(view, bases[address] + place * step if step else bases[address])
            is_same = str(view.dtype) == str(buffer_of(wanted).dtype)
            return value if is_same else tirx.NE(value, tirx.const(0, str(view.dtype)))

        return rebuilt(stage.value, read)

    def store(
        self, group: list[Stage], bases: list[Bases], run: tuple[int, ...], place: Any, held: Held | None = None
    ) -> None:
        """Iteration `place` of the inner loop of elementwise stages."""
        for stage, (reads, write) in zip(group, bases, strict=True):
            view, value = self.view(stage.store.buffer), self.value(stage, reads, run, place, held)
            is_same = str(view.dtype) == str(stage.store.buffer.dtype)
            self.loops.store(view, write + place, value if is_same else tirx.Cast(str(view.dtype), value))


def joined(positions: Sequence[int], group: list[Stage]) -> list[tuple[int, ...]]:
    """The iterators in runs, each innermost first, the innermost run first."""
    extents = group[0].extents
    accesses = [address.coefficients for stage in group for address in (stage.store, *(a for _, a in stage.loads))]
    left, runs = list(positions), []
    while left:
        runs.append(run_of(left[-1], left, extents, accesses))
        left = [position for position in left if position not in runs[-1]]
    return runs


def repeats_bfloat16(stage: Stage, run: Sequence[int]) -> bool:
    """Whether one number of bfloat16 is stored along a whole run: TVM cannot make a vector of it."""
    moving = any(address.coefficients[axis] for _, address in stage.loads for axis in run)
    return str(stage.store.buffer.dtype) == "bfloat16" and not moving
