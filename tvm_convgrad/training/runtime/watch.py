# SPDX-License-Identifier: Apache-2.0
"""Which validation was the best of a run, and when a run without a better one ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_convgrad.training.runtime.checkpoint import Progress

MEASURES = ("loss", "accuracy", "top5", "mean_iou", "mse")
_FALLING = ("loss", "mse")
"""Measures of which less is better."""


@dataclass(frozen=True)
class Watch:
    """The measure by which validations are compared, and how many in a row may be no better.

    Attributes:
        monitor: one of MEASURES.
        patience: validations without a better one after which the run ends; None: it never ends so.
    """

    monitor: str = "loss"
    patience: int | None = None

    def note(self, progress: Progress, measures: Mapping[str, float]) -> bool:
        """Bring the progress up to date with a validation; whether it is the best so far, as no NaN or infinity is."""
        if progress.monitor != self.monitor:
            progress.monitor, progress.best, progress.stale = self.monitor, None, 0
        value = measures[self.monitor]
        better = math.isfinite(value) and (progress.best is None or self._is_better(value, progress.best))
        if better:
            progress.best, progress.best_step, progress.stale = value, len(progress.losses), 0
        else:
            progress.stale += 1
        return better

    def is_over(self, progress: Progress) -> bool:
        """Whether the run ends before its last epoch."""
        return self.patience is not None and progress.monitor == self.monitor and progress.stale >= self.patience

    def _is_better(self, value: float, best: float) -> bool:
        return value < best if self.monitor in _FALLING else value > best
