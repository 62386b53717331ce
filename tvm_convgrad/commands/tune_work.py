# SPDX-License-Identifier: Apache-2.0
"""What `convgrad tune` tunes: the convolutions of a model's step, single problems, or the layers of networks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import typer

from tvm_convgrad.commands import option_values
from tvm_convgrad.commands.stages import print_warnings
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.training.model.own_loss import OwnLoss

if TYPE_CHECKING:  # TVM's start-up time: the command line is checked first
    from tvm.target import Target

    from relax_ops.lowering import Lowered
    from tvm_convgrad.tuning.search import Work

SUITE_BATCH = 8
"""Samples of a suite's layers, unless --batch says another number."""


@dataclass(frozen=True)
class TuneSources:
    """Where the work of a tuning comes from; one of `model`, `problems` and `suites` is given.

    Attributes:
        model: a model, as `build` takes it.
        problems: descriptors; suites: names of networks with commas between them, or "all".
        directions: of problems and suites.
        batch, outputs, layout, loss, dtype, results: as `build` takes them.
    """

    model: str | None
    problems: tuple[str, ...]
    suites: str | None
    directions: tuple[str, ...]
    batch: int | Literal["dynamic"] | None
    outputs: dict[str, float] | OwnLoss | None
    layout: str
    loss: str
    dtype: str
    results: str | None

    def check(self) -> None:
        """Refuse contradictory sources before anything is read.

        Raises:
            typer.BadParameter: more than one source or none, an unknown direction, or an option that is not for it.
        """
        from tvm_convgrad.core.catalogue import DIRECTIONS

        if (self.model is not None) + bool(self.problems) + (self.suites is not None) != 1:
            raise typer.BadParameter("give what to tune: exactly one of MODEL, --problem DESC and --suite NAME.")
        if set(self.directions) - set(DIRECTIONS):
            raise typer.BadParameter(f"--direction {','.join(self.directions)}: use {', '.join(DIRECTIONS)}.")
        if self.model is None and self.outputs is not None:
            raise typer.BadParameter(
                "--model-output and --loss model are for MODEL; problems and suites have no outputs to choose."
            )
        if self.model is None and (self.results is not None or (self.problems and self.dtype != "float32")):
            raise typer.BadParameter("--results is for MODEL; the types of a --problem are in its descriptor (_dt=).")

    def planned(self, target: Target, backends: tuple[str, ...] = ("none",)) -> list[Lowered]:
        """What computes the convolutions of the model's training step."""
        from tvm_convgrad.training.compile.lower import plan_of
        from tvm_convgrad.training.frontends import load_model
        from tvm_convgrad.training.step.build import build_step

        assert self.model is not None
        loaded = load_model(self.model, batch=self.batch, outputs=self.outputs)
        print_warnings(loaded.warnings)
        results = option_values.results_for(self.results, target, self.dtype)
        step = build_step(loaded, loss=self.loss, dtype=self.dtype, results=results, layout=self.layout)
        return plan_of(step, target, backends)

    def work(self, target: Target) -> list[Work]:
        """Each direction of each problem, and how often it occurs."""
        from tvm_convgrad.tuning.search import Work

        if self.model is not None:
            counts = Counter((entry.direction, entry.problem) for entry in self.planned(target))
            return [Work(direction, problem, count) for (direction, problem), count in counts.items()]
        problems = Counter(map(ConvProblem.from_descriptor, self.problems)) if self.problems else self._layers()
        return [Work(direction, problem, count) for problem, count in problems.items() for direction in self.directions]

    def _layers(self) -> Counter[ConvProblem]:
        from tvm_convgrad.bench.suites import NETWORKS, SUITES, suite

        names = list(NETWORKS) if self.suites == "all" else (self.suites or "").split(",")
        if set(names) - set(SUITES):
            raise typer.BadParameter(f"--suite {self.suites}: use all or {', '.join(SUITES)}.")
        if self.batch == "dynamic":
            raise typer.BadParameter("--batch dynamic: layers of a suite need a number.")
        counts: Counter[ConvProblem] = Counter()
        for name in names:
            for problem, count in suite(name, self.batch or SUITE_BATCH, self.layout).items():
                counts[problem.with_dtypes(self.dtype, self.dtype, self.dtype)] += count
        return counts


__all__ = ["TuneSources"]
