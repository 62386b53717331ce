# SPDX-License-Identifier: Apache-2.0
"""The charts of the report as Vega-Lite specifications: plain values, which need no package to be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.training.runtime.memory import StepMemory

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"
"""A value of a specification."""

COLOURS = {"wgrad": "#d55e00", "dgrad": "#0072b2", "forward": "#009e73"}
"""Of directions: those of Okabe and Ito that differ for everybody, and from white and black by 3:1."""

SHAPES = {"wgrad": "circle", "dgrad": "square", "forward": "triangle-up"}


@dataclass(frozen=True)
class Dot:
    """A convolution in the roofline.

    Attributes:
        number: of its row in the table.
        direction: "wgrad", "dgrad" or "forward".
        problem, kernel, tiling: in words.
        refused: the other implementations, "name: reason".
        gflop, bytes, seconds: of one step; the seconds are the estimate for one core, or were measured.
        share: its part of the arithmetic of its table, or of the time.
    """

    number: int
    direction: str
    problem: str
    kernel: str
    tiling: str
    refused: tuple[str, ...]
    gflop: float
    bytes: int
    seconds: float
    share: float

    @property
    def intensity(self) -> float:
        """FLOP a byte, each tensor moved once."""
        return self.gflop * 1e9 / self.bytes

    @property
    def gflops(self) -> float:
        """GFLOP a second of the estimate."""
        return self.gflop / self.seconds


def limits(machine: Machine, dtype: str = "float32") -> tuple[float, float]:
    """GFLOP/s and GB/s of one core, as the cost model has them."""
    peak = 2e-9 * machine.fmas * machine.lanes(dtype) * machine.clock
    return peak, machine.memory_rate * machine.clock * 1e-9


def roofline(
    dots: Sequence[Dot], lines_at: tuple[float, float], speed: str = "GFLOP/s of one core, estimated"
) -> dict[str, Json]:
    """The dots under the two lines of the machine, both axes logarithmic; gradients lie above forward.

    Args:
        dots: the convolutions.
        lines_at: GFLOP/s and GB/s that the machine reaches.
        speed: the title of the vertical axis.
    """
    peak, bandwidth = lines_at
    ridge = peak / bandwidth
    across = [dot.intensity for dot in dots]
    low, high = min(*across, ridge) / 1.5, max(*across, ridge) * 1.5
    lines = [{"x": low, "y": low * bandwidth}, {"x": ridge, "y": peak}, {"x": high, "y": peak}]
    x: dict[str, Json] = {"type": "quantitative", "scale": {"type": "log", "domain": [low, high], "nice": False}}
    slowest = min(lines[0]["y"], *(dot.gflops for dot in dots))
    fastest = max(peak, *(dot.gflops for dot in dots))
    y: dict[str, Json] = {
        "type": "quantitative",
        "scale": {"type": "log", "domain": [slowest / 1.2, fastest * 1.2], "nice": False},
    }
    shown = [direction for direction in COLOURS if any(dot.direction == direction for dot in dots)]
    directions: Json = {"domain": shown, "range": [COLOURS[each] for each in shown]}
    shapes: Json = {"domain": shown, "range": [SHAPES[each] for each in shown]}
    fields = ("direction", "problem", "kernel", "tiling", "GFLOP", "MiB", "GFLOP/s", "FLOP/byte", "not taken")
    return {
        "width": "container",
        "height": 380,
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line", "strokeWidth": 2, "tooltip": None, "aria": False},
                "name": "limits",
                "encoding": {
                    "x": {"field": "x", "title": "FLOP / byte, each tensor moved once", **x},
                    "y": {"field": "y", "title": speed, **y},
                },
            },
            {
                "data": {"values": [_dot_values(dot) for dot in sorted(dots, key=_depth)]},
                "mark": {"type": "point", "filled": True, "opacity": 0.85, "cursor": "pointer"},
                "name": "dots",
                "encoding": {
                    "x": {"field": "FLOP/byte", **x},
                    "y": {"field": "GFLOP/s", **y},
                    "color": {"field": "direction", "scale": directions, "legend": {"orient": "top", "title": None}},
                    "shape": {"field": "direction", "scale": shapes},
                    "size": {
                        "field": "share",
                        "type": "quantitative",
                        "legend": None,
                        "scale": {"range": [50, 500], "domain": [0, 1]},
                    },
                    "tooltip": [{"field": field.replace(".", "\\.")} for field in fields],
                    "description": {"field": "description"},
                },
            },
        ],
    }


def _depth(dot: Dot) -> int:
    """The place of a dot's direction, from the back: those in front are pointed at first."""
    return -list(COLOURS).index(dot.direction)


def _dot_values(dot: Dot) -> dict[str, Json]:
    """What the chart knows of a dot; names are those of the tooltip."""
    return {
        "number": dot.number,
        "direction": dot.direction,
        "problem": dot.problem,
        "kernel": dot.kernel,
        "tiling": dot.tiling,
        "GFLOP": _digits(dot.gflop),
        "MiB": _digits(dot.bytes / 2**20),
        "GFLOP/s": _digits(dot.gflops),
        "FLOP/byte": _digits(dot.intensity),
        "share": dot.share,
        "not taken": "; ".join(dot.refused) or "nothing else computes it",
        "description": f"{dot.number}: {dot.direction} of {dot.problem} by {dot.kernel}, {dot.gflops:.0f} GFLOP/s",
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def memory(step: StepMemory) -> dict[str, Json]:
    """The storages in use over the calls of a step, on top of the state and the batch."""
    always = (step.state + step.batch) / 2**20
    kinds = ("state and batch", "values of the step")
    values: list[Json] = []
    for number, moment in enumerate(step.moments, 1):
        for kind, size in zip(kinds, (always, moment.bytes / 2**20), strict=True):
            values.append({"call": number, "kernel": moment.name, "what": kind, "MiB": _digits(size)})
    totals: list[Json] = [
        {"call": number, "kernel": moment.name, "MiB in use": _digits(always + moment.bytes / 2**20)}
        for number, moment in enumerate(step.moments, 1)
    ]
    x: Json = {"field": "call", "type": "quantitative", "title": "kernel call", "scale": {"nice": False, "zero": False}}
    over: Json = {"name": "over", "select": {"type": "point", "nearest": True, "on": "pointerover", "fields": ["call"]}}
    return {
        "width": "container",
        "height": 240,
        "layer": [
            {
                "data": {"values": values},
                "mark": {"type": "area", "interpolate": "step-after", "tooltip": None},
                "encoding": {
                    "x": x,
                    "y": {"field": "MiB", "type": "quantitative", "stack": "zero", "title": "MiB in use"},
                    "color": {
                        "field": "what",
                        "scale": {"domain": list(kinds), "range": ["#7f8792", "#0072b2"]},
                        "legend": {"orient": "top", "title": None},
                    },
                    "order": {"field": "what"},
                },
            },
            {
                "data": {"values": totals},
                "name": "moments",
                "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
                "params": [over],
                "encoding": {
                    "x": x,
                    "opacity": {"condition": {"param": "over", "empty": False, "value": 0.8}, "value": 0},
                    "tooltip": [{"field": "call"}, {"field": "kernel"}, {"field": "MiB in use"}],
                },
            },
        ],
    }


__all__ = ["COLOURS", "Dot", "Json", "limits", "memory", "roofline"]
