# SPDX-License-Identifier: Apache-2.0
"""The loops of a tile's sum over the taps that meet the source: a range of planes, and a range of lines of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tvm_convgrad.kernels.gather_met import Met, Ranges
from tvm_convgrad.kernels.loops import Loops, Numbers, expr
from tvm_convgrad.kernels.spec import Phase


@dataclass(frozen=True)
class Which:
    """Of which tile: its phase, the depth of its results, and its number along the height."""

    phase: Any
    depth: Any
    tile: Any


class Taps:
    """Emits the loop over the taps of a tile, in runs of `run`."""

    def __init__(self, loops: Loops, phases: tuple[Phase, ...], met: Met, run: int) -> None:
        self.loops, self.met = loops, met
        counts = [[len(axis.taps) for axis in phase] for phase in phases]
        self._all = Numbers(loops, "tap_count", [d * h * w // run for d, h, w in counts])
        self._plane = Numbers(loops, "plane_taps", [h * w // run for _, h, w in counts])
        self._planes = Numbers(loops, "plane_count", [d for d, _, _ in counts])
        self._line = Numbers(loops, "line_taps", [w // run for _, _, w in counts])
        self._depth, self._tiles = phases[0][0].count, len(met.lines[0]) if met.lines is not None else 0
        self._first_plane, self._met_planes = self._tables("plane", met.planes)
        self._first_line, self._met_lines = self._tables("line", met.lines)

    def _tables(self, name: str, ranges: tuple[Ranges, ...] | None) -> tuple[Numbers, Numbers]:
        flat = [each for of_phase in ranges or () for each in of_phase]
        return (
            Numbers(self.loops, f"first_{name}", [first for first, _ in flat]),
            Numbers(self.loops, f"met_{name}s", [end - first for first, end in flat]),
        )

    def count(self, phase: Any) -> Any:
        """Runs of a phase, met or not."""
        return self._all.at(phase)

    @contextmanager
    def each(self, which: Which) -> Iterator[Any]:
        """The number, in its phase, of each run that meets the source."""
        loops, met, phase = self.loops, self.met, which.phase
        if met.planes is None and met.lines is None:
            with loops.loop(self._all.at(phase), "tap") as tap:
                yield tap
            return
        with ExitStack() as nest:
            of_plane = self._plane.at(phase)
            first, planes = 0, self._planes.at(phase)
            if met.planes is not None:
                at = loops.let(expr(phase * self._depth + which.depth), "depth_at")
                first, planes = self._first_plane.at(at), loops.let(expr(self._met_planes.at(at)), "met_planes")
            start: Any = 0
            length = of_plane
            if met.lines is not None:
                at = loops.let(expr(phase * self._tiles + which.tile), "tile_at")
                start = self._first_line.at(at) * self._line.at(phase)
                length = loops.let(expr(self._met_lines.at(at) * self._line.at(phase)), "met_taps")
            plane: Any = 0
            if not isinstance(planes, int) or planes != 1:
                plane = nest.enter_context(loops.loop(planes, "plane"))
            start = loops.let(expr((first + plane) * of_plane + start), "first_tap")
            yield start + nest.enter_context(loops.loop(length, "tap"))


__all__ = ["Taps", "Which"]
